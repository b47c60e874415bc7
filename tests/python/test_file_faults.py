"""FileCache in trouble: killed workers, no room, folders of others, limits, growth, forks.

Mounts are made in a mount namespace of a child: no disk of the machine is ever filled."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
from far import (
    KIB,
    Loaded,
    Pictures,
    all_right,
    complaint,
    copies_below,
    is_copy,
    make_far,
    opened_at,
    parts_of,
    read,
    used_bytes,
    write,
)
from kernel import become_nobody, mount_at, process_state, remount, root_only
from stocache import FileCache
from torch.utils.data import DataLoader

FORK = multiprocessing.get_context("fork")
FILE = 4 * KIB
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def told(function, *args):
    """What function(*args) returned, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        value = function(*args)
    return value, [str(warning.message) for warning in seen]


# P14: kills


@pytest.mark.parametrize("options", [{}, {"checksum": True, "limit": 4 << 20}], ids=str)
def test_killed_workers_leave_no_partial_file_under_a_name(tmp_path, near, scale, seed, options):
    far = make_far(tmp_path / "large", 24, 512 * KIB)
    rng = random.Random(seed)
    cache = FileCache(far, near, **options)

    def work(n):
        order = random.Random(n).sample(range(24), 24)
        while True:
            for idx in order:
                if words := complaint(cache.files[idx], read(cache.get_path(idx))):
                    print(words, flush=True)
                    os._exit(1)
            cache.clear()

    workers = [FORK.Process(target=work, args=(seed + n,), daemon=True) for n in range(3)]
    for worker in workers:
        worker.start()
    for turn in range(scale(20, 200)):
        time.sleep(rng.uniform(0, 0.02))
        k = rng.randrange(3)
        os.kill(workers[k].pid, signal.SIGKILL)
        workers[k].join()
        assert workers[k].exitcode == -signal.SIGKILL, "a worker read wrong bytes"
        workers[k] = FORK.Process(target=work, args=(seed + 3 + turn,), daemon=True)
        workers[k].start()
    for worker in workers:
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL, "a worker read wrong bytes"
    for name, path in copies_below(cache.folder).items():
        assert complaint(name, read(path)) is None and path.stat().st_size == 512 * KIB
    # then a run that finishes
    cache.close()
    dataset = Pictures(far, near, kind=FileCache, **options)
    epoch = Loaded(dataset, num_workers=2)
    assert not epoch.wrong and not epoch.warnings
    assert epoch.copies == 24, dataset.cache.stats()
    assert parts_of(dataset.cache) == [], "leftovers of the dead"
    assert used_bytes(dataset.cache) == dataset.cache.stats().bytes
    if "limit" not in options:
        assert set(copies_below(dataset.cache.folder)) == set(dataset.cache.files)
    dataset.cache.close()


def test_a_stopped_copier_is_not_waited_for(tmp_path, near, wait_until):
    # P3: who asks for the same file reads the source
    far = make_far(tmp_path / "large", 1, 32 << 20)
    cache = FileCache(far, near, checksum=True)
    child = FORK.Process(target=lambda: cache.get_path(0))
    child.start()
    wait_until(lambda: parts_of(cache) or not child.is_alive(), "a copy in the making", nap=0)
    os.kill(child.pid, signal.SIGSTOP)
    if parts_of(cache):  # it may have been quicker
        assert cache.get_path(0) == os.path.join(far, cache.files[0])
    os.kill(child.pid, signal.SIGCONT)
    child.join()
    assert child.exitcode == 0
    path = cache.get_path(0)
    assert is_copy(cache, path) and complaint(cache.files[0], read(path)) is None
    assert cache.stats().copies == 1
    cache.close()


# P15: a cache folder that cannot be used


