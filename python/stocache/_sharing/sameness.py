"""Whether two processes hold the same data: a digest of an object's contents.

Equal digests must mean equal data, so everything that can be looked into goes in, whole:
attributes, slots, elements, arrays, closures, arguments of partials, and of functions and classes
their code (``code.py``). Nothing that differs between processes by nature does: no addresses, no
hash order. What cannot be looked into is listed (``Contents.unseen``), and its owner must not be
taken for the same as another.

Values are looked at in columns: all elements of a list at once, then all elements of those, and
so on. What is of one type in a column goes to the hash at the speed of C, so millions of paths or
tuples take seconds. An object that was met before counts as that one, so cycles end and nothing is
looked at twice.
"""

from __future__ import annotations

import copyreg
import ctypes
import enum
import hashlib
import io
import logging
import marshal
import mmap
import pickle
import re
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any

import torch

from stocache import _C
from stocache._sharing import code
from stocache._sharing.memory import feed_memory

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MAX_DEPTH = 100
_CHUNK = 1 << 16  # of a long column go to the hash at a time
_FEW = 1 << 12  # of a column's members are remembered whatever they hold
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_HEAP_TYPE = 1 << 9  # the flag of classes that Python code defines
_EXTENDED = (int, float, complex, str, bytes)
_KNOWN_BASES = frozenset((object, list, tuple, dict, set, frozenset, *_EXTENDED))
_CACHES = (_C.Cache, _C.Records, _C.Files)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), "_multiprocessing.SemLock")
_BY_NAME = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice)
_C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_BUFFERS = (bytearray, memoryview, array, mmap.mmap, pickle.PickleBuffer, *_C_DATA)


@dataclass(frozen=True)
class Contents:
    """What a look into some values found."""

    digest: str
    """Equal in two processes if the values are."""
    unseen: tuple[str, ...] = ()
    """What could not be looked into, in words."""


def contents(*values: object, where: str = "it") -> Contents:
    """Looks into everything; ``where`` is what messages call it."""
    walk = _Walk()
    try:
        walk.column(list(values), where, 0)
    except RecursionError:
        walk.unseen.append(f"{where} is nested too deeply")
    return Contents(walk.hash.hexdigest(), tuple(dict.fromkeys(walk.unseen)))


def digest(*values: object) -> str:
    """A short text that is equal in two processes if the values are."""
    return contents(*values).digest


