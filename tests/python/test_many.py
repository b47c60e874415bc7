"""Batches: one call in, one call out, and no batch that somebody holds is ever written again."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time

import numpy as np
import pytest
import stocache
import torch
from samples import GIB, Batches, complaint, limit_gib, whole
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

WORDS = 16


@pytest.fixture
def cache(make_cache):
    """Room for 20 of 30 samples; the even ones are set."""
    made = make_cache((30 + 20 * 8 * WORDS) / GIB, 30, (WORDS,), torch.int64)
    assert len(made) == 20
    for idx in range(0, 30, 2):
        made.set_slot(idx, whole(idx, WORDS))
    return made


def expected(indices):
    found = [idx % 2 == 0 and idx < 20 for idx in indices]
    zero = torch.zeros(WORDS, dtype=torch.int64)
    rows = [whole(idx, WORDS) if hit else zero for idx, hit in zip(indices, found, strict=True)]
    return torch.stack(rows) if rows else torch.zeros(0, WORDS, dtype=torch.int64), found


KINDS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "int32 array": lambda i: np.array(i, dtype=np.int32),
    "strided array": lambda i: np.repeat(np.array(i), 2)[::2],
    "tensor": torch.tensor,
    "strided tensor": lambda i: torch.tensor(i).repeat_interleave(3)[::3],
    "list of numpy integers": lambda i: [np.int64(k) for k in i],
    "list of tensors": lambda i: [torch.tensor(k) for k in i],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_indices_may_be_of_any_kind(cache, kind, threads):
    indices = [4, 3, 0, 29, 18, 20, 4, 19]
    batch, found = cache.get_many(KINDS[kind](indices), threads=threads)
    rows, hits = expected(indices)
    assert batch.dtype == torch.int64 and batch.shape == (8, WORDS) and batch.is_contiguous()
    assert found.dtype == torch.bool and found.shape == (8,)
    assert found.tolist() == hits
    assert torch.equal(batch, rows), "missing rows are zero"


@pytest.mark.parametrize(
    "indices", [range(30), range(0), range(28, -1, -2), [], [0], (29,)], ids=str
)
def test_any_number_of_rows_is_a_batch(cache, indices):
    batch, found = cache.get_many(indices)
    rows, hits = expected(indices)
    assert found.tolist() == hits and torch.equal(batch, rows)
    assert cache.set_many([], torch.zeros(0, WORDS, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_buffer_of_the_caller_is_filled_and_returned(cache, threads):
    out = torch.full((30, WORDS), -1)
    at = out.data_ptr()
    for _ in range(3):
        batch, found = cache.get_many(range(30), out=out, threads=threads)
        assert batch.data_ptr() == out.data_ptr() == at
        rows, hits = expected(range(30))
        assert torch.equal(out, rows) and found.tolist() == hits
        out.fill_(-1)


def test_a_buffer_may_be_part_of_a_larger_one(cache):
    large = torch.full((10, WORDS), -1)
    cache.get_many([0, 1, 2], out=large[4:7])
    assert torch.equal(large[4:7], expected([0, 1, 2])[0])
    assert bool((large[:4] == -1).all()) and bool((large[7:] == -1).all())


def test_a_shared_or_pinned_style_buffer_is_a_buffer(cache):
    out = torch.empty(3, WORDS, dtype=torch.int64).share_memory_()
    cache.get_many([0, 2, 4], out=out)
    assert torch.equal(out, expected([0, 2, 4])[0])


def test_the_cache_itself_may_be_the_source_of_a_batch(make_cache, cache):
    other = make_cache(limit_gib(30, WORDS), 30, (WORDS,), torch.int64)
    batch, found = cache.get_many(range(30))
    stored = other.set_many(torch.arange(30)[found], batch[found])
    assert bool(stored.all())
    assert other.aux_array.tolist() == [int(f) for f in found]


def test_set_many_says_which_rows_it_stored(cache):
    rows = torch.stack([whole(idx, WORDS, version=1) for idx in range(30)])
    stored = cache.set_many(range(30), rows)
    assert stored.dtype == torch.bool
    assert stored.tolist() == [idx < 20 and idx % 2 == 1 for idx in range(30)]
    for idx in range(20):
        assert torch.equal(cache.get_slot(idx), whole(idx, WORDS, version=idx % 2))


def test_set_many_overwrites_when_allowed(cache):
    rows = torch.stack([whole(idx, WORDS, version=1) for idx in (0, 1, 25)])
    assert cache.set_many([0, 1, 25], rows, allow_overwrite=True).tolist() == [True, True, False]
    assert torch.equal(cache.get_slot(0), rows[0]) and torch.equal(cache.get_slot(1), rows[1])


def test_an_index_that_comes_twice_is_stored_once(cache):
    rows = torch.stack([whole(1, WORDS, version=v) for v in (1, 2)])
    assert cache.set_many([1, 1], rows).tolist() == [True, False]
    assert torch.equal(cache.get_slot(1), rows[0])
    batch, found = cache.get_many([1, 1])
    assert found.tolist() == [True, True] and torch.equal(batch[0], batch[1])


def test_a_batch_may_have_any_strides(cache):
    rows = torch.stack([whole(idx, WORDS) for idx in (1, 3, 5)])
    assert bool(cache.set_many([1, 3, 5], rows.t().contiguous().t()).all())
    same = whole(7, WORDS).expand(1, WORDS)
    assert bool(cache.set_many([7], same).all())
    for idx in (1, 3, 5, 7):
        assert complaint(idx, cache.get_slot(idx)) is None


def test_a_failed_set_many_does_not_forget_what_a_later_set_may_do(cache):
    with pytest.raises(IndexError):
        cache.set_many([1, 30], torch.zeros(2, WORDS, dtype=torch.int64))
    cache.set_slot(1, whole(1, WORDS))
    with pytest.raises(RuntimeError):
        cache.set_slot(1, whole(1, WORDS))


# Recycled buffers

HOLDERS = {
    "the batch": lambda batch: batch,
    "one row": lambda batch: batch[3],
    "a transposed view": lambda batch: batch.t(),
    "a numpy array": lambda batch: batch.numpy(),
    "its storage": lambda batch: batch.untyped_storage(),
    "a DLPack import": lambda batch: torch.from_dlpack(batch),
    "a detached alias": lambda batch: batch.detach(),
}


def as_array(held) -> np.ndarray:
    if isinstance(held, torch.UntypedStorage):
        held = torch.tensor([], dtype=torch.int64).set_(held)
    if isinstance(held, torch.Tensor):
        held = held.detach().numpy()
    return np.array(held)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_batch_that_is_held_in_any_way_is_not_written_again(cache, holder, seed):
    rng = random.Random(seed)
    kept = []
    for turn in range(60):
        indices = [rng.randrange(30) for _ in range(8)]
        batch, found = cache.get_many(indices)
        assert torch.equal(batch, expected(indices)[0]), f"turn {turn}"
        assert found.tolist() == expected(indices)[1]
        if rng.random() < 0.4:
            held = HOLDERS[holder](batch)
            kept.append((held, as_array(held), found, found.tolist()))
        del batch, found
        if kept and rng.random() < 0.2:
            del kept[rng.randrange(len(kept))]
        for held, before, found, hits in kept:
            assert np.array_equal(as_array(held), before), "somebody wrote into a held batch"
            assert found.tolist() == hits


def test_the_check_for_held_batches_sees_a_buffer_that_is_written_again(cache):
    # the control of the test above: one buffer for two batches is what it must notice
    out = torch.empty(2, WORDS, dtype=torch.int64)
    first, _ = cache.get_many([0, 2], out=out)
    before = as_array(first)
    cache.get_many([4, 6], out=out)
    assert not np.array_equal(as_array(first), before)


def test_released_batches_do_not_pile_up(make_cache):
    words = 1 << 17  # 1 MiB a row
    cache = make_cache(limit_gib(8, words), 8, (words,), torch.int64)
    cache.set_many(range(8), torch.stack([whole(i, words) for i in range(8)]))

    def resident() -> int:
        gc.collect()
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss_Anon:"):
                    anon = int(line.split()[1])
                elif line.startswith("Pss_Shmem:"):
                    return anon + int(line.split()[1])

    for _ in range(4):
        cache.get_many(range(8))
    before = resident()
    for _ in range(100):
        cache.get_many(range(8))
    assert resident() - before < 100 * 1024, "100 batches of 8 MiB each left more than 100 MiB"
    # the control: a third of them, held, is more than that
    held = [cache.get_many(range(8)) for _ in range(33)]
    assert resident() - before > 100 * 1024
    del held


def test_batches_of_changing_size_come_out_right(cache, seed):
    rng = random.Random(seed)
    for _ in range(200):
        indices = [rng.randrange(30) for _ in range(rng.randrange(0, 40))]
        batch, found = cache.get_many(indices, threads=rng.choice([1, 2]))
        rows, hits = expected(indices)
        assert batch.shape == (len(indices), WORDS)
        assert torch.equal(batch, rows) and found.tolist() == hits


@pytest.mark.parametrize("context, persistent", [("fork", True), ("fork", False), ("spawn", True)])
def test_batches_from_workers_stay_whole_while_the_trainer_holds_them(context, persistent, seed):
    dataset = Batches(96, 2048)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        dataset,
        sampler=BatchSampler(RandomSampler(range(96), generator=generator), 8, drop_last=False),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    held = []
    for epoch in range(3):
        held += [(epoch, indices, batch) for indices, batch in loader]
        seen = sorted(int(i) for e, indices, _ in held if e == epoch for i in indices)
        assert seen == list(range(96))
        # every batch of every epoch so far, although their workers went on or have ended
        for _, indices, batch in held:
            for idx, row in zip(indices, batch, strict=True):
                assert complaint(int(idx), row) is None
    stats = dataset.cache.stats()
    assert stats.filled == 96 and stats.fills == 96
    del loader
    dataset.cache.close()


def test_a_batch_put_in_a_queue_survives_the_sender(make_cache, in_child):
    # the sender exits before the batch is looked at; the buffer must not die or be reused with it
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    cache = make_cache(limit_gib(16, 512), 16, (512,), torch.int64)
    cache.set_many(range(16), torch.stack([whole(i, 512) for i in range(16)]))

    def send():
        for start in (0, 4, 8, 12):
            batch, found = cache.get_many(range(start, start + 4))
            queue.put(batch)
            del batch, found
        queue.put(None)
        gate.wait(60)

    gate = context.Event()
    sender = context.Process(target=send)
    sender.start()
    batches = list(iter(lambda: queue.get(timeout=60), None))
    gate.set()
    sender.join()
    assert sender.exitcode == 0
    for start, batch in zip((0, 4, 8, 12), batches, strict=True):
        for offset, row in enumerate(batch):
            assert complaint(start + offset, row) is None
    queue.close()
    queue.join_thread()


# While others write


def keep_overwriting(cache, length, words, seed, stop):
    rng = random.Random(seed)
    version = 0
    while not stop.is_set():
        version += 1
        idx = rng.randrange(length)
        if rng.random() < 0.3:
            few = [rng.randrange(length) for _ in range(4)]
            rows = torch.stack([whole(i, words, version) for i in few])
            cache.set_many(few, rows, allow_overwrite=True)
        else:
            cache.set_slot(idx, whole(idx, words, version), allow_overwrite=True)


def keep_clearing(cache, stop):
    while not stop.is_set():
        cache.clear()
        time.sleep(0.005)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("clearing", [False, True], ids=["overwriting", "overwriting and clearing"])
def test_a_batch_never_holds_a_torn_row(make_cache, scale, seed, threads, backing, clearing):
    length, words = 8, 1 << 13  # 64 KiB a row: long enough to be met half written
    cache = make_cache(limit_gib(length, words), length, (words,), torch.int64, backing=backing)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    jobs = [(keep_overwriting, (cache, length, words, seed + n, stop)) for n in range(2)]
    if clearing:
        jobs.append((keep_clearing, (cache, stop)))
    writers = [context.Process(target=target, args=args) for target, args in jobs]
    for writer in writers:
        writer.start()
    rng = random.Random(seed)
    rows = versions = 0
    seen = set()
    end = time.monotonic() + scale(2, 60)
    try:
        while time.monotonic() < end:
            indices = [rng.randrange(length) for _ in range(16)]
            batch, found = cache.get_many(indices, threads=threads)
            for idx, row, hit in zip(indices, batch, found.tolist(), strict=True):
                if hit:
                    assert complaint(idx, row) is None
                    rows += 1
                    seen.add(int(row[0]))
                else:
                    assert not row.any(), "a missing row is zero"
    finally:
        stop.set()
        for writer in writers:
            writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * len(writers)
    versions = len(seen)
    print(f"{rows} rows, {versions} versions")
    assert rows > 100 and versions > 10, "the writers and the reader hardly met"


def test_the_same_writers_tear_rows_that_are_read_without_the_protocol(make_cache, seed):
    # the control of the test above: a plain copy of the memory is torn sooner or later
    length, words = 8, 1 << 13
    cache = make_cache(limit_gib(length, words), length, (words,), torch.int64)
    array = cache.array
    for idx in range(length):
        cache.set_slot(idx, whole(idx, words))
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    writers = [
        context.Process(target=keep_overwriting, args=(cache, length, words, seed + n, stop))
        for n in range(2)
    ]
    for writer in writers:
        writer.start()
    torn = reads = 0
    end = time.monotonic() + 60
    while torn == 0 and time.monotonic() < end:
        torn += complaint(reads % length, array[reads % length].clone()) is not None
        reads += 1
    stop.set()
    for writer in writers:
        writer.join(60)
    assert torn == 1, f"{reads} unprotected reads and none torn: this test cannot see tearing"


def test_the_check_for_torn_rows_sees_one():
    # one word of another version, sample or position is enough to tell
    row = whole(3, 64, version=7)
    assert complaint(3, row) is None
    for at, word in ((0, whole(3, 64, 8)[0]), (63, whole(3, 64, 8)[63]), (5, row[6]), (9, 0)):
        torn = row.clone()
        torn[at] = word
        assert complaint(3, torn) is not None
    assert complaint(4, row) is not None


def test_threads_of_one_process_share_a_cache_without_torn_rows(make_cache, seed):
    length, words = 8, 1 << 13
    cache = make_cache(limit_gib(length, words), length, (words,), torch.int64)
    stop = threading.Event()
    failures = []

    def read(n):
        rng = random.Random(seed + 10 + n)
        try:
            while not stop.is_set():
                indices = [rng.randrange(length) for _ in range(8)]
                batch, found = cache.get_many(indices, threads=2)
                for idx, row, hit in zip(indices, batch, found.tolist(), strict=True):
                    if hit and (words_about := complaint(idx, row)):
                        failures.append(words_about)
        except BaseException as error:
            failures.append(repr(error))

    def write(n):
        try:
            keep_overwriting(cache, length, words, seed + n, stop)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=job, args=(n,)) for job in (read, write) for n in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures[:3]


def test_the_interpreter_goes_on_while_a_batch_is_copied(make_cache):
    # 64 rows of 4 MiB: long enough that a thread that could not run would show no progress
    words = 1 << 19
    cache = make_cache(limit_gib(64, words), 64, (words,), torch.int64)
    for idx in range(64):
        cache.set_slot(idx, whole(idx, words))
    out = torch.empty(64, words, dtype=torch.int64)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    moved = []
    for _ in range(5):
        time.sleep(0.01)  # gives the ticker its turn before each copy
        before = ticks[0]
        cache.get_many(range(64), out=out)
        moved.append(ticks[0] - before)
    stop.set()
    thread.join()
    # A call that kept the lock would let the ticker run for one switch interval at most.
    assert max(moved) > 10_000, moved
    assert all(complaint(i, out[i]) is None for i in (0, 31, 63))


def test_stats_is_imported_by_its_public_name():
    assert {"hits", "misses", "fills"} <= set(stocache.SharedCacheStats.__dataclass_fields__)


def test_threads_that_fill_the_same_slots_raise_nothing(make_cache):
    """One thread looks and misses, another fills the slot: the first cannot know."""
    n, rounds = 64, 30
    for _ in range(rounds):
        cache = make_cache((n + 16 * n) / GIB, n, (16,))
        errors: list[BaseException] = []
        together = threading.Barrier(4)

        def fill(cache=cache, errors=errors, together=together):
            try:
                together.wait()
                for i in range(n):
                    if cache.get_slot(i) is None:
                        cache.set_slot(i, torch.full((16,), i, dtype=torch.uint8))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=fill) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for i in range(n):
            with pytest.raises(RuntimeError, match="non-empty"):  # what everybody knows by now
                cache.get_slot(i)
                cache.set_slot(i, torch.zeros(16, dtype=torch.uint8))
        cache.close()


def test_a_batch_that_was_looked_for_in_vain_can_be_stored_once(make_cache):
    cache = make_cache((64 + 64) / GIB, 64, (1,))
    assert not cache.get_many(range(64))[1].any()
    for i in range(64):
        cache.set_slot(i, torch.tensor([i], dtype=torch.uint8))
    for i in range(64):
        with pytest.raises(RuntimeError, match="non-empty"):
            cache.set_slot(i, torch.tensor([0], dtype=torch.uint8))
