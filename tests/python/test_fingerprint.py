"""What a fingerprint sees: everything that decides what samples look like, whole; and what it does
not see it says."""

from __future__ import annotations

import enum
import functools
import itertools
import os
import sys
import textwrap
import types
from pathlib import Path

import pytest
import stocache
import stocache._sharing.dataset as opening
import torch
from stocache import _C
from stocache._sharing.fingerprint import differences, fingerprint
from stocache._sharing.sameness import contents, digest
from torch.utils.data import Dataset, Subset

np = pytest.importorskip("numpy")


def dataset_of(source: str, **attributes):
    """An object of the class `Data` that a user's file defines."""
    names = {"__name__": "__main__", "Dataset": Dataset}
    code = textwrap.dedent(source)
    if "def __len__" not in code:
        code += "\n    def __len__(self): return 3\n"
    exec(code, names)
    dataset = names["Data"]()
    vars(dataset).update(attributes)
    return dataset


def seen(source: str, **attributes) -> str:
    return fingerprint(dataset_of(source, **attributes)).text


CODE = {
    "a class attribute": """
        class Data(Dataset):
            size = {0}
            def __getitem__(self, i): return self.size
    """,
    "a class attribute of a parent": """
        class Parent(Dataset):
            size = {0}
        class Data(Parent):
            def __getitem__(self, i): return self.size
    """,
    "a global": """
        SIZE = {0}
        class Data(Dataset):
            def __getitem__(self, i): return SIZE
    """,
    "a global of a helper": """
        SIZE = {0}
        def shape(): return SIZE
        class Data(Dataset):
            def __getitem__(self, i): return [shape() for _ in range(2)]
    """,
    "the code of a helper": """
        def load(i): return i + {0}
        class Data(Dataset):
            def __getitem__(self, i): return load(i)
    """,
    "an attribute of a global": """
        class Config: pass
        config = Config(); config.size = {0}; config.other = 1
        class Data(Dataset):
            def __getitem__(self, i): return config.size
    """,
    "a nested class": """
        class Data(Dataset):
            class Config:
                size = {0}
            def __getitem__(self, i): return self.Config.size
    """,
    "an enum": """
        import enum
        class Size(enum.Enum):
            SMALL = [{0}]
        class Data(Dataset):
            size = Size.SMALL
            def __getitem__(self, i): return self.size.value
    """,
    "a partial": """
        import functools
        class Data(Dataset):
            def __init__(self): self.make = functools.partial(int, str({0}))
            def __getitem__(self, i): return self.make()
    """,
    "the code of a callable object": """
        class Resize:
            def __call__(self, i): return i * {0}
        class Data(Dataset):
            def __init__(self): self.transform = Resize()
            def __getitem__(self, i): return self.transform(i)
    """,
    "the code of an object in a list in a dict": """
        class Resize:
            __slots__ = ()
            def __call__(self, i): return i * {0}
        class Data(Dataset):
            def __init__(self): self.steps = {{"all": [Resize()]}}
            def __getitem__(self, i): return i
    """,
    "a property": """
        class Data(Dataset):
            @property
            def size(self): return {0}
            def __getitem__(self, i): return self.size
    """,
    "a cached function": """
        import functools
        @functools.lru_cache
        def size(): return {0}
        class Data(Dataset):
            def __getitem__(self, i): return size()
    """,
    "a default": """
        class Data(Dataset):
            @staticmethod
            def size(of={0}): return of
            def __getitem__(self, i): return self.size()
    """,
    "a table of functions": """
        READERS = {{".jpg": lambda i: i + {0}}}
        class Data(Dataset):
            def __getitem__(self, i): return READERS[".jpg"](i)
    """,
}


@pytest.mark.parametrize("what", CODE)
def test_code_and_constants_that_methods_use_are_seen(what):
    one, same, other = (seen(CODE[what].format(size)) for size in (224, 224, 256))
    assert one == same, "the same code twice"
    assert one != other, "224 became 256, and nobody noticed"


def test_what_methods_do_not_use_changes_nothing():
    source = """
        RATE = {0}
        class Config: pass
        config = Config(); config.size = 1; config.rank = {0}
        def train(): return RATE
        class Data(Dataset):
            '''{0} words'''
            def __init__(self): self.made = RATE > 0
            def __getitem__(self, i): return self.RATE, config.size
    """
    assert seen(source.format(1)) == seen("\n\n        # moved down\n" + source.format(2))


