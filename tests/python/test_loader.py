"""Batches: as default_collate makes them, through workers or without, and never overwritten."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import stocache
import torch
import torch.multiprocessing
from kernel import ends_with_torchs_error, leads_group
from kinds import MIXED, SAMPLES, WORDS, outcome
from samples import complaint, gathered_natively, whole
from sources import (
    FORK,
    INDEX,
    Counted,
    Fixed,
    Together,
    doubled,
    into_one_buffer,
    same,
    verified,
)  # fmt: skip
from stocache import _C
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    WeightedRandomSampler,
    default_collate,
)


@pytest.fixture
def filled(cached, log):
    """filled(length, words): a complete cache over Counted, and the source."""

    def make(length=64, words=WORDS, **options):
        source = Counted(log, length, words=words)
        dataset = cached(source, **options)
        dataset.warm(progress=False)
        return dataset, source

    return make


def stock(dataset, size, shuffle=False, **options):
    """torch's DataLoader over the view of batches, which workers gather natively."""
    order = (RandomSampler if shuffle else SequentialSampler)(dataset)
    batches = BatchSampler(order, size, drop_last=False)
    view = dataset.batches
    return DataLoader(view, sampler=batches, batch_size=None, collate_fn=as_it_is, **options)


def as_it_is(batch):
    """In the place of torch's default_convert, which makes lists of tuples."""
    return batch


def check(batch, expected=None):
    """A batch of Counted is whole, and holds the samples that are expected."""
    indices, rows = batch
    assert indices.dtype == torch.int64 and rows.dtype == torch.int64
    for idx, row in zip(indices.tolist(), rows, strict=True):
        assert complaint(idx, row) is None
    if expected is not None:
        assert indices.tolist() == list(expected)


# The same as default_collate


@pytest.mark.parametrize("kind", [*SAMPLES, *MIXED])
def test_batches_are_those_of_default_collate(cached, kind):
    samples = {**SAMPLES, **MIXED}[kind]
    expected = outcome(lambda: [default_collate(samples[:4]), default_collate(samples[4:])])
    dataset = cached(samples)
    assert same(
        outcome(lambda: list(DataLoader(dataset, 4, collate_fn=stocache.collate))), expected
    )
    dataset.warm(progress=False)
    for make in (
        lambda: list(DataLoader(dataset, 4, collate_fn=stocache.collate)),
        lambda: list(stocache.DataLoader(dataset, 4)),
        lambda: list(DataLoader(Subset(dataset, range(6)), 4, collate_fn=stocache.collate)),
        lambda: list(DataLoader(dataset, 4)),
        lambda: list(stock(dataset, 4)),
    ):
        for _ in range(2):
            got = outcome(make)
            assert same(got, expected), f"{got} instead of {expected}"
    if kind in SAMPLES and "bytes" not in kind:
        native = gathered_natively(dataset, range(4))
        assert native is not _C.MISS, "these are gathered natively"
        assert same(native, expected[0])


def test_batches_of_workers_are_those_of_default_collate(cached):
    # one worker serves all kinds, a batch of each
    kinds = [
        kind for kind, samples in {**SAMPLES, **MIXED}.items()
        if not isinstance(outcome(lambda samples=samples: default_collate(samples)), type)
    ]  # fmt: skip
    every = [sample for kind in kinds for sample in {**SAMPLES, **MIXED}[kind]]
    dataset = cached(Fixed(every))
    for context in ("fork", "fork", "spawn"):
        loader = stock(dataset, 6, num_workers=2, multiprocessing_context=context)
        for kind, batch in zip(kinds, loader, strict=True):
            assert same(batch, default_collate({**SAMPLES, **MIXED}[kind])), kind
    assert dataset.stats().loads == len(every)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_collate_fn_gets_a_plain_list(filled, workers):
    dataset, _ = filled(24, 64)
    for over in (dataset, Subset(dataset, range(24))):
        for kind in (DataLoader, stocache.DataLoader):
            loader = kind(over, 8, num_workers=workers, collate_fn=verified)
            assert [idx for batch in loader for idx in batch] == list(range(24))
    rows = Rows(24)
    loader = stocache.DataLoader(rows, 8, num_workers=workers, collate_fn=torch.stack)
    assert [tuple(batch.shape) for batch in loader] == [(8, 64)] * 3


