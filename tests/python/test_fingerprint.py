"""What a fingerprint sees: everything that decides what samples look like, whole; and what it does
not see it says."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import os
import pickle
import random
import sys
import tempfile
import textwrap
import types
from pathlib import Path, PosixPath

import pytest
import stocache
import stocache._sharing.dataset as opening
import torch
from stocache import _C
from stocache._sharing import code, sameness
from stocache._sharing.fingerprint import differences, fingerprint
from stocache._sharing.modules import users_own
from stocache._sharing.sameness import contents, digest
from torch.utils.data import Dataset, Subset

np = pytest.importorskip("numpy")


def dataset_of(source: str, **attributes):
    """An object of the class `Data` that a user's file defines."""
    names = {"__name__": "__main__", "Dataset": Dataset}
    program = textwrap.dedent(source)
    if "def __len__" not in program:
        program += "\n    def __len__(self): return 3\n"
    exec(program, names)
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
    "the code of a kind of list": """
        class Scaled(list):
            __slots__ = ()
            def __getitem__(self, i): return {0} * i
        class Data(Dataset):
            def __init__(self): self.rows = Scaled([1, 2])
            def __getitem__(self, i): return self.rows[i]
    """,
    "the code of many tuples": """
        import collections
        class Row(collections.namedtuple("Row", "size")):
            __slots__ = ()
            def area(self): return {0} * self.size
        class Data(Dataset):
            def __init__(self): self.rows = [Row(i) for i in range(5000)]
            def __getitem__(self, i): return self.rows[i].area()
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
    "a class whose parent has the same name": """
        class Data(Dataset):
            def __getitem__(self, i): return 1
        class Data(Data):
            def __getitem__(self, i): return {0}
    """,
    "the code of __str__": """
        class Root:
            def __str__(self): return "/data/{0}"
        class Data(Dataset):
            def __init__(self): self.root = Root()
            def __getitem__(self, i): return open(str(self.root))
    """,
    "a property beside an attribute": """
        class Config:
            @property
            def size(self): return {0}
        config = Config(); vars(config)["size"] = 1
        class Data(Dataset):
            def __getitem__(self, i): return config.size
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


