"""The ``__getitems__`` of a wrapped dataset, by which many samples are loaded at once.

torch hands whatever ``__getitems__`` gives straight to ``collate_fn``. Most give a list with a
sample for each index, as torch's Subset and Hugging Face's datasets do: those samples can be
cached. Others give the batch as a whole: a dict of columns, a tensor, a tuple of both. Nothing says
which part of that belongs to which sample, so it is handed on as it is.

A list of as many may be no samples of these indices either: it comes in the order in which a file
is read best, or padded to the longest of the batch. So some are compared with what the dataset
gives for a single index.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Subset

from stocache._compare import same
from stocache._dataset import attributes
from stocache._dataset.comparing import Countdown
from stocache._dataset.copying import as_stored
from stocache._torch.generators import random_numbers_kept

Function = Callable[[list[Any]], Any]

# So many batches are compared by a process and those that it starts. Those in ascending order look
# right also where they were sorted, so they have a number of their own.
_UNORDERED = 4
_ASCENDING = 3


class WholeBatch(Exception):
    """The dataset gave a batch, and not its samples; ``why`` goes on after "__getitems__"."""

    def __init__(self, indices: list[int], batch: Any, why: str) -> None:
        super().__init__()
        self.indices = indices
        self.batch = batch
        self.why = why


class Together:
    """Whether a dataset's ``__getitems__`` gives samples is known once it was called."""

    def __init__(self, source: Any) -> None:
        self._gives_samples: bool | None = None
        self._calls = 0  # for more than one sample
        self._has_agreed = False
        # Counted down by the process that finds other samples than those of single indices. It
        # holds for all: what any of them has stored is in doubt.
        self._until_others = Countdown(1) if _is_compared(source) else None
        # How many are still to be compared. Two that count at once may count as one, which is fine.
        self._looks = [
            Countdown(n if _is_compared(source) else 0) for n in (_ASCENDING, _UNORDERED)
        ]

    def gives_whole_batches(self) -> bool:
        return self._gives_samples is False or self.gives_others()

    def gives_others(self) -> bool:
        """Whether its samples were found to be others than those of single indices."""
        return self._until_others is not None and self._until_others.left == 0

    def samples(
        self, source: Any, function: Function, indices: list[int], given: Any
    ) -> Sequence[Any]:
        """What was ``given`` for ``indices``, if that is a sample for each; or WholeBatch."""
        fits = _is_list_of(given, len(indices))
        may_be_columns = self._gives_samples is None and fits and _may_be_columns(given, len(given))
        if self._gives_samples is None and not may_be_columns:
            self._gives_samples = fits
        is_next = fits and self._is_next(source, indices)
        why = None
        if may_be_columns or is_next:
            # Who is asked again may answer in the same memory. What cannot be stored needs no look.
            kept = [as_stored(sample) for sample in given]
            if may_be_columns:
                self._gives_samples = _is_longer_for_more(function, indices)
            if is_next and self._gives_samples:
                why = self._find_others(source, function, indices, kept)
            if same(kept, list(given)) is False:
                given = kept
        if not (fits and self._gives_samples):
            why = why or _no_list(given, len(indices))
        if why is not None:
            raise WholeBatch(indices, given, why)
        return given  # type: ignore[no-any-return]

    def _is_next(self, source: Any, indices: list[int]) -> bool:
        """Whether these are to be compared with single samples: the first in another order than
        the ascending one, and some others, whose number is a power of two. A single index only
        before all others."""
        if not _is_compared(source):
            return False
        if len(indices) == 1:
            return self._calls == 0
        self._calls += 1
        unordered = any(map(operator.gt, indices, indices[1:]))
        looks = self._looks[unordered]
        if looks.left == 0 or not (unordered or self._calls & (self._calls - 1) == 0):
            return False
        looks.count()
        return True

    def _find_others(
        self, source: Any, function: Function, indices: list[int], samples: Sequence[Any]
    ) -> str | None:
        """Compares these with what the dataset gives for the same indices the other way round: that
        shows any order of its own. And one of them with what its index alone gives: that shows what
        was made to fit. Says so, unless the dataset gives other samples every time."""
        kind = type(source).__name__
        k = self._calls % len(indices)  # another place each time
        with random_numbers_kept():
            try:
                if not self._is_the_same_reversed(function, indices, samples):
                    return self._others(kind)
                single = as_stored(_single(source, function, indices[k]))
                equal = same(samples[k], single)
                self._has_agreed = self._has_agreed or equal is True
                if equal is not False:
                    return None
                again = _single(source, function, indices[k])
                if not same(single, again) or not self._repeats(function, indices, samples):
                    return None
            except Exception as error:
                if self._has_agreed:  # of late there is trouble, of which others will tell
                    return None
                self._gives_samples = False
                return f"gives samples where {kind}[{indices[k]}] raises {error!r}"
        return self._others(kind)

    def _is_the_same_reversed(
        self, function: Function, indices: list[int], samples: Sequence[Any]
    ) -> bool:
        """Also if it raises, or if nothing can be concluded."""
        if len(indices) < 2:
            return True
        with contextlib.suppress(Exception):
            reversed_ = [as_stored(sample) for sample in function(indices[::-1])][::-1]
            if same(list(samples), reversed_) is False:
                return not self._repeats(function, indices, samples)
        return True

    @staticmethod
    def _repeats(function: Function, indices: list[int], samples: Sequence[Any]) -> bool:
        """Whether the dataset gives the same once more: else it is random."""
        return same(list(samples), list(function(list(indices)))) is True

    def _others(self, kind: str) -> str:
        self._gives_samples = False
        if self._until_others is not None:
            self._until_others.count()
        return (
            f"gives other samples than {kind}[i] does, in another order or made to fit their batch"
        )


def function_of(source: Any) -> Function | None:
    """The dataset's ``__getitems__``, as torch finds it: also one of the object itself, or one that
    it forwards. Not if its class says by a ``__getitem__`` of its own what its samples are."""
    kind = type(source)
    if hasattr(kind, "__getitems__") and attributes.defines_items_anew(kind):
        return None
    return getattr(source, "__getitems__", None) or None


def _is_compared(source: Any) -> bool:
    return function_of(source) is not None and not _asks_one_by_one(source)


def _asks_one_by_one(source: Any) -> bool:
    """torch's Subset does, if what is under it does: then there is nothing to compare."""
    if type(source) is not Subset:
        return False
    under = source.dataset
    return not callable(getattr(under, "__getitems__", None)) or _asks_one_by_one(under)


def _single(source: Any, function: Function, index: int) -> Any:
    """What the dataset gives for a single index, in whatever way it does."""
    try:
        return source[index]
    except Exception:
        (sample,) = function([index])
        return sample


def _no_list(given: Any, count: int) -> str:
    return f"gives a {type(given).__name__} for {count} indices, and not a list of {count} samples"


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
