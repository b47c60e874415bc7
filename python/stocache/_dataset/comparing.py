"""Whether a cached sample is still what the dataset gives."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from stocache import _C
from stocache._compare import same, same_as_stored
from stocache._dataset.until_random import Uncut
from stocache._torch.generators import random_numbers_kept

SAME, STALE, RANDOM, UNKNOWN, UNCUT = "same", "stale", "random", "unknown", "uncut"


def compare(
    records: _C.Records, dataset: Any, index: int, allow_pickle: bool, stored: Any = _C.MISS
) -> str:
    """Loads the sample and compares it with the cached one, or with that which is given. If they
    differ it is loaded once more: a dataset that gives another sample every time is not stale."""
    sample = dataset[index]
    if type(sample) is Uncut:  # there is nothing to be compared
        return UNCUT
    if stored is _C.MISS:
        equal = same_as_stored(records, index, sample, allow_pickle)
    else:
        equal = same(stored, sample)
    if equal is None:
        return UNKNOWN
    if equal:
        return SAME
    with random_numbers_kept():
        again = same(sample, dataset[index])
    return UNKNOWN if again is None else STALE if again else RANDOM


class Countdown:
    """A number that a process counts down together with those that it starts. Two that count at the
    same moment may count as one. Where there is no shared memory left, each counts for itself."""

    def __init__(self, start: int) -> None:
        self._left: torch.Tensor | list[int] = [start]
        with contextlib.suppress(OSError, RuntimeError):  # no room in /dev/shm
            shared = torch.tensor([start], device="cpu")  # whatever the default is
            shared.share_memory_()  # type: ignore[no-untyped-call]
            self._left = shared

    @property
    def left(self) -> int:
        return max(0, int(self._left[0]))

    def count(self) -> None:
        self._left[0] = int(self._left[0]) - 1
