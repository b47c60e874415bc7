"""One cache in many processes: however they were started, whatever order they come and go in."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import threading
from pathlib import Path

import pytest
import stocache
import torch
from samples import CachedSamples, Views, complaint, limit_gib, whole
from torch.utils.data import DataLoader

HERE = Path(__file__).parent
FORK = multiprocessing.get_context("fork")


def epoch(dataset, context, **options):
    """Indices, hits and rows of one epoch, every row verified."""
    loader = DataLoader(
        dataset, 8, shuffle=True, num_workers=2, multiprocessing_context=context, **options
    )
    hits = []
    seen = []
    for indices, hit, rows in loader:
        hits += hit.tolist()
        seen += indices.tolist()
        for idx, row in zip(indices.tolist(), rows, strict=True):
            assert complaint(idx, row) is None
    assert sorted(seen) == list(range(len(dataset)))
    return hits


# Workers


@pytest.mark.parametrize(
    "context, backing",
    [
        ("fork", "shm"),
        ("fork", "memfd"),
        ("spawn", "shm"),
        ("spawn", "memfd"),
        ("forkserver", "shm"),
    ],
)
def test_what_workers_fill_the_main_process_and_the_next_workers_see(context, backing):
    dataset = CachedSamples(48, 32, backing=backing)
    assert epoch(dataset, context) == [False] * 48
    for idx in range(48):
        assert complaint(idx, dataset.cache.get_slot(idx)) is None
    # persistent_workers is off: these are new processes
    assert epoch(dataset, context) == [True] * 48
    stats = dataset.cache.stats()
    assert stats.fills == stats.filled == 48
    assert stats.hits == 48 + 48 and stats.misses == 48, "the counts of ended workers stay"
    dataset.cache.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_hit_what_other_workers_filled(context):
    dataset = CachedSamples(48, 32)
    loader = DataLoader(
        dataset,
        8,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    for turn in range(3):
        hits = [hit for _, hits, _ in loader for hit in hits.tolist()]
        assert hits == [turn > 0] * 48
    del loader
    dataset.cache.close()


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_views_returned_by_workers_arrive_whole_and_leave_the_cache_alone(context, backing):
    # torch moves a tensor's whole storage when it crosses a process boundary. If the views shared
    # one storage, the first view sent would detach the worker from the cache, or copy all of it.
    dataset = Views(48, 64, backing=backing)
    loader = DataLoader(
        dataset,
        batch_size=None,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    for turn in range(4):
        rows = list(loader)
        assert sorted(int(row[0]) >> 47 for row in rows) == list(range(48))
        for row in rows:
            assert row.shape == (64,) and complaint(int(row[0]) >> 47, row) is None
            assert row.untyped_storage().nbytes() <= 4096, "more than the sample was sent"
        stats = dataset.cache.stats()
        assert stats.fills == 48 and stats.hits == 48 * turn, "a worker lost touch with the cache"
    del loader, rows, row
    dataset.cache.close()


def test_a_view_sent_through_a_queue_leaves_the_senders_cache_attached(make_cache):
    cache = make_cache(limit_gib(8, 64), 8, (64,), torch.int64)
    cache.set_slot(0, whole(0, 64))
    queue = FORK.Queue()
    view = cache.get_slot(0)
    queue.put(view)
    assert complaint(0, queue.get(timeout=60)) is None
    view.share_memory_()

    def fill():
        cache.set_slot(1, whole(1, 64))

    child = FORK.Process(target=fill)
    child.start()
    child.join()
    assert complaint(1, cache.get_slot(1)) is None
    assert cache.get_slot(0).data_ptr() + 64 * 8 == cache.get_slot(1).data_ptr()
    queue.close()
    queue.join_thread()


def test_a_pickled_cache_is_the_same_cache(make_cache):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    twin = pickle.loads(pickle.dumps(cache))
    cache.set_slot(3, whole(3, 4))
    assert complaint(3, twin.get_slot(3)) is None
    assert (twin.name, twin.path, len(twin)) == (cache.name, cache.path, len(cache))
    twin.set_slot(4, whole(4, 4))
    assert complaint(4, cache.get_slot(4)) is None
    twin.close()
    assert complaint(4, cache.get_slot(4)) is None


def test_a_pickled_cache_that_is_gone_comes_back_empty(make_cache, unique_name):
    name = unique_name()
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name)
    cache.set_slot(3, whole(3, 4))
    letter = pickle.dumps(cache)
    cache.close()
    del cache
    gc.collect()
    again = pickle.loads(letter)
    assert again.name == name and len(again) == 8 and again.array.dtype == torch.int64
    assert again.get_slot(3) is None
    again.set_slot(3, whole(3, 4))
    assert complaint(3, again.get_slot(3)) is None
    again.close()


# Who may know what


def test_a_second_set_in_a_child_forked_later_is_a_runtime_error(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    cache.set_slot(1, whole(1, 4))

    def again():
        with pytest.raises(RuntimeError):
            cache.set_slot(1, whole(1, 4, version=1))
        return int(cache.get_slot(1)[0])

    assert in_child(again) == int(whole(1, 4)[0])


def test_a_slot_that_another_process_filled_meanwhile_is_no_error(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    assert cache.get_slot(1) is None
    in_child(lambda: cache.set_slot(1, whole(1, 4)))
    cache.set_slot(1, whole(1, 4, version=1))  # the race: a no-op
    assert torch.equal(cache.get_slot(1), whole(1, 4))
    assert cache.stats().lost == 1
    with pytest.raises(RuntimeError):  # now this process has seen it
        cache.set_slot(1, whole(1, 4, version=1))


def test_a_hit_makes_a_later_set_an_error(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    in_child(lambda: cache.set_slot(1, whole(1, 4)))
    assert cache.get_slot(1) is not None
    with pytest.raises(RuntimeError):
        cache.set_slot(1, whole(1, 4))


def test_a_cleared_slot_can_be_set_again_by_everybody(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    cache.set_slot(1, whole(1, 4))
    in_child(cache.clear)
    assert cache.get_slot(1) is None
    cache.set_slot(1, whole(1, 4, version=2))
    assert torch.equal(cache.get_slot(1), whole(1, 4, version=2))


def test_clear_also_forgets_who_set_what(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)
    cache.set_slot(1, whole(1, 4))
    cache.clear()
    in_child(lambda: cache.set_slot(1, whole(1, 4)))
    cache.set_slot(1, whole(1, 4, version=1))  # not known to this process: an ordinary race
    assert torch.equal(cache.get_slot(1), whole(1, 4))


def race(cache, words, gate, seed):
    order = list(range(cache.stats().dataset_len))
    random.Random(seed).shuffle(order)
    gate.wait(60)
    for idx in order:
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, whole(idx, words))
        got = cache.get_slot(idx)
        assert got is None or complaint(idx, got) is None


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_racing_writers_of_the_same_slots_raise_nothing(make_cache, scale, seed, backing):
    for turn in range(scale(4, 100)):
        cache = make_cache(limit_gib(200, 512), 200, (512,), torch.int64, backing=backing)
        gate = FORK.Event()
        # one order for all: every slot is fought for
        racers = [FORK.Process(target=race, args=(cache, 512, gate, seed)) for _ in range(4)]
        for racer in racers:
            racer.start()
        gate.set()
        for racer in racers:
            racer.join(120)
        assert [racer.exitcode for racer in racers] == [0] * 4, f"turn {turn}"
        for idx in range(200):
            assert complaint(idx, cache.get_slot(idx)) is None
        stats = cache.stats()
        assert stats.fills == 200 and stats.dropped == 0
        cache.close()


def test_two_threads_may_hammer_the_same_slots(make_cache, seed):
    cache = make_cache(limit_gib(100, 512), 100, (512,), torch.int64)
    failures = []

    def hammer(n):
        rng = random.Random(seed + n)
        try:
            for _ in range(3000):
                idx = rng.randrange(100)
                cache.set_slot(idx, whole(idx, 512), allow_overwrite=rng.random() < 0.5)
        except RuntimeError as error:
            if "overwrite" not in str(error):
                failures.append(repr(error))
        except BaseException as error:
            failures.append(repr(error))

    def read():
        try:
            for _ in range(300):
                batch, found = cache.get_many(range(100), threads=2)
                for idx in found.nonzero().flatten().tolist():
                    if words := complaint(idx, batch[idx]):
                        failures.append(words)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(2)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures[:3]


# Joining by name

JOIN = """
    import sys, torch, stocache
    from samples import complaint, limit_gib, whole
    name, backing = sys.argv[1:3]
    cache = stocache.SharedCache(
        limit_gib(8, 4), 8, (4,), torch.int64, name=name, backing=backing
    )
    assert complaint(1, cache.get_slot(1)) is None
    try:
        cache.set_slot(1, whole(1, 4))
        sys.exit("a slot that was set before this process came can be set again")
    except RuntimeError:
        pass
    cache.set_slot(2, whole(2, 4))
