"""Processes that are killed, stopped or misused: no wrong bytes, no waiting, no crash."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
from pathlib import Path

import pytest
import stocache
import torch
from kernel import leads_group, process_state, stack_of
from samples import CachedSamples, complaint, limit_gib, whole, words_cache
from torch.utils.data import DataLoader

FORK = multiprocessing.get_context("fork")


# P1: no reader sees torn or foreign bytes, whoever is killed


def write_versions(cache, length, words, seed):
    rng = random.Random(seed)
    version = seed & 0xFFFF
    while True:
        version = (version + 1) & 0x7FFFF
        if rng.random() < 0.2:
            few = [rng.randrange(length) for _ in range(3)]
            rows = torch.stack([whole(idx, words, version) for idx in few])
            cache.set_many(few, rows, allow_overwrite=True)
        else:
            idx = rng.randrange(length)
            cache.set_slot(idx, whole(idx, words, version), allow_overwrite=True)


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parts(5)
def test_killed_writers_leave_no_torn_row_and_no_stuck_slot(make_cache, scale, seed, backing):
    length, words = 16, 1 << 12
    kills_wanted = scale(100, 5_000)
    cache = make_cache(limit_gib(length, words), length, (words,), torch.int64, backing=backing)
    rng = random.Random(seed)
    writers = []

    def start():
        args = (cache, length, words, rng.getrandbits(30))
        writers.append(FORK.Process(target=write_versions, args=args))
        writers[-1].start()

    rows = kills = 0
    try:
        for _ in range(3):
            start()
        while kills < kills_wanted:
            for _ in range(rng.randrange(1, 20)):
                indices = [rng.randrange(length) for _ in range(16)]
                batch, found = cache.get_many(indices)
                for idx, row, hit in zip(indices, batch, found.tolist(), strict=True):
                    if hit:
                        assert complaint(idx, row) is None
                        rows += 1
                    else:
                        assert not row.any()
            victim = writers.pop(rng.randrange(len(writers)))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            kills += 1
            start()
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    print(f"{rows} rows verified under {kills} kills")
    assert rows > kills
    # P2: all writers are dead; every slot is readable or can be written
    for idx in range(length):
        got = cache.get_slot(idx)
        if got is None:
            cache.set_slot(idx, whole(idx, words))
            got = cache.get_slot(idx)
        assert complaint(idx, got) is None
    assert cache.aux_array.tolist() == [1] * length


WRONG = 7  # the exit code that says so


def train(dataset, fatal: int | None, seed: int, shared, words: Path) -> None:
    """An epoch in which one worker is killed at batch `fatal`.

    Runs in a process of its own: torch's SIGCHLD handler raises wherever the trainer just is, so
    only its exit code can be relied on."""
    leads_group(words)
    torch.manual_seed(seed)
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    iterator = iter(loader)
    shared[:2] = [worker.pid for worker in iterator._workers]
    try:
        for turn, (indices, _, rows) in enumerate(iterator):
            for idx, row in zip(indices.tolist(), rows, strict=True):
                if complaint(idx, row) is not None:
                    os._exit(WRONG)
            if turn == fatal:
                os.kill(shared[seed % 2], signal.SIGKILL)
    finally:
        shared[2] = 1


@pytest.mark.parts(4)
def test_killed_dataloader_workers_cost_an_epoch_and_no_sample(scale, seed, tmp_path):
    rng = random.Random(seed)
    codes = []
    words = tmp_path / "words"
    for _ in range(scale(6, 200)):
        dataset = CachedSamples(128, 1 << 12)
        for fatal in (rng.randrange(32), rng.randrange(32), rng.randrange(32), None):
            shared = FORK.RawArray("i", 3)  # two workers, and whether the loop is over
            args = (dataset, fatal, rng.getrandbits(30), shared, words)
            trainer = FORK.Process(target=train, args=args)
            trainer.start()
            trainer.join(60)
            hangs = trainer.exitcode is None
            # About once in 250 kills the worker held a lock of torch's own queue machinery, and
            # the DataLoader's destructor waits for it for ever; or the other worker does.
            trainer.kill()
            trainer.join()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            assert shared[2] or not hangs, f"the epoch hangs: {stack_of(words)}"
            codes.append(0 if trainer.exitcode == 0 else 1)
            assert trainer.exitcode != WRONG, "a wrong sample"
            pids = shared[:2]
            # torch's own batches that were on their way: a kill leaves their files
            for file in (f for pid in pids for f in Path("/dev/shm").glob(f"torch_{pid}_*")):
                file.unlink()
        assert codes[-1] == 0, "without a kill the epoch ends"
        for idx in range(128):
            assert complaint(idx, dataset.cache.get_slot(idx)) is None
        dataset.cache.close()
    assert set(codes) == {0, 1}, "some epochs end and some are interrupted"


# P2 and P3: dead and stopped writers

BIG = 1 << 22  # 32 MiB a slot: a write that can be caught halfway


@pytest.fixture
def caught(make_cache, wait_until):
    """caught(signal): a cache, and the slot whose writer met that signal in the middle."""
    writers = []

    def catch(number, backing="shm"):
        cache = make_cache(limit_gib(8, BIG), 8, (BIG,), torch.int64, backing=backing)
        aux = cache.aux_array
        for idx in range(8):
            value = whole(idx, BIG)
            writer = FORK.Process(target=cache.set_slot, args=(idx, value))
            writer.start()
            writers.append(writer)
            while int(aux[idx]) == 0 and writer.is_alive():
                pass
            os.kill(writer.pid, number)
            if number == signal.SIGKILL:
                writer.join()
            else:
                wait_until(lambda w=writer: process_state(w.pid) in "TZ", "the writer stops")
            if int(aux[idx]) >= 3:
                return cache, idx, writer
            os.kill(writer.pid, signal.SIGCONT) if writer.is_alive() else None
            writer.join(60)
        pytest.fail("no writer could be caught in the middle of a write")

    yield catch
    for writer in writers:
        if writer.is_alive():
            writer.kill()
            writer.join()


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_nobody_waits_for_a_stopped_writer_and_nobody_steals_its_slot(caught, in_child, backing):
    cache, idx, writer = caught(signal.SIGSTOP, backing)

    def use():
        # the writer stays stopped until all of this has returned; a wait for it would never end
        for _ in range(100):
            assert cache.get_slot(idx) is None
        batch, found = cache.get_many([idx, 7])
        assert found.tolist() == [False, False] and not batch.any()
        cache.set_slot(idx, torch.full((BIG,), -1))
        cache.set_slot(idx, torch.full((BIG,), -2), allow_overwrite=True)
        stored = cache.set_many([idx], torch.full((1, BIG), -3))
        assert stored.tolist() == [False]
        assert cache.get_slot(idx) is None and int(cache.aux_array[idx]) >= 3
        with pytest.raises(RuntimeError):
            cache.get_slot(idx, allow_empty_slot=False)
        cache.stats()
        return os.getpid()

    in_child(use, timeout=60)
    assert process_state(writer.pid) == "T"
    os.kill(writer.pid, signal.SIGCONT)
    writer.join(60)
    assert writer.exitcode == 0
    assert complaint(idx, cache.get_slot(idx)) is None, "the slot belongs to its writer"


def test_clear_does_not_wait_for_a_stopped_writer(caught, in_child):
    cache, idx, writer = caught(signal.SIGSTOP)
    cache.set_slot(7, whole(7, BIG))
    in_child(cache.clear, timeout=60)
    assert cache.get_slot(7) is None
    os.kill(writer.pid, signal.SIGCONT)
    writer.join(60)
    assert writer.exitcode == 0
    got = cache.get_slot(idx)
    assert got is None or complaint(idx, got) is None


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("who", ["this process", "a forked child", "a process that joins"])
def test_the_slot_of_a_dead_writer_is_taken_over(caught, in_child, who, backing):
    cache, idx, _ = caught(signal.SIGKILL, backing)
    assert cache.get_slot(idx) is None, "half a sample is no sample"

    def take_over(through=cache):
        assert through.get_slot(idx) is None
        through.set_slot(idx, whole(idx, BIG, version=5))

    if who == "this process":
        take_over()
    elif who == "a forked child":
        in_child(take_over)
    else:
        letter = pickle.dumps(cache)
        in_child(lambda: take_over(pickle.loads(letter)))
    assert torch.equal(cache.get_slot(idx), whole(idx, BIG, version=5))


# P22: the name is removed under a live job


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_removed_name_does_not_stop_the_job(context):
    dataset = CachedSamples(64, 64, backing="shm")
    cache = dataset.cache

    def epoch(remove_at=None):
        loader = DataLoader(
            dataset, 4, shuffle=True, num_workers=2, multiprocessing_context=context
        )
        found = 0
        for turn, (indices, hits, rows) in enumerate(loader):
            for idx, row in zip(indices.tolist(), rows, strict=True):
                assert complaint(idx, row) is None
            if turn == remove_at:
                os.unlink(cache.path)
            found += int(hits.sum())
        return found

    path = cache.path
    epoch(remove_at=5)
    assert not os.path.exists(path)
    for idx in range(64):
        assert complaint(idx, cache.get_slot(idx)) is None
    # these workers start when the name is gone already, and find the very same cache
    assert epoch() == 64
    assert not os.path.exists(path), "a second cache was made"
    cache.stats(), cache.array, cache.aux_array
    cache.clear()
    assert dataset[0][1] is False and dataset[0][1] is True
    cache.close()
    assert not os.path.exists(path)


def test_a_removed_name_can_be_taken_by_a_new_cache(make_cache, unique_name):
    name = unique_name()
    old = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name, backing="shm")
    old.set_slot(0, whole(0, 4))
    os.unlink(old.path)
    new = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name, backing="shm")
    new.set_slot(0, whole(0, 4, version=1))
    assert complaint(0, old.get_slot(0)) is None
    path = old.path
    old.close()
    assert os.path.exists(path), "the old cache removed the name of the new one"
    assert torch.equal(new.get_slot(0), whole(0, 4, version=1))


# P23: bad input becomes exceptions


@pytest.mark.parts(4)
def test_a_fuzzed_api_raises_exceptions_and_nothing_else(run_script, scale, seed):
    script = (Path(__file__).parent / "fuzz.py").read_text()
    done = run_script(script, seed, scale(4000, 400_000), timeout=7200, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    calls, raised = map(int, done.stdout.split()[-2:])
    assert calls > raised > 0, "some calls must succeed and some must fail"
    assert "panicked at" not in done.stderr, f"{done.stderr[-4000:]}"


@pytest.mark.parametrize("mistake", ["abort", "crash", "SystemError", "panic"])
def test_a_fuzzed_api_with_a_mistake_in_it_is_noticed(run_script, seed, mistake):
    # the control
    script = (Path(__file__).parent / "fuzz.py").read_text()
    done = run_script(script, seed, 50, mistake, check=False)
    assert done.returncode in (1, -signal.SIGABRT, -signal.SIGSEGV)
    assert "planted here" in done.stderr
    assert not re.search(r"^\d+ \d+$", done.stdout, re.M), "it came to its end"
    stocache.sweep()  # what the dead left


CLOSING = {
    "get_slot": lambda cache, idx: cache.get_slot(idx),
    "set_slot": lambda cache, idx: cache.set_slot(idx, whole(0, 64), allow_overwrite=True),
    "getitem": lambda cache, idx: cache[idx],
    "setitem": lambda cache, idx: cache.__setitem__(idx, whole(0, 64)),
    "get_many": lambda cache, idx: cache.get_many([0, idx]),
    "set_many": lambda cache, idx: cache.set_many([0, idx], torch.zeros(2, 64).long(), True),
}


@pytest.mark.parametrize("call", CLOSING)
def test_an_index_that_closes_the_cache_while_it_is_asked_does_no_harm(in_child, call):
    def attempt():
        cache = words_cache(8, 64)
        cache.set_slot(0, whole(0, 64))

        class Closer:
            def __index__(self):
                cache.close()
                gc.collect()
                return 0

        with contextlib.suppress(RuntimeError, TypeError):
            CLOSING[call](cache, Closer())
        assert cache.closed or call == "setitem"
        cache.close()
        return "alive"

    assert in_child(attempt) == "alive"


@pytest.mark.parametrize("grow", [False, True], ids=["emptied", "grown"])
def test_a_list_that_changes_while_it_is_read_does_no_harm(in_child, grow):
    def attempt():
        cache = words_cache(8, 64)
        for rows in (3, 1000):
            for call in (
                lambda i: cache.get_many(i),
                lambda i, n=rows: cache.set_many(i, torch.zeros(n, 64).long(), True),
            ):
                indices = []

                class Changer:
                    def __index__(self, indices=indices):
                        indices.extend([0] * 100_000) if grow else indices.clear()
                        gc.collect()
                        return 0

                indices += [Changer(), *[object() for _ in range(rows - 1)]]
                with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                    call(indices)
        cache.close()
        return "alive"

    assert in_child(attempt) == "alive"


def test_a_view_cannot_be_made_larger_than_its_slot(in_child):
    def attempt():
        cache = words_cache(8, 64)
        for idx in range(8):
            cache.set_slot(idx, whole(idx, 64))
        view = cache.get_slot(3)
        for grow in (
            lambda: view.resize_(1 << 20),
            lambda: view.untyped_storage().resize_(1 << 24),
            lambda: cache.array.resize_(1 << 20),
            lambda: cache.aux_array.resize_(1 << 20),
            lambda: view.as_strided((1 << 24,), (1,)),
        ):
            with pytest.raises(RuntimeError):
                grow()
        assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(8) if idx != 3)
        cache.close()
        return "alive"

    assert in_child(attempt) == "alive"


def test_calls_from_another_thread_while_the_cache_is_closed_are_exceptions(in_child):
    def attempt():
        import threading

        for _ in range(50):
            cache = words_cache(64, 512)
            cache.set_many(range(64), torch.stack([whole(idx, 512) for idx in range(64)]))
            surprises = []

            def read(cache=cache, surprises=surprises):
                try:
                    while True:
                        batch, found = cache.get_many(range(64), threads=2)
                        torn = [i for i in range(64) if found[i] and complaint(i, batch[i])]
                        row = cache.get_slot(5)
                        if row is None or complaint(5, row) or torn:
                            surprises.append(torn)
                        cache.set_slot(6, whole(6, 512), allow_overwrite=True)
                except RuntimeError as error:
                    if "closed" not in str(error):
                        surprises.append(repr(error))

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.005)
            cache.close()
            for thread in threads:
                thread.join()
            assert not surprises, surprises
        return "alive"

    assert in_child(attempt) == "alive"
