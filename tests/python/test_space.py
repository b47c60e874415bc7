"""No space: a full mount, a memory cgroup, limits of the process, system calls that fail.

What could end the process (SIGBUS) happens in a child, and mounts are made in a mount namespace of
that child: the machine's own /dev/shm is never filled."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import time
import warnings
from pathlib import Path

import pytest
import stocache
import torch
from kernel import MS_RDONLY, hog_the_mount, mount_shm
from samples import complaint, limit_gib, whole, words_cache
from stocache._dataset.comparing import Countdown

FORK = multiprocessing.get_context("fork")


# P6: a full /dev/shm


@pytest.fixture
def in_own_shm(in_child):
    """in_own_shm(f, options) is f() in a child whose /dev/shm is a small mount of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount of its own: a full /dev/shm is not covered")

    def probe():
        try:
            mount_shm("size=1m")
        except OSError as error:
            return str(error)

    if reason := in_child(probe):
        pytest.skip(f"mounting is not permitted ({reason}): a full /dev/shm is not covered")

    def run(function, options="size=64m", flags=0):
        def inside():
            mount_shm(options, flags)
            return function()

        return in_child(inside)

    return run


SLOT = 1 << 15  # 256 KiB


def test_a_mount_that_another_program_fills_freezes_the_cache_and_reads_go_on(in_own_shm):
    def scenario():
        cache = words_cache(64, SLOT, backing="shm")
        for idx in range(10):
            cache.set_slot(idx, whole(idx, SLOT))
        hog = hog_the_mount()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for idx in range(10, 64):
                assert cache.get_slot(idx) is None
                cache.set_slot(idx, whole(idx, SLOT))  # no exception: training goes on
            cache.set_many([60, 61], torch.stack([whole(60, SLOT), whole(61, SLOT)]))
        mine = [w for w in seen if issubclass(w.category, RuntimeWarning)]
        assert len(mine) == 1, [str(w.message) for w in seen]
        text = str(mine[0].message)
        assert "\n" not in text and "frozen" in text
        stats = cache.stats()
        assert stats.frozen and stats.dropped >= 54 and stats.filled == 10
        for _ in range(3):
            for idx in range(10):
                assert complaint(idx, cache.get_slot(idx)) is None
        batch, found = cache.get_many(range(64))
        assert found.tolist() == [True] * 10 + [False] * 54
        assert not batch[10:].any()
        # what would touch memory that is not there is an error, never SIGBUS
        for touch in (
            lambda: cache.array.sum(),
            lambda: cache[:].sum(),
            lambda: cache[[1, 50]].sum(),
            lambda: cache[50].sum(),
            lambda: cache[-1].sum(),
            lambda: cache.__setitem__(50, whole(50, SLOT)),
            lambda: cache.__setitem__(slice(50, 52), 1),
        ):
            try:
                touch()
            except MemoryError as error:
                assert "\n" not in str(error)
        assert complaint(3, cache[3]) is None
        assert cache.aux_array.tolist()[:10] == [1] * 10
        os.unlink(hog)
        cache.set_slot(20, whole(20, SLOT))
        assert cache.get_slot(20) is None, "frozen until it is cleared"
        cache.clear()
        assert not cache.stats().frozen
        for idx in range(64):
            cache.set_slot(idx, whole(idx, SLOT))
            assert complaint(idx, cache.get_slot(idx)) is None
        return "done"

    assert in_own_shm(scenario) == "done"


def test_reading_a_hole_of_a_full_mount_is_what_kills_without_the_promise(in_own_shm):
    # the control: the same mount, touched through a plain mapping, ends the process with SIGBUS
    def scenario():
        file = os.open("/dev/shm/plain", os.O_CREAT | os.O_RDWR)
        os.ftruncate(file, 1 << 24)
        memory = mmap.mmap(file, 1 << 24)
        hog_the_mount()
        faulthandler.disable()  # its report of what must happen here would look like a failure
        pid = os.fork()
        if pid == 0:
            memory[1 << 23] = 1
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_own_shm(scenario) == -signal.SIGBUS