class Rows(Fixed):
    def __init__(self, length):
        super().__init__([whole(idx, 64) for idx in range(length)])


def test_torch_stack_over_a_cache(cached):
    dataset = cached(Rows(24))
    for _ in range(2):
        for kind in (DataLoader, stocache.DataLoader):
            for n, batch in enumerate(kind(dataset, 8, collate_fn=torch.stack)):
                assert torch.equal(batch, torch.stack([whole(8 * n + k, 64) for k in range(8)]))
    assert same(stocache.collate([1, 2]), torch.tensor([1, 2])), "it is an ordinary function"


class Shifting(Subset):
    """Does something of its own to the samples of a batch."""

    def __getitems__(self, indices):
        return [(idx, row + 1) for idx, row in super().__getitems__(indices)]


def test_datasets_in_between_that_touch_samples_get_samples(filled):
    dataset, _ = filled(8, 64)
    for over in (
        Shifting(dataset, range(8)),
        Subset(Shifting(dataset, range(8)), range(8)),
        Shifting(Subset(dataset, range(8)), range(8)),
    ):
        for kind in (DataLoader, stocache.DataLoader):
            (indices, rows), *_ = kind(over, 4, collate_fn=stocache.collate)
            expected = torch.stack([whole(idx, 64) + 1 for idx in range(4)])
            assert indices.tolist() == [0, 1, 2, 3] and torch.equal(rows, expected)
    for batch in DataLoader(StackDataset(dataset, dataset), 4, collate_fn=stocache.collate):
        for half in batch:
            check(half)
    for batch in stocache.DataLoader(ConcatDataset([dataset, dataset]), 4):
        check(batch)


# Batches stay as they are


def hold_some(filled, how):
    """Goes through epochs, holds some batches, and looks again and again whether they stay."""
    # more than the buffers of a worker (32) and of this process (8)
    words = 128 if "small" in how else WORDS
    dataset, _ = filled(48, words)
    torch.manual_seed(1)
    held = []
    for _ in range(4):
        if how.startswith("DataLoader"):
            loader = stocache.DataLoader(dataset, 4, shuffle=True)
        else:
            workers = 1 if how == "worker" else 0
            loader = stock(dataset, 4, shuffle=True, num_workers=workers)
        for turn, batch in enumerate(loader):
            # some are held as tensors, some through numpy or a view only, most are dropped
            kind = random.choice(["batch", "numpy", "view", "drop", "drop", "edit"])
            if kind == "batch":
                held.append((batch[0].tolist(), batch[1]))
            elif kind == "numpy":
                held.append((batch[0].tolist(), batch[1].numpy()))
            elif kind == "view":
                held.append((batch[0].tolist()[2:3], batch[1][2:3]))
            elif kind == "edit":
                batch[1].fill_(-1)  # may change neither the cache nor another batch
            else:
                check(batch)
            del batch
            if turn % 5 == 4:
                for indices, rows in held:
                    check((torch.tensor(indices), torch.as_tensor(rows)))
    assert len(held) > 10
    for indices, rows in held:
        check((torch.tensor(indices), torch.as_tensor(rows)))
    assert dataset.verify(48) == 48


@pytest.mark.parametrize("how", ["worker", "this process", "DataLoader", "DataLoader, small"])
def test_batches_that_are_held_are_never_overwritten(filled, how):
    hold_some(filled, how)


@pytest.mark.parametrize("how", ["DataLoader", "DataLoader, small"])
def test_control_memory_that_is_given_out_while_it_is_held_is_noticed(filled, how, monkeypatch):
    into_one_buffer(monkeypatch)
    with pytest.raises(AssertionError):
        hold_some(filled, how)


def test_all_batches_of_an_epoch_may_be_held(filled):
    dataset, source = filled(200, 2048)
    for kind in (stock, stocache.DataLoader):
        loader = kind(dataset, 2, num_workers=2)
        batches = list(loader)
        for n, batch in enumerate(batches):
            check(batch, [2 * n, 2 * n + 1])
        for batch in batches:
            batch[1].zero_()
        del batches, batch
    assert source.once_each() and dataset.verify(200) == 200