@pytest.fixture
def on_mount(in_child, near):
    """on_mount(f, options) is f() in a child that has a small file system of its own at `near`."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount of its own: a full disk is not covered")
    os.mkdir(near)

    def run(function, options="size=1m"):
        def inside():
            mount_at(near, options)
            return function()

        return in_child(inside)

    def probe():
        try:
            mount_at(near, "size=1m")
        except OSError as error:
            return str(error)

    if reason := in_child(probe):
        pytest.skip(f"mounting is not permitted ({reason}): a full disk is not covered")
    return run


def hog(folder: str) -> str:
    """Fills the file system of `folder` to its last page, as another program would."""
    path = os.path.join(folder, "hog")
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def test_on_a_full_disk_training_goes_on_and_copying_resumes(on_mount, far, near):
    def scenario():
        dataset = Pictures(far, near)
        for idx in range(5):
            dataset.cache.get_path(idx)
        path = hog(near)
        warned = []
        for _ in range(2):
            epoch = Loaded(dataset, num_workers=2)
            assert not epoch.wrong and epoch.copies == 5, "what is there is served"
            warned += epoch.warnings
        assert len(warned) == 1 and "takes no more files" in warned[0], warned
        assert "free some space" in warned[0] and "\n" not in warned[0]
        assert parts_of(dataset.cache) == []
        stats = dataset.cache.stats()
        assert stats.failed > 0 and stats.files == 5 and stats.bytes == 5 * FILE
        os.unlink(path)
        deadline = time.monotonic() + 60
        while dataset.cache.stats().files < 24:
            assert time.monotonic() < deadline, dataset.cache.stats()
            _, more = told(all_right, dataset.cache)
            assert not more
            time.sleep(0.2)
        epoch = Loaded(dataset, num_workers=2)
        assert epoch.copies == 24 and not epoch.wrong and not epoch.warnings
        dataset.cache.close()
        # whose records were lost is known again
        with FileCache(far, near) as again:
            assert all_right(again) == 24 and again.stats().copies == 0
        return "done"

    assert on_mount(scenario) == "done"


def test_a_disk_without_inodes_is_a_full_disk(on_mount, far, near):
    def scenario():
        with FileCache(far, near) as cache:
            served, warned = told(all_right, cache)
            assert 0 < served < 24 and len(warned) == 1 and "No space" in warned[0], warned
            return parts_of(cache)

    assert on_mount(scenario, "size=1m,nr_inodes=20") == []


@root_only
def test_a_folder_that_becomes_unwritable_serves_what_it_has(tmp_path, far, near, in_child):
    os.mkdir(near)
    os.chmod(near, 0o777)

    def scenario():
        become_nobody(tmp_path)
        dataset = Pictures(far, near)
        for idx in range(5):
            dataset.cache.get_path(idx)
        for folder in (dataset.cache.folder, os.path.join(dataset.cache.folder, "..", "parts")):
            os.chmod(folder, 0o500)
        epoch = Loaded(dataset, num_workers=2)
        assert not epoch.wrong and epoch.copies == 5
        assert len(epoch.warnings) == 1 and "Permission denied" in epoch.warnings[0], epoch.warnings
        assert "make it writable" in epoch.warnings[0] and "\n" not in epoch.warnings[0]
        dataset.cache.close()
        return "done"

    assert in_child(scenario) == "done"


def test_a_read_only_folder_serves_what_it_has(on_mount, far, near):
    def scenario():
        with FileCache(far, near) as cache:
            for idx in range(5):
                cache.get_path(idx)
        remount(near, read_only=True)
        dataset, warned = told(Pictures, far, near)
        epoch = Loaded(dataset, num_workers=2)
        assert not epoch.wrong and epoch.copies == 5
        warned += epoch.warnings
        assert len(warned) == 1 and "Read-only" in warned[0], warned
        assert dataset.cache.clear() == 0
        assert dataset.cache.verify(progress=False) == []
        left, more = told(lambda: dataset.cache.prefetch(progress=False))
        assert len(left) == 19 and not more
        dataset.cache.close()
        return "done"

    assert on_mount(scenario) == "done"


@root_only
def test_nothing_is_copied_again_and_again_on_a_disk_with_coarse_times(
    tmp_path, far, near, in_child
):
    # some file systems of scratch disks keep whole seconds only
    image, tools = tmp_path / "image", [shutil.which("mkfs.ext4"), shutil.which("mount")]
    if not all(tools):
        pytest.skip("mkfs.ext4 or mount is absent: coarse times are not covered")
    image.touch()
    os.truncate(image, 8 << 20)
    subprocess.run([tools[0], "-q", "-I", "128", str(image)], check=True, capture_output=True)
    os.mkdir(near)

    def scenario():
        mount_at(near, "size=1m")  # in a namespace of its own
        mounted = subprocess.run([tools[1], "-o", "loop", str(image), near], capture_output=True)
        if mounted.returncode != 0:
            return mounted.stderr.decode()
        for _ in range(2):
            with FileCache(far, near) as cache:
                (served, warned), (again, more) = told(all_right, cache), told(all_right, cache)
                assert served == again == len(cache.in_cache) and not more
                # no copy, and said so, or one for ever: but not one for every request
                assert len(warned) == 1 if served == 0 else served == 24
                assert cache.stats().copies <= 24 and cache.stats().stale == 0

    if reason := in_child(scenario):
        pytest.skip(f"mounting is not permitted ({reason}): coarse times are not covered")


def unusable(far, near, words):
    """A whole training on a folder that cannot be used: one warning, and everything works."""
    dataset, warned = told(Pictures, far, near)
    assert len(warned) == 1 and words in warned[0] and "\n" not in warned[0], warned
    assert f"files are read from {far} instead" in warned[0]
    for _ in range(2):
        epoch = Loaded(dataset, num_workers=2)
        assert not epoch.wrong and epoch.copies == 0 and not epoch.warnings
    cache = dataset.cache
    twin, warned = told(lambda: pickle.loads(pickle.dumps(cache)))
    assert not warned and twin.get_path(0) == os.path.join(far, cache.files[0])
    assert len(cache.in_cache) == 0 and cache.clear() == 0 and cache.files[0] not in cache.in_cache
    assert cache.prefetch(progress=False) == sorted(cache.files)
    assert cache.verify(progress=False) == []
    assert cache.stats().copies == 0 and cache.stats().files == 0
    with cache.open(0) as file:
        assert complaint(cache.files[0], file.read()) is None
    for closing in (cache, twin):
        closing.close()
    return "done"


def test_an_empty_read_only_folder_is_one_warning(on_mount, far, near):
    def scenario():
        remount(near, read_only=True)
        return unusable(far, near, "Read-only")

    assert on_mount(scenario) == "done"


def test_a_file_in_place_of_the_folder_is_one_warning(far, near):
    Path(near).write_text("somebody's notes")
    unusable(far, near, "cannot be used as a cache")
    unusable(far, os.path.join(near, "below"), "cannot be used as a cache")
    assert Path(near).read_text() == "somebody's notes"


def test_a_link_in_place_of_our_own_folder_is_one_warning(far, near, tmp_path):
    with FileCache(far, near) as cache:
        ours = Path(cache.folder).parent
    shutil.rmtree(ours)
    (tmp_path / "target").mkdir()
    ours.symlink_to(tmp_path / "target")
    unusable(far, near, "is not a folder")
    assert os.listdir(tmp_path / "target") == []


def test_a_folder_that_others_may_write_to_is_one_warning(far, near):
    with FileCache(far, near) as cache:
        ours = Path(cache.folder).parent
    ours.chmod(0o777)
    unusable(far, near, "chmod 700")


@root_only
def test_a_folder_of_another_user_is_one_warning(tmp_path, far, near, in_child):
    with FileCache(far, near) as cache:
        all_right(cache)
        ours = os.path.dirname(cache.folder)
    os.chmod(near, 0o755)

    def stranger():
        become_nobody(tmp_path)
        return unusable(far, near, "Permission denied")

    assert in_child(stranger) == "done"
    os.chmod(near, 0o1777)  # a scratch disk: a folder for each user

    def neighbour():
        become_nobody(tmp_path)
        with FileCache(far, near) as cache:
            assert os.path.dirname(cache.folder) != ours
            served = all_right(cache)
            return served, cache.stats().copies

    assert in_child(neighbour) == (24, 24)
    os.chown(ours, 65534, 65534)
    unusable(far, near, "65534")
    os.chown(ours, 0, 0)


def test_a_folder_that_is_removed_under_a_job_stops_nobody(far, near):
    # P22
    dataset = Pictures(far, near)
    Loaded(dataset, num_workers=2)
    shutil.rmtree(near)
    for _ in range(2):
        epoch = Loaded(dataset, num_workers=2)
        assert not epoch.wrong and not epoch.warnings
        assert epoch.copies == 24, "it is made anew, and filled"
    dataset.cache.close()
    dataset = Pictures(far, near)
    epoch = Loaded(dataset, num_workers=2)
    assert not epoch.wrong and epoch.copies == 24
    dataset.cache.close()


RENAME = "rename,renameat,renameat2"
REFUSALS = [
    ("copy_file_range:error=EXDEV", {}, "copy"),
    ("copy_file_range:error=EIO", {}, "copy"),
    ("copy_file_range:error=EINTR:when=1", {}, "copy"),
    ("copy_file_range:error=ENOSPC", {}, "source"),
    ("copy_file_range,pread64:error=EIO", {}, "error"),
    ("pread64:error=EIO:when=2", {"checksum": True}, "error"),
    ("pread64:error=EINTR:when=1", {"checksum": True}, "copy"),
    ("pwrite64:error=ENOSPC:when=1", {"checksum": True}, "source"),
    ("pwrite64:error=EDQUOT:when=2", {"checksum": True}, "source"),
    ("pwrite64:error=EIO:when=1", {"checksum": True}, "source"),
    ("pwrite64:error=EINTR:when=1", {"checksum": True}, "copy"),
    (RENAME + ":error=EIO", {}, "source"),
    (RENAME + ":error=ENOSPC", {}, "source"),
    ("fchmod:error=EPERM", {}, "source"),
    ("utimensat:error=EPERM", {}, "source"),
    ("openat:error=EMFILE:when=1", {}, "error"),
    ("openat:error=EMFILE:when=2", {}, "source"),
    ("openat:error=EMFILE:when=3", {}, "source"),
]


@pytest.mark.parametrize("fault, options, outcome", REFUSALS, ids=str)
def test_what_the_kernel_refuses_costs_a_copy_at_most(
    injected, tmp_path, near, fault, options, outcome
):
    far = make_far(tmp_path / "large", 2, 600 * KIB)
    name = "0001.bin"
    source = os.path.join(far, name)
    with FileCache(far, near, **options) as cache:

        def ask():
            try:
                (path, warned), error = told(cache.get_path, name), None
            except OSError as caught:
                path, warned, error = source, [], (caught.errno, caught.filename)
            return path, warned, error

        path, warned, error = injected(ask, fault)
        code = getattr(errno, fault.split("error=")[1].split(":")[0])
        assert error == ((code, source) if outcome == "error" else None)
        assert is_copy(cache, path) == (outcome == "copy")
        assert len(warned) == (1 if outcome == "source" else 0), warned
        assert complaint(name, read(path)) is None and os.path.getsize(path) == 600 * KIB
        assert parts_of(cache) == []
        assert cache.stats().failed == (outcome != "copy")
        assert cache.stats().bytes == used_bytes(cache)
    with FileCache(far, near, **options) as cache:
        assert all_right(cache) == 2
        assert cache.stats().copies == (1 if outcome == "copy" else 2)


# P16: the limit


@contextlib.contextmanager
def stopped(pids):
    """All these processes stand still: what is on the disk now was there at one moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while any(process_state(pid) not in "TZ" for pid in pids):
        time.sleep(0.0002)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("policy", ["lru", "freeze"])
