"""Whether two processes hold the same data: a digest of an object's contents.

Equal digests must mean equal data, so everything that can be looked into goes in: attributes,
slots, elements, closures, arguments of partials. Nothing that differs between processes by nature
does: no addresses, no hash order.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import torch

from stocache import _C

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 32
_MAX_OBJECTS = 1_000_000
# Larger arrays count by an even sample of their elements.
_WHOLE_ARRAY_BYTES = 64 << 20
_SAMPLED_ELEMENTS = 1 << 20
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def digest(*values: object) -> str:
    """A short text that is equal in two processes if the values are."""
    feeder = _Feeder()
    for value in values:
        feeder.feed(value, 0)
    return feeder.hash.hexdigest()


class _Feeder:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.left = _MAX_OBJECTS
        self.path: set[int] = set()  # what is being looked into, so that cycles end

    def say(self, *words: object) -> None:
        self.hash.update(repr(words).encode())

    def feed(self, value: object, depth: int) -> None:
        self.left -= 1
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, _PLAIN):
            self.say(kind, value)
        elif isinstance(value, _C.Cache) or depth > _MAX_DEPTH or self.left < 0:
            self.say(kind)  # a cache is what the question is about, not part of the data
        elif id(value) in self.path:
            self.say("cycle", kind)
        else:
            self.path.add(id(value))
            self.say(kind)
            try:
                self.look_into(value, depth + 1)
            except Exception as error:  # somebody's object that does not want to be looked at
                self.say("opaque", type(error).__qualname__)
            self.path.discard(id(value))

    def look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple, dict)) and self.feed_at_once(value):
            return
        if isinstance(value, Mapping):
            self.feed_all((part for item in value.items() for part in item), len(value), depth)
        elif isinstance(value, range):
            self.say(value)
        elif isinstance(value, (list, tuple)):
            self.feed_all(value, len(value), depth)
        elif isinstance(value, (set, frozenset)):
            self.feed_all(sorted(map(digest, value)), len(value), depth)
        elif isinstance(value, (PurePath, torch.dtype, torch.device)):
            self.say(str(value))
        elif isinstance(value, torch.Tensor):
            self.feed_tensor(value)
        elif hasattr(value, "__array_interface__"):
            self.feed_array(value, depth)
        elif isinstance(value, functools.partial):
            self.feed_all((value.func, value.args, value.keywords), 3, depth)
        elif isinstance(value, types.FunctionType):
            self.feed_function(value, depth)
        elif isinstance(value, types.MethodType):
            self.feed_all((value.__func__, value.__self__), 2, depth)
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            self.say(getattr(value, "__module__", ""), value.__name__)
        elif isinstance(value, torch.Generator):
            pass  # randomness after the cache is each rank's own
        else:
            self.feed_object(value, depth)

    def feed_at_once(self, value: Any) -> bool:
        """Nested plain values at the speed of C. Version 2 of marshal knows no references, so equal
        values give equal bytes."""
        try:
            self.hash.update(marshal.dumps(value, 2))
        except ValueError:
            return False
        return True

    def feed_all(self, values: Iterable[object], count: int, depth: int) -> None:
        self.say(count)
        for value in values:
            self.feed(value, depth)

    def feed_tensor(self, value: torch.Tensor) -> None:
        self.say(tuple(value.shape), str(value.dtype), str(value.device))
        flat = value.detach().cpu().reshape(-1)
        if flat.numel() * flat.element_size() > _WHOLE_ARRAY_BYTES:
            flat = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)]
        self.hash.update(bytes(flat.contiguous().view(torch.uint8).numpy()))

    def feed_array(self, value: Any, depth: int) -> None:
        self.say(value.shape, str(value.dtype), str(getattr(value, "filename", "")))
        if value.dtype.hasobject:
            self.feed(value.tolist(), depth)
            return
        flat = value.reshape(-1)
        if value.nbytes > _WHOLE_ARRAY_BYTES:
            flat = flat[:: max(1, value.size // _SAMPLED_ELEMENTS)]
        self.hash.update(flat.tobytes())

    def feed_function(self, value: types.FunctionType, depth: int) -> None:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        self.say(value.__module__, value.__qualname__)
        parts = (_shape(value.__code__), value.__defaults__, value.__kwdefaults__, cells)
        self.feed_all(parts, len(parts), depth)

    def feed_object(self, value: object, depth: int) -> None:
        slots = [
            name
            for kind in type(value).__mro__
            for name in _names(getattr(kind, "__slots__", ()))
            if name not in ("__dict__", "__weakref__") and hasattr(value, name)
        ]
        attributes = {name: getattr(value, name) for name in slots}
        own = getattr(value, "__dict__", None)
        if own is None and not slots:
            self.say(_ADDRESS.sub("", repr(value)))
            return
        attributes.update(own or {})
        for name in sorted(attributes):
            self.say(name)
            self.feed(attributes[name], depth)


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, without where it stands: a line moved down changes nothing."""
    constants = [_shape(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, constants, names, code.co_flags, code.co_argcount)


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
