"""A function of whole batches: batch_transform of stocache.DataLoader."""

from __future__ import annotations

import collections
import functools
import os
import threading

import pytest
import stocache
import torch
from sources import INDEX, Fixed
from stocache import _C
from stocache._loading import gatherer
from stocache._torch import batch_transform as transforms
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

LENGTH = 22


def samples(length=LENGTH):
    return Fixed([(torch.full((4,), float(idx)), idx) for idx in range(length)])


def noisy(batch, generator):
    """Says also who ran it, and where."""
    rows, labels = batch
    rows += torch.rand(rows.shape, generator=generator)  # a batch is nobody else's
    return rows, labels, os.getpid(), threading.current_thread().name


def global_noise(batch):
    rows, labels = batch
    return rows + torch.rand(rows.shape), labels


def same(sample):
    return sample


def make(cached, share, **options):
    """A cache of which this share is in memory; nobody is started to fill it."""
    memory = INDEX + 2600 if share == "some" else "8MiB"
    dataset = cached(
        samples(), memory, fingerprint="x", transform=same if share == "transform" else None
    )
    if share in ("all", "some"):
        [dataset[idx] for idx in range(0, LENGTH, 1 if share == "all" else 2)]
    return dataset


def epochs(loader, count=2):
    torch.manual_seed(6)
    return [[batch[:2] for batch in loader] for _ in range(count)]


def equal(one, other):
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other)


PLACES = [
    (share, workers, ahead)
    for share in ("all", "some", "none", "transform")
    for workers, ahead in ((0, False), (0, True), (1, False), (2, True))
]


def differing(cached, monkeypatch, function):
    """The places at which batches come out otherwise than at the first."""
    expected, differ = None, []
    for share, workers, ahead in PLACES:
        monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
        loader = stocache.DataLoader(
            make(cached, share), 4, shuffle=True, num_workers=workers, batch_transform=function
        )
        got = epochs(loader)
        expected = expected or got
        if not equal(got, expected):
            differ.append((share, workers, ahead))
    assert not equal(expected[0][0][0] % 1, expected[0][1][0] % 1), "each batch has its numbers"
    assert not equal(expected[0][0][0] % 1, expected[1][0][0] % 1), "and each epoch"
    return differ


def test_with_a_generator_it_gives_the_same_wherever_it_runs(cached, monkeypatch):
    assert differing(cached, monkeypatch, noisy) == []


def test_control_without_one_it_does_not(cached, monkeypatch):
    assert differing(cached, monkeypatch, global_noise)


def ran(cached, monkeypatch, function, share, workers, ahead):
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
    dataset = make(cached, share)
    loader = stocache.DataLoader(dataset, 4, num_workers=workers, batch_transform=function)
    return {(pid == os.getpid(), thread) for *_, pid, thread in loader}


def whereabouts(batch):
    return (*batch, os.getpid(), threading.current_thread().name)


@pytest.mark.parametrize("share, workers, ahead", PLACES)
def test_where_it_runs(cached, monkeypatch, share, workers, ahead):
    main = (True, "MainThread")
    with_generator = ran(cached, monkeypatch, noisy, share, workers, ahead)
    without = ran(cached, monkeypatch, whereabouts, share, workers, ahead)
    if share == "transform" and workers:
        assert with_generator == without == {(False, "MainThread")}, "a worker makes the batch"
    elif share == "all" and ahead:
        assert with_generator == {(True, "stocache-gather_0")} and without == {main}
    elif share in ("all", "transform") or workers == 0:
        assert with_generator == without == {main}
    else:  # batches are gathered here, or in a worker after the first epoch's few
        assert without <= {main, (False, "MainThread")}


@pytest.mark.parametrize("share", ["all", "none"])
def test_without_a_generator_it_draws_as_in_collate_fn(cached, share):
    def collate(batch):
        return global_noise(default_collate(batch))

    expected = epochs(DataLoader(samples(), 4, shuffle=True, collate_fn=collate))
    dataset = make(cached, share)
    loader = stocache.DataLoader(dataset, 4, shuffle=True, batch_transform=global_noise)
    assert equal(epochs(loader), expected)


def zeroed(batch):
    batch[0].zero_()
    return batch