def test_memory_that_is_not_held_is_used_again(filled):
    # the control of the tests above: without reuse they would prove nothing
    dataset, _ = filled(48, WORDS)
    places = Counter()
    for batch in stock(dataset, 4):
        places[batch[1].data_ptr()] += 1
        del batch
    assert len(places) < 12, "every batch had fresh memory"


def test_a_batch_of_a_worker_outlives_its_worker(filled):
    dataset, _ = filled(16, WORDS)
    batches = list(stock(dataset, 4, num_workers=2))
    gc.collect()
    # the workers are gone, and others reuse what is free
    again = list(stock(dataset, 4, num_workers=2))
    for held in (batches, again):
        for n, batch in enumerate(held):
            check(batch, range(4 * n, 4 * n + 4))


# Every way to make a loader


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_options_of_a_loader_do_what_they_do(filled, kind, workers):
    dataset, source = filled(22, 2048)
    many = {"num_workers": workers, "collate_fn": stocache.collate}
    assert [len(b[0]) for b in kind(dataset, 8, **many)] == [8, 8, 6]
    assert [len(b[0]) for b in kind(dataset, 8, drop_last=True, **many)] == [8, 8]
    assert len(kind(dataset, 8, **many)) == 3
    seen = []
    for batch in kind(dataset, 5, shuffle=True, **many):
        check(batch)
        seen += batch[0].tolist()
    assert seen != list(range(22)) and sorted(seen) == list(range(22))
    order = [3, 3, 21, 0, 3]
    batches = list(kind(dataset, 2, sampler=order, **many))
    for batch, expected in zip(batches, ([3, 3], [21, 0], [3]), strict=True):
        check(batch, expected)
    groups = [[1, 2, 3], [4], [-1, 5]]
    for batch, expected in zip(kind(dataset, batch_sampler=groups, **many), groups, strict=True):
        check(batch, [idx % 22 for idx in expected])
    weights = WeightedRandomSampler([1.0] * 22, 9)
    assert sum(len(b[0]) for b in kind(dataset, 4, sampler=weights, **many)) == 9
    sampler = BatchSampler(RandomSampler(dataset), 4, True)
    for batch in kind(dataset, batch_sampler=sampler, **many):
        check(batch)
    one = list(kind(dataset, batch_size=None, num_workers=workers))
    assert [s[0] for s in one] == list(range(22)), "without batches, samples come as they are"
    assert list(kind(dataset, 4, sampler=[], **many)) == []
    for over, base in (
        (Subset(dataset, range(10, 22)), 10),
        (Subset(Subset(dataset, range(5, 22)), range(5, 17)), 10),
        (Subset(dataset, torch.arange(10, 22)), 10),
        (Subset(dataset, np.arange(10, 22)), 10),
    ):
        for n, batch in enumerate(kind(over, 4, **many)):
            check(batch, range(base + 4 * n, base + 4 * n + 4))
    loads = source.loads()
    assert loads.pop(21) in (3, 5), "to see what -1 means, in each process that is asked for it"
    assert set(loads.values()) == {1} and len(loads) == 21, "all of this came from memory"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_that_of_torch(filled, workers):
    dataset, _ = filled(30, 64)

    def orders(kind, **options):
        torch.manual_seed(5)
        loader = kind(dataset, 4, shuffle=True, num_workers=workers, **options)
        return [[batch[0].tolist() for batch in loader] for _ in range(3)]

    assert orders(stocache.DataLoader) == orders(DataLoader)
    make = lambda: torch.Generator().manual_seed(7)  # noqa: E731
    assert orders(stocache.DataLoader, generator=make()) == orders(DataLoader, generator=make())


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_loops_may_end_early_and_loaders_may_be_many(filled, kind):
    dataset, source = filled(40, WORDS)
    loader = kind(
        dataset,
        4,
        num_workers=2,
        collate_fn=stocache.collate,
        persistent_workers=True,
        prefetch_factor=3,
    )
    other = kind(Subset(dataset, range(39, -1, -1)), 4, collate_fn=stocache.collate, num_workers=1)
    for epoch in range(4):
        for n, batch in enumerate(loader):
            check(batch, range(4 * n, 4 * n + 4))
            if n == epoch:
                break
        assert n == epoch
        count = 0
        for one, two in zip(loader, other, strict=True):
            check(one, range(4 * count, 4 * count + 4))
            check(two, range(39 - 4 * count, 35 - 4 * count, -1))
            count += 1
        assert count == 10
    iterator = iter(loader)
    check(next(iterator), range(4))
    del iterator, loader, other
    assert source.once_each()


