"""The names of FileCache: which files a folder has, in what order, and how they are asked for."""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from far import complaint, read, write
from stocache import FileCache
from stocache._file_names import FileNames, list_files

ODD = [
    "with space",
    " ",
    "new\nline",
    "tab\tand\x01control",
    "ümläut/日本語.png",
    "🦀",
    os.fsdecode(b"\xff\xfe not text"),
    "...",
    "a.b/.hidden",
    "-rf",
    "*?[x]",
    "quote\"s'",
    "back\\slash",
    "x" * 255,
    "/".join(["folder" * 20] * 8) + "/deep",
]


@pytest.fixture
def far(tmp_path):
    folder = tmp_path / "far"
    folder.mkdir()
    return folder


@pytest.fixture
def make_files(far, tmp_path):
    """FileCache(far, near), closed after the test."""
    made = []

    def make(*paths, **options):
        made.append(FileCache(*(paths or (far, tmp_path / "near")), **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


# Listing


def test_files_are_sorted_and_the_same_every_time(far, make_files, seed):
    names = [f"{n % 7}/{n:03}" if n % 2 else f"{n:03}" for n in range(100)]
    random.Random(seed).shuffle(names)
    for name in names:
        write(far, name, 1)
    cache = make_files()
    assert list(cache.files) == sorted(names) and len(cache) == 100
    assert make_files().files == cache.files


def test_an_empty_folder_has_no_files(far, make_files):
    (far / "empty" / "too").mkdir(parents=True)
    cache = make_files()
    assert len(cache) == 0 and list(cache.files) == [] and cache.prefetch(progress=False) == []
    with pytest.raises(IndexError):
        cache.get_path(0)
    with pytest.raises(IndexError):
        cache.get_path(-1)
    assert repr(cache.files) == "<0 files: >"


def test_odd_names_are_served_like_any_other(far, make_files):
    for name in ODD:
        write(far, name)
    cache = make_files()
    assert list(cache.files) == sorted(ODD)
    for turn in range(2):
        for idx, name in enumerate(cache.files):
            for which in (idx, name, os.path.join(str(far), name), Path(name)):
                path = cache.get_path(which)
                assert path == os.path.join(cache.folder, name)
            assert complaint(name, read(path)) is None
            assert name in cache.in_cache
        assert cache.stats().copies == len(ODD), turn
    assert sorted(cache.in_cache) == sorted(ODD)
    assert cache.prefetch(progress=False) == [] and cache.verify(progress=False) == []
    assert repr(cache.files).encode(), "it can be printed"
    repr(cache).encode()
    cache.close()
    with make_files() as again:  # nobody is about to open any of them
        assert again.clear() == len(ODD) and len(again.in_cache) == 0


def test_odd_names_are_known_again(far, make_files):
    for name in ODD:
        write(far, name)
    cache = make_files()
    cache.prefetch(progress=False)
    cache.close()
    again = make_files()
    assert sorted(again.in_cache) == sorted(ODD)
    again.prefetch(progress=False)
    assert again.stats().copies == 0


def test_a_source_of_an_odd_name_works(tmp_path, make_files):
    far = os.path.join(tmp_path, os.fsdecode(b"f\xffr\n \xc3\xbc"))
    write(far, "a")
    cache = make_files(far, os.path.join(tmp_path, os.fsdecode(b"n\xfear")))
    path = cache.get_path("a")
    assert path.startswith(cache.folder) and complaint("a", read(path)) is None


def test_links_are_followed_but_not_round_in_a_circle(far, tmp_path, make_files):
    write(far, "a/file")
    write(tmp_path / "other", "elsewhere")
    (far / "link").symlink_to("a/file")
    (far / "folder").symlink_to("a")
    (far / "outside").symlink_to(tmp_path / "other")
    (far / "a" / "up").symlink_to("..")  # round
    (far / "a" / "itself").symlink_to(".")
    (far / "one").symlink_to("two")
    (far / "two").symlink_to("one")  # leads nowhere
    (far / "self").symlink_to("self")
    (far / "nowhere").symlink_to("absent")
    os.mkfifo(far / "pipe")
    cache = make_files()
    assert {"a/file", "link", "folder/file", "outside/elsewhere"} <= set(cache.files)
    assert not {"one", "two", "self", "nowhere", "pipe"} & set(cache.files)
    assert len(cache) < 20, list(cache.files)
    for name in cache.files:
        assert read(cache.get_path(name)) == read(far / name)
        assert not os.path.islink(cache.get_path(name)), "a copy is no link to the source"


def test_a_source_given_through_a_link_is_the_same_source(far, tmp_path, make_files):
    write(far, "a")
    (tmp_path / "link").symlink_to(far)
    through, direct = make_files(tmp_path / "link", tmp_path / "near"), make_files()
    assert through.folder == direct.folder
    path = direct.get_path("a")
    for spelled in (tmp_path / "link" / "a", far / "a"):
        assert through.get_path(spelled) == path
        assert through.get_path(str(spelled)) == path
    assert direct.stats().copies == 1


def test_an_explicit_list_keeps_its_order(far, make_files):
    for name in "abc":
        write(far, name)
    cache = make_files(files=["c", Path("a"), far / "b", "./c", "x/../a"])
    assert list(cache.files) == ["c", "a", "b", "c", "a"]
    assert os.path.basename(cache.get_path(0)) == "c"
    assert make_files(files=iter(["b"])).files == ["b"]
    assert make_files(files=np.array(["b", "a"])).files == ["b", "a"]
    # others than those of the list can be asked for by name
    assert complaint("a", read(make_files(files=["b"]).get_path("a"))) is None


def test_neither_listing_nor_serving_starts_a_thread(far, make_files, in_child):
    # a thread in the parent is what forks get stuck on
    write(far, "a")

    def count():
        before = len(os.listdir("/proc/self/task"))
        with make_files() as cache:
            cache.get_path(0)
            return threading.active_count(), len(os.listdir("/proc/self/task")) - before

    assert in_child(count) == (1, 0)


def test_listing_takes_no_more_than_a_look(far):
    write(far, "a")
    names = list_files(str(far))
    assert next(names) == "a" and next(names, None) is None


# Asking


@pytest.fixture
def five(far, make_files):
    for n in range(5):
        write(far, f"{n}")
    return make_files()


@pytest.mark.parametrize(
    "make",
    [int, np.int64, np.uint8, np.int8, torch.tensor, lambda n: torch.tensor(n, dtype=torch.uint8)],
    ids=["int", "int64", "uint8", "int8", "tensor", "uint8 tensor"],
)
def test_indices_of_every_kind(five, make):
    for n in range(5):
        assert os.path.basename(five.get_path(make(n))) == str(n)
        assert five.files[make(n)] == str(n)


def test_negative_indices_count_from_the_end(five):
    for n in range(1, 6):
        for make in (int, np.int64, torch.tensor):
            assert os.path.basename(five.get_path(make(-n))) == str(5 - n)
            assert five.files[make(-n)] == str(5 - n)


@pytest.mark.parametrize("idx", [5, -6, 2**70, -(2**70), np.int64(5), torch.tensor(-6)], ids=repr)
def test_an_index_out_of_range_is_an_index_error(five, idx):
    for ask in (five.get_path, five.open, five.files.__getitem__):
        with pytest.raises(IndexError, match="out of bounds of 5 files"):
            ask(idx)


def test_an_index_of_a_small_type_works_in_a_long_list(far, make_files):
    names = FileNames(f"{n:04}" for n in range(1000))
    assert names[np.uint8(200)] == "0200" and names[np.int8(-1)] == "0999"
    assert names[torch.tensor(200, dtype=torch.uint8)] == "0200"


@pytest.mark.parametrize("which", [None, 1.5, [], {}, torch.tensor(0.5), torch.ones(2)], ids=repr)
def test_what_is_neither_an_index_nor_a_name_is_a_type_error(five, which):
    with pytest.raises(TypeError) as caught:
        five.get_path(which)
    assert "an index or a name" in str(caught.value)


@pytest.mark.parametrize("which", ["../0", "/etc/passwd", "", ".", "..", "a\0b", "0/..", "/", "0/"])
def test_a_name_that_is_not_below_the_source_is_a_value_error(five, which):
    for ask in (five.get_path, five.open, lambda name: five.prefetch([name], progress=False)):
        with pytest.raises(ValueError) as caught:
            ask(which)
        assert "\n" not in str(caught.value) and "below" in str(caught.value)


def test_a_name_in_another_spelling_is_the_same_file(five, far):
    path = five.get_path("0")
    for which in ("./0", ".//0", "x/../0", f"{far}//0", f"{far}/./0", b"0", Path("0"), far / "0"):
        assert five.get_path(which) == path
    assert five.stats().copies == 1


# The list of names


def test_a_list_of_names_is_a_sequence():
    names = FileNames(["b", "", "ä", "a/c", os.fsdecode(b"\xff")])
    plain = ["b", "", "ä", "a/c", os.fsdecode(b"\xff")]
    assert len(names) == 5 and list(names) == plain == [*names[:]]
    assert list(reversed(names)) == plain[::-1]
    for part in (slice(1, 3), slice(None, None, -1), slice(-2, None), slice(9, 20), slice(3, 1)):
        assert names[part] == plain[part]
    assert "ä" in names and "x" not in names and names.index("a/c") == 3
    assert names == plain and names == tuple(plain) and names == FileNames(plain)
    assert names != plain[:4] and names != FileNames(plain[::-1]) and names != 5
    assert names != FileNames(["b", "ä", "", "a/c", os.fsdecode(b"\xff")]), "same bytes, other cuts"
    for twin in (pickle.loads(pickle.dumps(names)), copy.deepcopy(names)):
        assert twin == names
    with pytest.raises(TypeError):
        hash(names)
    with pytest.raises(TypeError):
        names["b"]
    with pytest.raises(TypeError):
        names[0] = "c"
    assert repr(FileNames("abcdefg")) == "<7 files: 'a', 'b', 'c', …, 'g'>"
    assert repr(FileNames(["a"])) == "<1 files: 'a'>"
    torch.utils.data.random_split(names, [2, 3])


def test_threads_may_read_the_names_at_once(seed):
    names = FileNames(str(n) for n in range(10_000))
    wrong = []

    def look(n):
        rng = random.Random(seed + n)
        wrong.extend(i for i in (rng.randrange(10_000) for _ in range(5000)) if names[i] != str(i))

    threads = [threading.Thread(target=look, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Bad arguments


@pytest.mark.parametrize(
    "options, kind, words",
    [
        ({"limit": 0}, ValueError, "limit is 0"),
        ({"limit": -5}, ValueError, "limit is -5"),
        ({"limit": "much"}, ValueError, "limit is 'much'"),
        ({"limit": "1PB"}, ValueError, "limit is '1PB'"),
        ({"limit": 2**70}, ValueError, "limit is"),
        ({"limit": 1.5}, TypeError, "limit is 1.5"),
        ({"limit": True}, TypeError, "limit is True"),
        ({"limit": [1]}, TypeError, r"limit is \[1\]"),
        ({"policy": "mru"}, ValueError, '"lru" or "freeze"'),
        ({"policy": None}, TypeError, '"lru" or "freeze"'),
        ({"check": "twice"}, ValueError, '"once" or "always" or "never"'),
        ({"check": 1}, TypeError, '"once" or "always" or "never"'),
        ({"files": "a"}, TypeError, "a list of names"),
        ({"files": 5}, TypeError, "a list of names"),
        ({"files": [5]}, TypeError, "a name is needed"),
        ({"files": ["a", "../b"]}, ValueError, "'../b' in files"),
        ({"files": ["/etc/passwd"]}, ValueError, "below data_path"),
        ({"files": [""]}, ValueError, "below data_path"),
        ({"files": ["a\0b"]}, ValueError, "below data_path"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
    ids=repr,
)
def test_a_bad_option_is_one_clear_sentence(far, tmp_path, make_files, options, kind, words):
    write(far, "a")
    with pytest.raises(kind, match=words) as caught:
        make_files(**options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "near").exists(), "nothing is made before all is checked"


def test_limits_as_people_write_them(make_files):
    for given, wanted in [("1GiB", 1 << 30), ("1.5k", 1500), (7, 7), (np.int64(9), 9)]:
        assert make_files(limit=given).limit == wanted


@pytest.mark.parametrize(
    "paths, kind, words",
    [
        (("", "near"), ValueError, "data_path is ''"),
        (("far", ""), ValueError, "cache_path is ''"),
        ((None, "near"), TypeError, "data_path"),
        (("far", 5), TypeError, "cache_path"),
        (("far", "a\0b"), ValueError, "cache_path"),
        (("far", "far"), ValueError, "use a folder outside"),
        (("far", "far/near"), ValueError, "use a folder outside"),
        (("far", "link/near"), ValueError, "use a folder outside"),
        (("absent", "near"), FileNotFoundError, "absent"),
        (("far/a", "near"), NotADirectoryError, "far/a"),
    ],
    ids=repr,
)
def test_a_bad_path_is_one_clear_sentence(
    far, tmp_path, make_files, monkeypatch, paths, kind, words
):
    write(far, "a")
    (tmp_path / "link").symlink_to(far)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.walk(tmp_path))
    with pytest.raises(kind, match=words) as caught:
        make_files(*paths)
    assert "\n" not in str(caught.value)
    assert sorted(os.walk(tmp_path)) == before, "nothing is made"


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda cache: cache.prefetch("a"), TypeError, "a list of names"),
        (lambda cache: cache.prefetch(Path("a")), TypeError, "a list of names"),
        (lambda cache: cache.prefetch(3), TypeError, "a list of names"),
        (lambda cache: cache.prefetch([None]), TypeError, "an index or a name"),
        (lambda cache: cache.prefetch([7]), IndexError, "out of bounds"),
        (lambda cache: cache.prefetch(num_workers=0), ValueError, "at least 1"),
        (lambda cache: cache.prefetch(num_workers="2"), TypeError, "num_workers is '2'"),
        (lambda cache: cache.verify(num_workers=-1), ValueError, "at least 1"),
        (lambda cache: cache.verify("a"), TypeError, "a list of names"),
        (lambda cache: cache.open("a", "w"), ValueError, "can only be read"),
        (lambda cache: cache.open("a", "r+b"), ValueError, "can only be read"),
        (lambda cache: cache.open("a", "x"), ValueError, "can only be read"),
        (lambda cache: cache.open("a", "rbt"), ValueError, "mode"),
    ],
)
def test_a_bad_call_is_one_clear_sentence(far, make_files, call, kind, words):
    write(far, "a")
    cache = make_files()
    with pytest.raises(kind, match=words) as caught:
        call(cache)
    assert "\n" not in str(caught.value)
