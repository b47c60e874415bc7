"""What is another in every process by itself: why equal datasets have different fingerprints."""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from stocache._sharing.natives import ITEMS, attributes_of, base_of, plain, slots_of
from stocache._torch.generators import is_generator

# A dataset is looked at after it was made, and not long after.
_LATELY = 24 * 3600.0
_OBJECTS = 2000
_ITEMS = 64


def changes_by_itself(dataset: Any, names: Iterable[str]) -> list[str]:
    """In words, for each of these attributes in which there is such a thing."""
    found = []
    for name in names:
        try:
            value = dataset
            for part in name.split("."):
                value = _part(value, part)
        except Exception:  # it is code, or the number of samples
            continue
        if (what := next(_inside(value, name), None)) is not None:
            found.append(what)
    return found


def _part(value: Any, name: str) -> Any:
    kind = type(value)
    if name == ITEMS:
        return plain(value, base_of(kind) or object)
    return attributes_of(value, slots_of(kind))[name]


def _inside(value: Any, place: str) -> Iterator[str]:
    met: dict[int, Any] = {}
    waiting = [(place, value)]
    while waiting and len(met) < _OBJECTS:
        where, each = waiting.pop(0)
        if id(each) in met:
            continue
        met[id(each)] = each
        if (what := _what_changes(each)) is not None:
            yield f"{where} is {what}"
        kind = type(each)
        if kind in (list, tuple):
            waiting += [(f"{where}[{k}]", item) for k, item in enumerate(each[:_ITEMS])]
        elif kind is dict:
            waiting += [(f"{where}[{k!r}]", item) for k, item in islice(each.items(), _ITEMS)]
        elif kind.__dictoffset__ and not issubclass(kind, (type, torch.Tensor)):
            with contextlib.suppress(Exception):  # it does not want to be looked at
                own = islice(vars(each).items(), _ITEMS)
                waiting += [(f"{where}.{k}", item) for k, item in own]


def _what_changes(value: Any) -> str | None:
    if is_generator(value):
        return f"a random generator ({type(value).__name__}), of which every process has its own"
    if type(value) in (int, float) and abs(time.time() - value) < _LATELY:
        return "the time at which it was set"
    if type(value) is int and abs(time.time_ns() - value) < _LATELY * 1e9:
        return "the time at which it was set"
    if type(value) is datetime.datetime and abs(time.time() - value.timestamp()) < _LATELY:
        return "the time at which it was set"
    if type(value) is uuid.UUID and value.version in (1, 4):
        return "a UUID"
    return None
