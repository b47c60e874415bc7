"""Types that nobody registered: how they are stored follows from what they derive from.

| family | parts |
| --- | --- |
| tensor subclasses with ``__tensor_flatten__`` | the tensors inside, and what that gives beside |
| types that torch's pytree knows | the children, and the context |
| tensor subclasses that torch pickles as any tensor | the data, and the attributes |
| subclasses of built-in types that are pickled as such | a plain one, and the attributes |
| combined flags | the number |

Nothing of a class is called to make such an object again but what torch calls (the first two) and
what makes a flag of its number.
"""

from __future__ import annotations

import copyreg
import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from stocache._torch import subclasses

# What a class defines that is to be pickled in a way of its own.
_PICKLING = (
    "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__",
    "__getnewargs_ex__",
)  # fmt: skip
_HEAP_TYPE = 1 << 9
_TWO_POINTERS = 16


class Family(NamedTuple):
    to_parts: Callable[[Any], Any]
    from_parts: Callable[..., Any]
    stacks: bool = False


def family_of(cls: type) -> Family | None:
    """How objects of this type are taken apart and made; None if it is of no family."""
    if issubclass(cls, torch.Tensor):
        if subclasses.is_flattened(cls):
            return Family(subclasses.flatten, partial(subclasses.unflatten, cls))
        return _tree(cls) or _tensor(cls)
    return _tree(cls) or _subclass_of_plain(cls) or _flag(cls)


def _is_pickled_as(base: type, cls: type) -> bool:
    """Whether a subclass is pickled as its base is: by what the base holds, and by attributes."""
    same = (getattr(cls, name, None) is getattr(base, name, None) for name in _PICKLING)
    return (
        all(same) and cls not in copyreg.dispatch_table and not copyreg._slotnames(cls)  # type: ignore[attr-defined]
    )


# Tensors


def _tensor(cls: type) -> Family | None:
    if cls is torch.Tensor or not _is_pickled_as(torch.Tensor, cls) or not subclasses.is_data(cls):
        return None
    return Family(data_and_attributes, OverData(lambda: cls), subclasses.is_stacked_as_data(cls))


def data_and_attributes(value: torch.Tensor) -> tuple[Any, ...]:
    """The data, and the attributes if there are any."""
    attributes = vars(value)
    data = subclasses.data_of(value)
    return (data, attributes) if attributes else (data,)


class OverData:
    """Makes objects of a class, which is found at the first of them, over their data."""

    __slots__ = ("_find", "_make")

    def __init__(self, find: Callable[[], type]) -> None:
        self._find = find
        self._make: Callable[[torch.Tensor], Any] | None = None

    def __call__(self, data: torch.Tensor, attributes: dict[str, Any] | None = None) -> Any:
        if self._make is None:
            self._make = subclasses.maker(self._find())
        value = self._make(data)
        if attributes is not None:
            value.__dict__.update(attributes)
        return value


# Trees


def _tree(cls: type) -> Family | None:
    known = subclasses.tree_functions(cls)
    if known is None:
        return None
    flatten, unflatten = known

    def to_parts(value: Any) -> tuple[Any, Any]:
        children, context = flatten(value)
        return list(children), context

    return Family(to_parts, unflatten)


# Subclasses of what is built in


def _subclass_of_plain(cls: type) -> Family | None:
    base = next((base for base in _PLAIN if issubclass(cls, base)), None)
    if base is None or cls is base or not _is_pickled_as(base, cls):
        return None
    # No state that only code of another language knows.
    own = cls.__mro__[: cls.__mro__.index(base)]
    if not all(kind.__flags__ & _HEAP_TYPE for kind in own):
        return None
    if cls.__basicsize__ > base.__basicsize__ + _TWO_POINTERS:
        return None
    as_plain, make = _PLAIN[base]

    def to_parts(value: Any) -> tuple[Any, ...]:
        attributes = getattr(value, "__dict__", None)
        plain = as_plain(value)
        return (plain, attributes) if attributes else (plain,)

    def from_parts(plain: Any, attributes: dict[str, Any] | None = None) -> Any:
        if type(plain) is not base:
            raise TypeError(f"it is made of a {base.__name__}, not of {plain!r:.50}")
        value = make(cls, plain)
        if attributes:
            value.__dict__.update(attributes)
        return value

    return Family(to_parts, from_parts)


def _made_dict(cls: type, items: dict[Any, Any]) -> Any:
    value: Any = dict.__new__(cls)
    dict.update(value, items)
    return value


def _made_list(cls: type, items: list[Any]) -> Any:
    value: Any = list.__new__(cls)
    list.extend(value, items)
    return value


# What a subclass is as a plain one, past its own methods; and how it is made of that, without
# __init__, as pickle makes it.
_PLAIN: dict[type, tuple[Callable[[Any], Any], Callable[[type, Any], Any]]] = {
    dict: (dict.copy, _made_dict),
    list: (lambda value: list.__getitem__(value, slice(None)), _made_list),
    tuple: (lambda value: tuple.__getitem__(value, slice(None)), tuple.__new__),
    str: (str.__str__, str.__new__),
    bytes: (lambda value: bytes(memoryview(value)), bytes.__new__),
    int: (int.__pos__, int.__new__),
    float: (float.__pos__, float.__new__),
}


# Flags


def _flag(cls: type) -> Family | None:
    return Family(lambda value: (value.value,), cls) if issubclass(cls, enum.Flag) else None
