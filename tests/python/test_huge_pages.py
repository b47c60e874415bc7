"""Huge pages where the kernel gives them, and small ones where it does not.

Mounts are made in a mount namespace of a child. For a memfd the kernel's own setting counts; it is
put back whatever happens."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import stocache
import torch
from kernel import MS_REMOUNT, hog_the_mount, mount_shm, system
from samples import complaint, whole, words_cache

MIB = 1 << 20
SLOT = 20_000  # words: 160 KB, which divide no huge page
SLOTS = 200  # 31 MiB
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
ROOMY = "size=400m,huge=advise"  # leaves so much to others that "auto" takes it


@pytest.fixture
def in_own_shm(in_child):
    """in_own_shm(f, options) is f() in a child with a /dev/shm of its own."""

    def probe():
        try:
            mount_shm("size=4m,huge=advise")
        except OSError as error:
            return str(error)

    if reason := in_child(probe):
        pytest.skip(f"no mount with huge=advise here ({reason}): huge pages are not covered")

    def run(function, options=ROOMY):
        def inside():
            mount_shm(options)
            return function()

        return in_child(inside)

    return run


@pytest.fixture
def memfds_get_huge_pages():
    before = SETTING.read_text().partition("[")[2].partition("]")[0] if SETTING.exists() else ""
    try:
        SETTING.write_text("advise")
    except OSError as error:
        pytest.skip(f"cannot write {SETTING} ({error}): huge pages of a memfd are not covered")
    try:
        yield
    finally:
        SETTING.write_text(before)


def huge_bytes() -> int:
    """What this process has mapped of shared memory in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))


def table_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmPTE:")[2].split()[0]) << 10


def used_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def fill(cache: stocache.SharedCache, slots: int = SLOTS) -> None:
    order = list(range(SLOTS))
    random.Random(0).shuffle(order)
    for idx in order[:slots]:
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, whole(idx, SLOT))


def all_whole(cache: stocache.SharedCache) -> bool:
    return all(complaint(idx, cache.get_slot(idx)) is None for idx in range(SLOTS))