def joined_on_a_full_mount():
    """A cache that holds samples is joined, and compared, where there is no room for a counter."""
    options = {"name": "full", "fingerprint": "x", "backing": "shm", "verbose": False}
    source = [torch.full((8,), idx) for idx in range(8)]
    first = stocache.CachedDataset(source, "1MiB", **options)
    first.warm(progress=False)
    hog_the_mount()
    second = stocache.CachedDataset(source, "1MiB", **options)
    assert [int(row[0]) for row in second] == list(range(8))
    counted = second._stocache._uncompared is None
    os.unlink("/dev/shm/hog")
    loads = second.stats().loads
    second.close()
    first.close()
    return counted, loads


def test_a_cache_is_joined_where_there_is_no_room_for_a_counter(in_own_shm):
    assert in_own_shm(joined_on_a_full_mount) == (True, 8)


def test_control_a_counter_that_must_be_shared_ends_it(in_own_shm, monkeypatch):
    def shared_or_not_at_all(self, start):
        self._left = torch.tensor([start])
        self._left.share_memory_()

    monkeypatch.setattr(Countdown, "__init__", shared_or_not_at_all)
    with pytest.raises(pytest.fail.Exception, match=r"No space left|shared memory"):
        in_own_shm(joined_on_a_full_mount)


