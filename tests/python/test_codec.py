"""The codec: every sample comes back equal, types included; batches equal default_collate's; no
bytes crash it; nothing is unpickled without leave."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import io
import itertools
import math
import os
import pickle
import random
import struct
import sys
import threading
import time
import typing
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

try:
    import numpy as np
except ImportError:
    np = None
try:
    from PIL import Image, ImageFile, ImageOps
except ImportError:
    Image = None

# The package has the codec in its own extension; while working on it, it is a module of its own.
SHIM = """
from stocache import _C as codec
if not hasattr(codec, "codec_encode"):
    import stocache_codec_dev as codec
"""
try:
    shim: dict[str, typing.Any] = {}
    exec(SHIM, shim)
    codec = shim["codec"]
except ImportError:
    pytest.skip("no build of the codec: nothing of it is covered", allow_module_level=True)
encode, decode, collate = codec.codec_encode, codec.codec_decode, codec.codec_collate

needs_numpy = pytest.mark.skipif(
    np is None, reason="without numpy: arrays and numpy scalars are not covered"
)
needs_pil = pytest.mark.skipif(Image is None, reason="without PIL: images are not covered")


# Classes that samples are made of. Others find them by name, so they stand here.


class Point(typing.NamedTuple):
    x: typing.Any
    y: typing.Any = 0


Pair = collections.namedtuple("Pair", "first second")


class Picky(collections.namedtuple("Picky", "a b")):
    """Its constructor takes other arguments than its fields, and its instances have a __dict__."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


class Holder:
    class Inner(typing.NamedTuple):
        value: int


@dataclasses.dataclass
class Record:
    name: str
    image: typing.Any
    boxes: list = dataclasses.field(default_factory=list)
    score: float = dataclasses.field(default=0.5, init=False)
    kind: typing.ClassVar[str] = "record"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: Record | None = None

    def __post_init__(self):
        if self.a < 0:
            raise AssertionError("made by __init__")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: str = "b"


@dataclasses.dataclass
class Child(Record):
    more: int = 1


@dataclasses.dataclass
class Unset:
    there: int
    absent: int = dataclasses.field(init=False)


class SlotBase:
    __slots__ = ("beside",)


@dataclasses.dataclass
class WithSlot(SlotBase):
    __slots__ = ("x",)
    x: int


@dataclasses.dataclass
class Lazy:
    a: int

    @functools.cached_property
    def double(self):
        return 2 * self.a


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    value: T


@dataclasses.dataclass
class BuiltIn(dict):
    a: int = 0


@dataclasses.dataclass
class Failure(Exception):
    a: int = 0


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class MyInt(int):
    pass


class MyDict(dict):
    pass


class MyList(list):
    pass


class MyStr(str):
    __slots__ = ()


class MyTensor(torch.Tensor):
    pass


def noted(tensor, note):
    made = tensor.as_subclass(MyTensor)
    made.note = note
    return made


if np is not None:

    class MyArray(np.ndarray):
        pass


class Opaque:
    """Equal to its like, and nothing that the codec knows."""

    def __init__(self, value=0):
        self.value = value

    def __eq__(self, other):
        return type(other) is Opaque and other.value == self.value

    __hash__ = None


# Comparing


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() < 4096 else flat.numpy().tobytes()


def same(got, expected, where="sample"):
    """Asserts that both are equal to the last bit, types included."""
    assert type(got) is type(expected), f"{where}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert got.shape == expected.shape, where
        assert not got.requires_grad and got.is_contiguous(), where
        same(vars(got), vars(expected), f"attributes of {where}")
        expected = expected.detach().resolve_conj().resolve_neg()
        assert raw(got) == raw(expected), where
    elif np is not None and isinstance(expected, np.ndarray | np.generic):
        assert got.dtype == expected.dtype, where
        assert got.dtype.char == expected.dtype.char, where
        assert got.shape == expected.shape, where
        assert got.tobytes() == expected.tobytes(), where
        if isinstance(expected, np.ndarray):
            assert got.flags.c_contiguous and got.flags.writeable, where
    elif Image is not None and isinstance(expected, Image.Image):
        assert (got.mode, got.size) == (expected.mode, expected.size), where
        assert got.tobytes() == expected.tobytes(), where
        assert got.getpalette() == expected.getpalette(), where
        assert (got.palette and got.palette.mode) == (expected.palette and expected.palette.mode)
        assert got.info.get("transparency") == expected.info.get("transparency"), where
    elif isinstance(expected, float):
        assert struct.pack("d", got) == struct.pack("d", expected), where
    elif isinstance(expected, complex):
        same((got.real, got.imag), (expected.real, expected.imag), where)
    elif isinstance(expected, dict):
        assert len(got) == len(expected), where
        for (k, a), (l, b) in zip(got.items(), expected.items(), strict=True):  # noqa: E741
            same(k, l, f"key of {where}")
            same(a, b, f"{where}[{l!r}]")
    elif isinstance(expected, tuple | list | collections.deque):
        assert len(got) == len(expected), where
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif dataclasses.is_dataclass(expected):
        names = {f.name for f in dataclasses.fields(expected)} | set(
            getattr(expected, "__dict__", ())
        )
        for name in names:
            assert hasattr(got, name) == hasattr(expected, name), f"{where}.{name}"
            if hasattr(expected, name):
                same(getattr(got, name), getattr(expected, name), f"{where}.{name}")
    else:
        assert got == expected, where


def back(sample, allow_pickle=False):
    schema, record = encode(sample, allow_pickle)
    return decode(schema, record, allow_pickle)


def round_trip(sample, allow_pickle=False):
    got = back(sample, allow_pickle)
    same(got, sample)
    # What came back is stored as the same bytes again.
    assert encode(got, allow_pickle) == encode(sample, allow_pickle)
    return got


def refused(sample, *words, error=TypeError, allow_pickle=False) -> str:
    """Asserts that the sample is refused in one line that says these words."""
    with pytest.raises(error) as caught:
        encode(sample, allow_pickle)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said
    return said


# Single objects

NUMBERS = [
    0, 1, -1, 2**31, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 10**40, -(10**40), 2**4096,
    True, False, None,
    0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324,
    0j, complex(-0.0, math.nan), 1 - 2j,
]  # fmt: skip
STRINGS = [
    "", "a", "a\0b", "grün", "日本", "\U0001f600", "\ud800", "x" * 5000, "ü" * 5000,
    b"", b"a", b"\0\xff", b"x" * 5000, bytearray(), bytearray(b"a\0b"), bytearray(5000),
]  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS + STRINGS, ids=lambda v: f"{type(v).__name__}-{v!r:.12}")
def test_values(value):
    round_trip(value)
    round_trip((value, [value], {"k": value}))


def test_a_nan_keeps_its_bits():
    value = struct.unpack("d", struct.pack("Q", 0x7FF8000000000123))[0]
    round_trip(value)
    round_trip([value, 1.0])


