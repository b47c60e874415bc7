"""Objects that are stored by their parts: values and containers, subclasses, sparse tensors, arrays
of records, and what a program registers. In the cache are names of types, never code."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import gc
import io
import pathlib
import struct
import sys
import types
import uuid
import warnings
import zoneinfo

import numpy as np
import pytest
import stocache
import torch
from samples import gathered_natively
from sources import INDEX, Fixed
from stand_ins import (
    Bits,
    Boxes,
    Count,
    Form,
    Marked,
    Metres,
    Money,
    Name,
    Opaque,
    Pair,
    Picture,
    Row,
    Scan,
    Table,
    Tree,
    boxes,
    carrying,
    marked,
    scan,
)
from stocache import _C, UnsupportedSample, register_type
from stocache._compare import same
from stocache._types import registry, stacking
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, default_collate

encode, decode = _C.codec_encode, _C.codec_decode


def back(sample, allow_pickle=False):
    return decode(*encode(sample, allow_pickle), allow_pickle)


def refused(sample, *words) -> str:
    with pytest.raises(UnsupportedSample) as caught:
        encode(sample)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said
    return said


@pytest.fixture
def registering(monkeypatch):
    """register_type, whose types are forgotten at the end."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield register_type
    monkeypatch.undo()
    _C.note_registration()


class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Bit(enum.IntFlag):
    ONE = 1
    TWO = 2


# Values and containers

