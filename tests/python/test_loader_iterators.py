"""Iterators of stocache.DataLoader are torch's: when they draw, what they are, where they load."""

from __future__ import annotations

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import stocache
import torch
from differential import Copying, DrawsInIter, DrawsPerBatch
from sources import Fixed
from stocache._loading import gatherer
from stocache._torch import progress
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from torch.utils.data._utils.collate import default_collate_fn_map


@pytest.fixture
def complete(cached, log):
    """A complete cache of 40 samples, over a source that notes loads in this process."""

    def make(**options):
        dataset = cached(Copying([(torch.full((8,), idx), idx) for idx in range(40)], log))
        dataset.warm(num_workers=1, progress=False)
        return dataset

    return make


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_a_batch_can_grow_and_its_memory_is_not_used_again(cached, kind):
    dataset = cached([torch.full((1 << 14,), idx % 2) for idx in range(16)])
    dataset.warm(num_workers=1, progress=False)
    grown = []
    for batch in kind(dataset, 4):
        batch.resize_(8, 1 << 14)[4:] = 7
        grown.append(batch)
    for batch in grown:
        assert batch[:4, 0].tolist() == [0, 1, 0, 1] and (batch[4:] == 7).all()


class OldLoader(stocache.DataLoader):
    """As it was: a generator that draws a seed in every epoch, when the first batch is asked for,
    and loads what is missing itself."""

    def __iter__(self):
        gatherer = self._stocache_gatherer(self._stocache_source())
        if gatherer is None:
            yield from super().__iter__()
            return
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        for indices in self.batch_sampler:
            batch = gatherer.start(indices, (0, 0, 0)).finish()
            if batch is gatherer.missing:
                batch = stocache.collate([self.dataset[i] for i in indices])
            yield batch


def orders(kind, dataset, between, **options):
    """What three epochs give, and what is drawn after each."""
    torch.manual_seed(5)
    random.seed(5)
    loader, seen = kind(dataset, **options), []
    for _ in range(3):
        batches = iter(loader)
        seen.append(between())
        seen += [batch[1].tolist() for batch in batches]
        seen.append((torch.rand(1).item(), random.random()))
    return seen