CONTAINERS = [
    (), [], {}, collections.OrderedDict(), torch.Size(()),
    (1,), [1], [1, 2, 3], [1.0, 2.0], [1, 2.0], [True, False], [2**70, 1], [None], ((), [], {}),
    list(range(1000)), [0.5] * 1000, [["a", 1], ["b", 2]],
    torch.Size((3, 0, 2**40, 5)),
    {"b": 1, "a": 2}, {1: "a"}, {True: "b"}, {0: 1, "0": 2, None: 3, 1.5: 4, b"0": 5},
    {False: 1, 2: 2}, {(1, "a", (None, b"x")): 1, (): 2}, {-0.0: 1}, {math.inf: 1}, {"\ud800ü": 1},
    {-(2**63): 0, 2**63 - 1: 1}, {math.nan: 1},
    collections.OrderedDict([("z", 1), ("a", (2, 3))]),
    Point(1), Point([1, 2], {"a": Point(3, 4)}), Pair("a", b"b"), Holder.Inner(5), Picky(7),
    Color.RED, Color.GREEN, Color.CRIMSON, Level.HIGH, Permission.READ, [Color.RED, Level.LOW],
]  # fmt: skip


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda v: f"{type(v).__name__}-{v!r:.20}")
def test_containers(value):
    round_trip(value)
    round_trip([value, (value,), {"k": value}])


def test_the_order_of_an_ordered_dict():
    value = collections.OrderedDict.fromkeys("abc", 1)
    value.move_to_end("a")
    assert list(round_trip(value)) == ["b", "c", "a"]


def test_shared_objects_come_back_twice():
    shared = [torch.ones(3)]
    first, second = back((shared, shared))
    same(first, second)
    assert first is not second


def test_dataclasses():
    record = Record("a", torch.ones(2, 3), [1, 2])
    record.score = 0.25
    round_trip(record)
    round_trip(Frozen(1, record))
    round_trip(Slotted(1))
    round_trip([Child("c", None), Child("d", None, more=5)])
    round_trip(Unset(1))
    assert not hasattr(back(Unset(1)), "absent")
    slot = WithSlot(1)
    assert not hasattr(back(slot), "beside")
    slot.beside = "kept"
    assert back(slot).beside == "kept"


def test_attributes_beside_the_fields_are_kept():
    lazy = Lazy(4)
    assert lazy.double == 8
    assert back(lazy).__dict__ == {"a": 4, "double": 8}
    lazy.extra = [torch.ones(1), "x"]
    round_trip(lazy)
    lazy.extra = Opaque()
    refused(lazy, "sample.extra is a test_codec.Opaque")
    assert back(Box[int](5)) == Box(5)  # typing notes on it how it was made
    built_in = BuiltIn(3)
    built_in["key"] = 4
    got = back(built_in)
    assert type(got) is BuiltIn and got.a == 3 and dict(got) == {"key": 4}


def test_no_init_runs():
    broken = Frozen(1)
    object.__setattr__(broken, "a", -5)  # __init__ would refuse
    assert back(broken).a == -5
    assert back(Picky(3)) == (3, 3)


# Tensors


def stored_dtypes():
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    return sorted((d for d in found if not str(d).startswith(("torch.q", "torch.quint"))), key=str)