def test_two_iterators_of_one_loader_do_not_meet(filled):
    dataset, _ = filled(40, WORDS)
    for kind in (DataLoader, stocache.DataLoader):
        loader = kind(dataset, 4, collate_fn=stocache.collate)
        held = []
        for one, two in zip(loader, loader, strict=True):
            held.append((one, two))
        for n, pair in enumerate(held):
            for batch in pair:
                check(batch, range(4 * n, 4 * n + 4))


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory_without_an_accelerator_is_a_warning(filled, kind, workers):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    dataset, _ = filled(8, WORDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = kind(dataset, 4, pin_memory=True, num_workers=workers, collate_fn=stocache.collate)
        for n, batch in enumerate(loader):
            check(batch, range(4 * n, 4 * n + 4))


def test_a_cache_that_is_not_complete_is_filled_by_the_workers(cached, log):
    source = Counted(log, 30, words=2048)
    dataset = cached(source)
    dataset.warm(indices=range(7), progress=False)
    loader = stocache.DataLoader(dataset, 4, num_workers=2)
    for _ in range(3):
        for n, batch in enumerate(loader):
            check(batch, range(4 * n, min(30, 4 * n + 4)))
        assert dataset.is_complete()
    assert source.once_each()
    # the cache is emptied in the middle of an epoch
    for n, batch in enumerate(stocache.DataLoader(dataset, 4)):
        check(batch, range(4 * n, min(30, 4 * n + 4)))
        if n == 3:
            dataset.clear()
    for n, batch in enumerate(stocache.DataLoader(dataset, 4)):
        check(batch, range(4 * n, min(30, 4 * n + 4)))


@pytest.mark.parametrize("policy", ["freeze", "lru"])
def test_a_cache_that_is_too_small_gives_the_same_batches(cached, log, policy):
    source = Counted(log, 60, words=256)
    dataset = cached(source, INDEX + (100 << 10), policy=policy)
    for kind in (DataLoader, stocache.DataLoader):
        for workers in (0, 2):
            before = sum(source.loads().values())
            loader = kind(
                dataset, 4, shuffle=True, num_workers=workers, collate_fn=stocache.collate
            )
            seen = []
            for batch in loader:
                check(batch)
                seen += batch[0].tolist()
            assert sorted(seen) == list(range(60))
            assert sum(source.loads().values()) - before <= 60, "a miss was loaded twice"
    assert 0 < dataset.stats().filled < 60


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_runs_on_every_sample_of_every_batch(filled, workers):
    dataset, source = filled(12, 2048, transform=doubled)
    for kind in (DataLoader, stocache.DataLoader):
        for _ in range(2):
            loader = kind(dataset, 4, num_workers=workers, collate_fn=stocache.collate)
            for n, (indices, rows) in enumerate(loader):
                assert indices.tolist() == list(range(4 * n, 4 * n + 4))
                for idx, row in zip(indices.tolist(), rows, strict=True):
                    assert torch.equal(row, 2 * whole(idx, 2048))
    assert source.once_each()


@pytest.mark.parametrize("collate_fn", [stocache.collate, default_collate])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_loads_many_at_once_gets_the_misses_together(
    cached, log, workers, collate_fn
):
    source = Together(log, 32, words=64)
    dataset = cached(source)
    dataset.warm(indices=[0, 9], progress=False)
    for _ in range(2):
        for n, batch in enumerate(
            DataLoader(dataset, 8, num_workers=workers, collate_fn=collate_fn)
        ):
            check(batch, range(8 * n, 8 * n + 8))
    groups, expected = Counter(source.groups()), Counter([7, 7, 8, 8])
    assert dataset.stats().loads == 32 and not expected - groups
    assert (groups - expected).total() <= 4, "some are asked for the other way round, too"
    compared = source.loads() - Counter(range(32))
    assert compared.total() <= 4 * (8 + 1), "and one of each alone"


# Workers that die


WRONG = 7  # the exit code that says so


def broken_epoch(dataset, sign, words) -> None:
    """An epoch in which a worker is killed, in a process of its own: torch raises wherever this
    process just is."""
    leads_group(words)
    loader = stock(dataset, 2, num_workers=2)
    iterator = iter(loader)
    for turn, (indices, rows) in enumerate(iterator):
        for idx, row in zip(indices.tolist(), rows, strict=True):
            if complaint(idx, row) is not None:
                os._exit(WRONG)
        if turn == 3:
            os.kill(iterator._workers[0].pid, sign)


@pytest.mark.parts(4)
def test_the_death_of_a_worker_is_torchs_own_error_and_no_hang(filled, tmp_path, scale):
    dataset, source = filled(400, 2048)
    for turn in range(scale(4, 200)):
        words = tmp_path / f"words{turn}"
        sign = (signal.SIGKILL, signal.SIGSEGV)[turn % 2]
        trainer = FORK.Process(target=broken_epoch, args=(dataset, sign, words))
        assert ends_with_torchs_error(trainer, words) not in (0, WRONG)
    for n, batch in enumerate(stock(dataset, 4, num_workers=2)):
        check(batch, range(4 * n, 4 * n + 4))
    assert source.once_each()
    for file in Path("/dev/shm").glob("torch_*"):
        file.unlink()


def gather_at_random(dataset, seed, count, wrongs, gathered):
    """Native batches at random, verified; for ever if count is None."""
    rng = random.Random(seed)
    done = 0
    while count is None or done < count:
        # indices near each other are often in memory together
        first = rng.randrange(len(dataset))
        indices = [(first + rng.randrange(6)) % len(dataset) for _ in range(4)]
        for sample in dataset.__getitems__(indices):
            wrongs.value += complaint(sample[0], sample[1]) is not None
        batch = gathered_natively(dataset, indices)
        done += 1
        if batch is not _C.MISS:
            gathered.value += 1
            good = batch[0].tolist() == indices
            good &= all(complaint(i, row) is None for i, row in zip(indices, batch[1], strict=True))
            wrongs.value += not good


@pytest.mark.parts(4)
def test_batches_gathered_while_others_evict_and_die_are_whole(cached, seed, scale):
    # P1: the copy of a batch is guarded as that of a sample is
    samples = [(idx, whole(idx, 512)) for idx in range(150)]
    dataset = cached(Fixed(samples), INDEX + (300 << 10), policy="lru", fingerprint="x")
    wrongs, gathered, others = (FORK.Value("i", 0, lock=False) for _ in range(3))
    rng = random.Random(seed)
    readers = []
    try:
        for turn in range(scale(15, 2000)):
            while len(readers) < 2:
                args = (dataset, rng.getrandbits(30), None, wrongs, others)
                readers.append(FORK.Process(target=gather_at_random, args=args))
                readers[-1].start()
            gather_at_random(dataset, seed + turn, 100, wrongs, gathered)
            victim = readers.pop(rng.randrange(2))
            victim.kill()
            victim.join()
    finally:
        for reader in readers:
            reader.kill()
            reader.join()
    gather_at_random(dataset, seed, 300, wrongs, gathered)
    stats = dataset.stats()
    print(f"{gathered.value} batches gathered here, {others.value} there, {stats.evicted} evicted")
    assert wrongs.value == 0
    assert gathered.value > 200 and stats.evicted > 500


# Batches on their way to other processes


def mirror(inbox, outbox):
    """Sends back what it gets, and says what it was."""
    while True:
        try:
            if (message := inbox.get()) is None:
                return
            outbox.put((message, [int(part.sum()) for part in message]))
        except Exception as error:
            outbox.put((repr(error), None))


@pytest.fixture
def there_and_back():
    """A function that sends tensors through torch's queues to another process and back."""
    context = torch.multiprocessing.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=mirror, args=(inbox, outbox))
    child.start()

    def send(*tensors):
        inbox.put(list(tensors))
        message, sums = outbox.get(timeout=60)
        assert sums is not None, f"in the other process: {message}"
        assert sums == [int(tensor.sum()) for tensor in tensors]
        return message

    yield send
    inbox.put(None)
    child.join(60)
    assert child.exitcode == 0
    for queue in (inbox, outbox):
        queue.close()
        queue.join_thread()


