"""Places in a sample: what stands where, and the same sample with something else there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

Path = tuple[Any, ...]
"""Keys, indices and names of fields, from the outermost one on."""


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Any, Path]]:
    """All that is in a sample, and where."""
    yield node, path
    kind = type(node)  # which says more than isinstance(), that asks the node
    if issubclass(kind, dict):
        inside: Any = node.items()
    elif issubclass(kind, (list, tuple)):
        inside = enumerate(node)
    elif _has_fields(node):
        inside = ((field.name, getattr(node, field.name, None)) for field in fields(node))
    else:
        return
    for key, each in inside:
        yield from walk(each, (*path, key))


def is_container(node: Any) -> bool:
    """Whether ``walk`` looks into it."""
    return issubclass(type(node), (dict, list, tuple)) or _has_fields(node)


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = getattr(value, key) if _has_fields(value) else value[key]
    return value


def put(sample: Any, path: Path, value: Any) -> Any:
    """A sample with another value there; the rest of it is the same."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    inside = put(at(sample, path[:1]), rest, value)
    if isinstance(sample, tuple):
        parts = [*sample[:key], inside, *sample[key + 1 :]]
        make = getattr(type(sample), "_make", type(sample))
        return make(parts)
    made = copy.copy(sample)
    if _has_fields(sample):
        object.__setattr__(made, key, inside)  # also of one that is frozen
    else:
        made[key] = inside
    return made


def _has_fields(value: Any) -> bool:
    kind = type(value)
    return is_dataclass(kind) and not issubclass(kind, (dict, list, tuple, type))