def filled(shape, dtype):
    """A tensor of any dtype, with bytes that differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes warn that few operators know them
        tensor = torch.empty(shape, dtype=dtype)
    values = torch.arange(tensor.numel() * tensor.element_size()) % (
        2 if dtype is torch.bool else 251
    )
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).copy_(values)
    return tensor


@pytest.mark.parametrize("dtype", stored_dtypes(), ids=str)
def test_every_dtype(dtype):
    for shape in [(), (0,), (3,), (2, 0, 3), (3, 5, 7), (40, 50)]:
        round_trip(filled(shape, dtype))
    part = filled((6, 8), dtype)[1::2, ::3]
    assert not part.is_contiguous()
    got = back(part)
    assert got.dtype == dtype and got.shape == (3, 3)
    width = part.element_size()
    whole = raw(filled((6, 8), dtype))
    want = b"".join(
        whole[(8 * i + j) * width :][:width] for i in range(1, 6, 2) for j in range(0, 8, 3)
    )
    assert raw(got) == want


def test_every_layout_in_memory():
    base = torch.arange(120.0).view(2, 3, 4, 5)
    for tensor in (
        base.transpose(1, 3),
        base.to(memory_format=torch.channels_last),
        base[:, 1],
        base[..., ::2],
        base[1, 2, 3, 4],
        base[0, 0, 0].expand(7, 5),
        base.flip(0),
        torch.ones([1] * 70),
        base.as_strided((3, 3), (1, 1)),
    ):
        round_trip((tensor, 1))
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (
        numbers.conj(),
        numbers.conj().imag,
        torch._neg_view(torch.ones(3)),
        numbers.imag,
    ):
        round_trip(tensor)
    same(back(torch._efficientzerotensor(3)), torch.zeros(3))


def test_gradients_are_dropped():
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2, (leaf * 2)[::2]):
        got = back(tensor)
        assert not got.requires_grad and got.grad_fn is None
        assert torch.equal(got, tensor.detach())


def test_tensors_are_views_of_the_record():
    schema, record = encode((torch.zeros(1000), torch.ones(99, dtype=torch.complex128), 3))
    memory = torch.frombuffer(bytearray(record), dtype=torch.uint8).clone()
    first, second, _ = decode(schema, memory)
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for tensor in (first, second):
        assert start < tensor.data_ptr() < end and tensor.data_ptr() % 16 == 0
        assert tensor.storage_offset() == 0
        # torch carries whole storages to other processes and into files.
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    del memory
    gc.collect()
    first += 7  # it is ours
    assert (second == 1).all() and (first == 7).all()
    second.resize_(10**6)
    assert (first == 7).all()


@needs_numpy
def test_sharing_one_tensor_leaves_the_others_alone():
    """torch moves the memory of a tensor that goes to another process."""
    first, array, last = back((torch.ones(5000), np.arange(5000), torch.zeros(5000)))
    first.share_memory_()
    again = back((torch.ones(5000), torch.ones(5000)))  # uses memory that was freed, if it was
    assert (array == np.arange(5000)).all() and (last == 0).all() and (first == 1).all()
    last.share_memory_()
    assert (array == np.arange(5000)).all()
    del again


def test_a_record_at_an_odd_address():
    schema, record = encode((torch.arange(100), "text"))
    memory = torch.zeros(len(record) + 1, dtype=torch.uint8)
    memory[1:] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    same(decode(schema, memory[1:]), (torch.arange(100), "text"))


def test_tensors_that_are_not_stored():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    refused(quantized, "quantized", "x.dequantize()")
    meta = torch.ones(2, device="meta")
    refused((1, meta), "sample[1]", "without data", "meta", error=ValueError)
    refused(meta, "without data", error=ValueError, allow_pickle=True)
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    refused([freed], "sample[0] is a tensor whose memory was freed", error=ValueError)
    freed = torch.ones(10, 100).t()
    freed.untyped_storage().resize_(0)
    refused([freed], "sample[0] is a tensor whose memory was freed", error=ValueError)
    refused(torch.empty(2**32, 0), "2^32", error=ValueError)
    refused(torch.empty(2**31, 2**31, 0, dtype=torch.float64), "too large", error=ValueError)
    refused(torch.ones([1] * 300), "300 dimensions", error=ValueError)
    if torch.cuda.is_available():
        refused(torch.ones(1).cuda(), "sample is a tensor on cuda:0", "x.cpu()", error=ValueError)


def test_tensors_inside_transforms_are_not_stored():
    def store(x):
        refused(x, "sample is a torch.Tensor", "torch.func")
        return x

    torch.func.vmap(store)(torch.ones(3))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        refused(mode.from_tensor(torch.ones(2)), "FakeTensor", "subclass of torch.Tensor")


def test_a_sample_above_4_gib():
    # The memory is never touched.
    large = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    refused((large, large), "the sample takes", "4 GiB", error=ValueError)
    refused(torch.empty(2**30 + 1, dtype=torch.float32), "4 GiB", error=ValueError)


# numpy

if np is not None:
    CODES = "?bBhHiIlLqQefdgFDG"
    ARRAYS = [
        *(np.arange(6).reshape(2, 3).astype(c) for c in CODES),
        *(np.arange(6).astype(f">{c}") for c in CODES if c not in "?bB"),
        np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        np.array([1, 2], dtype="m8[25us]"),
        np.array([1, 2], dtype=">m8[s]"),
        np.array([1], dtype="m8"),
        np.array(["ab", "cdefg", "ü\U0001f600"]),
        np.array(["ab", "x"], dtype=">U7"),
        np.array([b"ab", b"c\0d"]),
        np.array("scalar"),
        np.array([], dtype="U5"),
        np.array(5),
        np.array(2.5, dtype="f4"),
        np.empty((0,)),
        np.empty((3, 0, 2), dtype="i2"),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(24).reshape(2, 3, 4)[:, ::-1, ::2],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.arange(100000, dtype="u1"),
    ]
    SCALARS = [
        *(np.dtype(c).type(1) for c in CODES),
        np.float64(math.nan),
        np.float32(-0.0),
        np.datetime64("2020-01-01T00:00", "ns"),
        np.datetime64("NaT"),
        np.timedelta64(5, "W"),
        np.str_("grün\0"),
        np.bytes_(b"a\0b"),
        np.str_(""),
        np.bool_(True),
    ]
else:
    ARRAYS = SCALARS = []


@needs_numpy
@pytest.mark.parametrize("value", ARRAYS, ids=lambda v: f"{v.dtype.str}-{v.shape}")
def test_arrays(value):
    got = back((value, 1))[0]
    same(got, np.array(value, order="C"))
    same(back([value])[0], np.array(value, order="C"))


@needs_numpy
@pytest.mark.parametrize("value", SCALARS, ids=lambda v: f"{type(v).__name__}-{v!r:.20}")
def test_numpy_scalars(value):
    round_trip(value)
    round_trip({"a": value, "b": [value, 1]})


@needs_numpy
def test_arrays_are_views_and_own_their_memory():
    array = back({"a": np.arange(1000)})["a"]
    gc.collect()
    array += 1
    assert (array == np.arange(1, 1001)).all()
    assert pickle.loads(pickle.dumps(array)).sum() == array.sum()


@needs_numpy
def test_a_memmap_comes_back_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "a", dtype="f4", mode="w+", shape=(3, 4))
    mapped[:] = 5
    same(back(mapped), np.full((3, 4), 5, dtype="f4"))
    same(back(mapped[:, ::2]), np.full((3, 2), 5, dtype="f4"))


@needs_numpy
def test_strings_of_any_width_have_one_schema():
    assert encode(np.array(["a"]))[0] == encode(np.array(["a longer one", "b"]))[0]


@needs_numpy
def test_numpy_that_is_not_stored():
    refused([np.array([{}, 1], dtype=object)], "sample[0] is a numpy.ndarray of dtype object")
    structured = np.zeros(2, dtype=[("a", "i4"), ("b", "O")])
    refused(structured, "numpy.ndarray of dtype", "allow_pickle=True")
    refused(structured[0], "sample is a numpy.void")
    refused(np.zeros(2).view(MyArray), "MyArray", "a subclass of numpy.ndarray", "numpy.asarray")
    got = back(structured, allow_pickle=True)
    assert got.dtype == structured.dtype and got.tolist() == structured.tolist()


def test_nothing_needs_numpy_or_pil(run_script):
    run_script(
        """
        import sys, warnings
        sys.modules["numpy"] = sys.modules["PIL"] = None
        warnings.simplefilter("ignore")
        import torch
        """
        + SHIM.replace("\n", "\n        ")
        + """
        sample = {"a": torch.ones(3), "b": [1, "x", (None, 2.5)]}
        got = codec.codec_decode(*codec.codec_encode(sample))
        assert torch.equal(got.pop("a"), sample.pop("a")) and got == sample
        try:
            codec.codec_encode(object())
        except TypeError as error:
            assert "is an object" in str(error)
        else:
            raise AssertionError("stored")
        assert codec.codec_decode(*codec.codec_encode({1, 2})) == {1, 2}
        """,
        fresh=True,
    )


# Images


def gradient(mode, size=(13, 7)):
    image = Image.new(mode, size)
    raw_bytes = image.tobytes()
    return Image.frombytes(mode, size, bytes(i * 7 % 251 for i in range(len(raw_bytes))))


@needs_pil
@pytest.mark.parametrize(
    "mode",
    [
        "1",
        "L",
        "P",
        "RGB",
        "RGBA",
        "CMYK",
        "LA",
        "PA",
        "I",
        "F",
        "I;16",
        "I;16L",
        "I;16B",
        "YCbCr",
        "HSV",
        "LAB",
        "La",
        "RGBa",
        "RGBX",
    ],
)
def test_image_modes(mode):
    for size in [(13, 7), (8, 8), (1, 1), (0, 5), (5, 0), (100, 90)]:
        image = gradient(mode, size) if all(size) else Image.new(mode, size)
        assert round_trip(image) == image
        assert round_trip({"image": image, "label": 1})["image"] == image


@needs_pil
def test_palettes():
    photo = gradient("RGB", (40, 30))
    images = [photo.convert("P"), photo.quantize(7), photo.convert("RGBA").quantize(5)]
    for count, mode in ((2, "RGB"), (3, "RGBA"), (256, "RGB")):
        image = gradient("P")
        image.putpalette(bytes(i % 256 for i in range(count * len(mode))), mode)
        images.append(image)
    for image in images:
        got = round_trip(image)
        assert got == image
        assert got.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


@needs_pil
def test_images_from_files_are_loaded():
    photo = gradient("RGB", (40, 30))
    for kind, options in (("PNG", {}), ("JPEG", {}), ("GIF", {"transparency": 1})):
        file = io.BytesIO()
        (photo.quantize(9) if kind == "GIF" else photo).save(file, kind, **options)
        opened = Image.open(io.BytesIO(file.getvalue()))
        got = back([opened])[0]
        expected = Image.open(io.BytesIO(file.getvalue()))
        assert type(got) is Image.Image
        assert got.tobytes() == expected.tobytes()
        assert got.convert("RGBA").tobytes() == expected.convert("RGBA").tobytes()
    file = io.BytesIO()
    photo.quantize(5).save(file, "PNG", transparency=bytes(range(5)))
    opened = Image.open(io.BytesIO(file.getvalue()))
    assert back(opened).convert("RGBA").tobytes() == opened.convert("RGBA").tobytes()


@needs_pil
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_photo_is_as_upright_as_it_was(kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    file = io.BytesIO()
    gradient("RGB", (40, 20)).save(file, kind, exif=exif, icc_profile=b"colours")
    expected = Image.open(io.BytesIO(file.getvalue()))
    got = back(Image.open(io.BytesIO(file.getvalue())))
    assert "exif" in got.info or kind == "TIFF"  # which newer versions of PIL turn themselves
    assert got.info["icc_profile"] == b"colours"
    upright = ImageOps.exif_transpose(expected)
    assert upright.size == (20, 40) and ImageOps.exif_transpose(got).size == (20, 40)
    assert ImageOps.exif_transpose(got).tobytes() == upright.tobytes()
    bare = back(Image.open(io.BytesIO(file.getvalue())))
    bare.info.clear()  # the control: as it was when only the pixels were kept
    assert kind == "TIFF" or ImageOps.exif_transpose(back(bare)).size == (40, 20)


@needs_pil
def test_a_photo_that_a_program_says_is_upright_stays_so():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    gradient("RGB", (40, 20)).save(file, "JPEG", exif=exif)
    for change in (lambda exif: exif.pop(0x0112), lambda exif: exif.update({0x0112: 3})):
        photo = Image.open(io.BytesIO(file.getvalue()))
        change(photo.getexif())
        got = back(photo)
        assert ImageOps.exif_transpose(got).tobytes() == ImageOps.exif_transpose(photo).tobytes()


@needs_pil
def test_what_loading_an_image_raises_passes_through():
    file = io.BytesIO()
    gradient("RGB", (64, 64)).save(file, "PNG")
    with pytest.raises((OSError, SyntaxError)) as expected:
        Image.open(io.BytesIO(file.getvalue()[:200])).load()
    with pytest.raises(type(expected.value)) as caught:
        encode(Image.open(io.BytesIO(file.getvalue()[:200])))
    assert str(caught.value) == str(expected.value)

    class Broken(ImageFile.ImageFile):
        def __init__(self):
            Image.Image.__init__(self)

        def _open(self):
            pass

        def load(self):
            raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        encode((1, Broken()))


@needs_pil
def test_images_that_are_not_stored():
    class Mine(Image.Image):
        pass

    mine = Mine()
    refused([mine], "sample[0] is a", "Mine")


# Everything together


def random_sample(rng: random.Random, depth=0):
    leaves = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(STRINGS),
        lambda: rng.getrandbits(rng.choice([8, 62, 100])),
        lambda: rng.random(),
        lambda: filled(
            [rng.randrange(5) for _ in range(rng.randrange(4))], rng.choice(stored_dtypes())
        ),
        lambda: torch.rand(rng.randrange(1, 300)),
        lambda: [rng.getrandbits(20) for _ in range(rng.randrange(200))],
        lambda: rng.choice(list(Color)),
        lambda: torch.Size([rng.randrange(9) for _ in range(rng.randrange(4))]),
        lambda: Slotted(rng.randrange(9)),
        lambda: rng.choice(list(Level)) | rng.randrange(2),
        lambda: {rng.getrandbits(9) for _ in range(rng.randrange(4))},
        lambda: range(rng.randrange(9)),
        lambda: datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=rng.getrandbits(30)),
        lambda: decimal.Decimal(rng.getrandbits(40)).scaleb(-rng.randrange(9)),
        lambda: Path("a" * rng.randrange(1, 9)),
        lambda: MyInt(rng.getrandbits(70)),
        lambda: MyStr("s" * rng.randrange(9)),
        lambda: torch.rand(rng.randrange(4)).as_subclass(MyTensor),
        lambda: noted(torch.rand(rng.randrange(4)), rng.getrandbits(20)),
    ]
    if np is not None:
        leaves += [
            lambda: np.array(rng.choice(ARRAYS), order="C"),
            lambda: rng.choice(SCALARS),
        ]
    if Image is not None:
        modes = ["1", "L", "P", "RGB", "F", "I;16"]
        leaves.append(
            lambda: gradient(rng.choice(modes), (rng.randrange(1, 20), rng.randrange(1, 9)))
        )

    def child():
        return random_sample(rng, depth + 1)

    def children():
        return [child() for _ in range(rng.randrange(5))]

    def key():
        kinds = [rng.getrandbits(70) >> 8, f"k{rng.getrandbits(9)}", rng.random(), None, True, b"b"]
        kinds += [2**70 + rng.getrandbits(9), MyStr("k"), Color.RED]
        return rng.choice([*kinds, tuple(kinds[:2]), tuple(kinds[-2:])])

    containers = [
        children,
        lambda: tuple(children()),
        lambda: {key(): child() for _ in range(rng.randrange(4))},
        lambda: collections.OrderedDict((key(), child()) for _ in range(rng.randrange(4))),
        lambda: Point(child(), child()),
        lambda: Pair(child(), child()),
        lambda: Record("r", child(), [child()]),
        lambda: Frozen(1, child()),
        lambda: Child("c", child(), more=child()),
        lambda: MyList(children()),
        lambda: MyDict({key(): child() for _ in range(rng.randrange(3))}),
        lambda: collections.deque(children(), maxlen=9),
        lambda: collections.defaultdict(list, {key(): child() for _ in range(rng.randrange(3))}),
        lambda: noted(torch.rand(2, 3), child()),
    ]
    return rng.choice(leaves if depth > 3 or rng.random() < 0.4 else containers)()


def test_random_nesting(seed, scale):
    rng = random.Random(seed)
    for _ in range(scale(1500, 50_000)):
        sample = random_sample(rng)
        round_trip(sample)
        schema, record = encode(sample)
        assert record == encode(sample)[1]
        with pytest.raises(ValueError):
            decode(schema, record + b"\0")
        if record:
            with pytest.raises(ValueError):
                decode(schema, record[:-1])
        with pytest.raises(ValueError):
            decode(schema[:-1], record)
        with pytest.raises(ValueError):
            decode(schema + b"n", record)


# The form of schema and record


def test_a_record_costs_little():
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)
    assert len(encode((image, 7))[1]) <= image.numel() + 40
    assert len(encode({"image": image, "label": 7})[1]) <= image.numel() + 40
    assert len(encode(None)[1]) == 0
    assert len(encode(5)[1]) == 8


def test_schemas_hold_no_values_shapes_or_lengths():
    samples = [
        {"x": torch.zeros(n, 2 * n), "y": n, "name": "n" * n, "tokens": list(range(n)),
         "scores": [0.5] * n, "raw": b"r" * n, "big": 10 ** (30 + n), "flag": n > 3}
        for n in range(1, 9)
    ]  # fmt: skip
    assert len({encode(sample)[0] for sample in samples}) == 1
    if Image is not None:
        assert encode(gradient("RGB", (3, 4)))[0] == encode(gradient("RGB", (30, 40)))[0]
    different = [
        1, 1.0, True, None, "1", b"1", (1,), [1], [1.0], {"a": 1}, {"b": 1}, {1: 1}, {True: 1},
        torch.ones(1), torch.ones(1, 1), torch.ones(1).half(), Point(1, 1), Pair(1, 1),
    ]  # fmt: skip
    assert len({encode(sample)[0] for sample in different}) == len(different)


def test_payloads_are_aligned():
    sample = ("abc", torch.ones(3), b"x", torch.arange(5), "y" * 1000, torch.ones(7), 5, "z")
    schema, record = encode(sample)
    memory = torch.frombuffer(bytearray(record), dtype=torch.uint8).clone()
    got = decode(schema, memory)
    same(got, sample)
    for tensor in (got[1], got[3], got[5]):
        assert (tensor.data_ptr() - memory.data_ptr()) % 16 == 0


def test_the_bytes_of_a_sample():
    """Other versions read what this one wrote: a change here needs another version number."""
    sample = ({"x": torch.tensor([[1, 2]], dtype=torch.int16), "n": -2}, "hi", [1.5])
    schema, record = encode(sample)
    assert schema == b"\x01(\x03{\x02s\x01xT\x02\x02s\x01nisd"
    assert record == (
        struct.pack("<IIII", 1, 2, 2, 1)  # dims, length of "hi", length of [1.5]
        + struct.pack("<q", -2) + bytes(8)
        + struct.pack("<hh", 1, 2) + bytes(12)
        + b"hi" + bytes(14)
        + struct.pack("<d", 1.5)
    )  # fmt: skip


# Refusals


def test_what_is_not_stored_is_named():
    refused({"meta": [1, 2, Opaque()]}, "sample['meta'][2] is a test_codec.Opaque;",
            "register_type", "allow_pickle=True")  # fmt: skip
    refused([object()], "sample[0] is an object;")
    refused((1, {(1, "a"): Opaque()}), "sample[1][(1, 'a')] is a test_codec.Opaque;")
    refused(Point(1, [len]), "sample.y[0] is a builtin_function_or_method;")
    refused(Record("a", Opaque()), "sample.image is a test_codec.Opaque;")
    refused({"a\nb" * 100: Opaque()}, "sample['a\\nb")
    refused(Failure(), "test_codec.Failure")
    refused({Opaque: 1}, "sample.keys[0] is a type;")
    refused([{(1, Opaque): 1}], "sample[0].keys[0][1] is a type;")
    picky = Picky(1)
    picky.extra = 1
    refused(picky, "attributes beside its fields")


def test_classes_that_others_do_not_find():
    @dataclasses.dataclass
    class Local:
        a: int = 1

    here = collections.namedtuple("here", "a")
    refused([Local()], "sample[0] is a test_codec.", "<locals>.Local", "inside a function")
    refused(Local(), "inside a function", allow_pickle=True)
    refused(here(1), "test_codec.here", "leads to nothing")
    shadow = dataclasses.make_dataclass("Record", ["a"])
    shadow.__module__ = __name__
    refused(shadow(1), "test_codec.Record", "leads to another object")


def test_nesting():
    deep = 5
    for _ in range(99):
        deep = [deep, None]
    round_trip(deep)
    refused([[deep]], "nested more than 100 levels deep", "sample[0][0]", error=ValueError)
    for _ in range(100_000):
        deep = [deep]
    refused(deep, "nested more than 100 levels deep", error=ValueError)
    while deep.__class__ is list and len(deep) == 1:  # or its end overflows the stack
        deep = deep[0]
    loop: list = [1, "a"]
    loop.append({"again": loop})
    refused(loop, "contains itself", "sample[2]['again']", error=ValueError)
    refused(loop, "contains itself", error=ValueError, allow_pickle=True)
    cycle: dict = {}
    cycle["self"] = cycle
    refused(cycle, "contains itself", error=ValueError)
    record = Record("a", None)
    record.image = record
    refused(record, "contains itself", "sample.image", error=ValueError)


def test_too_many_parts():
    refused(["a"] * (5 << 20), "too many parts", error=ValueError)
    round_trip(list(range(300_000)))


class Shrinking:
    """Changes the sample that it is in while the codec reads it."""

    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        self.act()
        return (int, ())


def test_a_sample_that_changes_while_it_is_stored():
    items: list = [None, "a", "b"]
    items[0] = Shrinking(items.clear)
    with pytest.raises(RuntimeError, match="sample changed while it was being stored"):
        encode(items, allow_pickle=True)
    grown: list = [None]
    grown[0] = Shrinking(lambda: grown.append(1))
    with pytest.raises(RuntimeError, match="changed"):
        encode(grown, allow_pickle=True)
    table: dict = {"a": None, "b": 1}
    table["a"] = Shrinking(table.clear)
    with pytest.raises(RuntimeError, match=r"sample\['x'\] changed"):
        encode({"x": table}, allow_pickle=True)


class Raising:
    def __reduce__(self):
        raise KeyError("own")


def test_what_an_object_raises_when_it_is_pickled_is_the_cause():
    with pytest.raises(codec.UnsupportedSample, match=r"sample\[1\] .*KeyError: 'own'") as caught:
        encode((1, Raising()), allow_pickle=True)
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_arguments():
    schema, record = encode(1)
    for arguments in [(), (1,), (schema, None), (None, record), (schema, torch.zeros(8)),
                      (schema, torch.zeros(2, 4, dtype=torch.uint8)),
                      (schema, torch.zeros(16, dtype=torch.uint8)[::2]),
                      (schema, torch.zeros(8, dtype=torch.uint8, device="meta"))]:  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            decode(*arguments)
    for arguments in [(), (schema, 5), (schema, [5]), (b"", [record])]:
        with pytest.raises((TypeError, ValueError)):
            collate(*arguments)


# Classes that change between storing and reading


def test_a_class_that_changed(monkeypatch):
    module = sys.modules[__name__]
    stored = encode([Point(1, 2)])
    for other in (collections.namedtuple("Point", "x z"), Record, 5, len):
        monkeypatch.setattr(module, "Point", other)
        with pytest.raises(ValueError, match=r"test_codec\.Point, which (now has|is now)"):
            decode(*stored)
    monkeypatch.delattr(module, "Point")
    with pytest.raises(ValueError, match=r"test_codec\.Point.* is not found") as caught:
        decode(*stored)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    same(decode(*stored), [Point(1, 2)])

    stored = encode(Slotted(1))
    monkeypatch.setattr(module, "Slotted", dataclasses.make_dataclass("Slotted", ["a", "c"]))
    with pytest.raises(ValueError, match="other fields"):
        decode(*stored)
    stored = encode(Color.GREEN)
    monkeypatch.setattr(module, "Color", enum.Enum("Color", "RED"))
    with pytest.raises(ValueError, match=r"GREEN of .*no such member"):
        decode(*stored)


def test_a_class_that_was_reloaded(monkeypatch):
    stored = encode(Point(1, 2))
    same(decode(*stored), Point(1, 2))
    again = collections.namedtuple("Point", "x y")
    again.__module__ = __name__
    monkeypatch.setattr(sys.modules[__name__], "Point", again)
    assert type(decode(*stored)) is again
    assert encode(again(1, 2)) == stored


def test_a_module_is_imported_to_find_a_class(tmp_path, monkeypatch):
    (tmp_path / "codec_classes.py").write_text(
        "import typing\nclass There(typing.NamedTuple):\n  a: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from codec_classes import There

    stored = encode(There(5))
    monkeypatch.delitem(sys.modules, "codec_classes")
    got = decode(*stored)
    assert got == (5,) and type(got).__module__ == "codec_classes" and type(got) is not There
    monkeypatch.delitem(sys.modules, "codec_classes")
    (tmp_path / "codec_classes.py").write_text("raise OSError('two\\nlines')")
    with pytest.raises(ValueError, match=r"codec_classes\.There.*not found \(OSError: two lines\)"):
        decode(*stored)


def test_classes_of_the_main_program_under_spawn(run_script):
    run_script(
        """
        import dataclasses, multiprocessing
        """
        + SHIM.replace("\n", "\n        ")
        + """
        @dataclasses.dataclass
        class Mine:
            a: int

        def store(a):
            return codec.codec_encode(Mine(a))

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                stored = pool.apply(store, (5,))
            assert stored == store(5)
            assert codec.codec_decode(*stored) == Mine(5)
        """
    )


# Pickle


def bomb(path: Path) -> bytes:
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(path),))

    return pickle.dumps(Bomb())


def test_pickle_only_where_it_is_allowed(tmp_path):
    sample = (1, {2, 3}, Opaque(7), MyDict(a=torch.ones(2)))
    schema, record = encode(sample, allow_pickle=True)
    got = decode(schema, record, allow_pickle=True)
    assert got[:3] == sample[:3] and type(got[3]) is MyDict
    with pytest.raises(ValueError, match="pass allow_pickle=True if you trust"):
        decode(schema, record)
    assert collate(schema, [record, record]) is NotImplemented
    # What needs no pickle uses none.
    assert encode((1, "a"), allow_pickle=True) == encode((1, "a"))

    planted = tmp_path / "planted"
    schema, record = encode(Opaque(1), allow_pickle=True)
    payload = bomb(planted)
    record = struct.pack("<I", len(payload)).ljust(16, b"\0") + payload
    with pytest.raises(ValueError):
        decode(schema, record)
    assert collate(schema, [record]) is NotImplemented
    assert not planted.exists()
    decode(schema, record, allow_pickle=True)
    assert planted.exists()  # so it was a bomb


def test_bombs_everywhere(tmp_path, seed):
    """A pickle in place of anything else is never run."""
    rng = random.Random(seed)
    planted = tmp_path / "planted"
    payload = bomb(planted)
    for _ in range(300):
        schema, record = encode(random_sample(rng))
        size = len(payload) + 16
        for at in {0, rng.randrange(len(record) + 1), (len(record) + 15) // 16 * 16}:
            for damaged in (record[:at] + payload, record[:at] + payload + record[at + size :]):
                with contextlib.suppress(Exception):
                    decode(schema, damaged)
                with contextlib.suppress(Exception):
                    collate(schema, [damaged, damaged])
    assert not planted.exists()


# Batches


def same_batch(samples):
    """Asserts that the batch is default_collate's; whether it was made here."""
    stored = [encode(sample) for sample in samples]
    assert len({schema for schema, _ in stored}) == 1
    made = collate(stored[0][0], [record for _, record in stored])
    if made is NotImplemented:
        return False
    same(made, default_collate([decode(*pair) for pair in stored]), "batch")
    same(collate(stored[0][0], [record for _, record in stored], threads=3), made, "by threads")
    return True


