"""Whether two samples are equal, part by part, whatever they are made of.

``==`` is no answer: on tensors it gives a tensor, and on most objects it means "the same object".
Nor are the bytes of pickles: equal objects may have different ones. So objects are compared by what
pickle would store of them: tensors and arrays by their elements, others by their class and state.

Floating-point numbers are equal up to rounding. The main process computes with all its threads and
a worker with one, so that sums are added up in another order; another processor or version of a
library does the same. A sample that differs by that alone is the same sample.
"""

from __future__ import annotations

import copyreg
import math
import numbers
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from stocache import _C
from stocache._pickling import is_storage, reduced
from stocache._torch.subclasses import untyped
from stocache._types.registry import parts_of

# Its parts, or by name: what pickle stores of these is not what they consist of.
_ATOMS = (str, bytes, bytearray, type(None), torch.Size, torch.dtype, torch.device, torch.layout)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)

# So much of the largest element may be rounding: some hundred times what float32 rounds to (6e-8),
# as errors add up over long sums and grow where nearly equal numbers are subtracted; and far less
# than the smallest change to a picture (1 of 255). float64 and Python's floats are no more exact:
# they often come from float32. Shorter types get two units in their last place.
_ROUNDING = 1e-5

# Whole numbers below this are no rounding of others, however large the largest element is: labels
# beside a timestamp. Above it, in shorter types earlier, a rounded number may be whole by chance.
_WHOLE = 2**16


def same(one: Any, other: Any) -> bool | None:
    """Whether these are equal, up to rounding. NaN equals NaN. None if it cannot be told: an object
    does not say what it consists of, or its code raises."""
    try:
        return _Comparison().same(one, other)
    except Exception:
        return None


def same_as_stored(records: _C.Records, index: int, sample: Any, allow_pickle: bool) -> bool | None:
    """Whether the stored sample equals this one. None if that cannot be told, or the stored one is
    gone or cannot be read."""
    try:
        differs = records.differs(index, sample, allow_pickle)
    except ValueError:  # this one cannot be stored
        differs = True
    if differs is False:
        return True
    try:
        stored = records.get(index, allow_pickle, False)
        if stored is _C.MISS:  # it may be below memory
            (stored,) = records.get_many([index], allow_pickle, False)
    except MemoryError:
        raise
    except Exception:
        if not records.is_open():
            raise
        return None
    return None if stored is _C.MISS else same(stored, sample)


class _Comparison:
    def __init__(self) -> None:
        # Pairs under way or done, so that cycles end; alive, so that no other object has their id.
        self._pairs: dict[tuple[int, int], tuple[Any, Any]] = {}

    def same(self, one: Any, other: Any) -> bool | None:
        if one is other:
            return True
        kind = type(one)
        if kind is not type(other):
            return False
        if isinstance(one, _BY_NAME):
            return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
        key = (id(one), id(other))
        if key in self._pairs:
            return True  # unless it was found to differ: then so do the samples
        self._pairs[key] = (one, other)
        # The codec first: it is quick, also for long lists.
        stored = _encoded(one)
        if stored is not None and stored == _encoded(other):
            return True
        if kind in (tuple, list):
            return len(one) == len(other) and self._all(zip(one, other, strict=True))
        if kind is dict:
            items = zip(one.items(), other.items(), strict=True)
            return len(one) == len(other) and self._all(items)
        if kind in (set, frozenset):
            return _same_sets(one, other)
        parts, others = _stored_parts(one), _stored_parts(other)
        if parts is not None and others is not None:
            found = self.same(parts, others)
            # A class with an equality of its own knows better than its parts.
            return True if not found and _says_equal(one, other) else found
        if isinstance(one, numbers.Number):
            return _same_numbers(one, other)
        if stored is not None and isinstance(one, torch.Tensor):
            return _same_elements(one, other)
        if isinstance(one, _ATOMS):
            return bool(one == other)
        if isinstance(one, pickle.PickleBuffer):
            return bytes(one.raw()) == bytes(other.raw())
        if is_storage(one):
            return torch.equal(_bytes_of(one), _bytes_of(other))
        if stored is not None and hasattr(one, "dtype") and hasattr(one, "shape"):
            return _same_elements(one, other)
        found = self._same_state(one, other)
        # A class with an equality of its own knows better than its state.
        return True if not found and _says_equal(one, other) else found

    def _all(self, pairs: Iterable[tuple[Any, Any]]) -> bool | None:
        """False if any pair differs; else None if any cannot be told."""
        told: bool | None = True
        for one, other in pairs:
            found = self.same(one, other)
            if found is False:
                return False
            if found is None:
                told = None
        return told

    def _same_state(self, one: Any, other: Any) -> bool | None:
        try:
            stored, given = _reduced(one), _reduced(other)
        except Exception:  # not even pickle knows what it consists of
            return None
        if isinstance(stored, str) or isinstance(given, str):
            return bool(stored == given)  # a name
        return self.same(_parts(stored), _parts(given))


