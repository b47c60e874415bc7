"""The ``__getitems__`` of a wrapped dataset, by which many samples are loaded at once.

torch hands whatever ``__getitems__`` gives straight to ``collate_fn``. Most give a list with a
sample for each index, as torch's Subset and Hugging Face's datasets do: those samples can be
cached. Others give the batch as a whole: a dict of columns, a tensor, a tuple of both. Nothing says
which part of that belongs to which sample, so it is handed on as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stocache._dataset import attributes
from stocache._dataset.comparing import random_numbers_kept

Function = Callable[[list[Any]], Any]


class WholeBatch(Exception):
    """The dataset gave a batch, and not its samples."""

    def __init__(self, indices: list[int], batch: Any) -> None:
        super().__init__()
        self.indices = indices
        self.batch = batch


class Together:
    """Whether a dataset's ``__getitems__`` gives samples is known once it was called."""

    def __init__(self) -> None:
        self._gives_samples: bool | None = None

    def gives_whole_batches(self) -> bool:
        return self._gives_samples is False

    def is_not_for(self, count: int) -> bool:
        """Whether this many samples are better loaded one by one."""
        return self._gives_samples is False or (self._gives_samples is True and count == 1)

    def samples(self, given: Any, function: Function, indices: list[int]) -> Sequence[Any]:
        """What was ``given`` for ``indices``, if that is a sample for each; or WholeBatch."""
        fits = _is_list_of(given, len(indices))
        if self._gives_samples is None:
            self._gives_samples = fits and (
                not _may_be_columns(given, len(indices)) or _is_longer_for_more(function, indices)
            )
        if not (fits and self._gives_samples):
            raise WholeBatch(indices, given)
        return given  # type: ignore[no-any-return]


def function_of(source: Any) -> Function | None:
    """The dataset's ``__getitems__``, unless only its ``__getitem__`` says what its samples are."""
    kind = type(source)
    if not hasattr(kind, "__getitems__") or attributes.defines_items_anew(kind):
        return None
    return getattr(source, "__getitems__", None)


def _is_list_of(found: Any, count: int) -> bool:
    # No subclass: a named tuple has fields, which are columns.
    return type(found) in (list, tuple) and len(found) == count


def _may_be_columns(parts: Any, count: int) -> bool:
    """Whether these may be columns, by chance as many as there are indices: any of that length.
    Beside columns there may be what belongs to the whole batch, such as its length."""
    return any(_may_be_column(part, count) for part in parts)


def _may_be_column(part: Any, count: int) -> bool:
    if part is None or isinstance(part, (str, bytes, int, float, complex)):
        return False
    if isinstance(part, Mapping):
        return _may_be_columns(part.values(), count)
    if isinstance(part, (list, tuple)):
        return len(part) == count or _may_be_columns(part, count)
    shape = getattr(part, "shape", None)
    return not isinstance(shape, tuple) or tuple(shape[:1]) == (count,)


def _is_longer_for_more(function: Function, indices: list[int]) -> bool:
    """There are as many columns whatever the number of indices, but not as many samples. Where it
    gives nothing for another number, nothing is known of it."""
    others = indices[:1] if len(indices) > 1 else indices * 2
    with random_numbers_kept(), contextlib.suppress(Exception):
        return _is_list_of(function(others), len(others))
    return False
