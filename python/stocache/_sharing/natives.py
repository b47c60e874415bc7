"""What an object holds itself, and whether it can hold more than it shows."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import types
from collections.abc import Callable, Mapping
from typing import Any

_HEAP_TYPE = 1 << 9  # the flag of classes that were made while the program ran
_IN_C = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)


def is_native(kind: type) -> bool:
    """Whether a class is written in C. Such a class may be made while the program runs, too; then
    its own members are: a class of Python has functions."""
    if not kind.__flags__ & _HEAP_TYPE:
        return True
    members = dict(vars(kind))
    new = members.get("__new__")
    return (isinstance(new, types.BuiltinFunctionType) and new.__self__ is kind) or any(
        isinstance(member, _IN_C) and member.__objclass__ is kind
        for name, member in members.items()
        if name not in ("__dict__", "__weakref__")
    )


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Where objects of the class keep what has a slot, by name. The names that ``__slots__`` lists
    need not be those: ``__x`` becomes ``_Kind__x``."""
    found: dict[str, types.MemberDescriptorType] = {}
    for parent in kind.__mro__:
        if is_native(parent):
            continue
        for name, member in list(vars(parent).items()):
            if isinstance(member, types.MemberDescriptorType):
                while name in found:  # a parent has one of the same name
                    name += "'"
                found[name] = member
    return found


def attributes_of(
    value: Any, slots: Mapping[str, types.MemberDescriptorType] | None = None
) -> dict[str, Any]:
    """The attributes that belong to the object itself, by name."""
    found = {}
    for name, slot in (slots or {}).items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(value)
    found.update(getattr(value, "__dict__", None) or {})
    return {name: found[name] for name in sorted(found, key=str)}


# What the items of a list, tuple or dict are called among its attributes.
ITEMS = "its items"

# What a class may derive from: what such an object holds beside its attributes, as a plain one.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    dict: dict.copy,
}


def base_of(kind: type) -> type | None:
    """What such an object is beside its attributes: a list, a tuple, a dict, or nothing, which is
    ``object``. None if it holds more than can be seen."""
    natives = [parent for parent in kind.__mro__ if is_native(parent)]
    if natives == [object]:
        return object if kind.__dictoffset__ or slots_of(kind) else None
    return natives[0] if natives[0] in _PLAIN and natives[1:] == [object] else None


def plain(value: Any, base: type) -> Any:
    """As an object of the base alone, past the methods of its own class."""
    return _PLAIN[base](value)


def open_file(file: Any) -> tuple[Any, ...]:
    """Which file it is: its name alone may be relative, or a number. What is only written to
    decides nothing."""
    name = str(getattr(file, "name", ""))
    if file.closed or not file.readable():
        return (name,)
    try:
        found = os.fstat(file.fileno())
    except (OSError, io.UnsupportedOperation):
        return (name, attributes_of(file))  # a member of an archive, say
    if stat.S_ISREG(found.st_mode):
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return (name, found.st_mode, found.st_rdev or found.st_ino)