def _says_equal(one: Any, other: Any) -> bool:
    """Whether ``==`` gives True itself: not a tensor, not an error."""
    try:
        return (one == other) is True
    except Exception:
        return False


def _encoded(value: Any) -> Any:
    try:
        return _C.codec_encode(value, False)
    except Exception:
        return None


def _stored_parts(value: Any) -> Any:
    try:
        return parts_of(value)
    except Exception:  # it is not stored
        return None


def _bytes_of(storage: Any) -> torch.Tensor:
    memory = untyped(storage)
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _reduced(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return reduced(value)
    reducer = copyreg.dispatch_table.get(type(value))
    return value.__reduce_ex__(5) if reducer is None else reducer(value)


def _parts(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Function, arguments, state, items of a list, items of a dict, setter: as plain containers."""
    function, arguments, state, items, pairs, setter = (given + (None,) * 5)[:6]
    if isinstance(state, tuple):  # with slots
        state = tuple(map(_in_order, state))
    return (
        function,
        arguments,
        _in_order(state),
        None if items is None else list(items),
        None if pairs is None else list(pairs),
        setter,
    )


def _in_order(state: Any) -> Any:
    """Attributes by name: in which order they were set says nothing."""
    if type(state) is dict and all(isinstance(name, str) for name in state):
        return sorted(state.items(), key=lambda item: item[0])
    return state


def _same_numbers(one: Any, other: Any) -> bool:
    if one == other or (one != one and other != other):
        return True
    if not isinstance(one, (float, complex)):  # numpy's double and complex are such, too
        return hasattr(one, "dtype") and _same_elements(one, other)
    return bool(abs(one - other) <= _ROUNDING * max(abs(one), abs(other)) < math.inf)


def _same_elements(one: Any, other: Any) -> bool:
    """Of tensors or arrays: whether what differs are NaNs of different bits, or rounding."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = (one == other) | ((one != one) & (other != other))
    if same.all():
        return True
    rounding = _rounding(one.dtype)
    if rounding is None:
        return False
    whole = min(_WHOLE, 0.25 / _eps(one.dtype))
    one, other = _widened(one), _widened(other)
    largest = torch.where(one.isfinite(), one.abs(), 0.0).max()
    near = (one - other).abs() <= rounding * largest
    if not bool((near | _as_tensor(same)).all()):
        return False
    one, other = _parts_of(one), _parts_of(other)
    both_whole = _is_whole(one, whole) & _is_whole(other, whole)
    return not bool((both_whole & (one != other)).any())


def _is_whole(elements: torch.Tensor, below: float) -> torch.Tensor:
    return (elements == elements.round()) & (elements.abs() < below)


def _parts_of(elements: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(elements.resolve_conj()) if elements.is_complex() else elements


def _rounding(dtype: Any) -> float | None:
    """How much of the largest element may be rounding. None: nothing."""
    if isinstance(dtype, torch.dtype):
        inexact = dtype.is_floating_point or dtype.is_complex
    else:
        inexact = dtype.kind in "fc"
    return max(_ROUNDING, 2 * _eps(dtype)) if inexact else None


def _eps(dtype: Any) -> float:
    """The step from 1 to the next number of this type."""
    if isinstance(dtype, torch.dtype):
        return torch.finfo(dtype).eps
    return float(sys.modules["numpy"].finfo(dtype).eps)


def _widened(elements: Any) -> torch.Tensor:
    if isinstance(elements, torch.Tensor):
        return elements.to(torch.complex128 if elements.is_complex() else torch.float64)
    return _as_tensor(elements.astype("c16" if elements.dtype.kind == "c" else "f8"))


def _as_tensor(elements: Any) -> torch.Tensor:
    """Not by torch.as_tensor, which would take them to the default device."""
    if isinstance(elements, torch.Tensor):
        return elements
    return torch.from_numpy(sys.modules["numpy"].asarray(elements))


def _same_sets(one: Any, other: Any) -> bool | None:
    if len(one) != len(other):
        return False
    members, others = {_encoded(item) for item in one}, {_encoded(item) for item in other}
    if None not in members | others:
        return members == others
    return True if _says_equal(one, other) else None