ZONE = datetime.timezone(datetime.timedelta(hours=2), "there")
VALUES = [
    set(), {1, 2}, {"b", "a"}, frozenset(), frozenset({(1, 2), (0, 5)}), {frozenset({1}), 2},
    range(3), range(5, -7, -2), slice(None), slice(1, 9, 2),
    collections.deque([1, "a"]), collections.deque([3, 4], maxlen=2),
    collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2}),
    collections.Counter("hello"), collections.Counter({"none": 0, "less": -2}),
    types.SimpleNamespace(a=1, b=[2]), types.SimpleNamespace(),
    pathlib.Path("a/b.jpg"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:/x"),
    decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("Infinity"),
    fractions.Fraction(1, 3), uuid.UUID(int=2**100 + 7),
    datetime.date(2026, 11, 18), datetime.timedelta(days=-1, microseconds=5),
    datetime.datetime(2026, 11, 18, 5, 25, 1, 7), datetime.datetime(1, 1, 1, tzinfo=ZONE),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone.utc, fold=1), ZONE, datetime.timezone.utc,
    Permission.READ | Permission.WRITE, Permission(0), Bit.ONE | Bit.TWO,
    torch.float32, torch.device("cuda:1"), torch.strided, torch.channels_last,
    {2**70: "far"}, {("a", 2**70): 1}, {Form.CORNERS: 1, "b": 2}, {Money(1, "EUR"): {1: 2}},
    {datetime.date(2026, 1, 1): [1.5]}, {frozenset({1}): 1},
    collections.OrderedDict({Form.CORNERS: 1, 2**70: 2}),
    Money(decimal.Decimal("2.50"), "EUR"), Money({"nested": [Money(1, "a")]}, "b"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_and_containers(value):
    for sample in (value, (value, [value], {"k": value}), [torch.ones(3), value]):
        got = back(sample)
        assert type(got) is type(sample)
        assert encode(got) == encode(sample), "what came back is stored as the same bytes"
    got = back(value)
    assert got == value and same(got, value)
    if not isinstance(value, (set, frozenset)):
        assert repr(got) == repr(value)


def test_values_that_equality_does_not_tell_apart():
    assert list(back(collections.Counter("abca")).items()) == [("a", 2), ("b", 1), ("c", 1)]
    assert back(collections.deque(maxlen=3)).maxlen == 3
    assert back(collections.defaultdict(set)).default_factory is set
    moment = datetime.datetime(2026, 1, 1, fold=1, tzinfo=ZONE)
    assert (back(moment).fold, back(moment).tzname()) == (1, "there")
    assert str(back(decimal.Decimal("NaN123"))) == "NaN123"
    for safe in uuid.SafeUUID:
        assert back(uuid.UUID(int=5, is_safe=safe)).is_safe is safe
    ordered = collections.OrderedDict(b=1, a=2)
    ordered.path = "1.jpg"
    assert list(back(ordered).items()) == [("b", 1), ("a", 2)]
    assert vars(back(ordered)) == {"path": "1.jpg"}


def test_sets_that_cannot_be_sorted():
    value = {1, "a", None, (1,), 2.5}
    assert back(value) == value
    assert same(value, back(value))


def test_what_makes_missing_values_is_known_or_nothing_is_stored():
    """A function of the program's would be code from the cache."""
    refused([collections.defaultdict(lambda: 5)], "sample[0]", "default_factory is <function")
    value = back(collections.defaultdict(Money, a=1), allow_pickle=True)
    assert value.default_factory is Money and value == {"a": 1}, "pickle can"


def test_a_container_in_itself_is_refused():
    loop = types.SimpleNamespace()
    loop.again = [loop]
    with pytest.raises(UnsupportedSample, match="contains itself"):
        encode(loop)
    queue = collections.deque()
    queue.append(queue)
    with pytest.raises(UnsupportedSample, match=r"contains itself|levels deep"):
        encode(queue)


# Subclasses of what is built in

SUBCLASSES = [
    Row([1, "a"]), Row(), Pair(1, torch.ones(2)), Name("ü"), Name(), Bits(b"\0x"), Count(5),
    Count(2**80), Metres(-0.0), Row([Name("a"), Count(1), {Name("k"): Metres(1.5)}]),
]  # fmt: skip


@pytest.mark.parametrize("value", SUBCLASSES, ids=repr)
def test_subclasses_of_what_is_built_in(value):
    got = back([value])[0]
    assert type(got) is type(value) and repr(got) == repr(value)
    assert encode(got) == encode(value)
    if not isinstance(value, tuple):
        value.note = {"kept": True}
        got = back(value)
        assert got == value and got.note == {"kept": True}
        assert encode(got) == encode(value) != encode(type(value)(value))


def test_their_own_methods_are_passed_by():
    table = Table.__new__(Table)
    dict.update(table, a=1, b=[2])
    table.note = "x"
    got = back(table)
    assert type(got) is Table and vars(got) == {"note": "x"}
    assert dict.copy(got) == {"a": 1, "b": [2]}


def test_control_asking_such_a_class_itself_gives_something_else():
    table = Table.__new__(Table)
    dict.update(table, a=1)
    assert list(table.items()) == [("wrong", 0)]


class Slotted(list):
    __slots__ = ("more",)


class Reduced(dict):
    def __reduce__(self):
        return Reduced, ()


def test_subclasses_with_a_state_of_their_own_are_not_stored():
    """They may hold more than can be seen."""
    for value in (Slotted(), Reduced(), collections.ChainMap(), io.BytesIO(), Opaque(), [Opaque]):
        refused(value, "register_type", "allow_pickle=True")

    class Inside(dict):
        pass

    refused(Inside(), "inside a function")


# Tensors


def as_data(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def same_tensor(got, expected):
    assert type(got) is type(expected)
    assert torch.equal(as_data(got), as_data(expected))
    assert vars(got) == vars(expected)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).as_subclass(Picture), boxes(torch.ones(3, 4), (8, 9), Form.CENTRE),
        scan(torch.ones(2, 3), origin=(1.5, 2), name="a"), marked(torch.arange(3)),
        marked(torch.ones(0, 2), note=[1, {"a": 2}]), marked(torch.tensor(5)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_tensor_subclasses(value):
    same_tensor(back(value), value)
    same_tensor(back((1, {"x": value}))[1]["x"], value)
    assert encode(back(value)) == encode(value)
    got = back(value)
    as_data(got).zero_()
    assert not torch.equal(as_data(value), as_data(got)) or not as_data(value).numel()


def test_parameters():
    for gradient in (True, False):
        got = back(torch.nn.Parameter(torch.arange(3.0), requires_grad=gradient))
        assert type(got) is torch.nn.Parameter and got.requires_grad is gradient
        assert got.is_leaf and got.tolist() == [0, 1, 2]


def test_attributes_of_plain_tensors():
    tensor = torch.ones(3)
    tensor.path = "1.jpg"
    got = back([tensor])[0]
    assert type(got) is torch.Tensor and vars(got) == {"path": "1.jpg"}
    assert torch.equal(got, tensor)


def sparse_tensors():
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 3, 0], [0, 0, 0, 0], [4, 0, 0, 5]])
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are
    yield dense.to_sparse()
    yield torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2, 3], (3,))  # not coalesced
    yield torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3))
    yield torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), [], (3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are in beta
        yield dense.to_sparse_csr()
        yield dense.to_sparse_csc()
        yield dense.to_sparse_bsr((2, 2))
        yield dense.to_sparse_bsc((2, 2))
        yield torch.stack([dense, dense]).to_sparse_csr()


@pytest.mark.parametrize("tensor", list(sparse_tensors()), ids=lambda t: f"{t.layout}-{t.dim()}")
def test_sparse_tensors(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = back({"a": tensor})["a"]
        assert (got.layout, got.dtype, got.shape) == (tensor.layout, tensor.dtype, tensor.shape)
        if tensor.layout is torch.sparse_coo:
            assert got.is_coalesced() == tensor.is_coalesced()
            assert torch.equal(got._indices(), tensor._indices())
            assert torch.equal(got._values(), tensor._values())
        assert torch.equal(got.to_dense(), tensor.to_dense())
        assert same(got, tensor)


def test_nested_tensors():
    parts = [torch.ones(1, 2), torch.arange(6.0).view(3, 2), torch.ones(0, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layout in (torch.strided, torch.jagged):
            got = back(torch.nested.nested_tensor(parts, layout=layout))
            assert got.is_nested and got.layout is layout
            assert all(map(torch.equal, got.unbind(), parts))
        narrowed = torch.nested.nested_tensor_from_jagged(
            torch.arange(8.0), torch.tensor([0, 3, 8]), torch.tensor([2, 4])
        )
        got = back(narrowed)
        assert [row.tolist() for row in got.unbind()] == [[0, 1], [3, 4, 5, 6]]


def jagged(*lengths, **attributes):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    made = torch.nested.nested_tensor_from_jagged(torch.arange(float(offsets[-1])), offsets)
    vars(made).update(attributes)
    return made


def test_attributes_of_nested_tensors():
    plain = torch.nested.nested_tensor([torch.ones(2)])
    plain.path = "1.jpg"
    for tensor in (jagged(2, 1, path="1.jpg", _more=[torch.ones(2)]), plain):
        got = back([tensor])[0]
        assert got.path == "1.jpg" and same(got, tensor)
    assert torch.equal(back(jagged(1, _more=torch.ones(2)))._more, torch.ones(2))


def test_jagged_tensors_of_the_same_rows_can_be_added():
    """To torch that takes one tensor of offsets, or the same number for both."""
    one = jagged(2, 3)
    other = torch.nested.nested_tensor_from_jagged(2 * one.values(), one.offsets())
    first, second = back((one, {"other": other}))[0], back(other)
    for x, y in ((first, second), (first, one), (back(one), other), *[back((one, other))]):
        assert torch.equal((x + y).values(), x.values() + y.values())
    assert first.offsets() is not second.offsets(), "each has its own"
    first.offsets().zero_()
    assert second.offsets().tolist() == one.offsets().tolist() == [0, 2, 5]
    narrowed = torch.nested.nested_tensor_from_jagged(
        torch.arange(8.0), torch.tensor([0, 3, 8]), torch.tensor([2, 3])
    )
    assert (back(narrowed) + back(narrowed)).unbind()[0].tolist() == [0, 2]
    with pytest.raises(RuntimeError):
        back(one) + back(jagged(3, 2))


def test_jagged_tensors_are_added_only_where_their_rows_lie_alike():
    """A sum is one of all that lies there, not of rows alone."""

    def apart(*starts):
        offsets, lengths = torch.tensor([*starts, 8]), torch.tensor([1, 2])
        return torch.nested.nested_tensor_from_jagged(torch.arange(8.0), offsets, lengths)

    one, same, other = back(apart(0, 3)), back(apart(0, 3)), back(apart(1, 3))
    assert [row.tolist() for row in (one + same).unbind()] == [[0], [6, 8]]
    with pytest.raises(RuntimeError):
        one + other


def test_lengths_that_nobody_uses_are_forgotten():
    from stocache._torch import subclasses

    gc.collect()
    before = len(subclasses._lengths_in_use)
    kept = [back(jagged(k, 100 + k)) for k in range(5)]
    assert len(subclasses._lengths_in_use) == before + 5
    del kept
    gc.collect()
    assert len(subclasses._lengths_in_use) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool])
def test_nested_tensors_without_rows(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = torch.nested.nested_tensor([], dtype=dtype)
        got = back(empty)
        assert got.is_nested and (got.dtype, got.size(0), got.dim()) == (dtype, 0, 1)
    values, offsets = torch.empty(0, 3, dtype=dtype), torch.tensor([0])
    got = back(torch.nested.nested_tensor_from_jagged(values, offsets))
    assert got.dtype == dtype and got.size(0) == 0 and got.values().shape == (0, 3)


def test_tensors_that_consist_of_others():
    value = TwoTensor(torch.ones(3), torch.arange(3.0))
    got = back(value)
    assert type(got) is TwoTensor and torch.equal(got.a, value.a) and torch.equal(got.b, value.b)
    refused(TwoTensor(torch.ones(2, 3).t(), torch.ones(2, 3).t()), "TwoTensor")


def test_trees():
    got = back(Tree([torch.ones(2), "a"], "name"))
    assert type(got) is Tree and got.name == "name"
    assert torch.equal(got.leaves[0], torch.ones(2)) and got.leaves[1] == "a"
    found = back(torch.max(torch.eye(2), 0))
    assert type(found) is torch.return_types.max and found.indices.tolist() == [0, 1]


# Arrays

PLAIN = [("a", "<i4"), ("b", ">f8"), ("c", "U3")]
DTYPES = [
    np.dtype(PLAIN), np.dtype(PLAIN, align=True), np.dtype([("x", PLAIN, (2,)), ("y", "?")]),
    np.dtype([(("title", "name"), "u1"), ("t", "M8[ms]")]), np.dtype("V5"),
    np.dtype({"names": ["p"], "formats": ["i2"], "offsets": [6], "itemsize": 16}),
    np.dtype([("long", "l"), ("longer", "q"), ("code", "g")]), np.dtype([]),
    np.dtype([("s", "S4"), ("b", "b"), ("h", "<f2"), ("c", "F")]),
]  # fmt: skip


def filled(dtype, *shape):
    size = dtype.itemsize * int(np.prod(shape))
    octets = bytes(size) if "U" in str(dtype) else bytes(i % 2 for i in range(size))
    return np.ndarray(shape, dtype, bytearray(octets))


def same_array(got, expected):
    assert type(got) is type(expected) and got.shape == expected.shape
    assert got.dtype == expected.dtype and got.dtype.type is expected.dtype.type
    assert str(got.dtype) == str(expected.dtype)
    assert got.dtype.isalignedstruct == expected.dtype.isalignedstruct
    assert str(got) == str(expected)  # padding aside, which numpy does not copy either
    for name in got.dtype.names or ():
        assert got.dtype[name].char == expected.dtype[name].char


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_records(dtype):
    for array in (filled(dtype, 3), filled(dtype, 2, 0), filled(dtype), filled(dtype, 4)[::2]):
        same_array(back(array), array.copy())
        assert back(array).flags.writeable
        if array.dtype.names:
            record = array.view(np.recarray)
            same_array(back(record), record.copy())
    one = filled(dtype, 2)[1]
    assert type(back(one)) is type(one) and back(one).dtype == one.dtype
    assert str(back(one)) == str(one)
    if dtype.names:
        one = filled(dtype, 2).view(np.recarray)[1]
        assert type(back(one)) is np.record and back(one).dtype == one.dtype
        assert type(back(dtype)) is type(dtype) and back(dtype) == dtype


NOTED = [
    np.dtype("i1", metadata={"enum": {"red": 0, "blue": 1}}),
    np.dtype("S5", metadata={"h5py_encoding": "utf-8"}), np.dtype("U3", metadata={1: 2}),
    np.dtype("M8[ns]", metadata={"k": [1]}), np.dtype(">f4", metadata={}),
    np.dtype([("a", np.dtype("i4", metadata={"x": 1})),
              ("b", (np.dtype("u1", metadata={"y": 2}), (2,)))]),
    np.dtype(np.dtype([("a", "i4"), ("b", "u1")], align=True), metadata={"z": 3}),
]  # fmt: skip


def notes(dtype):
    inside = [notes(field[0]) for field in (dtype.fields or {}).values()]
    noted = None if dtype.metadata is None else dict(dtype.metadata)
    return noted, inside, notes(dtype.base) if dtype.subdtype else None


@pytest.mark.parametrize("dtype", NOTED, ids=str)
def test_what_is_noted_in_a_type_of_numpy(dtype):
    array = np.zeros(4, dtype)
    for value in (array, array[::2], array.reshape(2, 2), array[:0], np.zeros((), dtype)):
        same_array(back(value), value.copy())
        assert notes(back(value).dtype) == notes(dtype) and back(value).flags.writeable
    masked = np.ma.array(array, mask=array == array)
    assert notes(back(masked).dtype) == notes(dtype)
    if dtype.names:
        records = array.view(np.recarray)
        same_array(back(records), records.copy())
        assert notes(back(records).dtype) == notes(records.dtype)
        assert notes(back(array[0]).dtype) == notes(array[0].dtype)
    plain = np.zeros(4, np.dtype("i1"))
    assert back(plain).dtype.metadata is None


def test_what_is_noted_and_cannot_be_stored():
    refused(np.zeros(2, np.dtype("i4", metadata={"x": object()})), "an object")
    refused(np.array(["a"], np.dtype("O", metadata={"vlen": str})), "dtype object")


def test_records_of_a_file(tmp_path):
    mapped = np.memmap(tmp_path / "a", dtype=PLAIN, mode="w+", shape=3)
    mapped["a"] = 5
    got = back(mapped)
    assert type(got) is np.ndarray and got["a"].tolist() == [5, 5, 5]


def test_masked_arrays():
    data = np.arange(6.0).reshape(2, 3)
    records = np.ma.array([(1, 2.0), (3, 4.0)], mask=[(0, 1), (1, 0)], dtype="i4,f8")
    for value in (
        np.ma.array(data, mask=data > 3, fill_value=-1), np.ma.array(data),
        np.ma.array(data, mask=True, hard_mask=True), np.ma.array(5, mask=True), records,
    ):  # fmt: skip
        before = dict(vars(value))
        got = back([value])[0]
        assert type(got) is np.ma.MaskedArray and got.dtype == value.dtype
        assert got.data.tobytes() == value.data.tobytes() and got.hardmask == value.hardmask
        assert np.array_equal(got.mask, value.mask)
        assert (got.mask is np.ma.nomask) == (value.mask is np.ma.nomask)
        assert before.keys() == vars(value).keys()
        assert all(vars(value)[name] is before[name] for name in before), "it was edited"
        assert (vars(got)["_fill_value"] is None) == (before["_fill_value"] is None)
        assert np.asarray(got.fill_value).tobytes() == np.asarray(value.fill_value).tobytes()


def test_a_fill_value_that_was_not_set_follows_the_type():
    value = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    got = back([value])[0]
    assert np.array_equal((got / 2).filled(), (value / 2).filled())
    assert np.array_equal(got.astype("U5").filled(), value.astype("U5").filled())


def test_control_asking_for_a_fill_value_edits_the_array():
    value = np.ma.array([1, 2])
    before = vars(value)["_fill_value"]
    assert value.fill_value is not None and before is None
    assert vars(value)["_fill_value"] is not None


def test_arrays_that_are_not_stored():
    refused(np.array([(1, {})], dtype=[("a", "i4"), ("b", "O")]), "dtype", "allow_pickle=True")
    refused(np.array([{}], dtype=object), "dtype object")
    noted = np.ma.array([1])
    noted.note = "x"
    refused(noted, "MaskedArray")

    class Own(np.ndarray):
        pass

    refused(np.ones(2).view(Own), "a subclass of numpy.ndarray")


def test_matrices():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = np.matrix([[1, 2]])
        assert type(back(value)) is np.matrix and (back(value) == value).all()


# What a program registers


class Parted:
    def __init__(self, *parts):
        self.parts = parts


def test_parts_are_what_somebody_says(registering):
    refused(Parted(1), "test_types.Parted;", "register_type")
    registering(Parted, lambda value: value.parts, Parted)
    tensor = torch.arange(5)
    got = back({"a": [Parted(1, tensor, {"b": Parted()})]})["a"][0]
    assert type(got) is Parted and got.parts[0] == 1 and torch.equal(got.parts[1], tensor)
    assert got.parts[2]["b"].parts == ()
    # Again, otherwise: what is known of the type is asked for anew.
    registering(Parted, lambda value: (len(value.parts),), lambda count: Parted(*range(count)))
    assert back(Parted("a", "b")).parts == (0, 1)


def test_what_to_parts_says_is_checked(registering):
    registering(Parted, lambda value: [1], Parted)
    refused([Parted()], "sample[0] is a test_types.Parted", "to_parts gave a list", "a tuple")
    registering(Parted, lambda value: 1 // 0, Parted)
    refused([Parted()], "could not be taken apart (ZeroDivisionError:")
    registering(Parted, lambda value: NotImplemented, Parted)
    refused([Parted()], "sample[0] is a test_types.Parted;", "register_type")
    registering(Parted, lambda value: ({"x": object()},), Parted)
    refused([Parted()], "sample[0].parts[0]['x'] is an object;")
    registering(Parted, lambda value: (value,), Parted)
    with pytest.raises(UnsupportedSample, match="contains itself"):
        encode(Parted())


def test_to_parts_may_say_why_an_object_is_never_stored(registering):
    def why(value):
        raise UnsupportedSample("it is secret")

    registering(Parted, why, Parted)
    for allow_pickle in (False, True):
        with pytest.raises(UnsupportedSample, match="it is secret"):
            encode([Parted()], allow_pickle)


def test_who_cannot_be_taken_apart_may_be_pickled(registering):
    for to_parts in (lambda value: 1 // 0, lambda value: NotImplemented):
        registering(Parted, to_parts, Parted)
        assert back(Parted(1, "a"), allow_pickle=True).parts == (1, "a")


def test_interrupts_go_through(registering):
    def interrupted(*parts):
        raise KeyboardInterrupt

    registering(Parted, interrupted, Parted)
    with pytest.raises(KeyboardInterrupt):
        encode(Parted(), True)
    registering(Parted, lambda value: (), interrupted)
    stored = encode(Parted())
    with pytest.raises(KeyboardInterrupt):
        decode(*stored)


def test_what_from_parts_raises_is_a_sample_that_cannot_be_read(registering):
    registering(Parted, lambda value: (1,), lambda part: 1 // 0)
    with pytest.raises(ValueError, match=r"test_types\.Parted.* of its parts \(ZeroDivisionError"):
        decode(*encode(Parted()))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((5, len, len), TypeError, "cls is 5; a type or its name"),
        (("Money", len, len), ValueError, "cls is 'Money'"),
        (("a..b", len, len), ValueError, "cls is 'a..b'"),
        ((Money, 5, len), TypeError, "to_parts is 5; a function"),
        ((Money, len, None), TypeError, "from_parts is None"),
        ((dict, len, len), ValueError, "builtins.dict is stored as it is; register a subclass"),
        ((torch.Tensor, len, len), ValueError, "torch.Tensor is stored as it is"),
        ((np.ndarray, len, len), ValueError, "numpy.ndarray is stored as it is"),
    ],
)
def test_bad_registrations(arguments, error, words):
    before = dict(registry._registered)
    with pytest.raises(error) as caught:
        register_type(*arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"no subclass of torch\.Tensor"):
        register_type(Parted, len, len, stacks=True)
    assert registry._registered == before


def test_a_type_that_is_registered_by_name_is_not_imported(registering, tmp_path, monkeypatch):
    package = tmp_path / "a_library"
    package.mkdir()
    (package / "__init__.py").write_text("from a_library._hidden import Shown\n")
    (package / "_hidden.py").write_text(
        "class Shown:\n    def __init__(self, x):\n        self.x = x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registering(
        "a_library.Shown",
        lambda value: (value.x,),
        registry.Named("a_library.Shown"),
    )
    encode(Money(1, "a"))
    assert "a_library" not in sys.modules
    import a_library

    try:
        stored = encode(a_library.Shown(5))
        assert b"a_library" in stored[0] and b"_hidden" not in stored[0], "where it is shown"
        assert decode(*stored).x == 5
        for name in ("a_library", "a_library._hidden"):
            monkeypatch.delitem(sys.modules, name)
        assert decode(*stored).x == 5 and "a_library" in sys.modules, "imported when it is met"
    finally:
        for name in ("a_library", "a_library._hidden"):
            sys.modules.pop(name, None)


def test_a_module_that_registers_its_types_is_imported_when_they_are_met(run_script, tmp_path):
    (tmp_path / "their_types.py").write_text(
        "import stocache\n"
        "class Their:\n"
        "    def __init__(self, x):\n"
        "        self.x = x\n"
        "stocache.register_type(Their, lambda value: (value.x,), Their)\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    stored = run_script(
        "import their_types; from stocache import _C; print(_C.codec_encode(their_types.Their(7)))",
        env=path,
    ).stdout
    run_script(
        f"from stocache import _C; assert _C.codec_decode(*{stored.strip()}).x == 7", env=path
    )
    # Without the registration: told, and nothing is made.
    (tmp_path / "their_types.py").write_text("class Their: pass\n")
    run_script(
        f"""
        import pytest
        from stocache import _C
        with pytest.raises(ValueError, match="their_types.Their, which is not known here"):
            _C.codec_decode(*{stored.strip()})
        """,
        env=path,
    )


def test_types_of_the_main_program_under_spawn(run_script):
    run_script(
        """
        import multiprocessing
        import stocache
        from stocache import _C

        class Mine:
            def __init__(self, x):
                self.x = x

        class Words(list):
            pass

        stocache.register_type(Mine, lambda value: (value.x,), Mine)

        def store(x):
            return _C.codec_encode((Mine(x), Words([x])))

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                stored = pool.apply(store, (5,))
            assert stored == store(5)
            mine, words = _C.codec_decode(*stored)
            assert type(mine) is Mine and mine.x == 5 and type(words) is Words and words == [5]
        """
    )


class Registered(collections.namedtuple("Registered", "a b")):
    pass


def test_what_is_registered_comes_before_what_a_type_is(registering):
    assert back(Registered(1, 2)) == Registered(1, 2)
    registering(Registered, lambda value: (value.b,), lambda b: Registered("made", b))
    assert back(Registered(1, 2)) == ("made", 2)


# No code from the cache


def text(name: str) -> bytes:
    return bytes([len(name)]) + name.encode()


def planted(module: str, name: str, *parts: str) -> tuple[bytes, bytes]:
    """A schema and a record of an object of that name, with texts as its parts."""
    schema = (
        b"\x01R" + text(module) + text(name) + b"\0\0\0" + bytes([len(parts)]) + b"s" * len(parts)
    )
    words = b"".join(struct.pack("<I", len(part)) for part in parts)
    payloads = b""
    for part in parts:
        payloads += b"\0" * (-(len(words) + len(payloads)) % 16) + part.encode()
    return schema, words + payloads


@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"), ("subprocess", "Popen"), ("subprocess", "getoutput"),
        ("builtins", "exec"), ("builtins", "eval"), ("pickle", "loads"),
        ("torch", "load"), ("stand_ins", "Opaque"),
        ("os", "path"), ("stocache", "CachedDataset"), ("importlib", "import_module"),
        ("pathlib", "Path.touch"), ("functools", "partial"), ("builtins", "open"),
    ],
)  # fmt: skip
def test_a_planted_name_is_not_called(tmp_path, monkeypatch, module, name):
    monkeypatch.chdir(tmp_path)
    for parts in (("touch bomb",), ("open('bomb', 'w')",), ("bomb",), ("bomb", "w"), ()):
        with pytest.raises(ValueError, match="which is not known here"):
            decode(*planted(module, name, *parts))
    assert not list(tmp_path.iterdir())


def test_control_a_planted_name_of_a_known_type_is_made():
    assert decode(*planted("stand_ins", "Money", "bomb", "w")) == Money("bomb", "w")


def test_parts_of_another_kind_are_told():
    """Whatever a damaged schema gives to a known type is an error, and takes no memory."""
    far = b"R" + text("builtins") + text("range") + b"\0\0\0\x03iii"
    record = struct.pack("<qqq", 0, 2**60, 1)
    assert len(decode(b"\x01" + far, record)) == 2**60
    for module, name in (
        ("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque"),
        ("collections", "Counter"), ("stand_ins", "Row"), ("stand_ins", "Pair"),
        ("stand_ins", "Table"), ("collections", "defaultdict"), ("numpy", "ndarray"),
    ):  # fmt: skip
        schema = b"\x01R" + text(module) + text(name) + b"\0\0\0\x01" + far
        with pytest.raises(ValueError, match="could not be made of its parts"):
            decode(schema, record)
    schema = b"\x01R" + text("stand_ins") + text("Bits") + b"\0\0\0\x01i"
    with pytest.raises(ValueError, match="made of a bytes, not of 1152921504606846976"):
        decode(schema, struct.pack("<q", 2**60))


def test_rows_outside_of_their_values_are_not_made():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(8.0), torch.tensor([0, 3, 8]))
        schema, record = encode(nested)
        offsets = struct.pack("<qqq", 0, 3, 8)
        assert record.count(offsets) == 1
        for wrong in ((0, 3, 9), (0, 9, 8), (-1, 3, 8)):
            with pytest.raises(ValueError, match="not within the values"):
                decode(schema, record.replace(offsets, struct.pack("<qqq", *wrong)))


# Samples are compared by parts too


@pytest.mark.parametrize(
    "one, other",
    [
        (boxes(torch.ones(2), (3, 4)), boxes(torch.ones(2), (3, 5))),
        (marked(torch.ones(2), a=1), marked(torch.ones(2), a=2)),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (Money(1, "a"), Money(1, "b")), (Name("a"), Name("b")), ({1}, {2}),
        (np.zeros(2, PLAIN), np.ones(2, PLAIN)),
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    ],
)  # fmt: skip
def test_what_differs_in_any_part_differs(one, other):
    assert same(one, other) is False and same([one], [other]) is False
    assert same(one, back(one)) is True and same({"k": other}, {"k": back(other)}) is True


def test_rounding_inside_of_parts_is_no_difference():
    one = marked(torch.tensor([1.0, 0.3]), a=torch.tensor([0.1]))
    assert same(one, marked(torch.tensor([1.0, 0.3 + 1e-7]), a=torch.tensor([0.1 + 1e-8])))
    assert not same(one, marked(torch.tensor([1.0, 0.4]), a=torch.tensor([0.1])))


def test_a_stored_sample_of_such_types_is_compared_with_its_source(cached):
    source = Fixed([(boxes(torch.ones(3, 4), (i, i)), {i}, Money(i, "a")) for i in range(4)])
    dataset = cached(source)
    for i in range(4):
        dataset[i]
    dataset.verify()
    source.samples[2][0].canvas = (7, 7)
    with pytest.raises(ValueError, match="2"):
        dataset.verify()


# Batches


def collated(samples):
    stored = [encode(sample) for sample in samples]
    assert len({schema for schema, _ in stored}) == 1
    return _C.codec_collate(stored[0][0], [record for _, record in stored])


def equal(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        same_tensor(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            equal(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            equal(one, other)
    else:
        assert got == expected


def pictures(i):
    return torch.full((3, 4), float(i)).as_subclass(Picture)


BATCHES = {
    "pictures": pictures,
    "boxes": lambda i: boxes(torch.full((2, 4), i), (i, 2 * i)),
    "scans": lambda i: scan(torch.full((2,), i / 3), origin=(i,), name="x" * i, more=[i] * (i + 1)),
    "marked": lambda i: marked(torch.full((2, 2), i), note="x" * i),
    "unmarked": lambda i: marked(torch.full((2, 2), i)),
    "scalars": lambda i: torch.tensor(i).as_subclass(Picture),
    "scalar scans": lambda i: scan(torch.tensor(i)),
    "empty": lambda i: boxes(torch.empty(0, 4), (i, i)),
    "all": lambda i: {
        "picture": pictures(i), "label": i, "name": "y" * i, "list": [boxes(torch.ones(2), (i, i))],
        "scan": scan(torch.ones(3) * i, name=str(i)), "x": torch.ones(2) * i,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_batches_of_tensor_subclasses_are_gathered_natively(kind, rows):
    samples = [BATCHES[kind](i) for i in range(rows)]
    equal(collated(samples), default_collate(samples))


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_loader_are_those_of_torch(cached, kind, workers):
    samples = [BATCHES[kind](i) for i in range(8)]
    dataset = cached(Fixed(samples))
    expected = [default_collate(samples[:4]), default_collate(samples[4:])]
    for _ in range(2):
        loader = stocache.DataLoader(dataset, 4, num_workers=workers)
        for got, batch in zip(loader, expected, strict=True):
            equal(got, batch)
    assert gathered_natively(dataset, [0, 1, 2, 3]) is not _C.MISS


def test_samples_of_other_shapes_are_no_native_batch():
    samples = [boxes(torch.ones(i + 1), (1, 1)) for i in range(3)]
    assert collated(samples) is NotImplemented
    assert collated([Money(1, "a")]) is NotImplemented
    assert collated([{1}, {2}]) is NotImplemented


def test_what_a_class_makes_of_a_batch_is_asked_of_it(registering):
    """A class that does not stack is not stacked, whatever was said of it."""
    samples = [Otherwise.of(i) for i in range(3)]
    registering(
        Otherwise, lambda value: (as_data(value),), lambda data: carrying(data, Otherwise, {}),
        stacks=True,
    )  # fmt: skip
    assert collated(samples) is NotImplemented
    assert default_collate(samples) == ["other"] * 3


class Otherwise(torch.Tensor):
    @classmethod
    def of(cls, i):
        return torch.full((2,), i).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.stack:
            return ["other"] * len(args[0])
        return super().__torch_function__(function, types, args, kwargs or {})


def test_functions_of_others_collate_what_they_are_registered_for(monkeypatch):
    """A library's own function is known to stack. Somebody else's is called."""
    samples = [BATCHES["boxes"](i) for i in range(3)]
    equal(collated(samples), default_collate(samples))
    monkeypatch.setitem(
        torch.utils.data._utils.collate.default_collate_fn_map, Boxes, lambda batch, **_: len(batch)
    )
    assert not stacking.is_stacked(Boxes) and stacking.is_stacked(Scan)
    assert stacking.is_stacked(Marked)


@pytest.mark.parametrize("key", [Boxes, Picture, torch.Tensor])
def test_a_registered_function_is_called_for_gathered_batches(cached, monkeypatch, key):
    dataset = cached(Fixed([BATCHES["boxes"](i) for i in range(4)]))
    for i in range(4):
        dataset[i]
    with monkeypatch.context() as patched:
        functions = torch.utils.data._utils.collate.default_collate_fn_map
        patched.setitem(functions, key, lambda batch, **_: len(batch))
        expected = list(DataLoader(dataset.dataset, 2))
        equal(list(stocache.DataLoader(dataset, 2)), expected)
    batch = next(iter(stocache.DataLoader(dataset, 2)))
    assert torch.equal(batch, torch.tensor([[[0] * 4] * 2, [[1] * 4] * 2]))


def test_a_function_of_the_library_that_does_not_stack_is_given_the_samples(cached, monkeypatch):
    dataset = cached(Fixed([BATCHES["boxes"](i) for i in range(4)]))
    for i in range(4):
        dataset[i]
    functions = torch.utils.data._utils.collate.default_collate_fn_map

    def counted(batch, **_):
        return len(batch)

    counted.__module__ = "stand_ins.more"
    monkeypatch.setitem(functions, Boxes, counted)
    assert stacking.is_stacked(Boxes)
    assert list(stocache.DataLoader(dataset, 2)) == [2, 2]


def brightest(batch, **_):
    return torch.stack([as_data(each).max() for each in batch])


def test_a_function_for_a_class_that_nobody_registered_sees_the_elements(cached, monkeypatch):
    """Also one of the same module: nobody said that it only stacks."""
    brightest.__module__ = "stand_ins"
    dataset = cached(Fixed([marked(torch.tensor([i, 2 * i])) for i in range(4)]))
    for i in range(4):
        dataset[i]
    assert gathered_natively(dataset, [0, 1]) is not _C.MISS
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, Marked, brightest)
    assert gathered_natively(dataset, [0, 1]) is _C.MISS
    assert [batch.tolist() for batch in stocache.DataLoader(dataset, 2)] == [[0, 2], [4, 6]]


def test_rests_of_many_samples_are_those_of_their_rows(cached, seed):
    generator = torch.Generator().manual_seed(seed)
    samples = [
        scan(
            torch.full((3,), i),
            name="n" * (i % 5),
            more={"i": [i] * (i % 7), "t": torch.ones(i % 4)},
        )
        for i in range(60)
    ]
    dataset = cached(Fixed(samples))
    for _ in range(2):
        order = torch.randperm(60, generator=generator).tolist()
        loader = stocache.DataLoader(dataset, 13, sampler=order)
        for n, batch in enumerate(loader):
            indices = order[13 * n :][:13]
            equal(batch.meta, [samples[i].meta for i in indices])
            assert batch[:, 0].tolist() == indices


def test_such_samples_come_back_from_a_disk(cached, tmp_path):
    samples = [scan(torch.full((512,), i), name="n" * i, owner=Money(i, "a")) for i in range(40)]
    expected = [default_collate(samples[n : n + 8]) for n in range(0, 40, 8)]
    dataset = cached(Fixed(samples), INDEX + (32 << 10), disk="16MiB", disk_path=tmp_path)
    for _ in range(2):
        equal(list(stocache.DataLoader(dataset, 8)), expected)
    assert dataset.flush()
    stats = dataset.stats()
    assert stats.disk.filled == 40 and stats.disk.hits > 0 and stats.loads == 40


def test_control_a_batch_whose_class_is_not_asked_differs(run_script):
    run_script(
        f"""
        import sys
        sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
        from stocache._types import stacking
        stacking.stacked = lambda from_parts, column, rests: column
        import test_types as tests
        samples = [tests.BATCHES["scans"](i) for i in range(3)]
        got, expected = tests.collated(samples), tests.default_collate(samples)
        assert type(got) is not type(expected)
        """
    )