"""


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_an_unrelated_process_joins_by_name(make_cache, unique_name, run_script, backing):
    name = unique_name()
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name, backing=backing)
    cache.set_slot(1, whole(1, 4))
    done = run_script(JOIN, name, backing)
    assert done.stdout == "", "only the creator prints the start message"
    assert complaint(2, cache.get_slot(2)) is None, "the joiner's exit took the cache away"
    if backing == "shm":
        assert os.path.exists(cache.path)


def test_two_handles_of_one_name_in_one_process_share(make_cache, unique_name):
    name = unique_name()
    first = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name)
    second = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name)
    first.set_slot(1, whole(1, 4))
    assert complaint(1, second.get_slot(1)) is None
    path = first.path
    first.close()
    assert complaint(1, second.get_slot(1)) is None
    third = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name)
    assert complaint(1, third.get_slot(1)) is None, "closing one handle must not unlink the rest"
    second.close()
    third.close()
    if path is not None:
        assert not os.path.exists(path)


def test_caches_without_a_name_are_not_found_by_others(make_cache):
    caches = [make_cache(limit_gib(8, 4), 8, (4,), torch.int64) for _ in range(4)]
    assert len({cache.name for cache in caches}) == 4
    assert len({cache.path for cache in caches} - {None}) in (0, 4)


def test_processes_that_create_the_same_name_at_once_share_one_cache(make_cache, unique_name):
    for _ in range(10):
        name = unique_name()
        gate = FORK.Event()
        results = FORK.Queue()
        leave = FORK.Event()

        def join(n, name=name, gate=gate, results=results, leave=leave):
            gate.wait(60)
            cache = stocache.SharedCache(
                limit_gib(8, 4), 8, (4,), torch.int64, name=name, verbose=False
            )
            cache.set_slot(n, whole(n, 4))
            results.put(n)
            leave.wait(60)
            cache.close()

        children = [FORK.Process(target=join, args=(n,)) for n in range(4)]
        for child in children:
            child.start()
        gate.set()
        for _ in children:
            results.get(timeout=60)
        cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name)
        assert cache.aux_array.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        leave.set()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * 4
        cache.close()
        results.close()
        results.join_thread()


def test_a_kept_cache_starts_warm_next_time(run_script, unique_name):
    name = unique_name()
    script = """
        import sys, torch, stocache
        from samples import complaint, limit_gib, whole
        cache = stocache.SharedCache(
            limit_gib(8, 4), 8, (4,), torch.int64, name=sys.argv[1], keep=True, verbose=False
        )
        if sys.argv[2] == "first":
            assert cache.get_slot(1) is None
            cache.set_slot(1, whole(1, 4))
        else:
            assert complaint(1, cache.get_slot(1)) is None
        print(cache.path)
    """
    path = run_script(script, name, "first").stdout.strip()
    try:
        assert os.path.exists(path)
        assert name not in str(stocache.sweep()), "a kept cache is no leftover"
        stocache.SharedCache(0.001, 4, (4,), verbose=False).close()  # sweeps too
        assert run_script(script, name, "second").stdout.strip() == path
    finally:
        os.unlink(path)


# fork


def test_a_forked_child_that_exits_normally_takes_nothing_away(run_script):
    done = run_script(
        """
        import os, sys, torch, stocache
        from samples import complaint, limit_gib, whole
        cache = stocache.SharedCache(limit_gib(8, 4), 8, (4,), torch.int64, verbose=False)
        cache.set_slot(1, whole(1, 4))
        for way in ("exit", "_exit", "close", "del", "raise"):
            pid = os.fork()
            if pid == 0:
                assert complaint(1, cache.get_slot(1)) is None
                if way == "_exit":
                    os._exit(0)
                if way == "close":
                    cache.close()
                if way == "del":
                    del cache
                if way == "raise":
                    sys.stderr = open(os.devnull, "w")
                    raise KeyboardInterrupt
                sys.exit(0)
            os.waitpid(pid, 0)
            assert cache.path is None or os.path.exists(cache.path), way
            assert complaint(1, cache.get_slot(1)) is None, way
            # and a stranger still finds it
            other = stocache.SharedCache(
                limit_gib(8, 4), 8, (4,), torch.int64, name=cache.name, verbose=False
            )
            assert complaint(1, other.get_slot(1)) is None, way
            other.close()
        print("whole", cache.path)
        """
    )
    word, path = done.stdout.split()
    assert word == "whole" and not os.path.exists(path), "the last one takes the name along"


def test_a_child_outlives_the_creator(run_script, wait_until):
    # the creator ends; its forked child still reads and writes, and then cleans up
    done = run_script(
        """
        import os, sys, time, torch, stocache
        from samples import complaint, limit_gib, whole
        cache = stocache.SharedCache(limit_gib(8, 4), 8, (4,), torch.int64, verbose=False)
        cache.set_slot(1, whole(1, 4))
        parent = os.getpid()
        print(cache.path, flush=True)
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            time.sleep(0.2)
            cache.set_slot(2, whole(2, 4))
            good = all(complaint(i, cache.get_slot(i)) is None for i in (1, 2))
            print("good" if good else "bad", flush=True)
        """
    )
    path, word = done.stdout.split()
    assert word == "good"
    wait_until(lambda: not os.path.exists(path), f"{path} goes with the last process")


def test_children_forked_while_threads_run_all_work(run_script, scale):
    run_script(
        """
        import os, random, signal, sys, threading, time
        import torch, stocache
        from samples import complaint, limit_gib, whole
        torch.set_num_threads(1)
        forks, words = int(sys.argv[1]), 512
        limit = limit_gib(256, words)
        cache = stocache.SharedCache(limit, 256, (words,), torch.int64, verbose=False)
        for idx in range(0, 128):
            cache.set_slot(idx, whole(idx, words))
        stop = threading.Event()

        def busy(n):
            rng = random.Random(n)
            while not stop.is_set():
                idx = rng.randrange(256)
                cache.set_slot(idx, whole(idx, words), allow_overwrite=True)
                cache.get_many([rng.randrange(256) for _ in range(16)], threads=2)
                cache.get_slot(rng.randrange(256))
                cache.stats()

        threads = [threading.Thread(target=busy, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()

        def child(n):
            for idx in (n % 256, (n + 77) % 256):
                cache.set_slot(idx, whole(idx, words), allow_overwrite=True)
            batch, found = cache.get_many(range(0, 256, 8), threads=1 + n % 2)
            for row, idx, hit in zip(batch, range(0, 256, 8), found.tolist()):
                assert not hit or complaint(idx, row) is None
            with stocache.SharedCache(0.001, 4, (4,), verbose=False) as other:
                other.set_slot(0, torch.zeros(4, dtype=torch.uint8))

        for n in range(forks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    child(n)
                    code = 0
                finally:
                    os._exit(code)
            deadline = time.monotonic() + 60
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    stop.set()
                    sys.exit(f"child {n} of {forks} hangs")
                time.sleep(0.001)
            if status:
                stop.set()
                sys.exit(f"child {n} of {forks} ended with {status:#x}")
        stop.set()
        for thread in threads:
            thread.join()
        """,
        scale(100, 1000),
        timeout=900,
    )


def test_grandchildren_share_the_cache(make_cache, in_child):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64)

    def child():
        pid = os.fork()
        if pid == 0:
            cache.set_slot(1, whole(1, 4))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        return complaint(1, cache.get_slot(1))

    assert in_child(child) is None
    assert complaint(1, cache.get_slot(1)) is None


# Views


def test_views_outlive_close(make_cache):
    for backing in ("shm", "memfd"):
        cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, backing=backing)
        for idx in range(8):
            cache.set_slot(idx, whole(idx, 4))
        views = [cache.get_slot(idx) for idx in range(8)]
        array, aux, item = cache.array, cache.aux_array, cache[2]
        cache.close()
        del cache
        gc.collect()
        for idx, view in enumerate(views):
            assert complaint(idx, view) is None
            assert complaint(idx, array[idx]) is None
        assert aux.tolist() == [1] * 8 and complaint(2, item) is None
        del view


def test_the_name_goes_at_close_although_views_live(make_cache):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, backing="shm")
    cache.set_slot(0, whole(0, 4))
    view, path = cache.get_slot(0), cache.path
    cache.close()
    assert not os.path.exists(path)
    assert complaint(0, view) is None


def test_a_cache_without_close_goes_with_its_last_reference():
    cache = stocache.SharedCache(
        limit_gib(8, 4), 8, (4,), torch.int64, verbose=False, backing="shm"
    )
    path = cache.path
    assert os.path.exists(path)
    del cache
    gc.collect()
    assert not os.path.exists(path)


# Large numbers


def test_many_caches_live_side_by_side(make_cache):
    caches = [make_cache(limit_gib(4, 4), 4, (4,), torch.int64) for _ in range(100)]
    for n, cache in enumerate(caches):
        cache.set_slot(0, whole(n, 4))
    for n, cache in enumerate(caches):
        assert complaint(n, cache.get_slot(0)) is None


def test_more_processes_than_fit_a_byte_write_at_once(make_cache):
    cache = make_cache(limit_gib(512, 64), 512, (64,), torch.int64)
    ready, leave = FORK.Semaphore(0), FORK.Event()
    count = 280

    def hold(n):
        try:
            cache.set_slot(n, whole(n, 64))
            got = cache.get_slot(n)
            assert got is None or complaint(n, got) is None
        finally:
            ready.release()
        leave.wait(120)

    children = [FORK.Process(target=hold, args=(n,)) for n in range(count)]
    try:
        for child in children:
            child.start()
        for _ in children:
            assert ready.acquire(timeout=120)
        stats = cache.stats()
        assert (stats.filled, stats.dropped) == (count, 0)
    finally:
        leave.set()
        for child in children:
            child.join(60)
    assert [child.exitcode for child in children] == [0] * count
    for idx in range(512):  # and all slots are usable once they are gone
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, whole(idx, 64))
        assert complaint(idx, cache.get_slot(idx)) is None


def test_worker_counts_are_summed_while_they_run(make_cache):
    cache = make_cache(limit_gib(64, 4), 64, (4,), torch.int64)
    ready, leave = FORK.Semaphore(0), FORK.Event()

    def work(n):
        for idx in range(n * 16, n * 16 + 16):
            cache.set_slot(idx, whole(idx, 4))
        ready.release()
        leave.wait(60)

    children = [FORK.Process(target=work, args=(n,)) for n in range(4)]
    for child in children:
        child.start()
    for _ in children:
        assert ready.acquire(timeout=60)
    stats = cache.stats()
    leave.set()
    for child in children:
        child.join(60)
    assert stats.fills == stats.filled == 64 and stats.bytes == 64 * 32
    assert cache.fill_fraction == 1.0
    assert cache.stats() == stats