def worker_batch(dataset, size=4):
    batch = next(iter(stock(dataset, size, num_workers=1)))
    assert _C.batch_ticket(torch.ones(5)) is None, "torch's own"
    return batch


def test_a_batch_of_a_worker_goes_to_another_process_and_back(filled, there_and_back):
    dataset, _ = filled(16, WORDS)
    _, rows = worker_batch(dataset)
    expected = rows.clone()
    for _ in range(80):  # more than can be in flight
        (back,) = there_and_back(rows)
        assert torch.equal(back, expected)
        (back,) = there_and_back(back)
        assert torch.equal(back, expected)
    parts = [rows[1], rows[:, ::2], rows[2:, 5:9], rows.t(), rows[1, 3], rows.view(torch.uint8)]
    for part in parts:
        (back,) = there_and_back(part)
        assert same(back, part)
    for got, part in zip(there_and_back(*parts, rows, rows), [*parts, rows, rows], strict=True):
        assert same(got, part)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    "part",
    [
        lambda rows: rows[:0],
        lambda rows: rows[:, 3:3],
        lambda rows: rows[1:1, 2],
        lambda rows: rows[:2].expand(3, 2, -1),
    ],
    ids=["no rows", "no columns", "neither", "expanded"],
)
def test_an_odd_part_of_a_batch_goes_there_and_back(filled, there_and_back, part):
    dataset, _ = filled(16, WORDS)
    rows = part(worker_batch(dataset)[1])
    assert same(there_and_back(rows)[0], rows)