def rows(make, count=5):
    return [make(i) for i in range(count)]


COLLATED = {
    "tensor": lambda i: torch.full((3, 4), i),
    "image and label": lambda i: (filled((3, 32, 32), torch.uint8) + i, i),
    "0-d": lambda i: torch.tensor(i),
    "empty": lambda i: torch.empty(0, 3),
    "int": lambda i: i - 2,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: "ü" * i,
    "bytes": lambda i: b"x" * i,
    "strings": lambda i: ("a" * i, {"k": "b" * i, "l": ["c", b"d" * 1000 * i]}, Point("e", i)),
    "dict": lambda i: {"x": torch.ones(2) * i, 5: i, None: i / 2, (1, "a"): "s" * i},
    "OrderedDict": lambda i: collections.OrderedDict(b=i, a=torch.ones(i * 0)),
    "namedtuple": lambda i: Point(torch.ones(2) * i, (i, [i, i + 1])),
    "list": lambda i: [torch.ones(1) * i, i, "a"],
    "ints": lambda i: [i, i * i, 7],
    "floats": lambda i: ([i / 2] * 100, "x"),
    "Size": lambda i: torch.Size((i, 3)),
    "nested": lambda i: ((), [], {}, ((i,), [[i]], {"a": {"b": (torch.ones(2),)}})),
    "nothing": lambda i: (),
    "ragged before and after": lambda i: ("a" * i, torch.ones(100) * i, "b" * (7 - i), [i, 1]),
}