def test_the_limit_is_never_exceeded(tmp_path, near, scale, seed, policy):
    far = make_far(tmp_path / "large", 40, 256 * KIB)
    limit = 14 * 256 * KIB + 5
    dataset = Pictures(far, near, limit=limit, policy=policy)
    rng = random.Random(seed)
    loader = DataLoader(
        dataset,
        sampler=rng.choices(range(40), k=100_000),
        batch_size=4,
        collate_fn=list,
        num_workers=4,
        multiprocessing_context="fork",
    )
    epoch = iter(loader)
    pids = [worker.pid for worker in epoch._workers]
    most = copies = 0
    for _ in range(scale(60, 2000)):
        for _ in range(rng.randrange(4)):
            for _, is_copied, wrong, warned in next(epoch):
                assert not wrong and not warned
                copies += is_copied
        with stopped(pids):
            most = max(most, used_bytes(dataset.cache))
    del epoch, loader
    gc.collect()
    assert 13 * 256 * KIB < most <= limit
    stats = dataset.cache.stats()
    assert stats.bytes == used_bytes(dataset.cache) <= limit and parts_of(dataset.cache) == []
    assert stats.files == len(dataset.cache.in_cache) == stats.copies - stats.evicted
    # Workers that make room at the same moment may each remove a file, where one would do.
    assert stats.files == 14 or (policy == "lru" and 14 - len(pids) <= stats.files < 14)
    assert copies > 0 and (stats.evicted > 0) == (policy == "lru")
    # Only who waits for a copy whose copier stands still is given the source in the end.
    assert stats.from_source <= stats.waits or policy == "freeze"
    dataset.cache.close()