def zeroed_ahead(batch, generator):
    return zeroed(batch)


@pytest.mark.parametrize("function", [zeroed, zeroed_ahead])
@pytest.mark.parametrize("share, workers, ahead", PLACES)
def test_it_cannot_edit_what_is_cached(cached, monkeypatch, function, share, workers, ahead):
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
    dataset = make(cached, share)
    for _ in range(2):
        loader = stocache.DataLoader(dataset, 4, num_workers=workers, batch_transform=function)
        for rows, labels in loader:
            assert not rows.any() and len(labels)
    for idx in range(LENGTH):
        assert dataset[idx][0].tolist() == [float(idx)] * 4
    assert dataset.dataset.samples[3][0].tolist() == [3.0] * 4


def fails(batch, error):
    if 5 in batch[1].tolist():
        raise error("of the function")
    return batch


def fails_ahead(batch, error, generator):
    return fails(batch, error)


# With workers, which take long, one kind of error will do.
ERRORS = [
    (error, *place)
    for error in (TypeError, IndexError, OSError, KeyError)
    for place in PLACES
    if error is IndexError or not place[1]
]


@pytest.mark.parametrize("function", [fails, fails_ahead])
@pytest.mark.parametrize("error, share, workers, ahead", ERRORS)
def test_its_errors_come_once_with_their_type(
    cached, monkeypatch, function, error, share, workers, ahead
):
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
    loader = stocache.DataLoader(
        make(cached, share), 4, num_workers=workers,
        batch_transform=functools.partial(function, error=error),
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(error, match="of the function"):
        next(batches)
    seen = [idx for batch in batches for idx in batch[1].tolist()]
    assert seen == list(range(8, LENGTH))


def test_control_an_error_that_is_raised_where_batches_are_gathered_is_lost(cached, monkeypatch):
    """A TypeError there means an index that is none."""
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0)
    prepare = gatherer.Begun._prepared

    def raises(self):
        try:
            batch = prepare(self)
            if isinstance(batch, gatherer._Raised):
                raise batch.take()
            return batch
        except (TypeError, IndexError):
            return _C.MISS

    monkeypatch.setattr(gatherer.Begun, "_prepared", raises)
    tries = []

    def function(batch, generator):
        tries.append(batch[1].tolist())
        return fails(batch, TypeError)

    loader = stocache.DataLoader(make(cached, "all"), 4, batch_transform=function)
    with pytest.raises(TypeError):
        list(loader)
    assert tries.count([4, 5, 6, 7]) == 2, "it was called again"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_pinned_was_transformed(cached, monkeypatch, workers):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    pinned = []

    def pin(tensor, device=None):  # which some versions of torch give
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for function in (lambda batch: batch[0] + 1000, lambda batch, generator: batch[0] + 1000):
        for ahead in (False, True):
            monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
            loader = stocache.DataLoader(
                make(cached, "all"), 4, num_workers=workers, pin_memory=True,
                batch_transform=function,
            )  # fmt: skip
            pinned.clear()
            assert len(list(loader)) == 6
            assert len(pinned) == 6 and all(rows.min() >= 1000 for rows in pinned)


def test_batches_that_workers_must_make_are_transformed_once(cached):
    rows = [(collections.OrderedDict(a=torch.ones(3)), idx) for idx in range(40)]
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    functions[collections.OrderedDict] = lambda batch, collate_fn_map: len(batch)
    try:
        for workers in (0, 2):
            dataset = cached(Fixed(rows), INDEX + 600, fingerprint="x")
            loader = stocache.DataLoader(
                dataset, 8, num_workers=workers, batch_transform=lambda batch: ["once", *batch]
            )
            for _ in range(2):
                batches = list(loader)
                assert [batch[:2] for batch in batches] == [["once", 8]] * 5
                assert batches[4][2].tolist() == list(range(32, 40))
            dataset.close()
    finally:
        del functions[collections.OrderedDict]


def joined(batch):
    return [idx for idx, *_ in batch]