@pytest.mark.parametrize("name", COLLATED)
@pytest.mark.parametrize("count", [1, 2, 5, 200])
def test_collate(name, count):
    assert same_batch(rows(COLLATED[name], count))


@pytest.mark.parametrize("dtype", stored_dtypes(), ids=str)
def test_collate_every_dtype(dtype):
    assert same_batch(rows(lambda i: (filled((5, 3), dtype), filled((), dtype), i)))


def test_collate_rows_of_every_size():
    for size in [*range(130), 1000, 5000]:
        assert same_batch(rows(lambda i, n=size: torch.arange(n, dtype=torch.uint8) + i, 70))


@needs_numpy
@pytest.mark.parametrize("value", ARRAYS + SCALARS, ids=lambda v: f"{type(v).__name__}-{v!r:.20}")
def test_collate_numpy(value):
    for sample in (value, (value, 1), {"a": [value, value]}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                default_collate([back(sample), back(sample)])
            possible = True
        except Exception:
            possible = False
        # numpy.str_ and numpy.bytes_ go through default_collate itself.
        assert same_batch([sample] * 3) == (possible and not isinstance(value, np.str_ | np.bytes_))


def test_what_default_collate_refuses_is_left_to_it():
    alone = [None, 1j, bytearray(b"a"), 2**70, Color.RED, Level.LOW, Record("a", 1)]
    for sample in (*alone, (1, [None]), {"a": 1, math.nan: 2}, {("a", math.nan): 2}):
        assert not same_batch([sample] * 2)
    if Image is not None:
        assert not same_batch([gradient("L")] * 2)
    for make in (torch.ones, lambda i: [1] * (i + 1), lambda i: ("s", torch.ones(1, i))):
        stored = [encode(make(i + 1)) for i in range(3)]
        assert collate(stored[0][0], [record for _, record in stored]) is NotImplemented
    schema, _ = encode(1)
    assert collate(schema, []) is NotImplemented


def test_collate_of_random_samples(seed, scale):
    rng = random.Random(seed)
    made = 0
    for _ in range(scale(1500, 50_000)):
        sample = random_sample(rng)
        made += same_batch([sample] * rng.randrange(1, 4))
    assert made > 20


# Any bytes


def mutated(rng: random.Random, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 | 1 if data:
                data[at % len(data)] = rng.getrandbits(8)
            case 2 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 3:
                del data[at : at + rng.choice([1, 4, 16, 1000])]
            case 4:
                data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 16]))
            case 5:
                word = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.getrandbits(32)])
                data[at // 4 * 4 : at // 4 * 4 + 4] = struct.pack("<I", word)
            case 6:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + rng.choice([1, 4, 20])]
            case _:
                data = data[:at]
    return bytes(data)


