"""What a program has changed about torch's default_collate."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data._utils import collate as torchs


def changed_kinds(functions: dict[Any, Any]) -> bytes:
    """The kinds of parts (see ``Kind`` in the codec) that default_collate would not collate in
    torch's own way, if ``functions`` were its default_collate_fn_map."""
    try:
        changed = [kind for kind, kinds_of in _native() if _differs(functions, kinds_of)]
        named = (key for key in functions if key not in _TORCHS)
        if any(issubclass(key, tuple) or issubclass(tuple, key) for key in named):
            changed.append(b"P")  # a namedtuple is any subclass of tuple
    except TypeError:  # a key that is no type: nothing is known
        return b"".join(kind for kind, _ in _native()) + b"P"
    return b"".join(changed)


def function_for(kind: type) -> Any:
    """What default_collate calls for objects of this type; None if they are containers to it."""
    return _function_for(torchs.default_collate_fn_map, kind)


def is_stacked(kind: type) -> bool:
    """Whether default_collate stacks objects of this type in torch's own way."""
    return function_for(kind) is torchs.collate_tensor_fn


def _differs(functions: dict[Any, Any], types: tuple[tuple[type, str | None], ...]) -> bool:
    return any(
        _function_for(functions, kind) is not (name and getattr(torchs, name))
        for kind, name in types
    )


def _function_for(functions: dict[Any, Any], kind: type) -> Any:
    """As default_collate looks for it."""
    if kind in functions:
        return functions[kind]
    return next((functions[key] for key in functions if issubclass(kind, key)), None)


_TENSOR = (torch.Tensor, "collate_tensor_fn")
_INT = (int, "collate_int_fn")
_FLOAT = (float, "collate_float_fn")
_LIST = (list, None)
_KINDS: tuple[tuple[bytes, tuple[tuple[type, str | None], ...]], ...] = (
    (b"T", (_TENSOR,)),
    (b"?", ((bool, "collate_int_fn"),)),
    (b"i", (_INT,)),
    (b"f", (_FLOAT,)),
    (b"s", ((str, "collate_str_fn"),)),
    (b"y", ((bytes, "collate_str_fn"),)),
    (b"(", ((tuple, None),)),
    (b"[", (_LIST,)),
    (b"l", (_LIST, _INT)),
    (b"d", (_LIST, _FLOAT)),
    (b"Z", ((torch.Size, None), _INT)),
    (b"{", ((dict, None),)),
    (b"O", ((OrderedDict, None),)),
)


def _native() -> Iterator[tuple[bytes, tuple[tuple[type, str | None], ...]]]:
    """The kinds that are gathered natively, with what torch has for them."""
    yield from _KINDS
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # without it there are none
        # Arrays are made tensors, and collated as those.
        yield b"A", ((numpy.ndarray, "collate_numpy_array_fn"), _TENSOR)
        scalars = {numpy.dtype(code).type for code in "?bBhHiIlLqQefdFD"}
        yield b"a", tuple((scalar, "collate_numpy_scalar_fn") for scalar in scalars)


def _torchs_keys() -> set[Any]:
    keys: set[Any] = {torch.Tensor, float, int, str, bytes}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        keys |= {numpy.ndarray, (numpy.bool_, numpy.number, numpy.object_)}
    return keys


_TORCHS = _torchs_keys()