SCRIPTS = {
    "persistent workers": lambda: dict(
        batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "a batch sampler that draws in __iter__": lambda: dict(batch_sampler=DrawsInIter(40, 4)),
    "the same, workers": lambda: dict(batch_sampler=DrawsInIter(40, 4), num_workers=2),
    "a batch sampler that draws per batch": lambda: dict(
        batch_sampler=DrawsPerBatch(40, 4), num_workers=1
    ),
    "shuffled": lambda: dict(batch_size=4, shuffle=True),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("between", [lambda: None, partial(torch.rand, 1)], ids=["", "rand()"])
def test_numbers_are_drawn_when_torch_draws_them(complete, monkeypatch, script, between, ahead):
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if ahead else 1 << 20)
    dataset, options = complete(), SCRIPTS[script]
    expected = orders(DataLoader, dataset, between, **options())
    assert orders(stocache.DataLoader, dataset, between, **options()) == expected


def test_control_a_generator_draws_at_other_times(complete):
    dataset, differ = complete(), []
    for script, options in SCRIPTS.items():
        for between in (lambda: None, partial(torch.rand, 1)):
            expected = orders(DataLoader, dataset, between, **options())
            if orders(OldLoader, dataset, between, **options()) != expected:
                differ.append(script)
    assert set(differ) == set(SCRIPTS), "every script finds it"


def test_a_sampler_with_a_generator_of_its_own_is_where_torch_leaves_it(complete, monkeypatch):
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0)
    dataset = complete()

    def states(kind):
        generator = torch.Generator().manual_seed(3)
        seen = []
        for stop in (1, 5, 9, 10, 11):
            sampler = RandomSampler(dataset, generator=generator)
            for n, _ in enumerate(kind(dataset, batch_sampler=BatchSampler(sampler, 4, False)), 1):
                seen.append(generator.get_state().sum().item())
                if n == stop:
                    break
        return seen

    assert states(stocache.DataLoader) == states(DataLoader)
    # control: one that is asked ahead of time without regard to what it draws
    monkeypatch.setattr(gatherer, "_knows_order", lambda batches: True)
    monkeypatch.setattr(stocache._torch.compat.HereIterator, "__len__", lambda self: 99)
    with pytest.raises((AssertionError, StopIteration)):
        assert states(stocache.DataLoader) == states(DataLoader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_keeps_its_type_and_its_length(cached, log, workers):
    def look(kind):
        dataset = cached(Copying([(torch.ones(2), idx) for idx in range(12)], log))
        loader, seen = kind(dataset, 4, num_workers=workers), set()
        for _ in range(3):
            batches = iter(loader)
            seen.add((type(batches), len(batches)))
            assert len(list(batches)) == 3
            assert next(batches, None) is None
        assert dataset.is_complete()
        return seen

    assert len(look(stocache.DataLoader)) == 1
    with pytest.raises(TypeError, match="has no len"):  # control
        look(OldLoader)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("chosen", [range(40), range(3, 37)], ids=["all", "Subset"])
def test_a_cache_emptied_in_mid_epoch_is_filled_by_workers(complete, tmp_path, chosen, persistent):
    def run(kind):
        dataset = complete()
        (tmp_path / "loads").unlink(missing_ok=True)
        top = dataset if len(chosen) == 40 else Subset(dataset, chosen)
        loader = kind(top, 4, num_workers=2, persistent_workers=persistent)
        for epoch in range(4):
            seen = []
            for n, (rows, labels) in enumerate(loader):
                assert rows[:, 0].tolist() == labels.tolist()
                seen += labels.tolist()
                if n == 3 and epoch != 1:
                    dataset.clear()
            assert seen == list(chosen)
        return (tmp_path / "loads").exists()

    assert not run(stocache.DataLoader), "the main process loaded a sample"
    if not persistent:
        assert run(OldLoader), "control: it did before"


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_that_pin_use_the_device_of_the_training_loop(complete, monkeypatch, workers):
    devices = {}

    def use(index):
        devices[threading.get_ident()] = index

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", use)
    monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0)
    dataset, pinned = complete(), []

    def pin(tensor, device=None):
        pinned.append(devices.get(threading.get_ident()))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = stocache.DataLoader(dataset, 4, num_workers=workers, pin_memory=True)
    assert len(list(loader)) == 10
    assert pinned == [3] * 20
    # control: a thread that nobody told
    pinned.clear()
    devices.clear()  # a new thread may get an old number
    monkeypatch.setattr(gatherer, "ThreadPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    list(loader)
    assert pinned == [None] * 20


def test_import_leaves_the_reducer_of_tensors_alone(run_script):
    source = """
        from multiprocessing.reduction import ForkingPickler
        import torch, torch.multiprocessing
        before = ForkingPickler._extra_reducers[torch.Tensor]
        import stocache
        dataset = stocache.CachedDataset(
            [torch.zeros(9999) + i for i in range(8)], "8MiB", verbose=False
        )
        for _ in range(2):
            for n, batch in enumerate(stocache.DataLoader(dataset, 4, num_workers=1)):
                assert batch[:, 0].tolist() == list(range(4 * n, 4 * n + 4))
        if "control" in __import__("sys").argv:
            ForkingPickler.register(torch.Tensor, lambda tensor: (torch.zeros, (1,)))
        print(ForkingPickler._extra_reducers[torch.Tensor] is before)
    """
    assert run_script(source).stdout == "True\n"
    assert run_script(source, "control").stdout == "False\n"


class Told:
    """A worker_init_fn that notes what get_worker_info() tells of."""

    def __init__(self, path):
        self.path = str(path)

    def __call__(self, worker):
        info = torch.utils.data.get_worker_info()
        with open(self.path, "a") as file:
            file.write(f"{type(info.dataset).__name__} {type(info.dataset.dataset).__name__}\n")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_are_told_of_the_dataset_and_not_of_a_view(cached, log, tmp_path, context):
    tops = (lambda dataset: dataset, lambda dataset: Subset(dataset, range(7)))
    for n, top in enumerate(tops if context == "fork" else tops[:1]):
        dataset = cached(Copying([(torch.ones(2), idx) for idx in range(8)], log))
        told = Told(tmp_path / f"told{n}")
        options = {"num_workers": 1, "multiprocessing_context": context, "worker_init_fn": told}
        assert len(list(stocache.DataLoader(top(dataset), 4, **options))) == 2
    assert (tmp_path / "told0").read_text() == "CachedDataset Copying\n"
    if context == "fork":
        assert (tmp_path / "told1").read_text() == "Subset CachedDataset\n"
    # control: a stock loader over the view tells of the view
    told = Told(tmp_path / "control")
    indices = [[0, 1], [2]]
    list(DataLoader(Named(dataset), None, sampler=indices, num_workers=1, worker_init_fn=told))
    assert (tmp_path / "control").read_text() == "Named CachedDataset\n"


class Named(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, indices):
        return self.dataset.batches[indices]


def test_a_view_of_batches_says_what_it_needs(complete):
    view = complete().batches
    assert len(view) == 40 and view[[3, 1]][1].tolist() == [3, 1]
    with pytest.raises(TypeError, match=r"index 3 of a view of batches; a list of indices"):
        view[3]
    with pytest.raises(IndexError, match="out of range"):
        view[[40]]


# What is set, and what runs where, while batches are gathered ahead


class Wide(Fixed):
    """Samples of which a batch is worth a thread."""

    def __init__(self, make):
        super().__init__([make(idx) for idx in range(12)])


def wide(idx):
    return torch.full((1 << 19,), idx, dtype=torch.uint8)


def set_in_mid_epoch(kind, dataset, **options):
    seen = []
    for n, batch in enumerate(kind(dataset, 2, **options)):
        if n == 1:
            dataset.transform = lambda sample: sample + 100
        seen += batch[:, 0].tolist()
    dataset.transform = None
    return seen


@pytest.mark.parametrize("make", [wide, lambda idx: torch.full((1,), idx)], ids=["wide", "small"])
def test_a_transform_that_is_set_in_mid_epoch_counts_where_it_does_with_torch(cached, make):
    dataset = cached(Wide(make), "64MiB")
    dataset.warm(progress=False)
    loader = stocache.DataLoader(dataset, 2)
    assert loader._stocache_gatherer(loader._stocache_source()) is not None
    for workers in (0, 1):
        expected = set_in_mid_epoch(DataLoader, dataset, num_workers=workers)
        assert set_in_mid_epoch(stocache.DataLoader, dataset, num_workers=workers) == expected
        assert (expected[4] == 104) == (workers == 0), "workers have datasets of their own"


def test_control_asking_only_at_the_start_misses_it(cached, monkeypatch):
    dataset = cached(Wide(wide), "64MiB")
    dataset.warm(progress=False)
    monkeypatch.setattr(dataset, "_stocache_gathers", lambda: True)
    assert set_in_mid_epoch(stocache.DataLoader, dataset) == list(range(12))


@dataclasses.dataclass
class Noted:
    """Cannot be gathered: its batches are collated by a function of the program."""

    row: torch.Tensor


def threads_that_collate(cached, monkeypatch):
    threads = []

    def collate_noted(batch, *, collate_fn_map=None):
        threads.append(threading.current_thread())
        return torch.stack([sample.row for sample in batch])

    monkeypatch.setitem(default_collate_fn_map, Noted, collate_noted)
    dataset = cached(Wide(lambda idx: Noted(wide(idx))), "64MiB")
    dataset.warm(progress=False)
    assert [batch[0, 0] for batch in stocache.DataLoader(dataset, 2)] == list(range(0, 12, 2))
    assert len(threads) == 6
    return set(threads)


def test_functions_of_a_program_run_in_its_own_thread(cached, monkeypatch):
    assert threads_that_collate(cached, monkeypatch) == {threading.current_thread()}


def test_control_functions_that_are_called_ahead_run_in_another_thread(cached, monkeypatch):
    finish = gatherer.Begun.finish

    def ahead(self, *arguments):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(finish, self, *arguments).result()

    monkeypatch.setattr(gatherer.Begun, "finish", ahead)
    assert threading.current_thread() not in threads_that_collate(cached, monkeypatch)


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_indices_of_a_subset_that_do_not_exist_fail_when_their_turn_comes(cached, kind):
    dataset = cached(Wide(wide), "64MiB")
    dataset.warm(progress=False)
    batches = iter(kind(Subset(dataset, range(6)), batch_sampler=[[0, 1], [2, 3], [6, 7], [4, 5]]))
    assert [next(batches)[0, 0].item() for _ in range(2)] == [0, 2]
    with pytest.raises(IndexError):
        next(batches)


# Iterators in the place of lists


class ByName(dict):
    """Samples by name."""


class InPieces:
    """A batch sampler that gives iterators."""

    def __init__(self, keys, kind):
        self.keys, self.kind = keys, kind

    def __len__(self):
        return len(self.keys) // 2

    def __iter__(self):
        for at in range(0, len(self.keys), 2):
            yield self.kind(self.keys[at : at + 2])


def pieces(loader, dataset, keys, kind, workers):
    loader = loader(dataset, batch_sampler=InPieces(keys, kind), num_workers=workers)
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.filterwarnings("ignore:index 'a' is passed on")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("loader", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("keys", [[2, 0, -1, 1], list("abcd")], ids=["numbers", "names"])
def test_a_batch_of_indices_may_be_an_iterator(cached, loader, keys, workers):
    samples = list(range(10, 14)) if keys[0] == 2 else ByName(zip("abcd", range(4), strict=True))
    expected = pieces(DataLoader, samples, keys, list, 0)
    assert pieces(loader, cached(samples), keys, iter, workers) == expected


def test_control_who_looks_for_places_has_read_from_an_iterator(cached):
    names = iter("ab")
    assert cached([1])._stocache._places(names) is None and list(names) == ["b"]


def pieces_around_clear(dataset):
    loader = stocache.DataLoader(dataset, batch_sampler=InPieces([0, 1, 2, 3], iter))
    list(loader)
    batches = iter(loader)
    first = next(batches).tolist()
    dataset.clear()
    return [first, *(batch.tolist() for batch in batches)]


def test_an_iterator_is_kept_until_its_batch_is_made(cached):
    assert pieces_around_clear(cached([5, 6, 7, 8])) == [[5, 6], [7, 8]]


def test_control_an_iterator_that_is_read_twice_gives_nothing(cached, monkeypatch):
    monkeypatch.setattr(progress, "kept", lambda indices: indices)
    with pytest.raises(IndexError):  # nothing to collate
        pieces_around_clear(cached([5, 6, 7, 8]))


# Cleared while batches are gathered ahead


class Shifted(Fixed):
    by = 0

    def __getitem__(self, idx):
        return super().__getitem__(idx) + self.by


def cleared_in_mid_epoch(dataset, fills_again=False):
    loader = stocache.DataLoader(dataset, 2)
    list(loader)
    batches = iter(loader)
    seen = [next(batches)[:, 0].tolist()]
    dataset.dataset.by = 100
    dataset.clear()
    if fills_again:
        dataset.warm(progress=False)
    return seen + [batch[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("fills_again", [False, True])
def test_what_was_gathered_ahead_and_cleared_since_is_loaded_anew(cached, monkeypatch, fills_again):
    dataset = cached(Shifted([wide(idx) for idx in range(8)]), "64MiB")
    seen = cleared_in_mid_epoch(dataset, fills_again)
    assert seen == [[0, 1], [102, 103], [104, 105], [106, 107]]


@pytest.mark.parametrize("fills_again", [False, True])
def test_control_unasked_old_samples_come_after_clear(cached, monkeypatch, fills_again):
    start = gatherer.Gatherer.start

    def at_once(self, *arguments):
        batch = start(self, *arguments).finish()
        return SimpleNamespace(rows=[], finish=lambda: batch)

    monkeypatch.setattr(gatherer.Gatherer, "start", at_once)
    dataset = cached(Shifted([wide(idx) for idx in range(8)]), "64MiB")
    assert cleared_in_mid_epoch(dataset, fills_again)[1] == [2, 3]