def test_workers_on_a_full_mount_warn_once_and_go_on(in_own_shm):
    def scenario():
        cache = words_cache(64, SLOT, backing="shm")
        cache.set_slot(0, whole(0, SLOT))
        counts = FORK.Queue()  # its semaphores live in /dev/shm too
        hog_the_mount()

        def work(n):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for idx in range(64):
                    if cache.get_slot(idx) is None:
                        cache.set_slot(idx, whole(idx, SLOT))
            counts.put(sum(issubclass(w.category, RuntimeWarning) for w in seen))
            assert complaint(0, cache.get_slot(0)) is None

        workers = [FORK.Process(target=work, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        warned = [counts.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join(60)
        return warned, [worker.exitcode for worker in workers]

    warned, codes = in_own_shm(scenario)
    assert codes == [0, 0, 0]
    assert sum(warned) == 1


def test_a_mount_that_is_too_small_is_a_memory_error_before_anything_is_made(in_own_shm):
    def scenario():
        with pytest.raises(MemoryError) as caught:
            words_cache(64, SLOT, backing="shm")
        message = str(caught.value)
        assert "16.0" in message and "MiB" in message and "\n" not in message, message
        assert os.listdir("/dev/shm") == []
        cache = words_cache(64, SLOT)  # auto: memory that needs no mount
        assert cache.backing == "memfd"
        for idx in range(64):
            cache.set_slot(idx, whole(idx, SLOT))
        assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(64))
        return "done"

    assert in_own_shm(scenario, "size=8m") == "done"


def test_auto_leaves_room_for_others(in_own_shm):
    # 64 MiB is what containers have; NCCL and DataLoader batches need it
    def scenario():
        return words_cache(64, SLOT).backing, words_cache(64, SLOT, backing="shm").backing

    assert in_own_shm(scenario, "size=64m") == ("memfd", "shm")


def test_a_mount_without_inodes_is_a_clear_error(in_own_shm):
    def scenario():
        files = 0
        try:
            while True:
                Path(f"/dev/shm/file{files}").touch()
                files += 1
        except OSError:
            pass
        with pytest.raises((MemoryError, OSError)) as caught:
            words_cache(8, 8, backing="shm")
        assert "/dev/shm" in str(caught.value) and "\n" not in str(caught.value)
        with words_cache(8, 8, backing="memfd") as cache:
            cache.set_slot(0, whole(0, 8))
            assert complaint(0, cache.get_slot(0)) is None
        with contextlib.suppress(MemoryError, OSError):
            words_cache(8, 8).close()
        assert len(os.listdir("/dev/shm")) == files
        return "done"

    assert in_own_shm(scenario, "size=64m,nr_inodes=10") == "done"


def test_a_read_only_mount_is_a_clear_error(in_own_shm):
    def scenario():
        with pytest.raises((OSError, RuntimeError)) as caught:
            words_cache(8, 8, backing="shm")
        assert "/dev/shm" in str(caught.value) and "\n" not in str(caught.value)
        assert "memfd" in str(caught.value)
        with words_cache(8, 8, backing="memfd") as cache:
            cache.set_slot(0, whole(0, 8))
        with contextlib.suppress(OSError, RuntimeError):
            words_cache(8, 8).close()
        return "done"

    assert in_own_shm(scenario, "size=64m", MS_RDONLY) == "done"


def test_a_batch_on_a_full_mount_still_comes(in_own_shm):
    # recycled batch buffers may live in shared memory too; without room they must do without
    def scenario():
        cache = words_cache(64, SLOT, backing="shm")
        cache.set_many(range(8), torch.stack([whole(idx, SLOT) for idx in range(8)]))
        hog_the_mount()
        held = [cache.get_many(range(8))[0] for _ in range(4)]
        for batch in held:
            assert all(complaint(idx, batch[idx]) is None for idx in range(8))
        return "done"

    assert in_own_shm(scenario) == "done"


# P6, other limits: what the process itself may do


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_limits_of_the_process_are_clear_errors(in_child, backing):
    def limited(what, value):
        def inside():
            gc.collect()
            resource.setrlimit(what, (value, value))
            try:
                words_cache(256, 1 << 15, backing=backing)
            except (MemoryError, OSError) as error:
                return type(error).__name__, str(error)
            return "made", ""

        return in_child(inside)

    kind, message = limited(resource.RLIMIT_FSIZE, 1 << 20)
    assert kind == "MemoryError" and "ulimit -f" in message
    used = len(os.listdir("/proc/self/fd"))
    kind, message = limited(resource.RLIMIT_NOFILE, used + 1)
    assert kind in ("MemoryError", "OSError", "made") and "\n" not in message
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    kind, message = limited(resource.RLIMIT_AS, now + (16 << 20))
    assert kind in ("MemoryError", "OSError") and message and "\n" not in message


# P6, injected: the kernel says no at every step of making and filling a cache


FAULTS = [
    ("shm", "fallocate:error=ENOSPC:when=1", "MemoryError"),
    ("shm", "fallocate:error=EINTR:when=1", None),
    ("shm", "ftruncate:error=EFBIG:when=1", None),
    ("shm", "linkat:error=ENOSPC:when=1", "MemoryError"),
    ("shm", "linkat:error=EPERM:when=1", None),
    ("shm", "flock:error=ENOLCK:when=1", None),
    ("shm", "pwrite64:error=EIO:when=1", None),
    ("shm", "pwrite64:error=ENOSPC:when=1", "MemoryError"),
    ("shm", "pwrite64:error=EINTR:when=1", "made"),
    ("memfd", "memfd_create:error=EMFILE:when=1", "MemoryError"),
    ("memfd", "memfd_create:error=ENOSYS:when=1", None),
    ("memfd", "fallocate:error=ENOMEM:when=1", "MemoryError"),
    ("memfd", "ftruncate:error=EPERM:when=1", None),
    ("memfd", "flock:error=ENOLCK:when=1", None),
]


@pytest.mark.parametrize("backing, inject, expected", FAULTS, ids=lambda v: str(v))
def test_a_failing_system_call_while_a_cache_is_made_is_one_clear_error(
    injected, backing, inject, expected
):
    def make():
        fds = len(os.listdir("/proc/self/fd"))
        try:
            cache = words_cache(8, 8, backing=backing)
        except Exception as error:
            gc.collect()
            return type(error).__name__, str(error), len(os.listdir("/proc/self/fd")) - fds
        cache.close()
        del cache
        gc.collect()
        return "made", "", len(os.listdir("/proc/self/fd")) - fds

    kind, message, leaked = injected(make, inject)
    assert kind in ("made", "MemoryError", "OSError", "RuntimeError", "PermissionError")
    assert expected is None or kind == expected, message
    assert "\n" not in message
    assert leaked == 0, f"{leaked} descriptors were not closed"


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT", "EFBIG"])
def test_a_write_that_fails_freezes_with_one_warning_and_no_exception(injected, make_cache, error):
    cache = make_cache(limit_gib(16, 512), 16, (512,), torch.int64, backing="shm")
    for idx in range(4):
        cache.set_slot(idx, whole(idx, 512))

    def fill():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for idx in range(4, 16):
                cache.set_slot(idx, whole(idx, 512))
        wrong = [
            idx for idx in range(16) if (x := cache.get_slot(idx)) is not None and complaint(idx, x)
        ]
        return [w.category.__name__ for w in seen], cache.stats().frozen, wrong

    names, frozen, wrong = injected(fill, f"pwrite64:error={error}:when=3+")
    assert names == ["RuntimeWarning"] and frozen and not wrong
    assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(4))
    assert cache.stats().filled < 16
    cache.clear()
    cache.set_slot(9, whole(9, 512))
    assert complaint(9, cache.get_slot(9)) is None


def test_short_writes_are_continued(injected, make_cache):
    # the kernel may write less than asked; retval would lie, so interrupted calls stand in for it
    cache = make_cache(limit_gib(4, 512), 4, (512,), torch.int64)

    def fill():
        for idx in range(4):
            cache.set_slot(idx, whole(idx, 512))
        return [complaint(idx, cache.get_slot(idx)) for idx in range(4)]

    assert injected(fill, "pwrite64:error=EINTR:when=1+2") == [None] * 4


# P7: the memory cgroup


@pytest.fixture
def cgroup():
    """cgroup(bytes): a memory cgroup (version 1) with that limit, gone after the test."""
    own = Path("/proc/self/cgroup").read_text()
    found = re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$", own, re.MULTILINE)
    parent = Path("/sys/fs/cgroup/memory") / (found[1].lstrip("/") if found else "absent")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        pytest.skip("no writable memory cgroup (version 1): the live cgroup limit is not covered")
    made = []

    def make(limit: int) -> Path:
        group = parent / f"stocache-test-{os.getpid()}-{len(made)}"
        group.mkdir()
        made.append(group)
        (group / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):
            (group / "memory.swappiness").write_text("0")  # too much is too much at once
        return group

    yield make
    for group in made:
        for _ in range(200):  # the last process is gone, the kernel may need a moment
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.02)