# What makes an object is part of what loads a sample, if that makes one.
MAKERS = {
    "a global that __init__ reads": """
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """,
    "a global of a function that __init__ calls": """
        SIZE = {0}
        def size(): return SIZE
        class Resize:
            def __init__(self): self.size = size()
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """,
    "the closure of __init__": """
        def resizing(size):
            class Resize:
                def __init__(self): self.size = size
            return Resize
        Resize = resizing({0})
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """,
    "__init__ of a parent": """
        SIZE = {0}
        class Parent:
            def __init__(self): self.size = SIZE
        class Resize(Parent):
            def __init__(self): super().__init__()
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """,
    "__init__ of what __init__ makes": """
        SIZE = {0}
        class Inner:
            def __init__(self): self.size = SIZE
        class Resize:
            def __init__(self): self.inner = Inner()
        class Data(Dataset):
            def __getitem__(self, i): return Resize().inner.size
    """,
    "__post_init__": """
        import dataclasses
        SIZE = {0}
        @dataclasses.dataclass
        class Resize:
            size: int = 0
            def __post_init__(self): self.size = SIZE
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """,
    "the code of a default_factory": """
        import dataclasses
        @dataclasses.dataclass
        class Resize:
            sizes: list = dataclasses.field(default_factory=lambda: [{0}])
        class Data(Dataset):
            def __getitem__(self, i): return Resize().sizes
    """,
    "a global that a default_factory reads": """
        import dataclasses
        SIZE = {0}
        @dataclasses.dataclass
        class Resize:
            sizes: list = dataclasses.field(init=False, default_factory=lambda: [SIZE])
        class Data(Dataset):
            def __getitem__(self, i): return Resize().sizes
    """,
    "a default_factory that a method calls": """
        import dataclasses
        @dataclasses.dataclass(init=False)
        class Resize:
            sizes: list = dataclasses.field(default_factory=lambda: [{0}])
        class Data(Dataset):
            def __getitem__(self, i): return dataclasses.fields(Resize)[0].default_factory()
    """,
    "what a field says of itself": """
        import dataclasses
        @dataclasses.dataclass
        class Config:
            name: str = dataclasses.field(default="", metadata={{"size": {0}}})
        class Data(Dataset):
            def __init__(self): self.config = Config()
            def __getitem__(self, i):
                return dataclasses.fields(self.config)[0].metadata["size"]
    """,
    "a class in a closure": """
        def data():
            class Resize:
                def __init__(self): self.size = SIZE
            class Data(Dataset):
                def __len__(self): return 3
                def __getitem__(self, i): return Resize().size
            return Data
        SIZE = {0}
        Data = data()
    """,
    "a class that is a class attribute": """
        SIZE = {0}
        class Data(Dataset):
            class Resize:
                def __init__(self): self.size = SIZE
            def __getitem__(self, i): return self.Resize().size
    """,
    "a class that is an attribute": """
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
        class Data(Dataset):
            def __init__(self): self.steps = [Resize]
            def __getitem__(self, i): return self.steps[0]().size
    """,
    "a class that is a default": """
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
        class Data(Dataset):
            def __getitem__(self, i, step=Resize): return step().size
    """,
    "a class in a partial": """
        import functools
        SIZE = {0}
        class Resize:
            def __init__(self, by): self.size = SIZE * by
        class Data(Dataset):
            def __init__(self): self.make = functools.partial(Resize, 2)
            def __getitem__(self, i): return self.make().size
    """,
    "a class of a module": """
        import types
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
        steps = types.ModuleType("steps_of_a_test"); steps.Resize = Resize
        class Data(Dataset):
            def __getitem__(self, i): return steps.Resize().size
    """,
    "a class method": """
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
            @classmethod
            def usual(cls): return cls()
        class Data(Dataset):
            def __getitem__(self, i): return Resize.usual().size
    """,
    "__init__ of a parent, called by its name": """
        SIZE = {0}
        class Resize:
            def __init__(self): self.size = SIZE
        class Data(Dataset):
            def __getitem__(self, i):
                Resize.__init__(self)
                return self.size
    """,
    "the class of an object, made once more": """
        SIZE = {0}
        class Resize:
            made = 0
            def __init__(self, size=None): self.size = size or SIZE
        class Data(Dataset):
            def __init__(self): self.first = Resize(1)
            def __getitem__(self, i): return Resize.made, self.first.size, Resize().size
    """,
    "a class that makes its like": """
        SIZE = {0}
        class Resize:
            def __init__(self, size=None): self.size = size or SIZE
            def other(self): return __class__()
        class Data(Dataset):
            def __init__(self): self.first = Resize(1)
            def __getitem__(self, i): return self.first.other().size
    """,
}


@pytest.mark.parametrize("what", MAKERS)
def test_what_makes_objects_while_a_sample_is_loaded_is_seen(what):
    one, same, other = (seen(MAKERS[what].format(size)) for size in (224, 224, 256))
    assert one == same, "the same code twice"
    assert one != other, "224 became 256, and nobody noticed"


@pytest.mark.parametrize("what", MAKERS)
def test_control_a_look_that_takes_all_objects_for_made_misses_it(what, monkeypatch):
    monkeypatch.setattr(code, "class_parts", functools.partial(code.class_parts, made=True))
    monkeypatch.setattr(code, "_fields", lambda *_: {})
    one, other = (seen(MAKERS[what].format(size)) for size in (224, 256))
    assert one == other


