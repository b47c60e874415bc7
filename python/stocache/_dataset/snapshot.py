"""What making a sample changes, so that it can be put back where it was made only to look at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stocache._torch.generators import (
    generators_of,
    have_moved,
    is_generator,
    is_set,
    objects_of,
    set_apart,
    set_states,
    slots_in,
    states,
)

# What a transform counts; and not a file, say, that it has opened.
_PLAIN = (int, float, complex, str, bytes, tuple, type(None))
_MOST_BYTES = 1 << 16  # of a tensor that is kept
_MOST_ITEMS = 64  # of a container that is kept
_MISSING = object()


class States:
    """Of random numbers: of the program, and of the generators that belong to something."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self._generators = generators_of(of)
        self._states = self._watched = states(self._generators)

    def watch(self) -> None:
        """From here on it is seen who uses them."""

    def were_used(self) -> bool:
        """Whether any were drawn or seeded since."""
        return have_moved(self._watched, states(self._generators))

    def put_back(self) -> None:
        set_states(self._generators, self._states)

    def numbers_back(self) -> None:
        """If watching has changed them."""


class Snapshot(States):
    """Of random numbers, and of what else a transform changes: counters, small buffers; but not
    what it opens. Generators that are made later, by the dataset as well, go away again."""

    def __init__(self, dataset: Any, transform: Any, owner: Any) -> None:
        super().__init__([dataset, transform])
        objects = objects_of(self._of)
        # A method may be the transform, and is of the dataset.
        own = set(map(id, objects_of(transform, without=owner)))
        self._undo: list[Callable[[], None]] = []
        for each in objects:
            with contextlib.suppress(Exception):  # it does not want to be looked at
                self._keep(each, id(each) in own)

    def watch(self) -> None:
        # Or one who seeds them as they are would not be seen.
        self._watched = set_apart(self._generators)

    def were_used(self) -> bool:
        known = set(map(id, self._generators))
        made = any(id(each) not in known for each in generators_of(self._of))
        return made or super().were_used()

    def put_back(self) -> None:
        for undo in self._undo:
            undo()
        self.numbers_back()

    def numbers_back(self) -> None:
        set_states(self._generators, self._states)

    def _keep(self, each: Any, is_own: bool) -> None:
        kind = type(each)
        if is_generator(each):
            return
        if kind is dict:
            self._keep_items(each, is_own)
        elif kind is list:
            if is_own and len(each) <= _MOST_ITEMS:
                self._undo.append(partial(each.__setitem__, slice(None), each[:]))
        elif isinstance(each, torch.Tensor):
            if is_own and each.nbytes <= _MOST_BYTES:
                self._undo.append(_elements_of(each))
        elif not isinstance(each, type):
            if kind.__dictoffset__:
                self._keep_items(vars(each), is_own)
            if slots := slots_in(kind):
                self._undo.append(_changes(_Slots(each, slots), is_own))

    def _keep_items(self, items: dict[Any, Any], is_own: bool) -> None:
        if len(items) <= _MOST_ITEMS:
            self._undo.append(_changes(items, is_own))


def _changes(items: Any, is_own: bool) -> Callable[[], None]:
    before = dict(items.items())

    def undo() -> None:
        now = dict(items.items())
        for name in {**now, **before}:
            value, old = now.get(name, _MISSING), before.get(name, _MISSING)
            if value is old:
                continue
            if not is_generator(value) and not (is_own and _is_plain(value) and _is_plain(old)):
                continue
            if old is _MISSING:
                del items[name]
            else:
                items[name] = old

    return undo


def _is_plain(value: Any) -> bool:
    return value is _MISSING or type(value) in _PLAIN


def _elements_of(tensor: torch.Tensor) -> Callable[[], None]:
    before = tensor.detach().clone()

    def undo() -> None:
        with torch.no_grad():
            if not torch.equal(tensor, before):
                tensor.copy_(before)

    return undo


class _Slots:
    """The slots of an object as a dict."""

    def __init__(self, owner: Any, slots: tuple[Any, ...]) -> None:
        self._owner = owner
        self._slots = slots

    def items(self) -> list[tuple[Any, Any]]:
        owner = self._owner
        return [(slot, slot.__get__(owner)) for slot in self._slots if is_set(slot, owner)]

    def __setitem__(self, slot: Any, value: Any) -> None:
        slot.__set__(self._owner, value)

    def __delitem__(self, slot: Any) -> None:
        slot.__delete__(self._owner)
