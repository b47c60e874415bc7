"""Which types are stored by their parts, and how."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stocache import _C
from stocache._types import families
from stocache._types.families import OverData

ToParts = Callable[[Any], Any]
FromParts = Callable[..., Any]

# Types that the codec stores itself. Nobody can take them from it.
_NATIVE = frozenset((
    type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, torch.Size,
))  # fmt: skip
# Of these it stores most. What it does not (sparse tensors, arrays of records) is stored by parts,
# which is said in this package and by nobody else.
_MOSTLY_NATIVE = frozenset(
    ("torch.Tensor", "numpy.ndarray", "numpy.memmap", "collections.OrderedDict")
)


class Registered(NamedTuple):
    cls: type | None
    """None if it was registered by its name."""
    to_parts: ToParts
    from_parts: FromParts
    stacks: bool


_registered: dict[str, Registered] = {}
"""By "module.name"."""


def register_type(
    cls: type | str, to_parts: ToParts, from_parts: FromParts, *, stacks: bool = False
) -> None:
    """Says how objects of a type are stored: by parts that are stored already.

    >>> class Money:
    ...     def __init__(self, amount, currency):
    ...         self.amount, self.currency = amount, currency
    >>> register_type(Money, lambda money: (money.amount, money.currency), Money)

    Call it in the module that defines the type, so that every process does that meets one.

    Args:
        cls: The type, or its name: "package.module.Type", which is looked up where somebody has
            imported the package. Subclasses are types of their own.
        to_parts: A function that gives a tuple of what such an object consists of: anything that is
            stored. It must not edit the object. It may give NotImplemented for an object that is
            not to be stored.
        from_parts: A function that makes the object again, of its parts:
            ``from_parts(*to_parts(value))`` equals ``value``.
        stacks: True for a subclass of torch.Tensor whose first part is its data, a plain tensor,
            and whose ``torch.stack`` gives the stacked data and otherwise looks at the other parts
            alone. Then batches are gathered natively, and the class is asked about them with
            tensors without elements.
    """
    for what, function in (("to_parts", to_parts), ("from_parts", from_parts)):
        if not callable(function):
            raise TypeError(f"{what} is {function!r}; a function is needed")
    if not isinstance(cls, (type, str)):
        raise TypeError(f'cls is {cls!r}; a type or its name is needed, as "package.module.Type"')
    name = cls if isinstance(cls, str) else _name_of(cls)
    if "." not in name or not all(name.split(".")):
        raise ValueError(f'cls is {cls!r}; a type or its name is needed, as "package.module.Type"')
    if cls in _NATIVE or name in _MOSTLY_NATIVE:
        raise ValueError(f"{name} is stored as it is; register a subclass of it")
    if stacks and isinstance(cls, type) and not issubclass(cls, torch.Tensor):
        raise ValueError(f"stacks is True, but {name} is no subclass of torch.Tensor")
    own = cls if isinstance(cls, type) else None
    _register(name, Registered(own, to_parts, from_parts, bool(stacks)))


def complete(name: str, to_parts: ToParts, from_parts: FromParts) -> None:
    """How those objects are stored that the codec leaves over of a type that it stores itself."""
    assert name in _MOSTLY_NATIVE
    _register(name, Registered(None, to_parts, from_parts, False))


def _register(name: str, registered: Registered) -> None:
    _registered[name] = registered
    _C.note_registration()


class Entry(NamedTuple):
    """What the codec asks for (``ask_parts`` in csrc/codec/classes.cpp)."""

    module: str
    name: str
    """Where every process finds the type."""
    to_parts: ToParts
    from_parts: FromParts
    stacks: bool
    over_data: bool
    """``from_parts`` is an ``OverData``, which the codec does itself."""
    registered: bool
    """Somebody said so of this very type; else it follows from what the type derives from."""


def entry_of(cls: type) -> Entry | None:
    """How objects of this type are stored by their parts; None if they are not."""
    module, name = str(cls.__module__), cls.__qualname__
    found = _find(cls)
    if found is None:
        family = families.family_of(cls)
        if family is None:
            return None
        return Entry(module, name, *family, isinstance(family.from_parts, OverData), False)
    known_as, registered = found
    if registered.cls is None and known_as != _name_of(cls):
        module, _, name = known_as.rpartition(".")  # where a package shows it
    made_over_data = isinstance(registered.from_parts, OverData)
    return Entry(module, name, *registered[1:], made_over_data, True)


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """What is stored of an object, if that is its parts; else None."""
    entry = entry_of(type(value))
    parts = NotImplemented if entry is None else entry.to_parts(value)
    return None if parts is NotImplemented else parts


def _find(cls: type) -> tuple[str, Registered] | None:
    name = _name_of(cls)
    found = _registered.get(name)
    if found is not None and found.cls in (None, cls):
        return name, found
    # A package may show a type under another name than that of the module that defines it.
    package = name.partition(".")[0]
    for other, registered in _registered.items():
        if registered.cls is cls or (
            registered.cls is None and other.partition(".")[0] == package and _loaded(other) is cls
        ):
            return other, registered
    return None


def _loaded(name: str) -> Any:
    """What is found under a name, without importing anything."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Named:
    """A function or a class by its name, which is imported at its first call."""

    __slots__ = ("_found", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.find()(*arguments)

    def find(self) -> Any:
        if self._found is None:
            module, _, attribute = self._name.rpartition(".")
            self._found = getattr(importlib.import_module(module), attribute)
        return self._found