def in_a_reader(read) -> tuple[int, int]:
    """What `read` maps in huge pages, and what page tables it costs, in a forked process: a fork
    starts without the pages of shared mappings."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = table_bytes()
        read()
        os.write(send, f"{huge_bytes()} {table_bytes() - before}".encode())
        os._exit(0)
    os.close(send)
    with open(receive) as told:
        huge, tables = told.read().split()
    os.waitpid(pid, 0)
    return int(huge), int(tables)


def test_a_filled_cache_is_mapped_by_huge_pages_and_hardly_any_tables(in_own_shm):
    def scenario(huge_pages):
        cache = words_cache(SLOTS, SLOT, huge_pages=huge_pages)
        assert cache.backing == "shm"
        fill(cache)
        assert all_whole(cache)
        return in_a_reader(lambda: [cache.get_slot(idx).max() for idx in range(SLOTS)])

    huge, tables = {}, {}
    for asked in (True, "auto", False):
        huge[asked], tables[asked] = in_own_shm(lambda asked=asked: scenario(asked))
    # all but the first page, which has the states, and the last, which is not whole
    for asked in (True, "auto"):
        assert huge[asked] >= 28 * MIB and tables[asked] <= tables[False] - (32 << 10), tables
    # the control: nobody asked, and the mount gives only to those who do
    assert huge[False] == 0


def test_a_memfd_has_huge_pages_where_the_kernel_gives_them(memfds_get_huge_pages, in_child):
    def scenario(huge_pages):
        cache = words_cache(SLOTS, SLOT, huge_pages=huge_pages, backing="memfd")
        fill(cache)
        assert all_whole(cache)
        return huge_bytes()

    assert in_child(scenario, True) >= 28 * MIB
    assert in_child(scenario, False) == 0  # the control


def test_a_dataset_has_huge_pages_in_whoever_reads_it(in_own_shm):
    def scenario():
        samples = torch.arange(300)[:, None].expand(300, SLOT)
        cached = stocache.CachedDataset(
            list(samples), memory="64MiB", huge_pages=True, shared=False, verbose=False
        )
        for idx in range(300):
            cached[idx]
        again = pickle.loads(pickle.dumps(cached))
        assert all(torch.equal(again[idx], samples[idx]) for idx in range(300))
        read, _ = in_a_reader(lambda: [again[idx] for idx in range(300)])
        return huge_bytes(), read, again._stocache.records.arguments()[-4]

    filled, read, word = in_own_shm(scenario)
    assert filled >= 40 * MIB and read >= 40 * MIB and word == "yes"


def test_what_was_asked_for_travels_with_the_cache(in_own_shm):
    def scenario():
        words = []
        for asked in (True, "auto", False):
            cache = words_cache(SLOTS, SLOT, huge_pages=asked)
            other = pickle.loads(pickle.dumps(cache))
            words.append(other._arguments()[-4])
            fill(other)
            assert all_whole(cache)
        return words

    assert in_own_shm(scenario) == ["yes", "auto", "no"]


def test_huge_pages_take_their_memory_sooner_and_never_more_than_the_limit(in_own_shm):
    def scenario(huge_pages):
        cache = words_cache(SLOTS, SLOT, huge_pages=huge_pages)
        empty = used_bytes()
        fill(cache, SLOTS // 10)
        some = used_bytes()
        fill(cache)
        return empty, some, used_bytes(), os.stat(cache.path).st_size

    empty, some, full, size = in_own_shm(lambda: scenario(True))
    small_empty, small_some, small_full, small_size = in_own_shm(lambda: scenario(False))
    assert empty == small_empty and size == small_size, "nothing is taken before it is filled"
    assert small_some < some, "a tenth of the samples, but more than a tenth of the pages"
    assert small_full <= full <= size + 4096


def test_a_full_mount_freezes_a_cache_of_huge_pages_and_reads_go_on(in_own_shm):
    def scenario():
        cache = words_cache(SLOTS, SLOT, backing="shm", huge_pages=True)
        fill(cache, 5)
        hog_the_mount()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fill(cache)
        stats = cache.stats()
        assert stats.frozen and 5 <= stats.filled < SLOTS, stats
        assert len([w for w in seen if "frozen" in str(w.message)]) == 1
        filled = [idx for idx in range(SLOTS) if cache.get_slot(idx) is not None]
        assert len(filled) == stats.filled
        assert all(complaint(idx, cache.get_slot(idx)) is None for idx in filled)
        os.unlink("/dev/shm/hog")
        cache.clear()
        fill(cache)
        return all_whole(cache)

    assert in_own_shm(scenario, "size=48m,huge=advise")


@pytest.mark.parametrize("huge_pages", ["auto", False])
def test_where_there_are_none_small_pages_do(in_own_shm, huge_pages):
    def scenario():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = words_cache(SLOTS, SLOT, backing="shm", huge_pages=huge_pages)
        fill(cache)
        return all_whole(cache), huge_bytes()

    assert in_own_shm(scenario, "size=64m,huge=never") == (True, 0)


def test_insisting_where_there_are_none_is_one_line_that_says_what_to_do(in_own_shm):
    def scenario():
        said = []
        for make in (
            lambda: words_cache(SLOTS, SLOT, backing="shm", huge_pages=True),
            lambda: stocache.CachedDataset(
                list(torch.arange(9)), "16MiB", backing="shm", huge_pages=True, verbose=False
            ),
        ):
            with pytest.raises(RuntimeError) as caught:
                make()
            said.append(str(caught.value))
        return said, os.listdir("/dev/shm")

    said, left = in_own_shm(scenario, "size=64m,huge=never")
    assert left == []
    for line in said:
        assert "\n" not in line and "huge_pages=True" in line, line
        assert "remount,huge=advise /dev/shm" in line and 'huge_pages="auto"' in line, line


def test_insisting_for_a_memfd_names_the_setting_of_the_kernel():
    if "[never]" not in (SETTING.read_text() if SETTING.exists() else "[never]"):
        pytest.skip(f"{SETTING} is not never: the message of a memfd without them is not covered")
    with pytest.raises(RuntimeError) as caught:
        words_cache(SLOTS, SLOT, backing="memfd", huge_pages=True)
    assert str(SETTING) in str(caught.value) and "\n" not in str(caught.value)


def test_whoever_joins_where_there_are_none_any_more_uses_small_pages(in_own_shm):
    def scenario():
        cache = words_cache(SLOTS, SLOT, huge_pages=True)
        fill(cache, 50)
        system("mount", b"none", b"/dev/shm", None, MS_REMOUNT, b"huge=never")
        other = pickle.loads(pickle.dumps(cache))
        fill(other)
        return all_whole(other) and all_whole(cache)

    assert in_own_shm(scenario)


@pytest.mark.parametrize("wrong", ["yes", "", None, 1, 2.0])
def test_other_words_are_refused(wrong):
    for make in (
        lambda: words_cache(8, 8, huge_pages=wrong),
        lambda: stocache.CachedDataset([1], "1MiB", huge_pages=wrong, verbose=False),
    ):
        with pytest.raises((TypeError, ValueError), match='use True, False or "auto"'):
            make()