def touch(value):
    """Reads all of a sample, so that a wrong pointer in it is noticed."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            sum(raw(value.reshape(-1)[:1000]))
    elif isinstance(value, dict):
        [touch(v) for v in value.values()]
    elif isinstance(value, tuple | list | collections.deque | set):
        [touch(v) for v in value]
    elif (np is not None and isinstance(value, np.ndarray)) or (
        Image is not None and isinstance(value, Image.Image)
    ):
        value.tobytes()
    elif dataclasses.is_dataclass(value):
        [touch(getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    else:
        hash(value) if isinstance(value, str | bytes) else str(value)


class NoImports:
    """Finds no module: a damaged name must not import what happens to lie in the folder."""

    def find_spec(self, name, path=None, target=None):
        raise ModuleNotFoundError(f"no module {name!r} in this test")


def fuzz(seed: int, count: int, planted: Path) -> tuple[int, int]:
    rng = random.Random(seed)
    good = bad = 0
    payload = bomb(planted)
    pickled = encode(Opaque(1), allow_pickle=True)[0]
    pool = [encode(random_sample(rng)) for _ in range(100)] + [(pickled, payload)]
    pool += [encode(make(i)) for make in COLLATED.values() for i in range(3)]
    pool += [encode(value) for value in everything()]
    for schema, record in pool:
        if schema != pickled:
            touch(decode(schema, record))  # imports what it needs
    sys.meta_path.insert(0, NoImports())
    for i in range(count):
        schema, record = rng.choice(pool)
        match i % 8:
            case 0 | 1 | 2:
                record = mutated(rng, record)
            case 3 | 4:
                schema = mutated(rng, schema)
            case 5:
                schema, record = mutated(rng, schema), mutated(rng, record)
            case 6:
                record = rng.choice(pool)[1]
            case _:
                schema = b"\x01" + rng.randbytes(rng.randrange(20))
        others = [rng.choice([record, mutated(rng, record)]) for _ in range(rng.randrange(3))]
        for call in (lambda s=schema, r=record: decode(s, r),
                     lambda s=schema, r=record, o=others: collate(s, [r, *o])):  # fmt: skip
            try:
                touch(call())
                good += 1
            except (SystemError, RecursionError):
                raise
            except Exception as error:
                assert "\n" not in str(error), error
                bad += 1
    return good, bad


@pytest.mark.skipif(np is None, reason="numpy is not installed")
@pytest.mark.parametrize("code", [b"|O", b"=O", b"O\0"])
def test_bytes_do_not_become_addresses(code):
    """The type of an array is described in its record."""
    for array in (
        np.arange(4, dtype=np.dtype("i8", metadata={"unit": "m"})),
        np.zeros(2, [("a", "i8"), ("b", np.dtype("i8", metadata={"n": 1}))]),
    ):
        schema, record = encode(array)
        described = bytes(record)
        assert b"=l" in described and np.array_equal(decode(schema, record), array)
        planted = described.replace(b"=l", code)
        with pytest.raises((ValueError, TypeError)):
            decode(schema, planted)


@pytest.mark.parts(3)
def test_no_bytes_crash_it(in_child, seed, scale, tmp_path):
    planted = tmp_path / "planted"
    good, bad = in_child(fuzz, seed, scale(60_000, 3_000_000), planted, timeout=3600)
    assert good > 1000 and bad > 1000
    assert not planted.exists()


def test_schemas_that_ask_for_too_much():
    many = 2**32 - 1
    count = b"\xff\xff\xff\xff\x0f"
    for schema in (
        b"\x01Z" + count,
        b"\x01(\x02Z" + b"\xff\xff\xff\xff\x01Z" + b"\x81\x80\x80\x80\x0e",  # wraps at 2^32
        b"\x01(" + count,
        b"\x01{" + count,
        b"\x01T\x00" + count,
        b"\x01A\x01B" + count,
        b"\x01A\x01O\x01",
        b"\x01s" + b"n" * 10,
        b"\x01" + b"(\x01" * 5000 + b"n",
        b"\x01{\x01" + b"(\x01" * 5000 + b"nn",
        b"\x01P" + b"\x01m\x01c" + count,
        b"\x01(" + b"\x80" * 20,
        b"\x02n",
        b"",
    ):
        for record in (b"", bytes(64)):
            with pytest.raises(ValueError, match=r"malformed schema|damaged record"):
                decode(schema, record)
    for dims in ([many] * 5, [0, many, many, many], [many], [2**31, 2]):
        schema = b"\x01T\x07" + bytes([len(dims)])
        with pytest.raises(ValueError, match="damaged record"):
            decode(schema, struct.pack(f"<{len(dims)}I", *dims))
    if Image is not None:
        for width, height in ((many, many), (0, many), (many, 0), (many, 1)):
            with pytest.raises(ValueError, match="damaged record"):
                decode(encode(gradient("1"))[0], struct.pack("<II", width, height))
    twice = encode({"a": 1, "b": 2})
    with pytest.raises(ValueError, match="key twice"):
        decode(twice[0].replace(b"b", b"a"), twice[1])
    with pytest.raises(ValueError, match="key twice"):
        collate(twice[0].replace(b"b", b"a"), [twice[1]])
    with pytest.raises(ValueError, match="not UTF-8"):
        decode(twice[0].replace(b"b", b"\xff"), twice[1])


@contextlib.contextmanager
def written_meanwhile(write):
    """Calls `write` again and again, in another thread."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            write()

    writer = threading.Thread(target=run)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def fuzz_while_it_changes(seed: int, count: int) -> None:
    rng, writing = random.Random(seed), random.Random(seed)
    for make in COLLATED.values():
        stored = [encode((make(i), torch.zeros(30_000))) for i in range(4)]
        memory = [bytearray(record) for _, record in stored]

        def overwrite(memory=memory):
            data, at = writing.choice(memory), writing.randrange(0, 40, 4)
            data[at : at + 4] = struct.pack("<I", writing.choice([0, 1, 5, 2**31, 2**32 - 1]))

        with written_meanwhile(overwrite):
            for i in range(count):
                # With threads, all but the last step runs without the GIL: next to the writer.
                with contextlib.suppress(ValueError):
                    touch(collate(stored[0][0], memory, threads=1 + i % 2))
                victim = rng.randrange(4)
                memory[victim][:] = stored[victim][1]