def test_the_limit_holds_for_files_of_all_sizes(tmp_path, near, seed):
    rng = random.Random(seed)
    far = tmp_path / "mixed"
    for n in range(60):
        write(far, f"{n}", rng.choice([1, 10, 1000, 30_000, 90_000]))
    with FileCache(far, near, limit="300kB") as cache:
        for _ in range(600):
            idx = rng.randrange(60)
            path = cache.get_path(idx)
            assert is_copy(cache, path) and complaint(cache.files[idx], read(path)) is None
            assert used_bytes(cache) == cache.stats().bytes <= 300_000
        assert set(copies_below(cache.folder)) == set(cache.in_cache)


def test_what_was_not_used_for_longest_goes_first(far, near):
    with FileCache(far, near, limit=6 * FILE) as cache:
        for idx in (0, 1, 2, 3, 4, 5):
            cache.get_path(idx)
        cache.get_path(0)  # used again: 1 is the oldest now
        for new, gone in ((6, 1), (7, 2), (8, 3)):
            cache.get_path(new)
            assert cache.files[gone] not in cache.in_cache
            assert cache.files[0] in cache.in_cache and cache.stats().files == 6
        assert set(cache.in_cache) == {cache.files[idx] for idx in (0, 4, 5, 6, 7, 8)}
        assert cache.stats().evicted == 3


