"""A disk level whose disk is full, fails, becomes read-only or lacks something; and one that all
its operations torture against each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import time
import warnings
from collections import Counter

import kernel
import pytest
import stocache
import torch
from command import run as command
from kernel import root_only
from samples import complaint
from sources import FORK, INDEX, Counted
from stocache import disk_caches
from torch.utils.data import DataLoader

WORDS = 512  # of a sample: 4 KiB
LENGTH = 100


@pytest.fixture
def below(tmp_path):
    (tmp_path / "below").mkdir(mode=0o700)
    return tmp_path / "below"


def opened(log, below, length=LENGTH, **options):
    """Memory has no room for a sample: all are on disk."""
    options = {"disk": "8MiB", "probe": 0, "verbose": False, "memory": INDEX + 64} | options
    return stocache.CachedDataset(Counted(log, length, words=WORDS), disk_path=below, **options)


def epoch(dataset) -> list[str]:
    """Every sample is right; what was warned of."""
    seen = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for numbers, rows in DataLoader(dataset, 10, shuffle=True):
            for number, row in zip(numbers.tolist(), rows, strict=True):
                assert complaint(number, row) is None
                seen[number] += 1
        dataset.flush()
    assert seen == Counter(range(len(dataset)))
    return [text for each in caught if "disk level" in (text := str(each.message))]


def data_files(below):
    return sorted(below.glob("*/*.dat"))


# The kernel says no


@pytest.mark.parametrize("kind", ["dat", "log"])
@pytest.mark.parametrize("error", ["EIO", "EROFS", "EDQUOT", "ENOSPC"])
def test_writes_that_fail_cost_one_warning_and_no_sample(injected, log, below, error, kind):
    dataset = opened(log, below)
    dataset[0]
    assert dataset.flush()
    (file,) = below.glob(f"*/*.{kind}")

    def fill():
        said = [text for _ in range(3) for text in epoch(dataset)]
        stats = dataset.stats().disk
        return said, stats.filled, stats.errors

    said, filled, errors = injected(fill, f"pwrite64:error={error}:when=1+", file)
    assert len(said) == 1 and "cannot write to the disk level in" in said[0]
    assert (filled, errors) == (1, 1), "and nothing is tried again at once"
    dataset.close()
    again = opened(log, below)
    assert epoch(again) == [] and again.stats().disk.filled == LENGTH, "the control"
    assert command("verify", below, "--quiet").returncode == 0
    again.close()


def test_short_writes_cost_one_warning_and_no_sample(log, below, in_child):
    """A limit on the size of files cuts the write that crosses it, and refuses the next."""

    def run():
        dataset = opened(log, below)
        dataset[0]
        assert dataset.flush()
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, free[1]))
        said = [text for _ in range(3) for text in epoch(dataset)]
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
        filled, errors = dataset.stats().disk.filled, dataset.stats().disk.errors
        dataset.close()
        checked = command("verify", below, "--quiet")
        again = opened(log, below)
        said_then = epoch(again)
        filled_then = again.stats().disk.filled
        again.close()
        return said, filled, errors, checked.returncode, said_then, filled_then

    said, filled, errors, status, said_then, filled_then = in_child(run)
    assert len(said) == 1 and "cannot write to the disk level in" in said[0], said
    assert 1 <= filled < LENGTH and errors == 1 and status == 0
    assert said_then == [] and filled_then == LENGTH, "the control"


def test_a_file_system_without_locks_is_refused_with_a_remedy(injected, log, below):
    opened(log, below).close()
    (lock,) = below.glob("*/lock")

    def reopen():
        with pytest.raises(OSError, match=r"cannot lock .*No locks available.*another disk_path"):
            opened(log, below)

    injected(reopen, "fcntl:error=ENOLCK:when=1+", lock)
    again = opened(log, below)
    assert epoch(again) == [], "the control"
    again.close()


def test_what_leaves_memory_for_a_slow_disk_is_not_lost(injected, log, below):
    """A region of memory goes down as a whole, while others wait for its room."""
    dataset = opened(log, below, 400, disk="16MiB", policy="lru", memory=INDEX + 64 * 4224)
    dataset[0]
    assert dataset.flush()
    folder = next(below.glob("*/store")).parent
    files = [folder / f"{r:03}-{g:08x}.dat" for r in range(4) for g in range(1, 4)]

    def fill():
        for _ in range(3):
            assert epoch(dataset) == []
        return dataset.stats().disk.dropped

    assert injected(fill, "pwrite64:delay_enter=100ms", *files) == 0
    assert dataset._stocache.source.once_each(), "none was loaded again"
    dataset.close()


@pytest.mark.parametrize("call", ["pwrite64", "pread64"])
def test_interrupted_calls_go_on(injected, log, below, call):
    dataset = opened(log, below)
    dataset[0]
    dataset.flush()
    (file,) = data_files(below)

    def use():
        said = epoch(dataset) + epoch(dataset)
        stats = dataset.stats().disk
        return said, stats.filled, stats.errors

    assert injected(use, f"{call}:error=EINTR:when=1+2", file) == ([], LENGTH, 0)
    dataset.close()


def test_reads_that_fail_cost_one_warning_and_no_sample(injected, log, below):
    dataset = opened(log, below)
    epoch(dataset)
    assert dataset.flush()
    (file,) = data_files(below)

    def read():
        said = [text for _ in range(2) for text in epoch(dataset)]
        return said, dataset.stats().disk.errors > 0, dataset.stats().misses

    said, failed, misses = injected(read, "pread64,preadv2:error=EIO:when=1+", file)
    assert len(said) == 1 and "cannot read from the disk level in" in said[0]
    assert failed and misses >= 2 * LENGTH
    before = dataset.stats().misses
    assert epoch(dataset) == [] and dataset.stats().misses == before, "the disk is well again"
    dataset.close()


# File systems


@root_only
def test_a_full_ext4_costs_one_warning_and_is_used_again_when_there_is_room(
    log, below, tmp_path, in_child, scale
):
    waits = scale(0, 11)  # after trouble the disk is left alone for 10 s

    def run():
        try:
            kernel.mount_ext4(below, tmp_path / "image", 32)
        except OSError as error:
            return str(error)
        hog = below / "hog"
        hog.write_bytes(bytes(24 << 20))
        os.sync()
        dataset = opened(log, below / "here", 1500, disk="16MiB")
        said = epoch(dataset) + epoch(dataset)
        full = dataset.stats().disk
        hog.unlink()
        time.sleep(waits)
        said += epoch(dataset)
        then = dataset.stats().disk.filled
        dataset.close()
        checked = command("verify", below / "here", "--quiet")
        return said, full.filled, full.errors, then, checked.returncode, checked.stdout

    found = in_child(run)
    if isinstance(found, str):
        pytest.skip(f"no ext4 can be made here ({found}): a full one is not covered")
    said, full, errors, then, status, text = found
    assert len(said) == 1 and "No space left" in said[0], said
    assert 0 <= full < 1500 and errors > 0
    assert then == 1500 if waits else then == full
    assert status == 0, text


@root_only
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "overlay"])
def test_a_file_system_that_lacks_something_is_used_all_the_same(
    log, below, tmp_path, in_child, kind
):
    """ramfs refuses O_DIRECT and fallocate(2)."""

    def run():
        try:
            if kind == "overlay":
                (tmp_path / "parts").mkdir()
                kernel.mount_overlay(below, tmp_path / "parts")
            else:
                kernel.mount_at(below, "size=32m" if kind == "tmpfs" else "", kind)
        except OSError as error:
            return str(error)
        if kind == "ramfs":  # the control: it does
            with pytest.raises(OSError, match="Invalid argument"):
                os.open(below / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
            os.chmod(below, 0o700)
        for _ in range(2):
            dataset = opened(log, below)
            assert epoch(dataset) + epoch(dataset) == []
            assert dataset.stats().disk.errors == 0
            dataset.close()
        return sum(Counted(log, LENGTH).loads().values())

    loads = in_child(run)
    if isinstance(loads, str):
        pytest.skip(f"no {kind} can be mounted here ({loads}): not covered")
    assert loads == LENGTH, "the second run finds all"


@root_only
def test_a_disk_that_is_read_only_serves_what_it_has(log, below, in_child):
    def run():
        kernel.mount_at(below, "size=32m")
        dataset = opened(log, below)
        for index in range(50):
            dataset[index]
        dataset.close()
        kernel.remount(below, read_only=True)
        again = opened(log, below)
        said = epoch(again) + epoch(again)
        stats, looked = again.stats(), look(below)
        again.close()
        return said, stats.hits, stats.misses, stats.disk.writes, looked[0].filled

    said, hits, misses, writes, filled = in_child(run)
    assert said == [] and (hits, misses) == (2 * 50, 2 * 50) and not writes and filled == 50


# Everything against everything


def torment(log, below, seed, policy, compression) -> None:
    """Does whatever can be done with a dataset, at random, until it is killed. A sample that is not
    right ends it."""
    rng = random.Random(seed)
    warnings.simplefilter("ignore")

    def fresh():
        return opened(
            log, below, 200, disk="1MiB", policy=policy, memory=INDEX + 64 * 4224,
            compression=rng.choice((None, compression)),
        )  # fmt: skip

    def check(indices, samples):
        for index, (number, row) in zip(indices, samples, strict=True):
            assert number == index and complaint(index, row) is None

    def in_a_fork(dataset, some):
        def child():
            check(some, dataset[some])

        process = FORK.Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0

    def by_batch(dataset, some):
        numbers, rows = dataset.batches[some]
        check(some, zip(numbers.tolist(), rows, strict=True))

    dataset = fresh()
    acts = {
        "one by one": lambda some: check(some, (dataset[index] for index in some)),
        "many": lambda some: check(some, dataset[some]),
        "a batch": lambda some: by_batch(dataset, some),
        "ahead": lambda some: dataset.prefetch(some),
        "fork": lambda some: in_a_fork(dataset, some),
        "flush": lambda some: dataset.flush(),
        "clear": lambda some: clear(dataset),
        "verify": lambda some: [disk_caches.verify(each.path) for each in look(below)],
        "gc": lambda some: disk_caches.sweep(below),
    }
    weights = [6, 6, 6, 3, 1, 1, 0.3, 0.5, 0.5]
    while True:
        (act,) = rng.choices(list(acts), weights)
        acts[act](rng.sample(range(200), rng.randint(1, 50)))
        if rng.random() < 0.02:
            dataset.close()
            dataset = fresh()


def clear(dataset) -> None:
    with contextlib.suppress(RuntimeError):  # others keep it from being cleared
        dataset.clear()


def look(below) -> list:
    with contextlib.suppress(OSError):
        return disk_caches.disk_caches(below)
    return []


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parts(4)
def test_all_that_can_be_done_with_two_levels_at_the_same_time(
    below, log, seed, scale, policy, monkeypatch
):
    monkeypatch.setattr(Counted, "note", lambda self, index: None)
    rng = random.Random(seed)
    children, kills = [], scale(20, 2000)
    try:
        for _ in range(kills):
            while len(children) < 3:
                args = (log, below, rng.getrandbits(30), policy, "lz4")
                children.append(FORK.Process(target=torment, args=args))
                children[-1].start()
            time.sleep(rng.uniform(0.05, 0.5))
            if rng.random() < 0.05:
                command("rm", below, "--force")
            victim = children.pop(rng.randrange(3))
            assert victim.exitcode is None, f"it ended by itself: {victim.exitcode}"
            victim.kill()
            victim.join()
    finally:
        for child in children:
            child.kill()
            child.join()
    dataset = opened(log, below, 200, disk="1MiB", policy=policy)
    assert epoch(dataset) == [] and epoch(dataset) == []
    assert dataset.stats().disk.hits > 0 and dataset.stats().disk.errors == 0
    dataset.close()
    for each in disk_caches.disk_caches(below):
        assert disk_caches.verify(each.path)[1] == 0, "something was torn"
    stocache.sweep()  # what the dead left


def test_control_a_sample_that_is_not_right_ends_it(below, log, monkeypatch):
    monkeypatch.setattr(Counted, "make", lambda self, index: (index, torch.zeros(WORDS).long()))
    child = multiprocessing.get_context("fork").Process(
        target=torment, args=(log, below, 1, "freeze", "lz4")
    )
    child.start()
    child.join(60)
    assert child.exitcode == 1
    stocache.sweep()
