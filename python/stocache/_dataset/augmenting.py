"""With what a fused transform is applied: the seed of the run, and which epoch it is.

A ``stocache.DataLoader`` says it of every batch that it has made, wherever that is. Where nobody
says it, the seed is that of ``torch.manual_seed`` in the process that started the workers, and the
epoch what ``set_epoch`` said; or else how often this process has gone through the dataset, so that
no sample comes twice in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from stocache import _C
from stocache._torch.progress import Numbers
from stocache.augment import Pipeline

Numbering = Callable[[Any], Any]
"""What the random numbers of samples follow from, by their indices."""

_SAID: ContextVar[Numbers | None] = ContextVar("augmented", default=None)
_MASK = (1 << 64) - 1


class Fusing(NamedTuple):
    """A pipeline, and what its random numbers follow from beside the index of a sample."""

    pipeline: Pipeline
    seed: int
    epoch: int
    numbering: Numbering | None = None
    """Where the numbers are not the indices of the samples."""

    def native(self, indices: Any, counted: Any = None) -> tuple[_C.Pipeline, int, int, Any]:
        """For a batch of these samples that is gathered; ``counted``: where their numbers are not
        the indices."""
        numbers = counted if self.numbering is None else self.numbering(indices)
        return self.pipeline.native, self.seed & _MASK, self.epoch & _MASK, numbers

    def sample(self, sample: Any, index: Any) -> Any:
        """One of them, made by itself."""
        number = number_of(index)
        if self.numbering is not None:
            number = int(self.numbering([number])[0])
        return self.pipeline.apply(sample, self.seed & _MASK, self.epoch & _MASK, number)

    def samples(self, samples: Iterable[Any], indices: Iterable[Any]) -> list[Any]:
        pairs = zip(samples, indices, strict=True)
        return [self.sample(sample, index) for sample, index in pairs]


@contextlib.contextmanager
def said(numbers: Numbers | None) -> Iterator[None]:
    """What is made inside is made with these numbers."""
    if numbers is None:
        yield
        return
    before = _SAID.set(numbers)
    try:
        yield
    finally:
        _SAID.reset(before)


class Passes:
    """How often a process went through a dataset without a word on epochs: a new pass begins with
    a sample that was asked for in this one."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._process = 0
        self._seen = bytearray()
        self._others: set[int] = set()  # of keys that are no places
        self._number = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self.length,)

    def epoch(self, numbers: Iterable[int]) -> int:
        """Of these samples, which are asked for together."""
        if self._process != os.getpid():  # what was asked of the process that forked this one
            self._process, self._number = os.getpid(), 0
            self._begin()
        numbers = list(numbers)
        places = [number for number in numbers if 0 <= number < self.length]
        others = set(numbers).difference(places) if len(places) < len(numbers) else set()
        seen = self._seen
        if any(seen[place >> 3] >> (place & 7) & 1 for place in places) or others & self._others:
            self._number += 1
            seen = self._begin()
        for place in places:
            seen[place >> 3] |= 1 << (place & 7)
        self._others |= others
        worker = get_worker_info()
        if worker is None:
            return self._number
        # Workers of the next epoch know nothing of these, but have another seed.
        text = f"{worker.seed} {self._number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def _begin(self) -> bytearray:
        self._seen = bytearray(self.length // 8 + 1)
        self._others = set()
        return self._seen


def fusing(
    pipeline: Pipeline, passes: Passes, keys: Iterable[Any], numbering: Numbering | None
) -> Fusing:
    """As it is to be applied to these samples now."""
    numbers = _SAID.get()
    if numbers is not None:
        return numbered(pipeline, numbers, numbering)
    epoch = pipeline.epoch
    if epoch is None:
        epoch = passes.epoch(number_of(key, passes.length) for key in keys)
    return Fusing(pipeline, pipeline.seed_here(), epoch, numbering)


def numbered(pipeline: Pipeline, numbers: Numbers, numbering: Numbering | None) -> Fusing:
    """With what was said of an epoch; but a seed of its own is that of a pipeline, whichever of
    several under one loader it is."""
    seed, epoch = numbers
    seed = seed if pipeline.seed is None else pipeline.seed
    return Fusing(pipeline, seed, epoch, numbering)


def number_of(key: Any, length: int = 0) -> int:
    """The number of a sample, also of one that is counted from the end of so many; of a key that
    is none, one that follows from it."""
    try:
        number = operator.index(key)
        return number + length if -length <= number < 0 else number
    except TypeError:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
