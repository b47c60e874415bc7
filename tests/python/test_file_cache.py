"""FileCache and DataCache: each file copied once per node, known again, and noticed if changed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import re
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import stocache
import torch
import torchrun
from far import (
    KIB,
    Loaded,
    Original,
    Pictures,
    all_right,
    complaint,
    content,
    copies_below,
    is_copy,
    make_far,
    named_at,
    opened_at,
    parts_of,
    read,
    used_bytes,
    write,
)
from kernel import become_nobody, root_only
from stocache import DataCache, FileCache
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def make_files(far, near):
    """FileCache(far, near), closed after the test."""
    made = []

    def make(*paths, kind=FileCache, **options):
        made.append(kind(*(paths or (far, near)), **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def told():
    """told(f) is what f() returned, and the texts of its warnings."""

    def run(function, *args):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            value = function(*args)
        return value, [str(warning.message) for warning in seen]

    return run


# The seed's class: one changed import


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_each_file_is_copied_once_whoever_asks_and_however_often(far, near, scale, context):
    workers = 4 if context == "fork" else scale(2, 4)  # each imports torch
    dataset = Pictures(far, near)
    (Path(dataset.cache.cache_path) / "deep" / "er").mkdir(0o700, parents=True)
    with opened_at(far) as opened, named_at(dataset.cache.cache_path) as named:
        inodes = []
        for _ in range(2):  # without persistent workers: these are new processes every time
            epoch = Loaded(dataset, num_workers=workers, multiprocessing_context=context)
            assert not epoch.wrong and not epoch.warnings and epoch.copies == 24
            found = copies_below(dataset.cache.cache_path)
            inodes.append({name: path.stat().st_ino for name, path in found.items()})
            assert named.count() == Counter(dataset.cache.files), "by the count of the kernel"
            assert opened.count() == Counter(dataset.cache.files), "and at the source"
    assert inodes[0] == inodes[1] and sorted(inodes[0]) == list(dataset.cache.files)
    stats = dataset.cache.stats()
    assert (stats.copies, stats.files, stats.failed, stats.from_source) == (24, 24, 0, 0)
    assert stats.hits == 24 and stats.bytes == stats.copied_bytes == 24 * 4 * KIB
    assert parts_of(dataset.cache) == []
    dataset.cache.close()


def test_the_count_at_the_source_sees_what_is_copied_twice(tmp_path, near):
    # the control: the class that this one replaces, which forgets when its workers end
    for n in range(12):
        write(tmp_path / "flat", f"{n}")
    dataset = Pictures(str(tmp_path / "flat"), near, kind=Original)
    with opened_at(dataset.data_path) as opened:
        for epoch in (1, 2):
            Loaded(dataset)
            assert min(opened.count().values()) == epoch


def test_workers_that_all_want_the_same_files_copy_them_once(tmp_path, near):
    # every worker asks for every file, in the same order, at the same time
    far = make_far(tmp_path / "large", 6, 4 << 20)
    dataset = Everything(far, near)
    loader = DataLoader(dataset, 1, num_workers=4, collate_fn=list, multiprocessing_context="fork")
    with opened_at(far) as opened:
        assert [wrong for batch in loader for wrong in batch[0]] == []
        assert set(opened.count()) == set(dataset.cache.files)
    stats = dataset.cache.stats()
    assert stats.copies == 6 and stats.hits == 18, stats
    dataset.cache.close()


class Everything(Pictures):
    """Each of four samples reads all files."""

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        samples = [Pictures.__getitem__(self, i) for i in range(len(self.cache.files))]
        return [sample[2] for sample in samples if sample[2] or not sample[1]]


def test_data_cache_has_the_words_of_cache_dataloading(make_files, far, near):
    cache = make_files(kind=DataCache)
    name = cache.files[0]
    assert cache.data_path == far and os.path.isdir(cache.cache_path)
    assert len(cache.in_cache) == 0
    assert cache.copy_to_cache(name) is None
    assert name in cache.in_cache
    path = cache.validate_cache(name)
    assert path == os.path.join(cache.cache_path, name) == cache.get_path(0)
    assert cache.stats().copies == 1
    assert repr(cache).startswith("<DataCache ")
    assert make_files(far, near, kind=DataCache, limit="1GiB", check="always").limit == 1 << 30


# torchrun

RANKS = """
    import json, os, sys
    from far import Loaded, Pictures
    from torch.utils.data import DistributedSampler
    folder, images, truths, near = sys.argv[1:]
    rank = int(os.environ["RANK"])
    answers = {}
    # images and ground truth: other folders, the same names, one cache folder
    for which, far in (("images", images), ("truths", truths)):
        dataset = Pictures(far, near)
        found = []
        for epoch in range(2):
            # all samples on both ranks: they race for every file
            loaded = Loaded(dataset, num_workers=2, multiprocessing_context="fork")
            found.append([loaded.copies, loaded.wrong, loaded.warnings])
        answers[which] = {"epochs": found, "folder": dataset.cache.folder}
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(answers, file)
"""


def test_ranks_and_their_workers_share_the_copies_and_two_sources_do_not_collide(tmp_path, near):
    images = make_far(tmp_path / "a" / "data", 20)
    truths = make_far(tmp_path / "b" / "data", 20, KIB)
    # one folder for both caches: what is made in there is counted by the kernel
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[4:] for line in RANKS.splitlines()))
    with opened_at(images) as first, opened_at(truths) as second:
        torchrun.launch(script, tmp_path, images, truths, near, folder=tmp_path).output()
        for watch in (first, second):
            assert set(watch.count().values()) == {1}, "a file was copied again"
            assert len(watch.count()) == 20
    answers = torchrun.answers(tmp_path, 2)
    for which in ("images", "truths"):
        one, two = (answer[which] for answer in answers)
        assert one == two and one["epochs"] == [[20, [], []]] * 2
        assert len(copies_below(one["folder"])) == 20
    assert answers[0]["images"]["folder"] != answers[0]["truths"]["folder"]


# Restart


def test_a_new_process_serves_the_copies_without_copying(make_files, far, near, in_child):
    with make_files() as cache:
        assert all_right(cache) == 24

    def next_job(check):
        with FileCache(far, near, check=check) as cache:  # nobody else has the folder open
            return len(cache.in_cache), all_right(cache), cache.stats().copies, cache.stats().hits

    with opened_at(far) as opened:
        for check in ("once", "always", "never"):
            assert in_child(next_job, check) == (24, 24, 0, 24)
        assert not opened.count(), "looked at, but not read"


def later(far, name, version=1, size=4 * KIB) -> None:
    """Changes a source, and makes sure that its time says so."""
    before = os.stat(os.path.join(far, name)).st_mtime_ns
    write(far, name, size, version)
    os.utime(os.path.join(far, name), ns=(0, before + 1))


@pytest.mark.parametrize("size", [4 * KIB, 5 * KIB, 100], ids=["time only", "larger", "smaller"])
@pytest.mark.parametrize("check", ["once", "always", "never"])
def test_a_changed_source_is_noticed_when_it_was_promised(make_files, far, check, size):
    name = "deep/er/0000.bin"
    cache = make_files(check=check)
    assert all_right(cache) == 24
    later(far, name, 1, size)

    def seen(cache):
        return next(
            v for v in range(3) if complaint(name, read(cache.get_path(name)), v) is None
        ), cache.stats().stale

    # in the same job
    assert seen(cache) == ((1, 1) if check == "always" else (0, 0))
    cache.close()
    # in the next one
    cache = make_files(check=check)
    fresh = check != "always"
    assert seen(cache) == ((0, 0) if check == "never" else (1, int(fresh)))
    # the time alone, and in the middle of the job again
    later(far, name, 2, size)
    wanted = {"always": (2, 1), "once": (1, 1), "never": (0, 0)}[check]
    assert seen(cache) == wanted
    stats = cache.stats()
    assert stats.files == 24 and stats.copies == stats.stale
    assert stats.bytes == 23 * 4 * KIB + os.stat(cache.get_path(name)).st_size


def test_a_source_touched_but_not_changed_is_copied_again(make_files, far):
    cache = make_files(check="always")
    name = cache.files[0]
    path = cache.get_path(0)
    os.utime(os.path.join(far, name), ns=(0, 5))
    assert complaint(name, read(cache.get_path(0))) is None
    assert os.stat(path).st_mtime_ns == 5
    assert cache.stats().stale == 1


def test_a_removed_copy_is_copied_again(make_files):
    cache = make_files()
    all_right(cache)
    os.unlink(cache.get_path(3))
    assert cache.files[3] not in cache.in_cache
    assert all_right(cache) == 24
    stats = cache.stats()
    assert stats.copies == 25 and stats.files == 24 and stats.bytes == 24 * 4 * KIB


# Errors about the source


def test_a_source_that_vanished_is_served_from_its_copy_with_one_warning(make_files, far, told):
    all_right(first := make_files())
    first.close()
    for name in list(first.files)[:5]:
        os.unlink(os.path.join(far, name))
    cache = make_files(files=list(first.files))
    served, warned = told(all_right, cache)
    assert served == 24 and len(warned) == 1, warned
    assert first.files[0] in warned[0] and "copy is used" in warned[0] and "\n" not in warned[0]
    assert told(all_right, cache) == (24, [])
    assert cache.stats().stale == cache.stats().copies == 0


def test_a_source_that_vanishes_in_the_middle_of_a_job_is_served_too(make_files, far, told):
    for check in ("once", "always", "never"):
        cache = make_files(check=check)
        all_right(cache)
        name = cache.files[0]
        data = read(os.path.join(far, name))
        os.unlink(os.path.join(far, name))
        (path, warned) = told(cache.get_path, name)
        assert is_copy(cache, path) and read(path) == data and len(warned) <= 1
        Path(far, name).write_bytes(data)
        cache.close()


class Errors(Dataset):
    """Raises what get_path raises."""

    def __init__(self, cache, names):
        self.cache, self.names = cache, names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        return self.cache.get_path(self.names[idx])


class Caught(Errors):
    """Returns what get_path raised, and so pickles it."""

    def __getitem__(self, idx):
        try:
            return super().__getitem__(idx)
        except OSError as error:
            return error


def opening(path) -> OSError:
    with pytest.raises(OSError) as caught:
        read(path)
    return caught.value


def same_error(one: OSError, other: OSError) -> bool:
    return type(one) is type(other) and (one.errno, one.filename, one.args, str(one)) == (
        other.errno,
        other.filename,
        other.args,
        str(other),
    )


@pytest.mark.parametrize(
    "names",
    [
        ["absent", "deep", "deep/er", "0001.bin/x", "new\nline", "ü", "x" * 300],
        [os.fsdecode(b"not text \xff")],
    ],
    ids=["text", "not text"],
)
def test_an_error_about_the_source_is_what_open_raises_and_crosses_a_worker(
    make_files, far, scale, names
):
    cache = make_files()
    wanted = [opening(os.path.join(far, name)) for name in names]
    fork = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(Caught(cache, names), batch_size=None, **fork)
    wrong = [(a, b) for a, b in zip(loader, wanted, strict=True) if not same_error(a, b)]
    assert [(str(a), str(b)) for a, b in wrong] == []
    assert cache.stats().copies == 0 and parts_of(cache) == []
    if scale(False, True):  # DataLoader takes 5 s to end after an error
        loader = DataLoader(Errors(cache, ["absent"]), **fork)
        with pytest.raises(FileNotFoundError, match="absent"):
            list(loader)
        del loader
        gc.collect()  # its worker must not be the last to leave: the traceback held it


def test_a_pipe_or_a_device_in_place_of_a_file_does_not_hang(make_files, far):
    os.mkfifo(os.path.join(far, "pipe"))
    cache = make_files()
    with pytest.raises(OSError) as caught:
        cache.get_path("pipe")
    assert caught.value.filename.endswith("pipe")


@root_only
def test_an_unreadable_source_is_a_permission_error(tmp_path, near, in_child):
    far = make_far(tmp_path / "far", 3)
    os.chmod(os.path.join(far, "0001.bin"), 0)
    os.mkdir(near)

    def other_user():
        become_nobody(tmp_path)
        with FileCache(far, near) as cache:
            path = os.path.join(far, "0001.bin")
            with pytest.raises(PermissionError) as caught:
                cache.get_path("0001.bin")
            assert same_error(caught.value, opening(path))
            assert same_error(pickle.loads(pickle.dumps(caught.value)), opening(path))
            assert is_copy(cache, cache.get_path("0002.bin"))
            assert cache.stats().failed == 1 and cache.stats().copies == 1

    os.chmod(near, 0o777)
    in_child(other_user)


# In the background


def settled(cache, wait_until, files=24):
    wait_until(lambda: cache.stats().files == files and not parts_of(cache), f"{files} copies")


def test_in_the_background_the_first_epoch_reads_the_source_and_the_second_the_copies(
    far, near, wait_until
):
    dataset = Pictures(far, near, background=True)
    first = Loaded(dataset, num_workers=0)
    assert not first.wrong and not first.warnings
    settled(dataset.cache, wait_until)
    assert dataset.cache.stats().from_source >= 24 - first.copies
    second = Loaded(dataset, num_workers=0)
    assert second.copies == 24 and not second.wrong and not second.warnings
    stats = dataset.cache.stats()
    assert stats.copies == 24 and stats.failed == 0
    dataset.cache.close()


def test_workers_copy_in_the_background_too(far, near, wait_until):
    dataset = Pictures(far, near, background=True)
    dataset.cache.get_path(0)  # the threads of this process are not those of the workers
    loader = DataLoader(
        dataset,
        4,
        num_workers=2,
        collate_fn=list,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    for epoch in range(2):
        samples = [sample for batch in loader for sample in batch]
        assert not any(sample[2] for sample in samples)
        settled(dataset.cache, wait_until)
        if epoch:
            assert all(sample[1] for sample in samples)
    assert dataset.cache.stats().copies == 24
    del loader
    dataset.cache.close()


def test_nothing_waits_for_the_background(make_files, far, wait_until):
    # the first answer is the source's path, whatever the size of the file
    write(far, "huge", 32 << 20)
    cache = make_files(background=True)
    assert cache.get_path("huge") == os.path.join(far, "huge")
    settled(cache, wait_until, 1)
    assert is_copy(cache, cache.get_path("huge"))


def test_an_error_in_the_background_is_one_warning_and_a_counter(make_files, far, told, wait_until):
    cache = make_files(background=True)
    for n in range(3):
        os.mkdir(os.path.join(far, f"folder{n}"))
    warned = []

    def ask():
        for n in range(3):
            path, more = told(cache.get_path, f"folder{n}")
            assert path == os.path.join(far, f"folder{n}"), "the source keeps being served"
            warned.extend(more)
        return warned

    wait_until(ask, "a warning of the background", nap=0.05)
    for _ in range(5):
        ask()
        time.sleep(0.02)
    assert len(warned) == 1 and "background" in warned[0] and "folder" in warned[0], warned
    assert "\n" not in warned[0]
    assert cache.stats().failed > 0
    path = cache.get_path(0)
    assert complaint(cache.files[0], read(path)) is None, "others are copied as before"
    wait_until(lambda: is_copy(cache, cache.get_path(0)), "the copy of another file")


# Ahead


def test_prefetch_copies_everything_and_shows_how_far_it_is(make_files, capfd):
    cache = make_files()
    with opened_at(cache.data_path) as opened:
        assert cache.prefetch() == []
        assert cache.prefetch(progress=False) == []
        assert set(opened.count().values()) == {1}
    text = capfd.readouterr().err
    assert "copying" in text and "24/24" in text and "96.0 KiB" in text and "file" in text
    assert set(cache.in_cache) == set(cache.files) and cache.stats().copies == 24
    assert cache.prefetch([0, "0001.bin", -1], num_workers=1, progress=False) == []
    assert capfd.readouterr().err == ""


def test_prefetch_of_some_copies_those(make_files):
    cache = make_files()
    assert cache.prefetch(range(5), progress=False) == []
    assert set(cache.in_cache) == set(cache.files[:5])
    assert cache.prefetch(iter(["0001.bin", torch.tensor(7)]), progress=False) == []


def test_prefetch_returns_what_has_no_copy(make_files, far, told):
    cache = make_files(limit=10 * 4 * KIB, policy="freeze")
    left = cache.prefetch(progress=False)
    assert len(left) == 14 and left == sorted(set(cache.files) - set(cache.in_cache))
    assert cache.prefetch(left, progress=False) == left
    cache.close()
    # with lru some had to make room again
    cache = make_files(limit=10 * 4 * KIB)
    left = cache.prefetch(progress=False)
    assert left == sorted(set(cache.files) - set(cache.in_cache)) and len(left) >= 14
    cache.close()
    cache = make_files()
    cache.clear()  # which files had stayed is up to the threads
    os.unlink(os.path.join(far, cache.files[3]))
    os.unlink(os.path.join(far, cache.files[4]))
    os.mkdir(os.path.join(far, cache.files[4]))
    left, warned = told(lambda: cache.prefetch(progress=False))
    assert left == [name for name in cache.files[3:5] if name not in cache.in_cache]
    assert len(left) == 2 and len(warned) == 1 and warned[0].startswith("2 of 24 files")


def test_an_interrupted_prefetch_goes_on_where_it_was(tmp_path, near, in_child, seed):
    far = make_far(tmp_path / "large", 30, 4 << 20)

    def interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with FileCache(far, near) as cache:
            wait = random.Random(seed).uniform(0.01, 0.05)
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                while True:  # until the interrupt comes
                    cache.prefetch(progress=False)
                    cache.clear()
            known = len(cache.in_cache)
            assert parts_of(cache) == [], "threads still copy"
            time.sleep(0.02)
            assert parts_of(cache) == [] and len(cache.in_cache) == known
            return known

    known = in_child(interrupted)
    with FileCache(far, near) as cache:
        assert len(cache.in_cache) == known
        assert cache.prefetch(progress=False) == []
        assert cache.stats().copies == 30 - known
        assert all_right(cache) == 30


# After


def flip(path) -> None:
    """Changes one byte, and neither size nor time."""
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)[0]
        file.seek(stat.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(path) -> None:
    stat = os.stat(path)
    os.truncate(path, stat.st_size // 2)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("checksum", [False, True])
def test_verify_finds_what_differs_and_it_is_copied_again(make_files, capfd, checksum):
    cache = make_files(checksum=checksum)
    all_right(cache)
    assert cache.verify(progress=False) == []
    bad = sorted([cache.files[2], cache.files[9]])
    flip(cache.get_path(2))
    cut(os.path.join(cache.folder, cache.files[9]))
    assert cache.verify(list(cache.files)[3:9], progress=False) == []
    capfd.readouterr()
    assert cache.verify(list(cache.files)) == bad
    text = capfd.readouterr().err
    assert "comparing" in text and "24/24" in text and "2 differ" in text
    assert all_right(cache) == 24 and cache.stats().copies == 26
    assert cache.verify(progress=False) == []


def test_verify_of_all_finds_a_cut_copy(make_files):
    cache = make_files()
    all_right(cache)
    cut(cache.get_path(9))
    assert cache.verify(progress=False) == [cache.files[9]]
    assert all_right(cache) == 24


@pytest.mark.parametrize("checksum", [False, True])
def test_verify_goes_on_when_a_source_is_gone(make_files, far, told, checksum):
    cache = make_files(checksum=checksum)
    all_right(cache)
    os.unlink(os.path.join(far, cache.files[0]))
    flip(cache.get_path(1))
    found, warned = told(lambda: cache.verify(progress=False))
    assert found == [cache.files[1]]
    assert len(warned) == (0 if checksum else 1)
    assert cache.files[0] in cache.in_cache, "nothing is known against it"


def test_a_checksum_notices_a_flipped_byte_at_the_next_jobs_first_use(make_files):
    for checksum in (True, False):
        cache = make_files(checksum=checksum)
        all_right(cache)
        flip(cache.get_path(5))
        name = cache.files[5]
        assert complaint(name, read(cache.get_path(5))) is not None, "once per job"
        cache.close()
        again = make_files(checksum=checksum)
        found = complaint(name, read(again.get_path(5)))
        assert (found is None) == checksum, "without a checksum, size and time are all there is"
        assert again.stats().copies == int(checksum)
        again.clear()
        again.close()


def test_a_copy_without_a_checksum_gets_one_when_it_is_asked_for(make_files):
    all_right(first := make_files())
    first.close()
    for copies in (24, 0):  # of unknown worth: copied again, once
        cache = make_files(checksum=True)
        assert all_right(cache) == 24 and cache.stats().copies == copies
        cache.close()


def test_clear_removes_only_what_we_made(make_files, far, told):
    cache = make_files()
    all_right(cache)
    folder = Path(cache.folder)
    mine = [folder / "deep" / "mine.txt", folder.parent / "notes", folder.parent.parent / "other"]
    for path in mine:
        path.write_text("mine")
    # under the name of a source, but not its bytes: never taken for a copy, never removed
    write(far, "name")
    (folder / "name").write_text("mine too")
    path, warned = told(cache.get_path, "name")
    assert path == os.path.join(far, "name") and len(warned) == 1 and "did not make it" in warned[0]
    assert "name" not in cache.in_cache
    cache.close()
    with make_files() as again:  # nobody is about to open anything
        assert again.clear() == 24
        assert len(again.in_cache) == 0 and again.stats().files == again.stats().bytes == 0
    assert all(path.read_text() == "mine" for path in mine)
    assert set(copies_below(folder)) == {"deep/mine.txt", "name"}
    assert (folder / "name").read_text() == "mine too"
    with make_files() as again:
        assert all_right(again) == 24, "and all is copied again"


def test_in_cache_is_a_set(make_files):
    cache = make_files()
    known = cache.in_cache
    assert len(known) == 0 and not known and list(known) == [] and known == set()
    for idx in range(3):
        cache.get_path(idx)
    names = set(cache.files[:3])
    assert len(known) == 3 and set(known) == names and known == names and known
    assert sorted(known) == list(known), "a stable order"
    assert cache.files[0] in known and cache.files[3] not in known
    assert 5 not in known and None not in known and "../x" not in known and "" not in known
    assert known | {"x"} == names | {"x"} and {"x"} | known == names | {"x"}
    assert set(cache.files) - known == set(cache.files[3:])
    assert known - {cache.files[0]} == set(cache.files[1:3])
    assert known & {cache.files[0], "x"} == {cache.files[0]}
    assert known ^ names == set() and known <= set(cache.files) and known.isdisjoint({"x"})
    assert type(known | {"x"}) is set and repr(known) == "<3 copies>"


def test_stats_say_what_happened_in_words(make_files, tmp_path):
    cache = make_files(limit="1MiB")
    assert str(cache.stats()) == "0 files, 0 bytes of 1.00 MiB; 0 hits; 0 copied (0 bytes, 0/s)"
    all_right(cache)
    all_right(cache)
    stats = cache.stats()
    text = str(stats)
    assert text.startswith("24 files, 96.0 KiB of 1.00 MiB; 24 hits; 24 copied (96.0 KiB, ")
    assert stats.copy_seconds > 0 and stats.limit == 1 << 20
    assert text in repr(cache) and repr(cache).startswith(f"<FileCache {cache.data_path} -> ")
    cache.close()
    small = make_files(cache.data_path, tmp_path / "small", limit=100)
    all_right(small)
    assert "24 from source" in str(small.stats()) and "24 too large" in str(small.stats())


# Coming and going


def test_open_reads_and_keeps_reading(make_files):
    cache = make_files()
    name = cache.files[0]
    with cache.open(0) as file:
        assert complaint(name, file.read()) is None
        os.unlink(cache.get_path(0))
        file.seek(0)
        assert complaint(name, file.read()) is None
    with cache.open(name, "r", encoding="latin-1") as file:
        assert file.read().encode("latin-1") == content(name, 4 * KIB) or file.newlines
    with cache.open(name, "rb", buffering=0) as file:
        assert file.readable() and not file.writable()


def test_a_pickled_cache_is_the_same_cache(make_files, near, far, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in (FileCache, DataCache):
        options = {"limit": "1MiB", "policy": "freeze", "check": "always"}
        cache = make_files("far", kind.__name__, kind=kind, **options)
        letter = pickle.dumps(cache)
        os.makedirs("elsewhere", exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        for twin in (pickle.loads(letter), copy.deepcopy(cache), copy.copy(cache)):
            assert type(twin) is kind and twin.files == cache.files and twin.folder == cache.folder
            assert twin.cache_path == cache.cache_path and twin.limit == 1 << 20
            assert (twin.policy, twin.check) == ("freeze", "always")
            path = twin.get_path(1)
            assert path == cache.get_path(os.path.join(far, cache.files[1]))
            assert twin.stats() == cache.stats()
            twin.close()
            assert is_copy(cache, cache.get_path(2))
        assert os.listdir(".") == [], "made where somebody happened to be"
        monkeypatch.chdir(tmp_path)
        assert cache.stats().copies == 2


def test_use_after_close_is_one_clear_error(make_files):
    cache = make_files()
    cache.get_path(0)
    known = cache.in_cache
    with cache as entered:
        assert entered is cache
    cache.close()
    twin = pickle.loads(pickle.dumps(cache))
    for closed in (cache, twin):
        for use in (
            lambda c: c.get_path(0),
            lambda c: c.open(0),
            lambda c: c.stats(),
            lambda c: c.folder,
            lambda c: c.clear(),
            lambda c: c.prefetch(progress=False),
            lambda c: c.verify(progress=False),
            lambda c: len(c.in_cache),
            lambda c: "x" in c.in_cache,
        ):
            with pytest.raises(RuntimeError, match=r"^this FileCache is closed"):
                use(closed)
        assert "closed" in repr(closed) and len(closed) == 24
    with pytest.raises(RuntimeError, match="closed"):
        len(known)


def test_closing_while_others_use_it_is_no_trouble(make_files):
    for _ in range(10):
        cache = make_files()
        errors = []

        def use(cache=cache, errors=errors):
            try:
                while True:
                    all_right(cache)
            except RuntimeError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        cache.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        assert len(errors) == 3 and all("closed" in text for text in errors), errors


def test_eight_threads_copy_each_file_once(tmp_path, make_files, scale):
    far = make_far(tmp_path / "large", 12, 1 << 20)
    for turn in range(scale(5, 100)):
        cache = make_files(far, tmp_path / f"near{turn}")
        gate, wrong = threading.Barrier(8), []

        def work(cache=cache, gate=gate, wrong=wrong):
            try:
                gate.wait()  # all at once, also for what a process does only once
                for idx, name in enumerate(cache.files):
                    if words := complaint(name, read(cache.get_path(idx))):
                        wrong.append(words)
            except BaseException as error:
                wrong.append(repr(error))

        with opened_at(far) as opened:
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a thread hangs"
            assert set(opened.count()) == set(cache.files)
        assert not wrong, wrong[:3]
        stats = cache.stats()
        assert stats.copies == 12 and stats.hits == 7 * 12 and stats.failed == 0, stats
        cache.close()


def test_the_segment_has_a_name_of_its_own_and_goes_with_the_last_user(make_files):
    def segments():
        return {name for name in os.listdir("/dev/shm") if "files-" in name}

    before = segments()
    one = make_files()
    (name,) = segments() - before
    assert re.fullmatch(r"stocache-\d+-\d+-files-[0-9a-f]{16}", name)
    two = make_files()
    assert segments() - before == {name}, "one per folder, not per object"
    one.close()
    assert segments() - before == {name}
    two.close()
    assert segments() == before
    assert os.path.isdir(two.cache_path), "the copies stay"


def test_a_second_list_of_names_that_is_much_longer_than_the_first(
    tmp_path, make_files, near, told
):
    # a short run opened the folder first, and is still there
    far = make_far(tmp_path / "many", 3000, 10)
    few = make_files(far, near, files=["0001.bin"])
    few.get_path(0)
    all_of_them = make_files(far, near)
    left, warned = told(lambda: all_of_them.prefetch(progress=False))
    assert len(all_of_them.in_cache) == 3000 - len(left) > 1000
    assert not left or (len(warned) == 1 and "fewer files" in warned[0]), warned
    few.close()
    all_of_them.close()
    again = make_files(far, near)
    assert told(lambda: again.prefetch(progress=False)) == ([], [])


def test_a_file_that_became_a_folder_stops_nobody(make_files, far, told):
    all_right(first := make_files())
    first.close()
    os.unlink(os.path.join(far, "0001.bin"))
    write(far, "0001.bin/inner")
    write(far, "more")
    cache = make_files()
    path, warned = told(cache.get_path, "0001.bin/inner")
    assert complaint("0001.bin/inner", read(path)) is None
    assert is_copy(cache, cache.get_path("more")), f"nothing is copied any more: {warned}"


@pytest.mark.parametrize("when", [0, 1, 10**9 - 1, -1, -(10**9), 2**33 * 10**9 + 7])
def test_a_source_of_any_time_is_known_again(make_files, far, when):
    path = os.path.join(far, "0001.bin")
    os.utime(path, ns=(when, when))
    if os.stat(path).st_mtime_ns != when:
        pytest.skip("this file system has no such times: not covered")
    for copies in (1, 0):
        with make_files(check="always") as cache:
            for _ in range(3):
                assert is_copy(cache, cache.get_path("0001.bin"))
            assert cache.stats().copies == copies and cache.stats().stale == 0


def test_a_lower_limit_than_last_time_holds(make_files):
    with make_files() as cache:
        assert all_right(cache) == 24
    with make_files(limit=10 * 4 * KIB) as cache:
        all_right(cache)
        assert used_bytes(cache) <= 10 * 4 * KIB and cache.stats().bytes <= 10 * 4 * KIB


def test_stocache_sweep_leaves_a_live_table_alone(make_files):
    cache = make_files()
    cache.get_path(0)
    assert not any("files-" in name for name in stocache.sweep())
    assert is_copy(cache, cache.get_path(0)) and cache.stats().hits == 1
