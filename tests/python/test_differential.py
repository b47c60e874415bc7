"""The same training script with and without stocache sees the same (P24, P25).

Scripts are generated: kinds of datasets, samples, transforms, samplers, collate functions, workers,
start methods, shares in memory, what is on top. Compared are samples, types, order, the state of
every random generator after every step, the source's own samples, and in which process a sample is
loaded. The script itself is in differential.py.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import hypothesis
import pytest
import stocache
import torch
from differential import (
    AUGMENTS,
    COLLATES,
    CONTENTS,
    FILES,
    OVERRIDES,
    SAMPLERS,
    SOURCES,
    TOPS,
    TRANSFORMS,
    Case,
    Product,
    difference,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


@st.composite
def cases(draw, **given) -> Case:
    def one(name, *values):
        return given[name] if name in given else draw(st.sampled_from(values), label=name)

    workers = one("workers", 0, 1, 2)
    source = one("source", *(s for s in SOURCES if workers or s != "opened by worker_init_fn"))
    init = one("worker_init", "none", "none", "draws") if workers else "none"
    top, override, transform = "none", "none", "none"
    augments, steps = given.get("augments", "none"), 0
    if augments == "any":
        augments, steps = one("how", *AUGMENTS), draw(st.integers(0, 1), label="steps")
        source = "Dataset"
        top = one("top", "none", "none", *TOPS)
    elif source == "opened by worker_init_fn":
        init = "opens"
    else:
        top = one("top", "none", "none", *TOPS)
        override = one("override", "none", "none", "none", *OVERRIDES)
        transform = one("transform", "none", "none", *TRANSFORMS)
    plain = source in FILES or "TensorDataset" in source
    sampler = one("sampler", *SAMPLERS)
    batch = one("batch", 1, 2, 3, 5) if "draws" in sampler else one("batch", 1, 2, 3, 5, None)
    before = ["nothing", "nothing", "warm", "warm by workers", "verify"]
    if source == "opened by worker_init_fn":
        before = ["nothing"]  # it cannot be loaded in any other process
    return Case(
        source=source,
        content="image and label" if plain else one("content", *CONTENTS),
        width=one("width", "small", "small", "large", "huge"),
        length=draw(st.integers(4, 13), label="length"),
        memory=one("memory", "all", "all", "half", "none"),
        policy=one("policy", "freeze", "freeze", "lru"),
        verbose=one("verbose", False, True),
        transform=transform,
        augments=augments,
        steps=steps,
        override=override,
        top=top,
        sampler=sampler,
        batch=batch,
        drop_last=one("drop_last", False, True),
        collate=one("collate", "default", "default", *COLLATES),
        loader=one("loader", "stock", "ours"),
        workers=workers,
        persistent=one("persistent", False, True) if workers else False,
        start=given.get("start", "fork"),
        prefetch=one("prefetch", 1, 2, 3) if workers else 2,
        generator=one("generator", False, True),
        worker_init=init,
        before=one("before", *before, *(["read"] if source not in FILES else [])),
        between=one("between", "nothing", "nothing", "clear"),
        ahead=one("ahead", False, True),
        draws=one("draws", "nowhere", "after iter", "every batch"),
        stops=tuple(draw(st.lists(st.sampled_from([None, None, 1, 2]), min_size=1, max_size=3))),
        seed=draw(st.integers(0, 99), label="seed"),
    )


def limits(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        phases=phases or (Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def compare(examples: int, seed: int, folder: Path, **given_) -> None:
    """Fails with the smallest script that sees a difference."""

    @hypothesis.seed(seed)
    @limits(examples)
    @given(case=cases(**given_))
    def run(case: Case) -> None:
        found = difference(case, folder)
        assert found is None, f"{found}\nin {case}"

    run()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("loader", ["stock", "ours"])
@pytest.mark.parts(5)
def test_a_script_sees_the_same_with_and_without_the_cache(tmp_path, seed, scale, loader, workers):
    cases = scale(40, 3000) if workers == 0 else scale(15, 1000)  # 10,000 with --long
    compare(cases, seed, tmp_path, loader=loader, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parts(4)
def test_a_script_sees_the_same_where_the_dataset_is_random_itself(tmp_path, seed, scale, workers):
    cases = scale(120, 3000) if workers == 0 else scale(25, 700)
    compare(cases, seed, tmp_path, augments="any", workers=workers)


@pytest.fixture
def quick_forkserver():
    """A forkserver that has torch loaded, so that its workers start at once."""
    multiprocessing.set_forkserver_preload(["torch", "stocache"])
    yield
    multiprocessing.set_forkserver_preload(["__main__"])
    multiprocessing.forkserver._forkserver._stop()


@pytest.mark.parts(6)
def test_a_script_sees_the_same_with_workers_of_a_forkserver(
    tmp_path, seed, scale, quick_forkserver
):
    compare(scale(6, 300), seed, tmp_path, start="forkserver", workers=1)


@pytest.mark.parts(4)
def test_a_script_sees_the_same_with_spawned_workers(tmp_path, seed, scale):
    # Starting costs seconds each time, so that few must do.
    compare(scale(1, 100), seed, tmp_path, start="spawn", workers=1, persistent=True,
            before="nothing")  # fmt: skip


# Controls: twins that do one harm each. The test must see it.


class BypassesSubclasses(stocache.CachedDataset):
    def __getitems__(self, indices):
        return [stocache.CachedDataset.__getitem__(self, idx) for idx in indices]


class DrawsANumber(stocache.CachedDataset):
    def __getitem__(self, index):
        torch.rand(1)
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class EditsTheSource(stocache.CachedDataset):
    def __init__(self, dataset, memory, transform=None, **options):
        super().__init__(dataset, memory, **options)
        self.own = transform

    def __getitem__(self, index):
        sample = self.dataset[index]
        return sample if self.own is None else self.own(sample)

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class LoadsAtTheStart(stocache.CachedDataset):
    def __init__(self, dataset, *arguments, **options):
        super().__init__(dataset, *arguments, **options)
        dataset[0]


class FlipsABit(stocache.CachedDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if isinstance(sample, tuple) and isinstance(sample[0], torch.Tensor) and index == 2:
            sample[0].view(-1).view(torch.uint8)[0] ^= 1
        return sample

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class GivesLists(stocache.CachedDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return list(sample) if type(sample) is tuple else sample

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class LosesMetadata(stocache.CachedDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        sample.meta = {}
        return sample

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class CutsBlindly(stocache.CachedDataset):
    """Never makes a sample both ways."""

    @classmethod
    def until_random(cls, dataset, memory, **options):
        return super().until_random(dataset, memory, probe=0, **options)


class DrawsEveryEpoch(stocache.DataLoader):
    """As if workers were started anew in every epoch, though they persist."""

    def __iter__(self):
        if self.persistent_workers and self._iterator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super().__iter__()


class AnotherOrder(stocache.DataLoader):
    def __iter__(self):
        yield from reversed(list(super().__iter__()))


TWINS = {
    "bypassed __getitem__": (BypassesSubclasses, {"override": "__getitem__"}),
    "drawn number": (DrawsANumber, {}),
    "edited source": (EditsTheSource, {"transform": "in place"}),
    "loaded elsewhere": (LoadsAtTheStart, {"workers": 1, "source": "Dataset"}),
    "flipped bit": (FlipsABit, {}),
    "other type": (GivesLists, {}),
    "cut blindly": (CutsBlindly, {"augments": "any"}),
    "lost metadata": (LosesMetadata, {"content": "scans"}),
    "seed drawn every epoch": (DrawsEveryEpoch, {"workers": 1}),
    "other order": (AnotherOrder, {}),
}


@pytest.mark.parametrize("harm", TWINS)
def test_control_a_harm_is_seen(tmp_path, seed, harm):
    twin, given_ = TWINS[harm]
    is_loader = issubclass(twin, stocache.DataLoader)
    product = Product(loader=twin) if is_loader else Product(cached=twin)
    quiet = {"verbose": False, "before": "nothing", "source": "list", "content": "image and label"}
    given_ = {"workers": 0, **quiet, **given_, "loader": "ours" if is_loader else "stock"}
    seen = hypothesis.find(
        cases(**given_),
        lambda case: difference(case, tmp_path, product) is not None,
        settings=limits(200, Phase.generate),
        random=random.Random(seed),
    )
    print(difference(seen, tmp_path, product))
    assert difference(seen, tmp_path) is None, "stocache itself differs here"