def oom_kills(group: Path) -> int:
    return int(re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())[1])


@pytest.mark.parametrize("backing", ["auto", "shm", "memfd"])
def test_a_cache_beyond_the_memory_cgroup_is_refused_instead_of_killed(cgroup, in_child, backing):
    group = cgroup(64 << 20)

    def ask():
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            cache = words_cache(128, 1 << 17, backing=backing)
        except MemoryError as error:
            return str(error)
        for idx in range(128):
            cache.set_slot(idx, whole(idx, 1 << 17))
        return None

    before = oom_kills(group)
    message = in_child(ask)
    assert message is not None, "128 MiB were promised in a cgroup of 64 MiB"
    assert "\n" not in message and "128.0" in message and "cgroup" in message
    assert "lower size_limit_gib to at most" in message
    assert oom_kills(group) == before


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_memory_taken_without_a_look_at_the_cgroup_is_killed(cgroup, flags):
    # the control: in the same group, taking the same bytes ends the process, and is counted
    group = cgroup(64 << 20)

    def take():
        (group / "cgroup.procs").write_text(str(os.getpid()))
        with mmap.mmap(-1, 128 << 20, flags | mmap.MAP_ANONYMOUS) as memory:
            for at in range(0, len(memory), mmap.PAGESIZE):
                memory[at] = 1

    before = oom_kills(group)
    child = FORK.Process(target=take)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert oom_kills(group) > before


def test_a_cache_within_the_memory_cgroup_can_be_filled(cgroup, in_child):
    # the other control: the same request in a larger group is granted, and kept
    group = cgroup(400 << 20)

    def ask():
        (group / "cgroup.procs").write_text(str(os.getpid()))
        with words_cache(128, 1 << 17) as cache:
            for idx in range(128):
                cache.set_slot(idx, whole(idx, 1 << 17))
            return cache.stats().filled

    before = oom_kills(group)
    assert in_child(ask) == 128
    assert oom_kills(group) == before