def test_use_in_an_earlier_job_counts(far, near):
    with FileCache(far, near, limit=6 * FILE) as cache:
        for idx in range(6):
            cache.get_path(idx)
        folder = cache.folder
    for idx, name in enumerate(cache.files[:6]):  # the day before yesterday, but for one
        path = os.path.join(folder, name)
        used = time.time() - (0 if idx == 3 else 2 * 86400 + idx)
        os.utime(path, ns=(int(used * 1e9), os.stat(path).st_mtime_ns))
    with FileCache(far, near, limit=6 * FILE) as cache:
        for idx in range(6, 11):
            cache.get_path(idx)
        assert cache.files[3] in cache.in_cache and cache.stats().evicted == 5


def test_freeze_keeps_what_is_there(far, near):
    with FileCache(far, near, limit=6 * FILE, policy="freeze") as cache:
        for _ in range(2):
            assert all_right(cache) == 6
        assert set(cache.in_cache) == set(cache.files[:6])
        stats = cache.stats()
        assert stats.evicted == 0 and stats.copies == 6 and stats.hits == 6
        assert stats.from_source == 36


def test_a_file_larger_than_the_limit_is_read_from_its_source(far, near):
    write(far, "huge", 100 * KIB)
    with FileCache(far, near, limit=50 * KIB) as cache:
        for idx in range(3):
            cache.get_path(idx)
        path, warned = told(cache.get_path, "huge")
        assert path == os.path.join(far, "huge") and not warned
        assert cache.stats().too_large == 1 and cache.stats().evicted == 0
        assert cache.stats().files == 3, "nothing made room in vain"


