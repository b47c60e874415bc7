"""Batches of which a part is in memory: rows come from where they are, workers load the rest."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import multiprocessing
import os
import random
import signal
import time
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import stocache
import torch
from kernel import ends_with_torchs_error, leads_group
from kinds import MIXED, SAMPLES, WORDS, outcome
from samples import complaint
from sources import (
    FORK,
    INDEX,
    Broken,
    Counted,
    Fails,
    Fixed,
    Together,
    doubled,
    into_one_buffer,
    same,
)  # fmt: skip
from stocache import _C
from stocache._dataset import together
from stocache._dataset.samples import Rest, Samples, finished
from stocache._loading import gatherer
from stocache._loading.gatherer import Begun
from stocache._torch.compat import WorkersIterator
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

LENGTH = 61
HALF = INDEX + 30 * (8 * WORDS + 64)


def check(batches, expected=None):
    """They are whole; which samples they hold."""
    seen = []
    for indices, rows in batches:
        for idx, row in zip(indices.tolist(), rows, strict=True):
            assert complaint(idx, row) is None
        seen.append(indices.tolist())
    assert expected is None or seen == expected
    return seen


def of_torch(seed, size=8, **options):
    """The order in which torch's own loader gives the samples of two epochs."""
    torch.manual_seed(seed)
    loader = DataLoader(range(LENGTH), size, **options)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


# The same as default_collate


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [3, 0, 5, 1], [4], [5, 5, 0], [2, 4]])
@pytest.mark.parametrize("kind", [*SAMPLES, *MIXED])
def test_what_was_loaded_is_gathered_beside_what_is_in_memory(cached, kind, indices):
    samples = {**SAMPLES, **MIXED}[kind]
    dataset = cached(samples)
    dataset.warm(indices=[0, 2, 3], progress=False)
    expected = outcome(lambda: default_collate([samples[i] for i in indices]))
    loaded = {row: samples[idx] for row, idx in enumerate(indices) if idx in (1, 4, 5)}

    def collated(indices, samples=None, packed=None):
        return finished(dataset._stocache.records.gather(indices, 2, False), 0, samples, packed)

    native = outcome(lambda: collated(indices, samples=loaded))
    packed = _C.pack(loaded)
    if packed is not _C.MISS:
        again = outcome(lambda: collated(indices, packed=[packed]))
        apart = [_C.pack({row: loaded[row]}) for row in loaded]
        assert same(outcome(lambda: collated(indices, packed=apart)), again) or again is _C.MISS
        assert same(again, native) or (again is native is _C.MISS)
    if kind in SAMPLES and "bytes" not in kind:
        assert native is not _C.MISS and packed is not _C.MISS, "these are gathered natively"
    if native is not _C.MISS:
        assert same(native, expected)
    assert same(outcome(lambda: dataset.batches[indices]), expected)
    assert collated([*indices, 1]) is _C.MISS or 1 in indices, "nobody has that one"


def test_packed_records_that_do_not_fit_their_memory_are_refused(cached):
    dataset = cached([torch.full((100,), float(idx)) for idx in range(4)])

    def batch(packed):
        return dataset._stocache.records.gather([1], 1, False).finish(0, None, packed)

    tensor, schemas, ((_, _, at, size),) = _C.pack({1: torch.ones(100)})
    end = len(tensor)
    for wrong in [(0, 0, at, end + 1), (0, 0, 1 << 63, 1 << 63), (0, 0, end + 1, 0),
                  (0, 1, at, size), (0, -1, at, size)]:  # fmt: skip
        with pytest.raises(ValueError, match="do not fit their memory"):
            batch([(tensor, schemas, [wrong])])
    for wrong in [[(tensor, schemas, [(1, 2)])], [(tensor, schemas, 5)], [(5, schemas, [])],
                  [(tensor, schemas)], [(tensor, [5], [])], (tensor, schemas, []), 5]:  # fmt: skip
        with pytest.raises(TypeError):
            batch(wrong)
    # Shorter than its schema says, or for another row: no batch.
    for row in [(0, 0, at, size - 1), (1, 0, at, size)]:
        assert batch([(tensor, schemas, [row])]) is _C.MISS
    # Of another schema.
    of_longs = _C.pack({0: (torch.ones(100), 5)})
    dataset[1]
    gathering = dataset._stocache.records.gather([1, 0], 1, False)
    assert gathering.finish(0, None, [(of_longs[0], of_longs[1], [(1, 0, 0, 16)])]) is _C.MISS
    with pytest.raises(ValueError):
        dataset._stocache.records.gather([1, 0], 1, False).finish(
            0, None, [(tensor, [b"nonsense"], [(1, 0, at, size)])]
        )
    dataset.clear()
    assert torch.equal(batch([(tensor, schemas, [(0, 0, at, size)])]), torch.ones(1, 100))


