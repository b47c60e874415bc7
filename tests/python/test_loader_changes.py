"""What a program changes while an epoch runs, or in its thread, counts when it does with torch."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import threading

import pytest
import stocache
import torch
from sources import INDEX, Fixed, same
from stocache._loading import gatherer
from stocache._torch.modes import Modes
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
)

LENGTH = 40
LARGE = 1 << 16  # numbers in a sample, of which batches are transformed ahead


def numbers(words: int = 3):
    return [torch.full((words,), float(idx)) for idx in range(LENGTH)]


@pytest.fixture
def complete(cached):
    def make(words: int = 3):
        dataset = cached(Fixed(numbers(words)), "64MiB", fingerprint=f"{words}")
        [dataset[idx] for idx in range(LENGTH)]
        return dataset

    return make


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


# Subsets and samplers that are edited


def assign(subset):
    subset.indices = list(range(20, 40))


def edit(subset):
    subset.indices[:] = range(20, 40)


def shorten(subset):
    del subset.indices[6:]


def another(subset):
    subset.dataset = Fixed([-x for x in numbers()])


def edited(kind, dataset, change, wrap):
    subset = Subset(dataset, list(range(20)))
    batches = []
    try:
        for batch in kind(wrap(subset), 4):
            if not batches:
                change(subset)
            batches.append(batch[:, 0].tolist())
    except IndexError:
        batches.append("IndexError")
    return batches


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Subset(x, list(range(20)))])
@pytest.mark.parametrize("change", [assign, edit, shorten, another])
def test_a_subset_that_is_changed_in_mid_epoch_is_seen_at_the_next_batch(complete, change, wrap):
    expected = edited(DataLoader, Fixed(numbers()), change, wrap)
    assert edited(stocache.DataLoader, complete(), change, wrap) == expected


def test_control_who_does_not_look_again_sees_it_later(complete, monkeypatch):
    monkeypatch.setattr(gatherer.Gatherer, "is_as_it_was", lambda *_: True)
    expected = edited(DataLoader, Fixed(numbers()), assign, lambda x: x)
    assert edited(stocache.DataLoader, complete(), assign, lambda x: x) != expected


def list_of_batches(change):
    def make():
        batches = [list(range(k, k + 4)) for k in range(0, 24, 4)]
        return {"batch_sampler": batches}, lambda: change(batches)

    return make


def random_subset():
    sampler = SubsetRandomSampler(list(range(20)), torch.Generator().manual_seed(3))

    def change():
        sampler.indices[:] = range(20, 40)

    return {"batch_size": 4, "sampler": sampler}, change


CHANGES = {
    "shorter": list_of_batches(lambda batches: batches.__delitem__(slice(2, None))),
    "longer": list_of_batches(lambda batches: batches.append([7, 8])),
    "another": list_of_batches(lambda batches: batches.__setitem__(1, [39])),
    "edited": list_of_batches(lambda batches: batches[1].append(39)),
    "random": random_subset,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sampler_that_is_changed_in_mid_epoch_is_seen_at_the_next_batch(complete, name):
    def run(kind, dataset):
        options, change = CHANGES[name]()
        seen = []
        for batch in kind(dataset, **options):
            if not seen:
                change()
            seen.append(batch[:, 0].tolist())
        return seen

    assert run(stocache.DataLoader, complete()) == run(DataLoader, Fixed(numbers()))


def test_control_who_asks_a_list_ahead_sees_it_later(complete, monkeypatch):
    monkeypatch.setattr(gatherer, "_knows_order", lambda _: True)
    with pytest.raises(AssertionError):
        test_a_sampler_that_is_changed_in_mid_epoch_is_seen_at_the_next_batch(complete, "another")


@pytest.mark.parametrize("full", [True, False])
def test_a_transform_that_is_set_between_epochs_is_not_the_workers_that_live_on(cached, full):
    dataset = cached(Fixed(numbers()), fingerprint="x")
    if full:
        [dataset[idx] for idx in range(LENGTH)]
    loader = stocache.DataLoader(dataset, 8, num_workers=1, persistent_workers=True)
    before = list(loader)
    dataset.transform = torch.neg
    assert same(list(loader), before), "as with torch's own loader"


# Modes of the thread


def test_batches_that_are_begun_in_an_inference_mode_can_be_trained_on(complete):
    for workers in (0, 2):
        weight = torch.nn.Parameter(torch.ones(3))
        batches = iter(stocache.DataLoader(complete(), 4, num_workers=workers))
        with torch.inference_mode():
            next(batches)
        for batch in batches:
            assert not batch.is_inference()
            (batch * weight).sum().backward()
        assert weight.grad is not None


def augmented(batch, generator):
    batch[:, 0] += torch.rand(len(batch), generator=generator)  # in its place
    made = batch @ torch.ones(batch.shape[1], 1, requires_grad=True)
    return made, threading.current_thread() is threading.main_thread()


def gradless():
    return torch.no_grad()


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def told(batches):
    return [(made.dtype, made.requires_grad, made.is_inference()) for made, _ in batches]


MODES = [gradless, torch.inference_mode, autocast, lambda: torch.device("cpu")]


@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_runs_ahead_runs_in_the_modes_of_the_training_loop(complete, mode):
    with mode():
        small = list(stocache.DataLoader(complete(), 8, batch_transform=augmented))
        large = list(stocache.DataLoader(complete(LARGE), 8, batch_transform=augmented))
    assert told(large) == told(small)
    assert all(here for _, here in small)
    assert any(here for _, here in large) == (mode is MODES[-1]), "else it ran in the other thread"


@pytest.mark.parametrize("mode", MODES[:3])
def test_a_mode_that_is_left_in_mid_epoch_is_left_at_the_next_batch(complete, mode):
    def run(words):
        batches = iter(stocache.DataLoader(complete(words), 8, batch_transform=augmented))
        with mode():
            first = next(batches)
        return [first, *batches]

    torch.manual_seed(1)
    small = run(3)
    torch.manual_seed(1)
    large = run(LARGE)
    assert told(large) == told(small) and len(set(told(large))) == 2


def test_control_without_a_look_at_the_modes_they_are_those_of_before(complete, monkeypatch):
    monkeypatch.setattr(Modes, "__eq__", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_mode_that_is_left_in_mid_epoch_is_left_at_the_next_batch(complete, gradless)


# Processes and threads


GOES_ON = """
    import os, signal, sys, torch, stocache

    torch.set_num_threads(1)  # those of OpenMP are not there in a child either

    def more(batch, generator):
        return batch + 1

    dataset = stocache.CachedDataset(
        [torch.full((1 << 16,), float(idx)) for idx in range(40)], "64MiB", verbose=False
    )
    [dataset[idx] for idx in range(40)]
    batches = iter(stocache.DataLoader(dataset, 8, batch_transform=more))
    next(batches)
    child = os.fork()
    if not child:
        signal.alarm(60)
    assert [batch[:, 0].tolist() for batch in batches] == [
        [float(idx + 1) for idx in range(k, k + 8)] for k in range(8, 40, 8)
    ]
    if not child:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_child_that_is_forked_in_mid_epoch_goes_on_with_it(run_script):
    run_script(GOES_ON)