def test_a_replaced_copy_keeps_within_the_limit(far, near):
    with FileCache(far, near, limit=6 * FILE, check="always") as cache:
        for idx in range(6):
            cache.get_path(idx)
        name = cache.files[0]
        for version in range(1, 4):
            write(far, name, 2 * FILE, version)
            os.utime(os.path.join(far, name), ns=(0, version))
            path = cache.get_path(name)
            assert complaint(name, read(path), version) is None
            assert used_bytes(cache) == cache.stats().bytes <= 6 * FILE
        assert cache.stats().stale == 3


def test_only_our_own_files_are_evicted(far, near):
    with FileCache(far, near, limit=6 * FILE) as cache:
        folder = Path(cache.folder)
        (folder / "deep").mkdir()
        mine = [folder / "mine", folder / "deep" / "mine", folder.parent / "mine"]
        for path in mine:
            path.write_bytes(bytes(FILE))
            path.chmod(0o600)
            os.utime(path, (0, 0))
        write(far, "same name")
        (folder / "same name").write_bytes(b"mine")
        told(cache.get_path, "same name")
        for _ in range(2):
            assert all_right(cache) == 24
        assert all(path.read_bytes() == bytes(FILE) for path in mine)
        assert (folder / "same name").read_bytes() == b"mine"
        assert cache.stats().evicted >= 42
    with FileCache(far, near, limit=6 * FILE) as cache:
        all_right(cache)
        cache.clear()
    assert all(path.exists() for path in mine)


def test_an_open_file_keeps_reading_after_its_eviction(far, near):
    with FileCache(far, near, limit=6 * FILE) as cache:
        name = cache.files[0]
        with cache.open(0) as file:
            for idx in range(1, 24):
                cache.get_path(idx)
            assert name not in cache.in_cache
            assert complaint(name, file.read()) is None


def test_the_last_two_files_of_a_thread_stay(far, near):
    with FileCache(far, near, limit=6 * FILE) as cache:
        one, two = cache.get_path(0), cache.get_path(1)

        for idx in range(2, 24):
            # more threads, one after the other, than a process can have at once
            for _ in range(3):
                thread = threading.Thread(target=cache.get_path, args=(idx,))
                thread.start()
                thread.join()
        assert complaint(cache.files[0], read(one)) is None
        assert complaint(cache.files[1], read(two)) is None


def test_what_ended_processes_were_given_can_be_evicted(far, near, in_child):
    with FileCache(far, near, limit=6 * FILE) as cache:
        for first in (0, 2, 4):
            in_child(lambda first=first: [cache.get_path(first), cache.get_path(first + 1)])
        for idx in range(6, 24):
            assert is_copy(cache, cache.get_path(idx)), (idx, cache.stats())


def test_after_a_prefetch_with_threads_there_is_room_for_others(far, near):
    # the last two files of each of its threads may stay for a while
    with FileCache(far, near, limit=8 * FILE) as cache:
        for turn in range(20):
            cache.prefetch(range(8), num_workers=2, progress=False)
            for idx in range(8, 24):
                assert is_copy(cache, cache.get_path(idx)), (turn, idx, cache.stats())


def test_eviction_in_many_workers_never_takes_a_file_that_is_about_to_be_opened(
    tmp_path, near, scale
):
    # get_path, then open: the promise of the last two files
    far = make_far(tmp_path / "large", 40, 16 * KIB)
    dataset = Pictures(far, near, limit=14 * 16 * KIB)
    for _ in range(scale(4, 100)):
        epoch = Loaded(dataset)  # raises if a path is gone when it is opened
        assert not epoch.wrong and not epoch.warnings
    assert dataset.cache.stats().evicted > 0
    dataset.cache.close()


# P8: memory does not grow


