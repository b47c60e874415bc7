"""A dataset that is random is noticed in the first epoch, and nothing else changes for it."""

from __future__ import annotations

import random
import time
import warnings

import numpy as np
import pytest
import torch
from stocache._dataset import doubts
from torch.utils.data import DataLoader, Dataset

OF_MODULE = np.random.default_rng(5)
BY_DEFAULT = random.Random(5)


def drawn_elsewhere():
    return OF_MODULE.random()


def drawn_by_default(generator=BY_DEFAULT):
    return generator.random()


class Draws(Dataset):
    """Draws from one of the generators that there are."""

    of_class = np.random.RandomState(5)

    def __init__(self, kind, length=64, seeded=False):
        self.kind, self.length, self.seeded = kind, length, seeded
        self.own = {"own": [np.random.RandomState(3)], "torch's own": torch.Generator()}
        self.new = np.random.default_rng(3)
        self.loads = []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.loads.append(i)
        if self.seeded:
            random.seed(i)
            torch.manual_seed(i)
        number = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(()).item(),
            "own": lambda: self.own["own"][0].rand(),
            "torch's own": lambda: torch.rand((), generator=self.own["torch's own"]).item(),
            "new": self.new.random,
            "the module's": lambda: OF_MODULE.random(),
            "the module's, elsewhere": drawn_elsewhere,
            "a default": drawn_by_default,
            "the class's": self.of_class.rand,
            "none": lambda: 0.5,
            "unseen": lambda: len(self.loads) / 7,
        }[self.kind]()
        return torch.full((4,), number), i


KINDS = [
    "python", "numpy", "torch", "own", "torch's own", "new", "the module's, elsewhere", "a default",
    "the class's",
]  # fmt: skip


def told(found):
    return [each for each in found if "gives another sample" in str(each.message)]


@pytest.fixture
def noted():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_who_draws_is_noticed_at_the_first_samples(cached, noted, kind):
    dataset = cached(Draws(kind))
    dataset[0]
    assert len(told(noted)) == 1 and "another sample 0" in str(told(noted)[0].message)
    for i in range(64):
        dataset[i]
    assert len(told(noted)) == 1 and len(dataset.dataset.loads) == 66, "three for the first"
    assert dataset.stats().loads == 64


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_numbers_are_those_without_a_cache(cached, noted, kind):
    outcomes = []
    for source in (Draws(kind), cached(Draws(kind))):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        OF_MODULE.bit_generator.state = np.random.default_rng(5).bit_generator.state
        BY_DEFAULT.seed(5)
        Draws.of_class.seed(5)
        samples = [source[i][0].tolist() for i in range(64)]
        outcomes.append((samples, random.random(), np.random.rand(), torch.rand(()).item()))
    assert outcomes[0] == outcomes[1]


def test_control_who_does_not_restore_draws_others(cached, noted, monkeypatch):
    monkeypatch.setattr("stocache._dataset.samples.generators_of", lambda source: [])
    outcomes = []
    for source in (Draws("own"), cached(Draws("own"))):
        outcomes.append([source[i][0].tolist() for i in range(64)])
    assert outcomes[0] != outcomes[1]


def test_who_seeds_for_each_sample_is_not_random(cached, noted):
    dataset = cached(Draws("python", seeded=True))
    for i in range(64):
        dataset[i]
    assert not told(noted) and len(dataset.dataset.loads) == 64 + 4, "as many as probe says"


def test_who_draws_nothing_is_loaded_once(cached, noted):
    dataset = cached(Draws("none"))
    for _ in range(2):
        for i in range(64):
            dataset[i]
    assert not told(noted) and dataset.dataset.loads == list(range(64))


def test_probe_0_looks_at_nothing(cached, noted):
    dataset = cached(Draws("torch", 3000), probe=0)
    for i in range(3000):
        dataset[i]
    assert not told(noted) and len(dataset.dataset.loads) == 3000


def test_what_draws_unseen_is_noticed_at_one_of_a_thousand(cached, noted):
    dataset = cached(Draws("unseen", 3000))
    for i in range(999):
        dataset[i]
    assert not told(noted) and len(dataset.dataset.loads) == 999
    for i in range(999, 3000):
        dataset[i]
    assert len(told(noted)) == 1


def test_it_takes_no_more_than_its_share(cached, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Draws):
        def __getitem__(self, i):
            now[0] += 0.25 + (i % 16) / 4  # not one is like the other
            return super().__getitem__(i)

    dataset = cached(Slow("none", 20000))
    for i in range(20000):
        dataset[i]
    again = len(dataset.dataset.loads) - 20000
    assert 10 <= again <= 20
    found = dataset._stocache._doubts
    assert found._looking <= doubts._SHARE * found._loading


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_notice_it_and_one_tells(cached, workers):
    dataset = cached(Draws("torch"))
    # Warnings of workers are on their standard error; that it was told is a bit in the cache.
    for _ in DataLoader(dataset, 8, num_workers=workers):
        pass
    assert not dataset._stocache.records.is_first_to_tell(3)
    other = cached(Draws("none"))
    for _ in DataLoader(other, 8, num_workers=workers):
        pass
    assert other._stocache.records.is_first_to_tell(3)


class Together(Draws):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_samples_that_come_together(cached, noted):
    dataset = cached(Together("own"))
    dataset.__getitems__(list(range(8)))
    assert len(told(noted)) == 1


def test_who_answers_in_the_same_memory_gives_the_sample_that_was_loaded(cached, noted):
    class Same(Draws):
        buffer = torch.zeros(4)

        def __getitem__(self, i):
            self.buffer[:] = torch.rand(4)
            return self.buffer

    plain, dataset = Same("none"), cached(Same("none"))
    torch.manual_seed(4)
    first = plain[0].clone()
    torch.manual_seed(4)
    assert torch.equal(dataset[0], first)


def test_what_fails_the_second_time_is_no_matter(cached, noted):
    class Once(Draws):
        def __getitem__(self, i):
            if i in self.loads:
                raise OSError("gone")
            return super().__getitem__(i)

    dataset = cached(Once("torch"))
    for i in range(64):
        dataset[i]
    assert not told(noted) and dataset.stats().filled == 64