def change_between_two_looks(count: int) -> tuple[int, int]:
    """The shape and the length in the first record change while thousands of others are checked.
    Who looks at them twice makes a tensor that is too small for its rows."""
    schema, record = encode((torch.zeros(64, dtype=torch.float64), "text" * 20))
    first, other = bytearray(record), bytearray(record)
    turns = itertools.cycle([struct.pack("<II", 64, 80), struct.pack("<II", 1, 3)])
    made = tried = 0
    end = time.monotonic() + 60

    def overwrite():
        first[0:8] = next(turns)
        time.sleep(20e-6)  # hands the GIL over: otherwise collate may meet the same one for long

    with written_meanwhile(overwrite):
        # On until both were met often: the writer may be slow to start.
        while tried < count or (min(made, tried - made) < 20 and time.monotonic() < end):
            tried += 1
            batch = collate(schema, [first, *[other] * 5000], threads=2)
            if batch is NotImplemented:
                continue
            made += 1
            assert batch[0].shape == (5001, 64) and len(batch[1]) == 5001
            assert batch[0][1:].count_nonzero() == 0
            assert set(batch[1][1:]) == {"text" * 20}
    return made, tried


@pytest.mark.parts(10)
def test_records_that_change_meanwhile(in_child, seed, scale):
    in_child(fuzz_while_it_changes, seed, scale(50, 5000), timeout=3600)
    made, tried = in_child(change_between_two_looks, scale(500, 20_000), timeout=3600)
    assert made >= 20 and tried - made >= 20