def test_a_thread_may_train_after_the_main_thread_ended(run_script):
    said = run_script(
        """
        import concurrent.futures.thread, threading, time, torch, stocache

        def train():
            threading.main_thread().join()
            while not concurrent.futures.thread._shutdown:  # from then on it starts no thread
                time.sleep(0.001)
            batches = stocache.DataLoader(dataset, 8, batch_transform=lambda x, generator: x + 1)
            print(len(list(batches)))

        dataset = stocache.CachedDataset(
            [torch.full((1 << 16,), float(idx)) for idx in range(40)], "64MiB", verbose=False
        )
        [dataset[idx] for idx in range(40)]
        threading.Thread(target=train).start()
        """
    )
    assert said.stdout.split() == ["5"]


def test_threads_may_begin_epochs_of_one_loader_at_the_same_moment(complete):
    dataset = complete()
    loader = stocache.DataLoader(dataset, 8, num_workers=1)
    expected = [list(map(float, range(k, k + 8))) for k in range(0, LENGTH, 8)]
    seen = []
    barrier = threading.Barrier(4)

    def run():
        for _ in range(25):
            barrier.wait()
            seen.append(firsts(loader) == expected)

    threads = [threading.Thread(target=run) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == [True] * 100


def fails_at(count: int):
    calls = []

    def fork():
        calls.append(None)
        if len(calls) == count:
            raise BlockingIOError(11, "no more processes")
        return os.fork()

    return fork


@pytest.mark.parametrize("in_mid_epoch", [False, True])
def test_where_a_worker_cannot_be_started_those_before_it_end(complete, monkeypatch, in_mid_epoch):
    dataset = complete()
    if not in_mid_epoch:
        dataset.clear()
    before = set(multiprocessing.active_children())
    batches = stocache.DataLoader(dataset, 8, num_workers=3)
    with monkeypatch.context() as patch, pytest.raises(BlockingIOError):
        if in_mid_epoch:
            batches = iter(batches)
            next(batches)
            dataset.clear()
        patch.setattr("multiprocessing.popen_fork.os.fork", fails_at(3))
        list(batches)
    assert set(multiprocessing.active_children()) == before


# What torch would not have asked


class Alone(Dataset):
    """Cannot give many at once, though it has a method for it: torch does not ask a part of a
    ConcatDataset for many."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, idx):
        return torch.full((50,), float(self.first + idx))

    def __getitems__(self, indices):
        raise NotImplementedError


@pytest.mark.parametrize("memory", ["8MiB", INDEX + 2000])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_of_a_concatenation_is_asked_for_single_samples(cached, parts, workers, memory):
    plain = [Alone(100 * k) for k in range(parts)]
    made = [cached(part, memory, fingerprint=f"{k}") for k, part in enumerate(plain)]
    for _ in range(2):
        torch.manual_seed(0)
        expected = list(DataLoader(ConcatDataset(plain), 8, shuffle=True))
        torch.manual_seed(0)
        joined = ConcatDataset(made)
        assert same(
            list(stocache.DataLoader(joined, 8, shuffle=True, num_workers=workers)), expected
        )


class Hashed(Dataset):
    """Its keys are no positions."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key):
        return torch.tensor(key % 1000)


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_of_a_subset_may_be_larger_than_any_index(cached, workers):
    keys = [2**63 + k for k in range(8)]
    expected = list(DataLoader(Subset(Hashed(), keys), 4))
    dataset = Subset(cached(Hashed()), keys)
    assert same(list(stocache.DataLoader(dataset, 4, num_workers=workers)), expected)


class Sorted(stocache.CachedDataset):
    """Wants what the sampler gave."""

    def __getitems__(self, indices):
        assert isinstance(indices, torch.Tensor)
        return [self[int(idx)] for idx in indices.sort().values]


def test_a_subclass_gets_what_the_sampler_gave():
    dataset = Sorted(Fixed(numbers()), "8MiB", verbose=False)
    batches = [torch.tensor([3, 1, 2]), torch.tensor([7, 6, 5])]
    assert firsts(stocache.DataLoader(dataset, batch_sampler=batches)) == [[1, 2, 3], [5, 6, 7]]
    dataset.close()


# Samplers whose state cannot be had


class FromTheSystem(Sampler):
    def __init__(self) -> None:
        self.random = random.SystemRandom()

    def __iter__(self):
        return iter(sorted(range(LENGTH), key=lambda _: self.random.random()))

    def __len__(self) -> int:
        return LENGTH


class Abstract(Sampler):
    """As a base class whose subclasses may do better."""

    def state_dict(self):
        raise NotImplementedError

    def load_state_dict(self, state):
        raise NotImplementedError

    @property
    def epoch(self):
        raise RuntimeError("not set")

    def set_epoch(self, number):
        pass

    def __iter__(self):
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [FromTheSystem, Abstract])
def test_a_sampler_without_a_state_ends_no_epoch(complete, sampler, workers):
    loader = stocache.DataLoader(complete(), 8, sampler=sampler(), num_workers=workers)
    for _ in range(2):
        assert sorted(itertools.chain.from_iterable(firsts(loader))) == list(
            map(float, range(LENGTH))
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_that_a_sampler_has_no_state_is_told_to_who_asks_for_it(complete, workers):
    loader = stocache.DataLoader(complete(), 8, sampler=Abstract(), num_workers=workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(NotImplementedError):
        loader.state_dict()
    assert len(list(batches)) == LENGTH // 8 - 1


class Left(Sampler):
    """What is left is its state, and gets less as it gives."""

    def __init__(self) -> None:
        self.left = list(range(LENGTH))

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = list(state["left"])

    def __iter__(self):
        while self.left:
            yield self.left.pop(0)
        self.left = list(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_changes_as_its_sampler_gives_is_kept_as_it_was(complete, workers):
    def make():
        return stocache.DataLoader(complete(), 8, sampler=Left(), num_workers=workers)

    loader = make()
    for n, _ in enumerate(loader, 1):
        if n == 2:
            state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert firsts(loader) == [list(map(float, range(k, k + 8))) for k in range(16, LENGTH, 8)]