# How the objects that are there were made is told by what they are.
MADE = {
    "an attribute": """
        class Data(Dataset):
            def __init__(self): self.step = Resize()
            def __getitem__(self, i): return self.step(i)
    """,
    "an attribute of its class": """
        class Data(Dataset):
            step = Resize()
            def __getitem__(self, i): return Data.step(i), self.step.__class__.__name__
    """,
    "a global": """
        step = Resize()
        class Data(Dataset):
            def __getitem__(self, i): return step(i), Resize.unit, Resize.twice(i)
    """,
    "a kind of list": """
        class Steps(list):
            def __init__(self): self.append(SIZE > 0)
        class Data(Dataset):
            def __init__(self): self.steps = Steps()
            def __getitem__(self, i): return self.steps
    """,
    "a kind of deque": """
        import collections
        class Steps(collections.deque):
            def __init__(self): self.append(SIZE > 0)
        class Data(Dataset):
            def __init__(self): self.steps = Steps()
            def __getitem__(self, i): return self.steps
    """,
    "a dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class Config:
            known: bool = dataclasses.field(default_factory=lambda: SIZE > 0)
            def __post_init__(self): self.known = SIZE > 0
        class Data(Dataset):
            def __init__(self): self.config = Config()
            def __getitem__(self, i): return self.config.known
    """,
    "the dataset, whose methods call those of its parent": """
        class Parent(Dataset):
            def __init__(self): self.known = SIZE > 0
            def __getitem__(self, i): return self.known
            def rest(self): return 1
        class Data(Parent):
            def __init__(self): super().__init__(); self.same = SIZE > 0
            def __getitem__(self, i): return super().__getitem__(i), super(Data, self).rest()
    """,
    "a class, by its metaclass": """
        class Meta(type):
            def __init__(cls, *_): cls.known = SIZE > 0
        class Data(Dataset, metaclass=Meta):
            def __getitem__(self, i): return self.known
    """,
}
RESIZE = """
        SIZE = {0}
        class Resize:
            unit = 1
            def __init__(self): self.known = SIZE > 0
            def __call__(self, i): return i * self.known
            @staticmethod
            def twice(i): return 2 * i
"""


@pytest.mark.parametrize("what", MADE)
def test_what_made_the_objects_that_are_there_changes_nothing(what):
    one, other = (seen(RESIZE.format(size) + MADE[what]) for size in (224, 256))
    assert one == other


def test_a_counter_of_what_was_made_changes_nothing():
    source = """
        COUNT = 0
        class Resize:
            def __init__(self):
                global COUNT
                COUNT += 1
                self.size = {0}
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """
    dataset = dataset_of(source.format(1))
    before = fingerprint(dataset).text
    dataset[0]
    assert fingerprint(dataset).text == before
    dataset = dataset_of(source.format("COUNT"))  # control: another sample every time
    before = fingerprint(dataset).text
    dataset[0]
    assert fingerprint(dataset).text != before


READS = {
    "an entry": """os.environ["SIZE_OF_A_TEST"]""",
    "get": """os.environ.get("SIZE_OF_A_TEST")""",
    "get with a default": """os.environ.get("SIZE_OF_A_TEST", "1")""",
    "getenv": """os.getenv("SIZE_OF_A_TEST")""",
    "getenv with a default": """os.getenv("SIZE_OF_A_TEST", "1")""",
}


@pytest.mark.parametrize("how", READS)
def test_of_the_environment_counts_what_is_read(how, monkeypatch):
    """All of it differs between ranks."""
    source = """
        import os
        class Resize:
            def __init__(self): self.size = {0}
        class Data(Dataset):
            def __getitem__(self, i): return Resize().size
    """
    whole = source.format("dict(os.environ)")
    computed = source.format('os.environ.get("SIZE_" + "{0}_TEST".format("OF_A"))')
    monkeypatch.setenv("SIZE_OF_A_TEST", "224")
    sources = (source.format(READS[how]), whole, computed)
    one = [seen(each) for each in sources]
    monkeypatch.setenv("RANK_OF_A_TEST", "1")
    other = [seen(each) for each in sources]
    assert one[0] == other[0]
    assert one[1] != other[1] and one[2] != other[2]  # control
    monkeypatch.setenv("SIZE_OF_A_TEST", "256")
    assert seen(sources[0]) != one[0]


def chain(length: int, end: int) -> str:
    """Classes of which each makes one of the next, in turns with functions."""
    links = [f"def make_{length}(): return {end}"]
    for n in range(length):
        links.append(f"class Link_{n}:\n    def __init__(self): self.next = make_{n + 1}()")
        links.append(f"def make_{n}(): return Link_{n}()")
    links.append("class Data(Dataset):\n    def __getitem__(self, i): return make_0()")
    return "\n".join(links)


def test_code_that_leads_far_is_seen(monkeypatch):
    one, other = (fingerprint(dataset_of(chain(300, end))) for end in (1, 2))
    assert one.unseen == () and one.text != other.text
    monkeypatch.setattr(sameness, "_STEP", 1)  # control: as deep as lists in lists
    assert "nested more than 100 deep" in fingerprint(dataset_of(chain(300, 1))).unseen[0]


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


def test_what_the_program_drew_so_far_changes_nothing():
    """Generators of a dataset's own are another matter: HIDDEN has them."""
    source = """
        import random
        import numpy as np
        import torch
        from random import choice
        class Data(Dataset):
            def __getitem__(self, i):
                torch.rand(1, generator=torch.default_generator)
                return choice([1, 2]) + random.random() + np.random.rand()
    """
    before = seen(source)
    random.random(), np.random.rand(), torch.rand(1)
    assert seen(source) == before


def test_docstrings_change_nothing():
    source = """
        class Data(Dataset):
            {0}
            def __getitem__(self, i):
                {0}
                def inner():
                    {0}
                    return None
                return inner(), {1}
    """
    none, one, other = (seen(source.format(doc, 1)) for doc in ("", "'one'", "'two'"))
    assert none == one == other
    assert seen(source.format("'one'", 2)) != one  # control


def test_a_class_is_the_same_after_an_object_of_it_was_pickled():
    """copyreg leaves a word in the class."""
    dataset = Reading(Pickled())
    before = fingerprint(dataset).text
    pickle.dumps(dataset.reader)
    assert "__slotnames__" in vars(Pickled) and fingerprint(dataset).text == before


class Pickled:
    pass


IMPORTS = {
    "import": "import {0}; return {0}.size()",
    "import as": "import {0} as helper; return helper.size()",
    "from": "from {0} import size; return size()",
    "import in a lambda's default": "from {0} import size as of; return (lambda: of())()",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_a_module_that_a_method_imports_is_looked_into(how, tmp_path, monkeypatch):
    name = f"helper_{how.replace(' ', '_').replace(chr(39), '')}"
    source = f"""
        class Data(Dataset):
            def __getitem__(self, i): {IMPORTS[how].format(name)}
    """
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text("SIZE = 224\ndef size(): return SIZE")
    dataset = dataset_of(source)
    not_yet = fingerprint(dataset)
    assert name in not_yet.unseen[0] and "not imported yet" in not_yet.unseen[0]
    assert name not in sys.modules, "looking imports nothing"
    dataset[0]
    one, same = fingerprint(dataset), fingerprint(dataset)
    sys.modules[name].SIZE = 256
    other = fingerprint(dataset)
    sys.modules.pop(name)
    assert one.text == same.text != other.text
    assert not one.unseen


def test_a_package_that_a_method_imports_counts_the_same_before_and_after(run_script):
    """Looking must not import it, and having imported it must not change the fingerprint."""
    source = """
        import sys
        from torch.utils.data import Dataset
        from stocache._sharing.fingerprint import fingerprint
        class Data(Dataset):
            def __len__(self): return 1
            def __getitem__(self, i):
                import xml.dom.minidom, wave, not_there_at_all
                from xml.sax import handler
                return wave, handler
        before = fingerprint(Data())
        assert not before.unseen, before.unseen
        assert "wave" not in sys.modules and "xml.dom.minidom" not in sys.modules
        import wave, xml.dom.minidom, xml.sax.handler
        assert fingerprint(Data()).text == before.text
    """
    run_script(source)


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
def test_the_last_of_more_than_a_million_entries_are_seen(kind, scale):
    entries = 1_001_000 if kind == "text" else scale(101_000, 1_001_000)
    one, other = many(kind, entries), many(kind, entries, changed=500)
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


class Mangled:
    __slots__ = ("__size",)

    def __init__(self, size: int) -> None:
        self.__size = size


class Array(np.ndarray):
    pass


class Words(str):
    def __str__(self) -> str:
        return "always the same"


class Lying(list):
    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 0


class Queue(collections.deque):
    pass


class Numbers(set):
    pass


class Far(PosixPath):
    __slots__ = ("__dict__",)


class Access(enum.Flag):
    READ, WRITE, RUN = 1, 2, 4


def with_attribute(value, scale: int):
    value.scale = scale
    return value


def entry(folder: Path, scale: int) -> os.DirEntry:
    (folder / str(scale)).mkdir(exist_ok=True)
    (folder / str(scale) / "a.jpg").touch()
    with os.scandir(folder / str(scale)) as entries:
        return next(entries)


def of_unnamed_file(words: bytes) -> tuple[object, str]:
    """The name of such a file, which is the number of a descriptor, and its digest."""
    with tempfile.TemporaryFile() as file:
        file.write(words)
        file.flush()
        return file.name, digest(file)


def closed_file():
    with open(os.devnull) as file:
        return file


def module(size: int) -> types.ModuleType:
    made = types.ModuleType("helper_of_a_test")
    made.size = size
    return made


# Each of two numbers makes a value; those of one number are equal.
HIDDEN = {
    "a module": lambda n, _: module(n),
    "a generator of torch": lambda n, _: torch.Generator().manual_seed(n),
    "a generator of numpy": lambda n, _: np.random.default_rng(n),
    "an old generator of numpy": lambda n, _: np.random.RandomState(n),
    "a generator of Python": lambda n, _: random.Random(n),
    "an entry of a folder": lambda n, folder: entry(folder, n),
    "an attribute of a tensor": lambda n, _: with_attribute(torch.zeros(2), n),
    "an attribute of a parameter": lambda n, _: with_attribute(
        torch.nn.Parameter(torch.ones(1)), n
    ),
    "an attribute of an array": lambda n, _: with_attribute(np.zeros(2).view(Array), n),
    "an attribute of a function": lambda n, _: with_attribute(lambda: None, n),
    "an attribute of a set": lambda n, _: with_attribute(Numbers([1]), n),
    "an attribute of a path": lambda n, _: with_attribute(Far("/a"), n),
    "an attribute of a partial": lambda n, _: with_attribute(functools.partial(int), n),
    "a mangled slot": lambda n, _: Mangled(n),
    "a text with a __str__ of its own": lambda n, _: Words(n),
    "a list with an __iter__ of its own": lambda n, _: Lying([n]),
    "a kind of deque": lambda n, _: Queue([n]),
    "a combination of flags": lambda n, _: Access(1 | n),
    "a date's unit": lambda n, _: [
        np.datetime64("2020", "Y"),
        np.datetime64("2020", " YM"[n // 2]),
    ],
    "a view of a dict": lambda n, _: {n: 1}.keys(),
    "a constant that no compiler makes": lambda n, _: with_constant([n]),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_what_an_object_holds_beside_its_contents_is_seen(what, tmp_path):
    one, same, other = (contents(HIDDEN[what](n, tmp_path)) for n in (2, 2, 4))
    assert one.unseen == ()
    assert one == same
    assert one != other, "another value, and nobody noticed"


def test_two_files_without_names_are_two_files():
    one, two = of_unnamed_file(b"one"), of_unnamed_file(b"two")
    assert one[0] == two[0] and one[1] != two[1]


class Raises:
    """Whatever it is asked, it does not want to answer."""

    def __getattribute__(self, name):
        raise RuntimeError("two\nlines")

    __len__ = __iter__ = __eq__ = __bool__ = __hash__ = lambda self, *_: self.no
    __repr__ = __str__ = __reduce__ = __reduce_ex__ = lambda self, *_: self.no


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


class Unhashable(type):
    __hash__ = None


class OfUnhashable(metaclass=Unhashable):
    pass


class Growing(dict):
    """A table that changes while it is looked at."""

    def __reduce_ex__(self, protocol):
        raise Unspeakable


class Nameless:
    __module__ = None


class Endless(staticmethod):
    """A method that leads to another one, which was not there before."""

    @property
    def __func__(self):
        return Endless(len)


def with_constant(value):
    """A function with a constant that no compiler makes."""
    made = (lambda: 12345).__code__
    constants = (value if each == 12345 else each for each in made.co_consts)
    return types.FunctionType(made.replace(co_consts=tuple(constants)), {})


class Pretender:
    __class__ = property(lambda self: self.no)


def ring_of_sets():
    """Members of sets that lead back to the set, twice each: 2^depth ways through it."""

    class Member:
        pass

    one, two = Member(), Member()
    one.all = two.all = {one, two}
    return one.all


def sets_of_sets(depth: int):
    inner = frozenset()
    for _ in range(depth):
        inner = frozenset([(inner, 1), (inner, 2)])
    return inner


WEIRD = {
    "raises": Raises,
    "a proxy": Pretender,
    "no module": Nameless,
    "a class that has no hash": OfUnhashable,
    "an error that has no words": lambda: Growing(a=1),
    "a ring of sets": ring_of_sets,
    "sets of sets": lambda: sets_of_sets(12),
    "a very long chain": lambda: nested(100_000, 1),
    "a closed file": closed_file,
    "a generator": lambda: (i for i in range(3)),
    "methods without end": lambda: Endless(len),
    "a tensor without data": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("what", WEIRD)
def test_nothing_that_is_looked_at_ends_the_run(what):
    value = WEIRD[what]()
    found = fingerprint(Reading(value))
    again = fingerprint(Reading([value]))
    assert found.text != again.text or found.unseen
    for words in (*found.unseen, *again.unseen):
        assert words.startswith("reader") and "\n" not in words, words


def test_nested_datasets_are_not_asked_for_their_lengths():
    class Inner(Reading):
        def __len__(self) -> int:
            raise AssertionError("asked")

    outer = Reading(1)
    outer.inner = Inner(2)
    outer.inner.back = outer  # and round and round
    found = fingerprint(outer)
    assert found.unseen == () and "inner.reader" in found.parts
    outer.inner.reader = 3
    assert fingerprint(outer).text != found.text


def test_a_dataset_that_does_not_want_to_be_looked_at_is_unseen(cached, monkeypatch):
    class Shy(Reading):
        @property
        def __dict__(self):
            raise RuntimeError("no")

    found = fingerprint(Shy(1))
    assert found.unseen == ("Shy (RuntimeError: no)",)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match="Shy .* cannot be looked into"):
        assert cached(Shy(1))[2] == 2


def test_the_package_of_one_dataset_says_nothing_about_another():
    """What was looked at before must not matter: ranks may have made other caches before."""
    import pluggy

    uses = Reading(pluggy.PluginManager)
    before = fingerprint(uses).text
    theirs = type("Data", (Reading,), {"__module__": pluggy.__name__})
    fingerprint(theirs(1))
    assert fingerprint(uses).text == before
    with users_own("pluggy"):  # control
        assert fingerprint(uses).text != before


def test_control_a_look_without_attributes_misses_them(monkeypatch, tmp_path):
    monkeypatch.setattr(sameness._Walk, "own_attributes", lambda *_: None)
    for what in ("an attribute of a tensor", "a mangled slot", "an attribute of a set"):
        assert digest(HIDDEN[what](2, tmp_path)) == digest(HIDDEN[what](4, tmp_path))


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


def test_what_a_program_did_so_far_changes_nothing_about_how_objects_are_made(run_script, tmp_path):
    """Nor does the order of a hash, nor whether its modules were compiled in this run."""
    (tmp_path / "steps.py").write_text(
        textwrap.dedent("""
            import abc, dataclasses, enum, functools, logging, threading
            import numpy as np, torch
            LOG, LOCK, NAMES = logging.getLogger("steps"), threading.Lock(), {"a", "b", 3}
            SIZES = (1, 2)
            class Kind(enum.Enum):
                ONE, TWO = 1, 2
                def __init__(self, value): self.names = NAMES
            class Step(abc.ABC):
                def __init__(self):
                    with LOCK: LOG.debug("made")
                    self.names, self.kind = sorted(map(str, NAMES)), Kind(1)
                @abc.abstractmethod
                def __call__(self, i): ...
            class Net(torch.nn.Module):
                def __init__(self, step):
                    super().__init__(); self.linear, self.step = torch.nn.Linear(2, 2), step
                def forward(self, i): return self.step(i)
            @dataclasses.dataclass
            class Config:
                sizes: list = dataclasses.field(default_factory=lambda: list(SIZES))
                rng: object = dataclasses.field(default_factory=lambda: np.random.default_rng(1))
                names: frozenset = frozenset({"x", "y", "z"})
                def __post_init__(self): self.step = Resize
            class Resize(Step):
                def __init__(self, config=None):
                    super().__init__(); self.config = config or Config()
                def __call__(self, i):
                    return i in {"p", "q", "r"}, i in (1, 2), self.table(), Config()
                @functools.lru_cache
                def table(self): return np.arange(3)
        """)
    )
    source = """
        import copy, pickle
        from torch.utils.data import Dataset
        from stocache._sharing.fingerprint import fingerprint
        import steps
        class Data(Dataset):
            def __init__(self): self.step = steps.Resize()
            def __len__(self): return 3
            def __getitem__(self, i):
                from steps import Net
                return Net(steps.Resize(steps.Config()))(i), isinstance(self.step, steps.Step)
        before = fingerprint(Data())
        assert not before.unseen, before.unseen
        for i in range(3):
            Data()[i]
        issubclass(int, steps.Step), pickle.dumps(steps.Config()), copy.deepcopy(steps.Config())
        assert fingerprint(Data()).text == before.text
        print(before.text)
    """
    runs = []
    for seed in ("1", "2", "3"):
        runs.append(run_script(source, env={"PYTHONHASHSEED": seed}).stdout)
    assert len(set(runs)) == 1, runs
    steps = tmp_path / "steps.py"
    steps.write_text(steps.read_text().replace("SIZES = (1, 2)", "SIZES = (1, 4)"))
    assert run_script(source).stdout not in runs  # control


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