# Nothing leaks


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def everything():
    sample = [
        torch.ones(1000), "a" * 1000, "ü" * 1000, b"b" * 1000, {"k": [1, 2.5, None]},
        Point(1, "x" * 600), Record("r", torch.ones(3)), Slotted(1), Color.RED, 10**40,
        bytearray(1000), list(range(100)), collections.OrderedDict(a=1), torch.Size((1, 2)),
    ]  # fmt: skip
    if np is not None:
        sample += [
            np.arange(1000),
            np.arange(10)[::2],
            np.float32(1),
            np.str_("a" * 600),
            np.array(["a"]),
            np.arange(4, dtype=np.dtype("i8", metadata={"unit": "m"})),
            np.array([(1, 0.5)], [("a", "i8"), ("b", np.dtype("f8", metadata={"n": 1}))]),
            np.ma.array([1, 2], mask=[True, False]),
        ]
    if Image is not None:
        sample += [gradient("RGB"), gradient("P")]
    return sample


def growth(act, count) -> int:
    """Bytes by which the process grows over these calls, after some to warm up."""
    for _ in range(count // 10):
        act()
    gc.collect()
    before = resident()
    for _ in range(count):
        act()
    gc.collect()
    return resident() - before


def test_nothing_leaks(in_child):
    image = (torch.zeros(3, 32, 32, dtype=torch.uint8), 7)
    schema, record = encode(image)
    sample = everything()
    all_schema, all_record = encode(sample)
    bad = [*sample, Opaque()]

    def fail():
        with pytest.raises(TypeError):
            encode(bad)
        with pytest.raises(ValueError):
            decode(all_schema, all_record[:-1])
        with pytest.raises(ValueError):
            decode(all_schema + b"x", all_record)

    batch = encode(COLLATED["strings"](3))

    def check():
        few = 8 << 20
        assert growth(lambda: encode(image), 100_000) < few
        assert growth(lambda: decode(schema, record), 100_000) < few
        assert growth(lambda: encode(sample), 10_000) < few
        assert growth(lambda: decode(all_schema, all_record), 10_000) < few
        assert growth(lambda: collate(batch[0], [batch[1]] * 10), 10_000) < few
        assert growth(fail, 10_000) < few

    in_child(check, timeout=600)


def test_references_are_given_back():
    sample = everything()
    parts = [sample, *sample, *sample[4]["k"], sample[6].image, Point, Record, Color.RED]
    schema, record = encode(sample)
    got = decode(schema, record)
    del got
    before = [sys.getrefcount(part) for part in parts]
    for _ in range(50):
        encode(sample)
        got = decode(schema, record)
        collate(schema, [record])
        with pytest.raises(TypeError):
            encode([sample, Opaque()])
        with pytest.raises(ValueError):
            decode(schema, record[:-1])
    del got
    gc.collect()
    after = [sys.getrefcount(part) for part in parts]
    # None, small ints and classes that are cached may differ by a few, never by one per call.
    assert all(b - a < 20 for a, b in zip(before, after, strict=True)), (before, after)


def test_the_record_lives_as_long_as_a_part_of_it():
    schema, record = encode({"a": torch.ones(1000), "b": [torch.zeros(10)]})
    memory = torch.frombuffer(bytearray(record), dtype=torch.uint8).clone()
    got = decode(schema, memory)["b"][0]
    del memory
    again = [torch.full((len(record),), 7, dtype=torch.uint8) for _ in range(20)]
    assert (got == 0).all()
    del again