def many(kind: str, count: int, changed: int = 0) -> list:
    """`count` entries, the last `changed` of which are others."""
    names = [f"/data/{'b' if i >= count - changed else 'a'}/{i}.jpg" for i in range(count)]
    made = {
        "text": lambda: names,
        "paths": lambda: [Path(name) for name in names],
        "tuples": lambda: list(zip(names, itertools.count(), strict=False)),
        "dicts": lambda: [{"file": name} for name in names],
        "objects": lambda: [types.SimpleNamespace(file=name) for name in names],
        "an array of objects": lambda: np.array(names, dtype=object),
        "mixed": lambda: [n if i % 2 else (n, i) for i, n in enumerate(names)],
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["text", "paths", "tuples", "an array of objects", "mixed"])
def test_the_last_of_more_than_a_million_entries_are_seen(kind):
    one, other = many(kind, 1_001_000), many(kind, 1_001_000, changed=500)
    assert digest(one) != digest(other)
    if kind == "text":  # control: what was looked at before
        assert digest(one[:1_000_000]) == digest(other[:1_000_000])


@pytest.mark.parametrize("kind", ["dicts", "objects"])
def test_the_last_of_many_objects_is_seen(kind):
    one, same, other = (many(kind, 50_000, changed) for changed in (0, 0, 1))
    assert digest(one) == digest(same) != digest(other)


def nested(depth: int, bottom) -> list:
    for _ in range(depth):
        bottom = [bottom]
    return bottom


def test_what_lies_deep_is_seen_and_what_lies_deeper_is_told():
    assert digest(nested(90, 1)) != digest(nested(90, 2))
    assert contents(nested(90, 1)).unseen == ()
    assert "nested more than 100 deep" in contents(nested(400, 1)).unseen[0]


def test_shapes_types_and_structures_are_told_apart():
    ring: list = [1]
    ring.append(ring)
    line = [1, [1, 2]]
    values = [
        [np.zeros((2, 3))], [np.zeros((3, 2))], [np.zeros((2, 3), "f4")], [bytes(48)],
        [np.arange(6).reshape(2, 3)], [np.arange(6).reshape(2, 3).T], [np.arange(6)],
        [(1, 2), (3,)], [(1,), (2, 3)], [[1, 2], [3]], [1, 2, 3], {1: 2, 3: 4}, {1: 3, 2: 4},
        [1], [True], [1.0], ["1"], [b"1"], [np.int64(1)], [np.float64(1)], [None], [], ring, line,
        {1, 2}, frozenset({1, 2}), {"a", 1}, range(3), slice(3), torch.zeros(3), torch.zeros(3, 1),
        torch.zeros(3, dtype=torch.int32), torch.eye(3), torch.eye(3).to_sparse(),
        np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0]), bytearray(b"1"),
        functools.partial(int, "1"), functools.partial(int, "2"), int, float, len, max,
    ]  # fmt: skip
    prints = [digest(value) for value in values]
    twice = [i for i, each in enumerate(prints) if prints.count(each) > 1]
    assert not twice, [values[i] for i in twice]


@pytest.mark.parametrize("where", ["array", "array with gaps", "tensor", "column major"])
def test_large_arrays_are_looked_at_whole(where):
    one = np.zeros(72 << 20, np.uint8)
    other = one.copy()
    other[54_321_123] = 1
    shape = {
        "array": lambda a: a,
        "array with gaps": lambda a: a.reshape(-1, 2)[:, 1],
        "tensor": torch.from_numpy,
        "column major": lambda a: a.reshape(1024, -1).T,
    }[where]
    assert digest(shape(one)) == digest(shape(one)) != digest(shape(other))
    # control: an even sample of a million elements, as it was, misses one byte of 72 MiB
    step = len(one) >> 20
    assert digest(one[::step]) == digest(other[::step])


@pytest.fixture
def hashed(monkeypatch):
    """How many bytes were hashed."""
    sizes = []
    real = _C.hash_bytes
    monkeypatch.setattr(_C, "hash_bytes", lambda b: (sizes.append(len(b)), real(b))[1])
    return sizes


def test_an_array_of_a_file_counts_by_the_file_and_is_not_read(tmp_path, hashed):
    file = tmp_path / "array"
    with file.open("wb") as made:
        made.truncate(8 << 30)  # a hole: no disk is filled
    one = np.memmap(file, np.uint8, "r")
    same = np.memmap(file, np.uint8, "r")
    part = np.asarray(one)[4096:]
    assert digest(one) == digest(same) != digest(part)
    assert sum(hashed) < 8 << 20
    before = digest(one)
    with file.open("r+b") as changed:
        changed.seek(1234567)
        changed.write(b"x")
    os.utime(file, ns=(1, 1))  # as an editor with a coarse clock; the time differs all the same
    assert digest(np.memmap(file, np.uint8, "r")) != before


def test_an_array_that_this_process_alone_may_have_changed_is_looked_at_whole(tmp_path, hashed):
    file = tmp_path / "array"
    with file.open("wb") as made:
        made.truncate(72 << 20)
    one, other = (np.memmap(file, np.uint8, "c") for _ in range(2))
    other[54_321_123] = 1
    assert digest(one) != digest(other)
    assert sum(hashed) == 2 * (72 << 20)


