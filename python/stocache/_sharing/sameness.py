"""Whether two processes hold the same data: a digest of an object's contents.

Equal digests must mean equal data, so everything that can be looked into goes in, whole:
attributes, slots, elements, arrays, closures, arguments of partials, and of functions and classes
their code (``code.py``). Nothing that differs between processes by nature does: no addresses, no
hash order. What cannot be looked into is listed (``Contents.unseen``), and its owner must not be
taken for the same as another.

Values are looked at in columns: all elements of a list at once, then all elements of those, and
so on. What is of one type in a column goes to the hash at the speed of C, so millions of paths or
tuples take seconds. An object that was met before counts as that one, so cycles end and nothing is
looked at twice. Functions, classes and modules wait until all else has been looked at: one leads to
the next, and the chain may be as long as the program.
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
import os
import pickle
import random
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import torch

from stocache import _C
from stocache._sharing import code
from stocache._sharing.code import ClassOf, Parts
from stocache._sharing.memory import feed_memory
from stocache._sharing.modules import NotImported
from stocache._sharing.natives import attributes_of, is_native, open_file, slots_of

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MAX_DEPTH = 100
_STEP = 1 / 64  # from a function or class to the next, for what makes ever new ones has to end
_SAID = 200  # characters of somebody's error are told
_CHUNK = 1 << 16  # of a long column go to the hash at a time
_FEW = 1 << 12  # of a column's members are remembered whatever they hold
# The value in an object of a subclass, whatever that makes of str() and the like.
_EXTENDED: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: b"".join([value]),
}
_KNOWN_BASES = frozenset((object, list, tuple, dict, set, frozenset, *_EXTENDED))
_LOCKS = (type(threading.Lock()), type(threading.RLock()), "_multiprocessing.SemLock")
_GENERATORS = ("random.Random", "numpy.random.mtrand.RandomState")
_BY_NAME = (torch.dtype, torch.device, torch.layout, torch.memory_format, range)
_PATHS = frozenset((PosixPath, PurePosixPath, WindowsPath, PureWindowsPath))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_BUFFERS = (bytearray, memoryview, array, mmap.mmap, pickle.PickleBuffer, *_C_DATA)


class NoPart:
    """Base of what is ours in a dataset, and no part of its data."""

    __slots__ = ()


_NO_DATA = (_C.Cache, _C.Records, _C.Files, NoPart)


@dataclass(frozen=True)
class Contents:
    """What a look into some values found."""

    digest: str
    """Equal in two processes if the values are."""
    unseen: tuple[str, ...] = ()
    """What could not be looked into, in words."""


def contents(*values: object, where: str = "it") -> Contents:
    """Looks into everything; ``where`` is what messages call it. Never raises: what does not want
    to be looked at is unseen."""
    return _Walk({}).look(values, where, 0)


def digest(*values: object) -> str:
    """A short text that is equal in two processes if the values are."""
    return contents(*values).digest


def refusal(error: Exception) -> str:
    """What somebody's code raised, in one line."""
    try:
        said = " ".join(str(error).split())[:_SAID]
    except Exception:
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class _Walk:
    def __init__(self, members: dict[int, tuple[Any, Contents | None]]) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.met: dict[int, int] = {}  # objects by address, numbered as they come
        self.alive: list[Any] = []  # so that no address is used again
        self.unseen: list[str] = []
        self.classes: dict[int, ClassOf] = {}  # of objects, by address
        # Functions, classes and modules that were met and numbered, and wait.
        self.later: list[tuple[Parts, Any, str, float]] = []
        # Members of sets by address, of all walks of one look; None: being looked at.
        self.members = members

    def look(self, values: Sequence[object], where: str, depth: float) -> Contents:
        try:
            self.column(list(values), where, depth)
            for parts, value, place, at in self.later:  # which grows meanwhile
                self.look_into(parts, value, place, at)
        except RecursionError:
            self.unseen.append(f"{where} is nested too deeply")
        except Exception as error:
            self.unseen.append(f"{where} ({refusal(error)})")
        return Contents(self.hash.hexdigest(), tuple(dict.fromkeys(self.unseen)))

    def look_into(self, parts: Parts, value: Any, where: str, depth: float) -> None:
        """A function, a class or a module."""
        try:
            self.named(parts(value), where, depth - 1 + _STEP)
        except RecursionError:
            raise
        except Exception as error:  # somebody's module that does not want to be looked at
            self.say("unseen")
            self.unseen.append(f"{where} ({_name(type(value))}: {refusal(error)})")

    def say(self, *words: object) -> None:
        self.hash.update(repr(words).encode("utf-8", "surrogatepass"))

    def column(self, values: list[Any], where: str, depth: float) -> None:
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
            try:
                self.say(kind.__module__, kind.__qualname__)
                self.same_kind(kind, group, where, depth)
            except RecursionError:
                raise
            except Exception as error:  # somebody's object that does not want to be looked at
                self.say("unseen")
                self.unseen.append(f"{where} ({_name(kind)}: {refusal(error)})")

    def same_kind(self, kind: type, values: list[Any], where: str, depth: float) -> None:
        if kind in _PLAIN:
            # Version 2 of marshal knows no references, so equal values give equal bytes.
            for at in range(0, len(values), _CHUNK):
                self.hash.update(marshal.dumps(values[at : at + _CHUNK], 2))
        elif issubclass(kind, _NO_DATA) or kind in _LOCKS or _name(kind) in _LOCKS:
            pass  # a cache is what the question is about, and a lock says nothing of data
        elif issubclass(kind, NotImported):
            missing = [f"{where} (the module {each.name} is not imported yet)" for each in values]
            self.unseen += missing
        elif kind in _PATHS:
            self.column(list(map(str, values)), where, depth + 1)
        elif issubclass(kind, _BY_NAME):
            self.column(list(map(repr, values)), where, depth + 1)
        elif issubclass(kind, enum.Enum):
            self.column([(each._name_, each._value_) for each in values], where, depth + 1)
            self.column([ClassOf(kind)], where, depth + 1)
        elif _is_numpy_scalar(kind):
            # Dates of several units, or texts of several lengths, become equal in one array.
            if values[0].dtype.kind in "MmSUV":
                self.column([str(value.dtype) for value in values], where, depth + 1)
            self.column([sys.modules["numpy"].array(values)], where, depth + 1)
        elif kind is torch.Generator or _name(kind) in _GENERATORS:
            self.compound(
                kind, [each for each in values if not _is_programs_own(each)], where, depth
            )
        elif kind is ClassOf:
            classes = [self.classes.setdefault(id(each.kind), each) for each in values]
            self.compound(kind, classes, where, depth)
        else:
            self.compound(kind, values, where, depth)

    def compound(self, kind: type, values: list[Any], where: str, depth: float) -> None:
        """What has parts. Each is looked into once."""
        container = issubclass(kind, (list, tuple, dict))
        if container and len(values) > _FEW:
            inside = _elements(kind, values)
            if _PLAIN.issuperset(map(type, inside)):  # no way back from there, and many
                self.lengths_and(inside, values, where, depth)
                self.attributes(kind, values, where, depth, whole=True)
                return
        values = self.new(values)
        if not values:
            return
        if container:
            self.lengths_and(_elements(kind, values), values, where, depth)
            self.attributes(kind, values, where, depth, whole=True)
        elif base := next((base for base in (set, frozenset) if issubclass(kind, base)), None):
            for value in values:
                self.a_set(list(base.__iter__(value)), where, depth)
            self.attributes(kind, values, where, depth, whole=True)
        elif issubclass(kind, tuple(_EXTENDED)):
            exact = next(exact for base, exact in _EXTENDED.items() if issubclass(kind, base))
            self.column(list(map(exact, values)), where, depth + 1)
            self.attributes(kind, values, where, depth, whole=True)
        elif issubclass(kind, torch.Tensor) or _is_array(kind) or _is_buffer(kind):
            for value in values:
                feed_memory(self, value, where, depth)
            if not _is_map_of_file(kind):  # has its own memory as an attribute, too
                self.column([ClassOf(kind)], where, depth + 1)
                self.own_attributes(kind, values, where, depth)
        elif issubclass(kind, types.MappingProxyType):
            self.column([dict(value) for value in values], where, depth + 1)
        elif issubclass(kind, _VIEWS):
            self.column(list(map(list, values)), where, depth + 1)
        elif issubclass(kind, torch.Generator):
            states = [(str(value.device), value.get_state()) for value in values]
            self.column(states, where, depth + 1)
        elif (parts := code.parts_of(kind)) is not None:
            self.later += [(parts, value, where, depth) for value in values]
        elif issubclass(kind, weakref.ref):
            self.column([value() for value in values], where, depth + 1)
        elif issubclass(kind, logging.Logger):
            self.column([value.name for value in values], where, depth + 1)
        elif issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
            self.column([ClassOf(kind), *map(open_file, values)], where, depth + 1)
        elif issubclass(kind, os.DirEntry):
            self.column([value.path for value in values], where, depth + 1)
        elif issubclass(kind, PurePath):
            # Its slots hold what it computed on the way.
            self.column(list(map(str, values)), where, depth + 1)
            self.column([ClassOf(kind)], where, depth + 1)
            self.column(
                [dict(getattr(value, "__dict__", {})) for value in values], where, depth + 1
            )
        else:
            self.attributes(kind, values, where, depth)

    def lengths_and(self, inside: list[Any], values: list[Any], where: str, depth: float) -> None:
        length = next(base for base in (list, tuple, dict) if isinstance(values[0], base)).__len__
        self.hash.update(array("Q", map(length, values)).tobytes())
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

    def a_set(self, members: list[Any], where: str, depth: float) -> None:
        kinds = set(map(type, members))
        if len(kinds) == 1 and kinds < {int, float, str, bytes}:
            self.column(sorted(members), where, depth + 1)
            return
        found = [self.member(each, where, depth + 1) for each in members]
        self.column(sorted(each.digest for each in found), where, depth + 1)
        self.unseen += chain.from_iterable(each.unseen for each in found)

    def member(self, value: Any, where: str, depth: float) -> Contents:
        """What is in a member of a set: it has no number there, so it is looked at by itself."""
        if id(value) not in self.members:
            self.members[id(value)] = (value, None)
            self.members[id(value)] = (value, _Walk(self.members).look([value], where, depth))
        found = self.members[id(value)][1]
        return found or Contents("", (f"{where} (a set that contains itself)",))

    def named(self, parts: Mapping[str, Any], where: str, depth: float) -> None:
        """Parts that have names; a part is called by its owner's name and its own."""
        for name in sorted(parts):
            self.say(name)
            self.column([parts[name]], f"{where}.{name}", depth + 1)

    def attributes(
        self, kind: type, values: list[Any], where: str, depth: float, whole: bool = False
    ) -> None:
        """What the methods of one class do, and attributes and slots of its objects, a column for
        each. ``whole``: the rest of what they hold has been looked at."""
        if kind in _KNOWN_BASES:
            return
        self.column([ClassOf(kind)], where, depth + 1)
        shows_itself = bool(kind.__dictoffset__ or slots_of(kind))
        if not all(p in _KNOWN_BASES for p in kind.__mro__ if is_native(p)) or not (
            shows_itself or whole
        ):
            self.opaque(kind, values, where, depth)
        self.own_attributes(kind, values, where, depth)

    def own_attributes(self, kind: type, values: list[Any], where: str, depth: float) -> None:
        slots = slots_of(kind)
        if not (kind.__dictoffset__ or slots):
            return
        owned = [attributes_of(value, slots) for value in values]
        names = list(map(tuple, owned))
        if len(set(names)) == 1:
            for name in names[0]:
                self.say(name)
                self.column([own[name] for own in owned], f"{where}.{name}", depth + 1)
        else:
            self.column(owned, where, depth + 1)

    def opaque(self, kind: type, values: list[Any], where: str, depth: float) -> None:
        """Objects of a native type: what pickle would store of them. What they print need not be
        all that they are, so without that they are unseen."""
        reduce = copyreg.dispatch_table.get(kind)
        parts = []
        for value in values:
            try:
                reduced = reduce(value) if reduce else value.__reduce_ex__(5)
            except RecursionError:
                raise
            except Exception as error:
                self.unseen.append(f"{where} ({_name(kind)}: {refusal(error)})")
                continue
            if isinstance(reduced, tuple):
                made_by, arguments, *rest = reduced
                made_by, *arguments = (
                    ClassOf(kind) if each is kind else each
                    for each in (made_by, *(arguments or ()))
                )
                reduced = (made_by, arguments, *rest[:1], *(list(each or ()) for each in rest[1:3]))
            parts.append(reduced)
        self.column(parts, where, depth + 1)


def _elements(kind: type, values: list[Any]) -> list[Any]:
    """What lists, tuples or dicts hold, one after the other; of dicts first all keys. Of subclasses
    too: what those give when they are iterated over may be anything."""
    if issubclass(kind, dict):
        keys = chain.from_iterable(map(dict.__iter__, values))
        return [*keys, *chain.from_iterable(map(dict.values, values))]
    base = list if issubclass(kind, list) else tuple
    return list(chain.from_iterable(values if kind is base else map(base.__iter__, values)))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_programs_own(generator: Any) -> bool:
    """Whether it is the one behind ``random.random()`` and so on. All of a program draws from it,
    so that its state says nothing of one dataset, and differs in every process."""
    numpy: Any = sys.modules.get("numpy.random")
    draws: tuple[Any, ...] = (random.random, *([numpy.rand] if numpy else []))
    shared = (torch.default_generator, *(draw.__self__ for draw in draws))
    return any(generator is each for each in shared)


def _is_numpy_scalar(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def _is_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _is_map_of_file(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is numpy.memmap


def _is_buffer(kind: type) -> bool:
    return issubclass(kind, _BUFFERS)