# Epochs


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("kind", [Counted, Together])
def test_epochs_of_a_dataset_that_does_not_fit(cached, log, kind, policy, persistent):
    source = kind(log, LENGTH, words=WORDS)
    dataset = cached(source, HALF, policy=policy, fingerprint="x")
    options = {"shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    expected = of_torch(5, **options)
    torch.manual_seed(5)
    loader = stocache.DataLoader(dataset, 8, **options)
    check(loader, expected[0])
    together = len(source.groups()) if kind is Together else 0
    check(loader, expected[1])
    if kind is Together:
        assert len(source.groups()) > together, "what does not fit is still loaded together"
    elif policy == "freeze":
        in_memory = [idx for idx in range(LENGTH) if dataset._stocache.records.contains(idx)]
        assert 20 < len(in_memory) < 40
        loads = source.loads()
        assert all(loads[idx] == (1 if idx in in_memory else 2) for idx in range(LENGTH))
        stats = dataset.stats()
        assert stats.hits + stats.misses == 2 * LENGTH and stats.hits == len(in_memory)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_of_every_kind_of_sample_that_does_not_fit(cached, workers):
    for kind, samples in {**SAMPLES, **MIXED}.items():
        expected = outcome(lambda samples=samples: list(DataLoader(samples, 4)))
        if workers and isinstance(expected, type):
            continue  # torch takes five seconds a worker to end after an error
        dataset = cached(Fixed(samples), INDEX + 200, fingerprint=kind)
        for _ in range(2):
            loader = stocache.DataLoader(dataset, 4, num_workers=workers)
            assert same(outcome(lambda loader=loader: list(loader)), expected), kind
        dataset.close()


def test_workers_are_started_for_what_is_missing_and_for_nothing_else(cached, log):
    source = Counted(log, 64, words=WORDS)
    dataset = cached(source)
    dataset.warm(indices=range(40), progress=False)
    loader = stocache.DataLoader(Subset(dataset, range(40)), 8, num_workers=2)
    batches = iter(loader)
    assert check(batches) == [list(range(n, n + 8)) for n in range(0, 40, 8)]
    assert not hasattr(batches, "_workers"), "all of this subset is in memory"
    # Asked for as far ahead as torch asks, which is four batches.
    loader = stocache.DataLoader(Subset(dataset, range(4, 44)), 8, num_workers=2)
    batches = iter(loader)
    assert not hasattr(batches, "_workers")
    check([next(batches)], [list(range(4, 12))])
    assert len(batches._workers) == 2
    check(batches, [list(range(n, n + 8)) for n in range(12, 44, 8)])
    assert source.loads() == collections.Counter(range(44))


def test_what_is_in_memory_is_gathered_here_and_only_the_rest_travels(cached, log, monkeypatch):
    source = Counted(log, 64, words=WORDS)
    dataset = cached(source, INDEX + 52 * (8 * WORDS + 64), fingerprint="x")
    dataset.warm(progress=False)
    there = {idx for idx in range(64) if dataset._stocache.records.contains(idx)}
    assert 40 < len(there) < 64
    given = []
    finish = Begun.finish

    def noted(self, rests=None):
        given.append((self._located.indices.tolist(), rests or []))
        return finish(self, rests)

    monkeypatch.setattr(Begun, "finish", noted)
    check(stocache.DataLoader(dataset, 8, num_workers=2))
    assert len(given) == 8
    for places, rests in given:
        rows = [row for rest in rests for row, *_ in rest.packed[2]]
        assert [places[row] for row in rows] == [idx for idx in places if idx not in there]


class Uneven(Counted):
    """Some samples take much longer than others."""

    def __getitem__(self, idx):
        time.sleep(0.03 if idx % 11 == 3 else 0)
        return super().__getitem__(idx)


@pytest.mark.parametrize("size", [3, 25])  # of the larger ones, workers share the rows
def test_answers_belong_to_their_batches_whoever_is_faster(cached, log, seed, size):
    dataset = cached(Uneven(log, LENGTH, words=64), INDEX + 4000, fingerprint="x")
    torch.manual_seed(seed)
    loader = stocache.DataLoader(
        dataset, size, shuffle=True, num_workers=3, prefetch_factor=4, persistent_workers=True
    )
    for _ in range(4):
        seen = check(loader)
        assert sorted(idx for batch in seen for idx in batch) == list(range(LENGTH))


class ByWorker(Dataset):
    """Samples that say which worker has loaded them."""

    def __len__(self):
        return 96

    def __getitem__(self, idx):
        return torch.tensor([idx, get_worker_info().id])


class ByWorkerTogether(ByWorker):
    def __getitems__(self, indices):
        return [torch.tensor([idx, get_worker_info().id]) for idx in indices]


@pytest.mark.parametrize("kind", [ByWorker, ByWorkerTogether])
@pytest.mark.parametrize(
    "workers, size, shares", [(2, 32, [16, 16]), (3, 32, [10, 11, 11]), (4, 9, [4, 5]), (3, 7, [7])]
)
def test_workers_share_what_is_missing_of_a_batch(cached, monkeypatch, kind, workers, size, shares):
    # None is compared with one that another worker would load.
    monkeypatch.setattr(together.Together, "samples", lambda *args: args[-1])
    dataset = cached(kind(), INDEX + 64, fingerprint="x")  # room for one
    loader = stocache.DataLoader(dataset, size, drop_last=True, num_workers=workers)
    loaded = collections.Counter()
    for n, batch in enumerate(loader):
        assert batch[:, 0].tolist() == list(range(n * size, (n + 1) * size))
        of_worker = collections.Counter(batch[:, 1].tolist())
        if n:  # the first sample stays in memory
            assert len(of_worker) == len(shares)
            assert max(of_worker.values()) - min(of_worker.values()) <= 2
        loaded += of_worker
    assert max(loaded.values()) - min(loaded.values()) <= max(shares, default=0) // len(shares)


class BrokenTwice(ByWorker):
    def __getitem__(self, idx):
        if idx in (37, 60):
            time.sleep(0.2 if idx == 37 else 0)
            raise Fails(f"sample {idx}")
        return super().__getitem__(idx)


def test_of_several_errors_it_is_that_of_the_first_row(cached):
    dataset = cached(BrokenTwice(), INDEX + 64, fingerprint="x")
    batches = iter(stocache.DataLoader(dataset, 32, num_workers=2))
    assert len(next(batches)) == 32
    with pytest.raises(Fails, match="sample 37"):
        next(batches)
    assert next(batches)[:, 0].tolist() == list(range(64, 96))
    assert list(batches) == []


def test_a_share_that_cannot_be_sent_makes_the_batch_anothers(cached):
    """Of samples that are collated in Python."""
    source = [{"names": {"a": idx}, "x": torch.full((4,), float(idx))} for idx in range(64)]
    for idx in range(40, 64):
        source[idx]["x"] = torch.full((5,), float(idx))
    dataset = cached(source, INDEX + 64, fingerprint="x")
    loader = stocache.DataLoader(dataset, 20, num_workers=2)
    batches = iter(loader)
    assert next(batches)["x"].shape == (20, 4) and next(batches)["x"].shape == (20, 4)
    assert next(batches)["x"].shape == (20, 5)
    assert next(batches)["names"]["a"].tolist() == [60, 61, 62, 63]


def test_control_an_answer_for_another_batch_would_be_seen(cached, log, monkeypatch):
    dataset = cached(Counted(log, LENGTH, words=64), INDEX + 4000, fingerprint="x")
    rest_of_batch = Samples.rest_of_batch

    def of_others(self, indices, *more):
        return rest_of_batch(self, [min(idx ^ 1, 60) for idx in indices], *more)

    monkeypatch.setattr(Samples, "rest_of_batch", of_others)
    with pytest.raises(AssertionError):
        for _ in range(2):
            check(
                stocache.DataLoader(dataset, 3, num_workers=2),
                [[n, n + 1, n + 2] for n in range(0, 60, 3)] + [[60]],
            )


def test_an_epoch_that_is_left_early_leaves_nothing_to_the_next(cached, log):
    source = Counted(log, LENGTH, words=WORDS)
    dataset = cached(source, HALF, fingerprint="x")
    loader = stocache.DataLoader(dataset, 8, num_workers=2, persistent_workers=True)
    for stop in (1, 3, 0, 5):
        batches = iter(loader)
        for n in range(stop):
            check([next(batches)], [list(range(8 * n, 8 * n + 8))])
    check(loader, [list(range(n, min(n + 8, LENGTH))) for n in range(0, LENGTH, 8)])


def test_samples_that_are_cleared_on_the_way_are_loaded_again(cached, log):
    source = Counted(log, LENGTH, words=WORDS)
    dataset = cached(source)
    dataset.warm(indices=range(0, LENGTH, 2), progress=False)
    loader = stocache.DataLoader(dataset, 8, num_workers=2)
    seen = []
    for n, batch in enumerate(loader):
        seen += check([batch])[0]
        if n % 2:
            dataset.clear()
    assert seen == list(range(LENGTH))


def test_after_a_clear_the_workers_share_what_is_missing(cached, log):
    source = Pids(log, LENGTH, words=64)
    dataset = cached(source)
    dataset.warm(progress=False)
    Path(log).unlink()
    loader = stocache.DataLoader(dataset, 4, num_workers=2, prefetch_factor=3)
    batches = iter(loader)
    check([next(batches)], [[0, 1, 2, 3]])
    dataset.clear()
    check(batches, [list(range(n, min(n + 4, LENGTH))) for n in range(4, LENGTH, 4)])
    loads = source.loads()
    assert loads.keys() == {worker.pid for worker in batches._workers}
    assert min(loads.values()) > LENGTH // 4, "one after the other, they would not be shared"


class Pids(Counted):
    """Notes who loads."""

    def __getitem__(self, idx):
        self.note(os.getpid())
        return self.make(idx)


class Recycled:
    """A batch sampler that fills one list or array again and again."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 15

    def __iter__(self):
        for n in range(15):
            for k in range(4):
                self.batch[k] = 4 * n + k
            yield self.batch


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_what_the_sampler_gave_may_be_used_again(cached, log, kind):
    # torch itself may send one of them twice, but never a mixture.
    for memory in (INDEX + 10_000, "8MiB"):
        dataset = cached(Counted(log, LENGTH, words=64), memory, fingerprint="x")
        for _ in range(2):
            sampler = Recycled(kind([0, 0, 0, 0]))
            loader = stocache.DataLoader(dataset, batch_sampler=sampler, num_workers=2)
            check(loader, [list(range(4 * n, 4 * n + 4)) for n in range(15)])
        dataset.close()


class Moved(Counted):
    """The same samples under other numbers."""

    def make(self, idx):
        return super().make(idx + 1000)


@pytest.mark.parametrize("what", ["dataset", "indices", "indices in place"])
def test_what_is_set_while_workers_live_mixes_no_datasets(cached, log, what):
    one = cached(Counted(log, 16, words=512), INDEX + 8 * 4200, fingerprint="one")
    other = cached(Moved(log, 16, words=512), INDEX + 8 * 4200, fingerprint="other")
    for dataset in (one, other):  # some batches are all there
        dataset.warm(indices=[*range(4), *range(8, 16, 2)], progress=False)

    def epochs(loader_type, over):
        subset = Subset(over, list(range(16)))
        loader = loader_type(subset, 4, num_workers=1, persistent_workers=True)
        found = [check(loader)]
        if what == "dataset":
            subset.dataset = other
        elif what == "indices":
            subset.indices = list(range(15, -1, -1))
        else:
            subset.indices.reverse()
        return [*found, check(loader)]

    expected = epochs(DataLoader, one._stocache.source)
    assert epochs(stocache.DataLoader, one) == expected


def test_after_a_timeout_where_workers_make_all_batches_every_batch_comes(cached):
    """Once the first ones could not be gathered."""
    dataset = cached(SlowOdd(17), INDEX + 64, fingerprint="x")
    loader = stocache.DataLoader(
        dataset, 2, num_workers=1, timeout=1, persistent_workers=True, prefetch_factor=3
    )
    for _ in range(2):
        batches = iter(loader)
        seen = []
        while True:
            try:
                seen += next(batches).tolist()
            except StopIteration:
                break
            except RuntimeError as error:
                assert "timed out" in str(error)
        assert seen == [float(idx) for idx in range(32)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [dict.fromkeys, lambda batch: dict(enumerate(batch)).values()])
def test_indices_of_any_type(cached, log, workers, kind):
    dataset = cached(Counted(log, 16, words=64))
    order = [kind(range(n, n + 4)) for n in range(0, 16, 4)]
    order = [batch.keys() if isinstance(batch, dict) else batch for batch in order]
    if workers:
        order = [list(batch) for batch in order]  # torch cannot send them
    for _ in range(2):
        loader = stocache.DataLoader(dataset, batch_sampler=order, num_workers=workers)
        check(loader, [list(range(n, n + 4)) for n in range(0, 16, 4)])


def test_a_transform_that_is_taken_away_between_epochs_stays_with_the_workers(cached, log):
    dataset = cached(Counted(log, 16, words=64), transform=doubled)
    loader = stocache.DataLoader(dataset, 4, num_workers=1, persistent_workers=True)
    first = list(loader)
    dataset.transform = None
    assert same(list(loader), first)


def test_records_travel_by_ticket(cached, log, monkeypatch):
    dataset = cached(Counted(log, 64, words=WORDS), INDEX + 32 * (8 * WORDS + 64), fingerprint="x")
    dataset.warm(progress=False)
    kinds = []
    finish = Begun.finish

    def noted(self, rests=None):
        for rest in rests or ():
            if rest.packed is not None:
                kinds.append(_C.batch_ticket(rest.packed[0]) is not None)
        return finish(self, rests)

    monkeypatch.setattr(Begun, "finish", noted)
    check(stocache.DataLoader(dataset, 4, num_workers=2))
    assert kinds and all(kinds)


def test_what_is_cleared_under_a_loader_without_order_is_loaded_by_the_workers(cached, log):
    dataset = cached(Counted(log, 64, words=64))
    dataset.warm(progress=False)
    seen = []
    for n, batch in enumerate(stocache.DataLoader(dataset, 4, num_workers=2, in_order=False)):
        seen += check([batch])[0]
        if n in (1, 5, 6):
            dataset.clear()
    assert sorted(seen) == list(range(64))


class SlowOdd(Fixed):
    """Samples that cannot be gathered, one of which takes its time."""

    def __init__(self, slow=9):
        super().__init__([float(idx) if idx % 2 else idx for idx in range(32)])
        self.slow = slow

    def __getitem__(self, idx):
        time.sleep(1.5 if idx == self.slow else 0)
        return super().__getitem__(idx)


def test_after_a_timeout_the_epoch_goes_on_with_every_batch(cached):
    dataset = cached(SlowOdd(), INDEX + 64, fingerprint="x")
    batches = iter(stocache.DataLoader(dataset, 4, num_workers=1, timeout=1))
    seen, timeouts = [], 0
    while True:
        try:
            seen += next(batches).tolist()
        except StopIteration:
            break
        except RuntimeError as error:
            assert "timed out" in str(error)
            timeouts += 1
    assert seen == [float(idx) for idx in range(32)] and timeouts > 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["mixed shapes", "None inside", "mixed kinds"])
def test_what_cannot_be_collated_is_the_error_of_a_worker(cached, kind, half):
    samples = MIXED[kind] * 2
    expected = error_of(DataLoader(samples, 4, num_workers=1))
    assert expected[1].startswith("Caught")
    dataset = cached(Fixed(samples))
    dataset.warm(indices=range(6 if half else 12), progress=False)
    assert error_of(stocache.DataLoader(dataset, 4, num_workers=1)) == expected


def error_of(loader):
    """Its type, and its first and last line. Its workers have ended then."""
    try:
        list(loader)
    except Exception as error:
        lines = str(error).splitlines()
        found = type(error), lines[0], lines[-1]
    # After an error torch waits this long for each worker, and ends it then.
    with unittest.mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1):
        gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(10)
    return found


class SlowTogether(Fixed):
    """Has no other way, and takes longer than others wait."""

    def __getitem__(self, idx):
        raise NotImplementedError

    def __getitems__(self, indices):
        time.sleep(0.8)
        return [self.samples[idx] for idx in indices]


def test_samples_that_only_come_together_come_so_while_another_process_loads_them(cached):
    dataset = cached(SlowTogether([torch.full((4,), float(idx)) for idx in range(8)]))
    for loader in (DataLoader, stocache.DataLoader):
        order = [[0, 1], [0, 1]]
        batches = list(loader(dataset, batch_sampler=order, num_workers=2))
        assert [batch[:, 0].tolist() for batch in batches] == order
        dataset.clear()


def test_indices_from_the_end(cached, log):
    order = [[-1, 3], [5, -LENGTH], [-7, -8], [60, -60]]
    expected = [[idx % LENGTH for idx in batch] for batch in order]
    for memory in (INDEX + 4000, "8MiB"):
        dataset = cached(Counted(log, LENGTH, words=64), memory, fingerprint="x")
        dataset.warm(indices=range(0, LENGTH, 2), progress=False)
        for _ in range(3):
            check(stocache.DataLoader(dataset, batch_sampler=order, num_workers=2), expected)
        dataset.close()


# Errors


def fail_halfway(cached, log):
    """An epoch whose first batch is half filled when its source raises."""
    Path(log + ".broken").touch()
    dataset = cached(Broken(log, 24, words=WORDS))
    dataset.warm(indices=[0, 1, 4, 5, 6, 7, 8], progress=False)
    batches = iter(stocache.DataLoader(dataset, 4, num_workers=2))
    with pytest.raises(Fails, match="Caught Fails in DataLoader worker process 0"):
        next(batches)
    check(batches, [list(range(n, n + 4)) for n in range(4, 24, 4)])
    assert not dataset._stocache.records.contains(3)
    assert not dataset._stocache.records.missing([0, 1, 2, *range(4, 24)]), "the others are kept"


def test_an_error_of_the_source_comes_at_its_batch_and_the_others_are_whole(cached, log):
    fail_halfway(cached, log)


def test_control_a_sample_that_is_stored_though_its_source_failed_is_noticed(
    cached, log, monkeypatch
):
    load = Samples.load

    def twin(self, index, *arguments, **options):
        try:
            return load(self, index, *arguments, **options)
        except Fails:
            with self.records.acquire([index], 1.0) as acquired:
                for of in acquired.to_load():
                    acquired.put(of, (of, torch.zeros(WORDS, dtype=torch.int64)), False)
            raise

    monkeypatch.setattr(Samples, "load", twin)
    with pytest.raises(AssertionError, match="contains"):
        fail_halfway(cached, log)


def killed_epoch(dataset, sign, words, harm=None):
    """An epoch in which a worker dies with rows lent to it; see test_loader.py."""
    leads_group(words)
    if harm is not None:
        gatherer.finished = harm
    loader = stocache.DataLoader(dataset, 4, num_workers=2)
    batches = iter(loader)
    for n, batch in enumerate(batches):
        try:
            check([batch], [list(range(4 * n, 4 * n + 4))])
        except AssertionError:
            os._exit(7)
        if n > 2 and hasattr(batches, "_workers"):  # the first batches come to be in memory
            os.kill(batches._workers[n % 2].pid, sign)


@pytest.mark.parts(4)
def test_the_death_of_a_worker_that_loads_is_torchs_own_error(cached, log, tmp_path, scale):
    source = Uneven(log, 400, words=512)
    dataset = cached(source, INDEX + 200 * (8 * 512 + 64), fingerprint="x")
    dataset.warm(indices=range(0, 400, 3), progress=False)
    for turn in range(scale(4, 200)):
        words = tmp_path / f"words{turn}"
        sign = (signal.SIGKILL, signal.SIGSEGV)[turn % 2]
        trainer = FORK.Process(target=killed_epoch, args=(dataset, sign, words))
        assert ends_with_torchs_error(trainer, words) not in (0, 7)
    check(stocache.DataLoader(dataset, 4, num_workers=2))
    for file in Path("/dev/shm").glob("torch_*"):
        file.unlink()


def test_control_a_row_that_is_not_whole_is_seen_by_who_loses_workers(cached, log, tmp_path):
    def harm(*arguments):
        indices, rows = finished(*arguments)
        rows[-1, -1] ^= 1
        return [indices, rows]

    dataset = cached(Uneven(log, 40, words=512), fingerprint="x")
    words = tmp_path / "words"
    trainer = FORK.Process(target=killed_epoch, args=(dataset, signal.SIGKILL, words, harm))
    assert ends_with_torchs_error(trainer, words) == 7


def test_what_a_dead_worker_was_asked_for_does_not_count_in_the_next_epoch(cached, log):
    dataset = cached(Uneven(log, 64, words=64), INDEX + 4000, fingerprint="x")
    loader = stocache.DataLoader(dataset, 16, num_workers=2, persistent_workers=True)
    check(loader)
    loader._iterator._tasks_outstanding = 8  # torch forgets the questions, and not their number
    for _ in range(2):
        check(loader, [list(range(n, n + 16)) for n in range(0, 64, 16)])


def test_an_epoch_ends_with_an_error_if_the_worker_that_was_asked_is_gone(cached, log):
    dataset = cached(Uneven(log, 64, words=64), INDEX + 4000, fingerprint="x")
    batches = iter(stocache.DataLoader(dataset, 4, num_workers=1))
    next(batches)
    batches._workers_status[0] = False  # as torch marks one that has died
    with pytest.raises(RuntimeError, match="a DataLoader worker is gone"):
        while True:
            next(batches)


def hold_some(cached, log, seed):
    dataset = cached(Counted(log, LENGTH, words=WORDS), HALF, fingerprint="x")
    loader = stocache.DataLoader(
        dataset, 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3
    )
    rng, held = random.Random(seed), []
    for _ in range(3):
        for batch in loader:
            held.append(batch)
            if len(held) > 12:
                del held[rng.randrange(len(held))]
            check(held)


def test_rows_are_held_as_long_as_somebody_uses_them(cached, log, seed):
    """No memory is used again that a batch, or a record on its way, still lies in."""
    hold_some(cached, log, seed)


def test_control_rows_that_are_written_while_somebody_holds_them_are_noticed(
    cached, log, seed, monkeypatch
):
    into_one_buffer(monkeypatch)
    with pytest.raises(AssertionError):
        hold_some(cached, log, seed)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_workers_must_make_are_made_by_them(cached, workers):
    """Where the program has a collate function of its own for a type."""
    samples = [(collections.OrderedDict(a=torch.ones(3) * idx), idx) for idx in range(40)]
    dataset = cached(Fixed(samples), INDEX + 600, fingerprint="x")
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    with contextlib.ExitStack() as stack:
        functions[collections.OrderedDict] = lambda batch, collate_fn_map: ["own", len(batch)]
        stack.callback(functions.pop, collections.OrderedDict)
        for _ in range(2):
            batches = list(stocache.DataLoader(dataset, 8, num_workers=workers))
            assert [batch[0] for batch in batches] == [["own", 8]] * 5
            assert [batch[1].tolist() for batch in batches] == [
                list(range(n, n + 8)) for n in range(0, 40, 8)
            ]


@pytest.mark.parametrize("every", [25, 2])
def test_samples_of_another_kind_keep_only_their_own_batches_from_being_gathered(
    cached, monkeypatch, every
):
    samples = [(torch.full((50,), k), 0.5 if k % every == 7 % every else k) for k in range(400)]
    dataset = cached(Fixed(samples), INDEX + 60_000, fingerprint="x")
    loader = stocache.DataLoader(dataset, 5, num_workers=2)
    whole = []
    ask = WorkersIterator._ask_for_all
    monkeypatch.setattr(
        WorkersIterator, "_ask_for_all", lambda self, task: (whole.append(task), ask(self, task))
    )
    expected = list(DataLoader(Fixed(samples), 5))
    for _ in range(2):
        whole.clear()
        assert same(list(loader), expected)
    assert 0 < dataset.stats().filled < 400
    assert len(whole) == {25: 16, 2: 80}[every], (
        "80 batches, of which 16 have such a sample, or all"
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_lists_of_different_lengths_are_an_error_wherever_they_are(cached, together, workers):
    """Two numbers and one are as many columns as one and two."""
    samples = [([1, 2], [3]), ([10], [20, 30])]
    dataset = cached(Fixed(samples), fingerprint="x")
    [dataset[idx] for idx in range(1 + together)]
    expected = error_of(DataLoader(samples, 2, num_workers=workers))
    assert expected[0] is RuntimeError
    assert error_of(stocache.DataLoader(dataset, 2, num_workers=workers)) == expected


class Gives:
    """Code of a sample's class that gives back the memory of another sample."""

    of: torch.Tensor

    def __get__(self, instance, owner):
        Gives.of.untyped_storage().resize_(0)
        return ("x",)


def test_memory_that_a_sample_gives_back_is_not_read(cached):
    kind = collections.namedtuple("Kind", "x")
    dataset = cached([1, 2])
    records = dataset._stocache.records
    for way in ("stack", "pack", "finish"):
        Gives.of = torch.ones(1 << 20)
        bad = type("Bad", (kind,), {"_fields": Gives(), "__module__": __name__})
        samples = [(Gives.of, 1), (bad(torch.ones(3)), 2)]
        with contextlib.suppress(Exception):  # anything but a crash
            if way == "stack":
                records.stack(samples, 1, False)
            elif way == "pack":
                _C.pack(dict(enumerate(samples)))
            else:
                records.gather([0, 1], 1, False).finish(0, dict(enumerate(samples)))


def test_tensors_whose_memory_was_given_back_are_errors(cached):
    dataset = cached([torch.ones(2), torch.ones(2)])
    records = dataset._stocache.records
    empty, short = torch.tensor([0, 1, 0]), torch.arange(1 << 20)
    empty.untyped_storage().resize_(0)
    short.untyped_storage().resize_(8)
    for indices in (empty, short, torch._efficientzerotensor(3, dtype=torch.int64)):
        for call, more in (
            (records.gather, (1, False)),
            (records.missing, ()),
            (records.acquire, (0.1,)),
            (functools.partial(_C.gather_from, [records], indices), (1, False)),
        ):
            with contextlib.suppress(Exception):  # anything but a crash
                call(indices, *more)
    tensor, schemas, rows = _C.pack({1: torch.ones(1000)})
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(16)
    with pytest.raises(ValueError, match="do not fit their memory"):
        records.gather([0, 1], 1, False).finish(0, None, [(tensor, schemas, rows)])


class Clears:
    """A number whose code empties the list that it is in."""

    def __init__(self, *lists):
        self.lists = lists

    def __index__(self):
        for each in self.lists:
            each.clear()
        return 1


def test_lists_that_are_emptied_while_they_are_read_do_no_harm(cached):
    dataset = cached([torch.ones(2), torch.ones(2)])
    tensor, schemas, ((row, schema, _, size),) = _C.pack({1: torch.ones(2)})
    rows: list = []
    packed = [(tensor, schemas, rows)]
    rows.append((row, schema, Clears(rows, packed), size))
    with contextlib.suppress(Exception):
        dataset._stocache.records.gather([0, 1], 1, False).finish(0, None, packed)


class Named(stocache.DataLoader):
    """A program's own loader, with names of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.source = self.view = self.gatherer = "the program's"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_a_program_meets_no_name_of_ours(cached, log, workers):
    dataset = cached(Counted(log, LENGTH, words=64), INDEX + 10_000, fingerprint="x")
    for _ in range(2):
        loader = Named(dataset, 8, num_workers=workers)
        check(loader, [list(range(n, min(n + 8, LENGTH))) for n in range(0, LENGTH, 8)])
        assert loader.source == "the program's"


def test_a_rest_travels_as_it_is():
    packed = (torch.arange(6, dtype=torch.uint8), [b"s"], [(0, 0, 0, 6)])
    rest = Rest(packed, [3], (["x"], [0], None))
    inbox = FORK.SimpleQueue()
    inbox.put(rest)
    back = inbox.get()
    assert (back.counted, back.of) == ([3], (["x"], [0], None)) and same(back.packed, packed)