class Opaque:
    """As an object of a native library: nothing in it can be looked at."""

    __slots__ = ("__weakref__",)

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be pickled")


class Reading(Dataset):
    def __init__(self, reader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int):
        return torch.tensor(i)


def test_what_cannot_be_looked_into_is_named():
    found = fingerprint(Reading({"files": [Opaque()]}))
    assert len(found.unseen) == 1
    assert found.unseen[0].startswith("reader (") and "Opaque" in found.unseen[0]
    assert fingerprint(Reading({"files": [1]})).unseen == ()


def test_a_dataset_that_cannot_be_looked_into_is_not_served_from_a_name(cached, unique_name):
    with pytest.raises(ValueError, match=r"reader .*Opaque.* cannot be looked into.*fingerprint="):
        cached(Reading(Opaque()), name=unique_name())
    assert cached(Reading(Opaque()), name=unique_name(), fingerprint="v1")[2] == 2


RANK = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "localhost"}


def test_ranks_whose_data_cannot_be_looked_into_do_not_share_and_are_told(cached, monkeypatch):
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match=r"Opaque.* cannot be looked into.*a cache of its own"):
        one = cached(Reading(Opaque()))
    assert one.name.startswith("private-")
    assert cached(Reading(1)).name.startswith("job-")  # control


def test_a_private_cache_is_made_without_a_look(cached, unique_name, monkeypatch):
    def fail(dataset):
        raise AssertionError("looked at")

    monkeypatch.setattr(opening, "fingerprint", fail)
    assert cached(Reading(1))[2] == 2
    assert cached(Reading(1), name=unique_name(), fingerprint="v1")[2] == 2
    with pytest.raises(AssertionError, match="looked at"):  # control
        cached(Reading(1), name=unique_name())


def test_the_same_dataset_has_the_same_fingerprint_in_every_process(run_script):
    source = """
        import collections, enum, functools, logging, re, threading, types
        import numpy as np, torch
        from pathlib import Path
        from torch.utils.data import ConcatDataset, Dataset, Subset
        from stocache._sharing.fingerprint import fingerprint

        class Size(enum.Flag):
            A, B = 1, 2

        class Data(Dataset):
            kinds = {"a", "b", "c", 3, (4, "d")}
            log = logging.getLogger("data")
            def __init__(self):
                self.lock = threading.Lock()
                self.paths = {Path("/a"), Path("/b"), Path("/c")}
                self.size = Size.A | Size.B
                self.table = collections.defaultdict(list, a=[1])
                self.words = frozenset("abcdefg")
                self.net = torch.nn.Linear(2, 2)
                torch.nn.init.ones_(self.net.weight); torch.nn.init.ones_(self.net.bias)
                self.pattern = re.compile("a+")
                self.made = functools.partial(sorted, key=lambda word: word[::-1])
                self.queue = collections.deque([1, 2])
                self.rng = np.random.default_rng(3)
                self.simple = types.SimpleNamespace(a=object, b=len, c=self.read)
                self.file = open("/dev/null")
            def __len__(self): return 3
            def read(self): return self.log, np.zeros(3), torch.zeros(2)
            def __getitem__(self, i): return self.read()

        found = fingerprint(ConcatDataset([Subset(Data(), [1, 2]), Data()]))
        assert not found.unseen, found.unseen
        print(found.text)
    """
    seeds = ({"PYTHONHASHSEED": seed} for seed in ("1", "2", "3"))
    assert len({run_script(source, env=seed).stdout for seed in seeds}) == 1


def test_what_differs_has_a_name():
    def notes(rank: int, size: int) -> str:
        source = f"""
            SIZE = {size}
            class Data(Dataset):
                width = {size}
                def __getitem__(self, i): return SIZE, self.width
        """
        inner = dataset_of(source, rank=rank, files=["a", "b"])
        return fingerprint(Subset(inner, [0, 1])).notes()

    assert differences(notes(0, 1), notes(0, 1)) == []
    assert differences(notes(0, 1), notes(1, 1)) == ["dataset.rank"]
    found = differences(notes(0, 1), notes(0, 2))
    assert "global SIZE" in found and any(name.endswith(".width") for name in found)
    assert "dataset.rank" not in found


def test_a_cache_kept_for_other_constants_is_refused(cached, unique_name):
    name = unique_name()
    made = {size: dataset_of(CODE["a class attribute"].format(size)) for size in (224, 256)}
    sys.modules["__main__"].Data = type(made[224])
    assert cached(made[224], name=name)[0] == 224
    with pytest.raises(ValueError, match="fingerprint"):
        cached(made[256], name=name)
    assert cached(dataset_of(CODE["a class attribute"].format(224)), name=name)[0] == 224


class Colour(enum.Enum):
    RED = 1


def test_a_plan_needs_no_fingerprint():
    assert stocache.plan(Reading(Colour.RED), "16MiB").dataset_len == 4