def test_batches_with_a_gradient_travel_as_torch_does(filled, there_and_back):
    dataset, _ = filled(16, WORDS)
    rows = worker_batch(dataset)[1]
    leaf = rows.double().requires_grad_()
    assert same(there_and_back(leaf)[0].detach(), leaf.detach())
    rows.share_memory_()
    assert same(there_and_back(rows)[0], rows)
    check(worker_batch(dataset))


def test_other_tensors_travel_as_torch_does(there_and_back):
    shared = torch.arange(5000).share_memory_()
    (back,) = there_and_back(shared)
    back[0] = 77
    assert int(shared[0]) == 77 and back.is_shared(), "shared memory stays shared"
    for tensor in (
        torch.arange(10),
        torch.empty(0),
        torch.tensor(5),
        torch.arange(100_000)[::3],
        torch.ones(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(4)),
    ):
        assert same(there_and_back(tensor)[0], tensor)


def test_a_batch_in_a_message_of_its_own_process(filled):
    dataset, _ = filled(16, WORDS)
    queue = torch.multiprocessing.get_context("fork").Queue()
    batch = worker_batch(dataset)
    for _ in range(5):
        queue.put(batch)
        check(queue.get(timeout=60), range(4))
    check(batch, range(4))
    queue.close()
    queue.join_thread()


def test_a_held_batch_survives_forks_on_both_sides(filled):
    dataset, _ = filled(48, WORDS)
    loader = stock(dataset, 4, num_workers=1, persistent_workers=True)
    wrongs = FORK.Value("i", 0)

    def look(batches):
        for n, batch in enumerate(batches):
            wrongs.value += any(
                complaint(4 * n + k, row) is not None for k, row in enumerate(batch)
            )
        for batch in batches:
            batch.sum()

    held = []
    children = []
    for n, (_, rows) in enumerate(loader):
        held.append(rows)
        if n % 3 == 2:
            children.append(FORK.Process(target=look, args=(list(held),)))
            children[-1].start()
    for _ in range(2):
        for batch in loader:
            check(batch)
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4 and wrongs.value == 0
    look(held)
    assert wrongs.value == 0
    del loader