class _Walk:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.met: dict[int, int] = {}  # objects by address, numbered as they come
        self.alive: list[Any] = []  # so that no address is used again
        self.unseen: list[str] = []

    def say(self, *words: object) -> None:
        self.hash.update(repr(words).encode("utf-8", "surrogatepass"))

    def column(self, values: list[Any], where: str, depth: int) -> None:
        """Values of any types, which together are all there is at this depth of ``where``."""
        self.say(len(values))
        if depth > _MAX_DEPTH:
            self.unseen.append(f"{where} is nested more than {_MAX_DEPTH} deep")
            return
        kinds = list(dict.fromkeys(map(type, values)))
        groups = {kinds[0]: values} if len(kinds) == 1 else {kind: [] for kind in kinds}
        if len(kinds) > 1:
            number = {kind: n for n, kind in enumerate(kinds)}
            self.hash.update(array("I", map(number.__getitem__, map(type, values))).tobytes())
            for value in values:
                groups[type(value)].append(value)
        for kind, group in groups.items():
            self.say(kind.__module__, kind.__qualname__)
            try:
                self.same_kind(kind, group, where, depth)
            except RecursionError:
                raise
            except Exception as error:  # somebody's object that does not want to be looked at
                self.say("unseen")
                self.unseen.append(f"{where} ({_name(kind)}: {type(error).__name__}: {error})")

    def same_kind(self, kind: type, values: list[Any], where: str, depth: int) -> None:
        if kind in _PLAIN:
            # Version 2 of marshal knows no references, so equal values give equal bytes.
            for at in range(0, len(values), _CHUNK):
                self.hash.update(marshal.dumps(values[at : at + _CHUNK], 2))
        elif issubclass(kind, _CACHES) or kind in _LOCKS or _name(kind) in _LOCKS:
            pass  # a cache is what the question is about, and a lock says nothing of data
        elif issubclass(kind, torch.Generator):
            pass  # randomness after the cache is each rank's own
        elif issubclass(kind, PurePath):
            self.column(list(map(str, values)), where, depth + 1)
        elif issubclass(kind, _BY_NAME):
            self.column(list(map(repr, values)), where, depth + 1)
        elif issubclass(kind, enum.Enum):
            self.column([member.name for member in values], where, depth + 1)
            self.column([kind], where, depth + 1)
        elif _is_numpy_scalar(kind):
            self.column([sys.modules["numpy"].array(values)], where, depth + 1)
        else:
            self.compound(kind, values, where, depth)

    def compound(self, kind: type, values: list[Any], where: str, depth: int) -> None:
        """What has parts. Each is looked into once."""
        container = issubclass(kind, (list, tuple, dict))
        if container and len(values) > _FEW:
            inside = _elements(kind, values)
            if _PLAIN.issuperset(map(type, inside)):  # no way back from there, and many
                self.lengths_and(inside, values, where, depth)
                values = values if kind.__dictoffset__ else []
                container = False
        values = self.new(values)
        if not values:
            return
        if container:
            self.lengths_and(_elements(kind, values), values, where, depth)
            self.attributes(kind, values, where, depth, whole=True)
        elif issubclass(kind, (set, frozenset)):
            for value in values:
                self.a_set(value, where, depth)
        elif issubclass(kind, _EXTENDED):
            base = next(base for base in kind.__mro__ if base in _PLAIN)
            self.column([base(value) for value in values], where, depth + 1)
            self.attributes(kind, values, where, depth, whole=True)
        elif issubclass(kind, torch.Tensor) or _is_array(kind) or _is_buffer(kind):
            for value in values:
                feed_memory(self, value, where, depth)
        elif issubclass(kind, types.MappingProxyType):
            self.column([dict(value) for value in values], where, depth + 1)
        elif (parts := code.parts_of(kind)) is not None:
            for value in values:
                self.named(parts(value), where, depth)
        elif issubclass(kind, weakref.ref):
            self.column([value() for value in values], where, depth + 1)
        elif issubclass(kind, logging.Logger):
            self.column([value.name for value in values], where, depth + 1)
        elif issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
            self.column([str(getattr(value, "name", "")) for value in values], where, depth + 1)
        else:
            self.column([kind], where, depth + 1)  # what its methods do
            self.attributes(kind, values, where, depth)

    def lengths_and(self, inside: list[Any], values: list[Any], where: str, depth: int) -> None:
        self.hash.update(array("Q", map(len, values)).tobytes())
        self.column(inside, where, depth + 1)

    def new(self, values: list[Any]) -> list[Any]:
        """Those not met before; for the others, which one they are goes to the hash."""
        first = len(self.met)
        numbers = array("Q", (self.met.setdefault(id(v), len(self.met)) for v in values))
        self.alive.append(values)
        self.hash.update(numbers.tobytes())
        following, fresh = first, []
        for value, number in zip(values, numbers, strict=True):
            if number == following:
                fresh.append(value)
                following += 1
        return fresh

    def a_set(self, value: Any, where: str, depth: int) -> None:
        kinds = set(map(type, value))
        if len(kinds) == 1 and kinds < {int, float, str, bytes}:
            self.column(sorted(value), where, depth + 1)
            return
        found = [contents(element, where=where) for element in value]
        self.column(sorted(each.digest for each in found), where, depth + 1)
        self.unseen += chain.from_iterable(each.unseen for each in found)

    def named(self, parts: Mapping[str, Any], where: str, depth: int) -> None:
        """Parts that have names; a part is called by its owner's name and its own."""
        for name in sorted(parts):
            self.say(name)
            self.column([parts[name]], f"{where}.{name}", depth + 1)

    def attributes(
        self, kind: type, values: list[Any], where: str, depth: int, whole: bool = False
    ) -> None:
        """Attributes and slots of objects of one class, a column for each. ``whole``: the rest of
        what they hold has been looked at."""
        slots = [
            name
            for parent in kind.__mro__
            for name in _names(vars(parent).get("__slots__", ()))
            if name not in ("__dict__", "__weakref__")
        ]
        shows_itself = bool(kind.__dictoffset__ or slots)
        if not all(p in _KNOWN_BASES for p in kind.__mro__ if _is_native(p)) or not (
            shows_itself or whole
        ):
            self.opaque(kind, values, where, depth)
        if not shows_itself:
            return
        owned = [attributes_of(value, slots) for value in values]
        names = list(map(tuple, owned))
        if len(set(names)) == 1:
            for name in names[0]:
                self.say(name)
                self.column([own[name] for own in owned], f"{where}.{name}", depth + 1)
        else:
            self.column(owned, where, depth + 1)

    def opaque(self, kind: type, values: list[Any], where: str, depth: int) -> None:
        """Objects of a native type: what pickle would store of them, or else what they print."""
        reduce = copyreg.dispatch_table.get(kind)
        parts = []
        for value in values:
            try:
                reduced = reduce(value) if reduce else value.__reduce_ex__(5)
            except Exception:  # cannot be pickled
                reduced = repr(value)
                if _ADDRESS.search(reduced):  # that is all that tells it from others of its type
                    self.unseen.append(f"{where} ({_name(kind)} shows nothing of itself)")
                    reduced = _ADDRESS.sub("", reduced)
            if isinstance(reduced, tuple):
                made_by, arguments, *rest = reduced
                reduced = (made_by, arguments, *rest[:1], *(list(each or ()) for each in rest[1:3]))
            parts.append(reduced)
        self.column(parts, where, depth + 1)


def attributes_of(value: Any, slots: Iterable[str] = ()) -> dict[str, Any]:
    """The attributes that belong to the object itself, by name."""
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found.update(getattr(value, "__dict__", None) or {})
    return {name: found[name] for name in sorted(found)}


def shows_all(kind: type) -> bool:
    """Whether the attributes of such an object are all that it holds."""
    slotted = any(vars(parent).get("__slots__") for parent in kind.__mro__)
    natives = [parent for parent in kind.__mro__ if _is_native(parent)]
    return bool(kind.__dictoffset__) and natives == [object] and not slotted


def _elements(kind: type, values: list[Any]) -> list[Any]:
    """What lists, tuples or dicts hold, one after the other; of dicts first all keys."""
    if not issubclass(kind, dict):
        return list(chain.from_iterable(values))
    return [*chain.from_iterable(values), *chain.from_iterable(map(dict.values, values))]


def _is_native(kind: type) -> bool:
    return not kind.__flags__ & _HEAP_TYPE


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_numpy_scalar(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def _is_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _is_buffer(kind: type) -> bool:
    return issubclass(kind, _BUFFERS)