def private_dirty() -> float:
    """MiB of this process alone. The table is shared, whoever touched its pages first."""
    total, shared = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(None, 1)[0]
            if not first.endswith(":"):
                shared = "/dev/shm/" in line
            elif first == "Private_Dirty:" and not shared:
                total += int(line.split()[1])
    return total / 1024


def test_a_million_names_grow_no_private_memory(far, near, scale, in_child):
    count = scale(300_000, 1_000_000)
    names = [f"folder/with/a/long/name/{n:09}.jpg" for n in range(count)]
    for n in range(0, count, count // 100):
        write(far, names[n], 16)
    cache = FileCache(far, near, files=names)
    real = names[:: count // 100]

    def worker():
        gc.collect()
        grown = []
        for _ in range(2):
            before = private_dirty()
            for idx in range(count):
                name = cache.files[idx]
            assert name.endswith(f"{count - 1:09}.jpg")
            for _ in range(20):
                for name in real:
                    cache.get_path(name)
            for idx in range(0, count, 10):
                with contextlib.suppress(FileNotFoundError):
                    cache.get_path(idx)
            grown.append(private_dirty() - before)
        # the control: names as Python objects are what this measurement must see
        before = private_dirty()
        held = [cache.files[idx] for idx in range(count)]
        return grown, private_dirty() - before, len(held)

    grown, seen, _ = in_child(worker)
    limit = 4 + 28 * count / 1_000_000  # 32 MiB at the full count; some are taken once, by anybody
    assert max(grown) <= limit, grown
    assert seen > limit
    assert cache.stats().copies == len(real)
    cache.close()


# P9: few descriptors and mappings


def fds_and_maps() -> tuple[int, int]:
    # the kernel knows a segment by the number under which it was made, before it had a name
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/dev/shm/" in line for line in maps)


def use_fully(cache) -> None:
    all_right(cache)
    assert len(cache.in_cache) and cache.stats().hits >= 0
    cache.verify([0], progress=False)
    cache.prefetch([1], progress=False)
    with cache.open(0):
        pass


def test_a_cache_costs_a_process_four_descriptors_and_four_mappings_at_most(
    far, tmp_path, in_child
):
    def main():
        with FileCache(far, tmp_path / "first") as first:
            use_fully(first)
        gc.collect()
        before = fds_and_maps()
        caches = [FileCache(far, tmp_path / f"near{n}", limit="1MiB") for n in range(5)]
        twins = [pickle.loads(pickle.dumps(cache)) for cache in caches]
        for cache in (*caches, *twins):
            use_fully(cache)
        used = fds_and_maps()
        receive, send = FORK.Pipe(duplex=False)

        def child(caches):
            for cache in caches:
                use_fully(cache)
            send.send(fds_and_maps())

        process = FORK.Process(target=child, args=(caches,))
        process.start()
        in_fork = receive.recv()
        process.join()
        process.close()
        receive.close()
        send.close()
        for cache in (*caches, *twins):
            cache.close()
        del cache, caches, twins
        gc.collect()
        return before, used, (in_fork[0] - 2, in_fork[1]), fds_and_maps()

    before, used, in_fork, after = in_child(main)
    assert used[0] - before[0] <= 5 * 4 and used[1] - before[1] <= 5 * 4
    # one more of each: the parent's sentinel, and a page that the fork left
    assert in_fork[0] - before[0] <= 5 * 4 + 1 and in_fork[1] - before[1] <= 5 * 4 + 1
    assert after == before, "descriptors or mappings outlive their caches"


def test_opening_and_closing_leaks_nothing(far, near, in_child):
    def main():
        with FileCache(far, near) as cache:
            use_fully(cache)
        before = fds_and_maps()
        for _ in range(100):
            with FileCache(far, near) as cache, pickle.loads(pickle.dumps(cache)) as twin:
                twin.get_path(0)
        del cache, twin
        gc.collect()
        return before, fds_and_maps()

    before, after = in_child(main)
    assert after[0] <= before[0] and after[1] <= before[1]


# P10: fork while threads copy


def test_every_child_forked_while_threads_copy_works(tmp_path, near, scale, seed):
    far = make_far(tmp_path / "some", 24, 64 * KIB)
    cache = FileCache(far, near, limit=18 * 64 * KIB)
    behind = FileCache(far, near, limit=18 * 64 * KIB, background=True)
    stop, wrong = threading.Event(), []

    def work(n):
        rng = random.Random(seed + n)
        try:
            while not stop.is_set():
                idx = rng.randrange(24)
                which = behind if n % 2 else cache
                with which.open(idx) as file:
                    if words := complaint(cache.files[idx], file.read()):
                        wrong.append(words)
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    codes = []
    for _ in range(scale(20, 1000)):
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(60)  # a hang ends with a message instead
            with contextlib.suppress(BaseException):
                names = cache.files
                for idx in range(24):
                    for which in (cache, behind):
                        with which.open(idx) as file:
                            assert complaint(names[idx], file.read()) is None
                code = 0
            os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert set(codes) == {0}, codes
    assert not wrong, wrong[:3]
    cache.close()
    behind.close()


# P12: private by default


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777], ids=oct)
@root_only
def test_copies_are_private_under_any_umask(tmp_path, far, near, in_child, umask):
    os.mkdir(near)
    os.chmod(near, 0o777)
    for path in copies_below(far).values():
        path.chmod(0o644)

    def make():
        become_nobody(tmp_path)  # whom missing rights stop
        os.umask(umask)
        cache, warned = told(FileCache, far, near)
        served = all_right(cache)
        modes = {}
        for at, folders, names in os.walk(os.path.dirname(cache.folder)):
            for name in (*folders, *names):
                path = os.path.join(at, name)
                modes[os.path.relpath(path, near)] = oct(stat.S_IMODE(os.lstat(path).st_mode))
        modes["."] = oct(stat.S_IMODE(os.stat(os.path.dirname(cache.folder)).st_mode))
        folders = {name: os.path.isdir(os.path.join(near, name)) for name in modes}
        wrong = {n: m for n, m in modes.items() if m != ("0o700" if folders[n] else "0o600")}
        copies = cache.stats().copies
        cache.close()
        return served, copies, warned, wrong

    served, copies, warned, wrong = in_child(make)
    assert wrong == {} and warned == []
    assert served == copies == 24