def batch_mappings(pid="self"):
    """How many batch buffers a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("stocache-batch")


@pytest.mark.parametrize("end", ["exhausted", "left early", "an error", "persistent"])
def test_when_the_workers_end_only_batches_that_are_held_keep_memory(cached, log, end):
    dataset = cached(Counted(log, 64, words=WORDS))
    dataset.warm(progress=False)
    # with such a function, workers make the batches
    loader = stocache.DataLoader(
        dataset, 4, num_workers=2, persistent_workers=end == "persistent", worker_init_fn=id
    )
    _C.batch_sweep()
    before = batch_mappings()  # of batches that other tests made in this process
    held = []
    batches = iter(loader)
    with contextlib.suppress(ZeroDivisionError):
        for n, batch in enumerate(batches):
            check(batch)
            if n in (3, 4):
                held.append(batch)
            if n == 12 and end != "exhausted":
                assert batch_mappings() > before + 2, "buffers are kept for the next batches"
                if end == "left early":
                    break
                if end == "an error":
                    raise ZeroDivisionError
    del batches, loader
    # a batch that goes would take others with it, so this one stays until all was counted
    held.append(batch)
    assert batch_mappings() == before + 3
    for batch in held:
        check(batch)
    held.clear()
    del batch
    assert batch_mappings() == before


def test_released_batches_do_not_pile_up(filled):
    dataset, _ = filled(64, WORDS)
    before = batch_mappings()  # of batches that other tests made in this process
    loader = stock(dataset, 4, num_workers=1, persistent_workers=True)

    counts = []
    for _ in range(4):
        for batch in loader:
            check(batch)
        worker = loader._iterator._workers[0].pid
        counts.append((batch_mappings() - before, batch_mappings(worker) - before))
    assert 0 < max(counts[-1]) <= 12, counts
    assert counts[-1] <= tuple(count + 2 for count in counts[0])
    del loader, batch


def test_closing_the_dataset_under_a_loader_is_an_error_and_no_crash(filled, in_child):
    dataset, _ = filled(64, WORDS)

    def scenario():
        loader = iter(stocache.DataLoader(dataset, 4))
        held = [next(loader) for _ in range(3)]
        dataset.close()
        try:
            for batch in loader:
                held.append(batch)
        except RuntimeError as error:
            assert "closed" in str(error)
        else:
            return "no error"
        for n, batch in enumerate(held):
            check(batch, range(4 * n, 4 * n + 4))
        return "closed"

    assert in_child(scenario) == "closed"


def test_a_message_about_a_batch_that_does_not_fit_its_memory_is_refused(cached):
    """Also where the sum of its strides wraps to something small."""
    dataset = cached([torch.zeros(4096) for _ in range(8)])
    assert dataset.warm(progress=False).filled == 8
    batch = dataset._stocache.records.gather(range(8), 1, True).finish(0)
    *where, sizes, strides, offset = _C.batch_ticket(batch)
    assert (sizes, strides, offset) == ((8, 4096), (4096, 1), 0)
    wrong = [
        (sizes, strides, 1),
        ((8, 4097), strides, 0),
        (sizes, (4097, 1), 0),
        (sizes, strides, -1),
        (sizes, (4096, -1), 0),
        ((0, 4096), strides, 0),
        (sizes, (4096,), 0),
        (((1 << 30) + 1,) * 4, (1 << 32,) * 4, 0),  # 2**64 in all
        (((1 << 31) - 1,) * 3, (0, 0, 0), 0),  # and more elements than can be counted
        ((2, 8, 4096), ((1 << 63) - 1, 4096, 1), 1),
    ]
    for described in wrong:
        with pytest.raises(ValueError, match="does not fit its memory"):
            _C.batch_tensor(*where, *described)
    # The control: what was sent is what fits.
    assert torch.equal(_C.batch_tensor(*where, sizes, strides, offset), batch)