@pytest.mark.parametrize("workers", [0, 1])
def test_over_datasets_and_collate_functions_of_any_kind(cached, workers):
    def negated(batch, generator):
        return [-idx for idx in batch]

    plain = [(idx, 0) for idx in range(6)]
    for dataset in (plain, Subset(plain, range(6)), cached(plain), Subset(cached(plain), range(6))):
        loader = stocache.DataLoader(
            dataset, 3, num_workers=workers, collate_fn=joined, batch_transform=negated
        )
        assert list(loader) == [[0, -1, -2], [-3, -4, -5]] and len(loader) == 2
        loader = stocache.DataLoader(
            dataset, 3, num_workers=workers, batch_transform=lambda batch: batch[0].tolist()
        )
        assert list(loader) == [[0, 1, 2], [3, 4, 5]]


class Told:
    def __init__(self, path):
        self.path = str(path)

    def __call__(self, worker):
        info = torch.utils.data.get_worker_info()
        with open(self.path, "a") as file:
            file.write(type(info.dataset).__name__)


def test_workers_are_told_of_the_dataset(tmp_path):
    told = Told(tmp_path / "told")
    list(stocache.DataLoader(
        samples(), 4, num_workers=1, worker_init_fn=told, batch_transform=whereabouts
    ))  # fmt: skip
    assert (tmp_path / "told").read_text() == "Fixed"


def test_persistent_workers_draw_other_numbers_in_every_epoch(cached):
    for share in ("all", "none"):
        loader = stocache.DataLoader(
            make(cached, share), 4, num_workers=1, persistent_workers=True, batch_transform=noisy
        )
        noise = [epoch[0][0] % 1 for epoch in epochs(loader, 3)]
        assert len({tuple(rows.flatten().tolist()) for rows in noise}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_goes_on_draws_the_same_numbers(cached, workers):
    def make_loader():
        options = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
        return stocache.DataLoader(make(cached, "some"), 4, batch_transform=noisy, **options)

    torch.manual_seed(3)
    loader = make_loader()
    list(loader)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [batch[:2] for batch in batches]
    again = make_loader()
    again.load_state_dict(state)
    assert equal([batch[:2] for batch in again], rest)


def test_seeds_are_spread():
    seeds = {
        transforms.generator_of((seed, turn, number)).initial_seed()
        for seed in (0, 1, 2**63 - 1) for turn in range(4) for number in range(50)
    }  # fmt: skip
    assert len(seeds) == 3 * 4 * 50


class Layer(torch.nn.Module):
    def forward(self, batch, generator=None):
        return "layer", generator is not None


def test_who_takes_a_generator(cached):
    def positional(batch, generator, /):
        pass

    takes = {
        noisy: True, global_noise: False, functools.partial(noisy): True, Layer(): True,
        functools.partial(noisy, generator=None): False, positional: False, max: False,
        torch.neg: False, functools.partial(fails_ahead, error=OSError): True,
    }  # fmt: skip
    for function, expected in takes.items():
        assert transforms.BatchTransform(function).takes_generator is expected, function
    loader = stocache.DataLoader(make(cached, "all"), 4, batch_transform=Layer())
    assert list(loader) == [("layer", True)] * 6


# Refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_what_makes_no_sense_is_refused():
    for given, options, words in [
        ([1, 2], {"batch_transform": 5}, "batch_transform is 5; a function of one batch is needed"),
        ([1, 2], {"batch_transform": same, "batch_size": None}, "no batches; give a batch_size"),
        (Stream(), {"batch_transform": same}, "a Stream, which is an IterableDataset; a map-style"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            stocache.DataLoader(given, **options)


def test_spawned_workers_get_it_by_pickle(cached):
    dataset = make(cached, "none")
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = stocache.DataLoader(dataset, 8, batch_transform=lambda batch: batch, **options)
    with pytest.raises(TypeError, match=r"batch_transform .* started by spawn .*; define it at"):
        iter(loader)
    loader = stocache.DataLoader(dataset, 8, shuffle=True, batch_transform=noisy, **options)
    here = stocache.DataLoader(dataset, 8, shuffle=True, batch_transform=noisy)
    assert equal(epochs(loader, 1), epochs(here, 1))


def runs_dry(batch):
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", ["all", "none"])
def test_one_that_raises_stop_iteration_ends_no_epoch_without_a_word(cached, share, workers):
    loader = stocache.DataLoader(
        make(cached, share), 4, num_workers=workers, batch_transform=runs_dry
    )
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(loader)