# Names of the dead


def test_a_job_that_was_killed_leaves_one_segment_that_the_next_start_removes(
    far, near, run_script, wait_until
):
    def segments():
        return {name for name in os.listdir("/dev/shm") if "files-" in name}

    before = segments()
    child = run_script.start(
        """
        import sys, time, stocache
        cache = stocache.FileCache(*sys.argv[1:])
        cache.prefetch(range(10), progress=False)
        print("ready", flush=True)
        time.sleep(60)
        """,
        far,
        near,
    )
    assert child.stdout.readline() == "ready\n"
    run_script.kill_group(child)
    assert len(segments() - before) == 1
    with FileCache(far, near) as cache:
        assert len(cache.in_cache) == 10 and all_right(cache) == 24
        assert cache.stats().copies == 14, "the copies of the dead are as good as any"
    assert segments() == before


def test_a_damaged_index_costs_no_copy(far, near, seed):
    # P13: the files themselves say what they are
    rng = random.Random(seed)
    with FileCache(far, near) as cache:
        all_right(cache)
        index = Path(cache.folder).parent / "index"
    good = index.read_bytes()
    for turn in range(20):
        # Cut off, then flipped: a cut between two records alone leaves a log that is in order.
        damaged = bytearray(good[: rng.choice([len(good), rng.randrange(1, len(good))])])
        for _ in range(rng.choice([1, 10, 100])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        index.write_bytes(damaged)
        with opened_at(far) as opened, FileCache(far, near, limit="1MiB") as cache:
            assert all_right(cache) == 24, turn
            assert not opened.count(), f"turn {turn}: copied again"
            assert cache.stats().bytes == used_bytes(cache) == 24 * FILE
    index.unlink()
    with FileCache(far, near) as cache:
        assert len(cache.in_cache) == 24 and all_right(cache) == 24 and cache.stats().copies == 0
