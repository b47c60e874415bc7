"""Batches that the training process gathers itself, from what is in memory and what workers add."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from stocache import _C
from stocache._dataset.augmenting import Fusing
from stocache._dataset.samples import Rest, finished
from stocache._loading.sources import Located, Source, source_of
from stocache._torch import compat
from stocache._torch.batch_transform import BatchTransform, Key
from stocache._torch.modes import Modes
from stocache._torch.order import Drawn

# Batches from this size on are transformed and pinned by a thread while the one before is used.
WORTH_A_THREAD = 1 << 20


class Gatherer:
    """Makes the batches of an epoch. What is in memory is copied ahead, by native threads. Code of
    the program (classes of samples, collate functions, indices of a subset) runs in the thread that
    asks for a batch, as without the cache; but for a function of batches that takes a generator,
    which says by that that it may run ahead."""

    missing = _C.MISS

    def __init__(self, source: Source, loader: Any, fusing: Fusing | None) -> None:
        self.fusing = fusing
        self.is_complete = source.is_complete()  # as this epoch begins
        self.knows_order = _knows_order(loader.batch_sampler)
        self.source = source
        # Workers would not see what is set here while they run.
        self.sees_changes = loader.num_workers == 0
        # As torch: pinned where there is something to pin for, on this thread's device.
        device = torch.accelerator.current_accelerator() if loader.pin_memory else None
        self._pinned = (
            device is not None and device.type != "mps" and torch.accelerator.is_available()
        )
        self._device = torch.accelerator.current_device_index() if self._pinned else None
        function = loader.batch_transform
        self._transform = None if function is None else BatchTransform(function)
        # What draws from the program's generators draws when its turn comes.
        self._may_transform_ahead = self._transform is None or self._transform.takes_generator
        self.prepares = self._pinned or self._transform is not None
        self._bytes_per_sample = source.bytes_per_sample() if self.prepares else 0.0
        self.threads = max(1, len(os.sched_getaffinity(0)))
        self._ahead: ThreadPoolExecutor | None = None
        self._process = 0  # of that thread
        self._dataset = loader.dataset

    def gather(self, located: Located) -> _C.Gathering:
        return self.source.gather(located, self.threads, fusing=self.fusing)

    def gathers(self) -> bool:
        """Whether samples may still be gathered as they were when the epoch began."""
        pipeline = None if self.fusing is None else self.fusing.pipeline
        return self.source.gathers() and self.source.pipeline() == pipeline

    def start(self, indices: Sequence[Any] | Drawn, key: Key) -> Begun:
        """Begins with a batch: what is in memory of it is copied from now on."""
        return Begun(self, indices, key)

    def ahead(self, prepare: Callable[[], Any], rows: int, modes: Modes) -> Future[Any] | None:
        """Has a thread do what may be done in any, if that is worth it."""
        if not self._may_transform_ahead or not modes.can_be_entered:
            return None
        if self._ahead is None or self._process != os.getpid():  # it is not there after a fork
            if rows * self._bytes_per_sample < WORTH_A_THREAD:
                return None
            self._ahead = ThreadPoolExecutor(1, "stocache-gather", _use_device, (self._device,))
            self._process = os.getpid()
        try:
            return self._ahead.submit(_in_modes, modes, prepare)
        except RuntimeError:  # the interpreter ends, or no thread can be had
            return None

    def is_as_it_was(self, located: Located, indices: Sequence[Any] | Drawn) -> bool:
        """Whether these rows are still where they were: the program may have changed a subset."""
        unchanged = self.source.is_as_it_was(located)
        if unchanged is not None:
            return unchanged
        now = source_of(self._dataset)
        if now is None or list(map(id, now.parts)) != list(map(id, self.source.parts)):
            return False
        try:
            return now.locate(indices).numbers() == located.numbers()
        except Exception:  # of the dataset, when it is asked
            return False

    def prepared(self, batch: Any, key: Key) -> Any:
        """What can be done with a batch in any thread."""
        if not self.prepares or batch is _C.MISS or not self._may_transform_ahead:
            return batch
        if self._transform is not None:
            try:
                batch = self._transform(batch, key)
            except Exception as error:
                return _Raised(error)
        return self._pin(batch)

    def completed(self, batch: Any, key: Key) -> Any:
        """What is left to be done in the thread that asks for it."""
        if isinstance(batch, _Raised):
            raise batch.take()
        if batch is _C.MISS or self._transform is None or self._may_transform_ahead:
            return batch
        return self._pin(self._transform(batch, key))

    def _pin(self, batch: Any) -> Any:
        return compat.pin_memory(batch) if self._pinned else batch  # type: ignore[no-untyped-call]


class Begun:
    """A batch that was begun in the training process."""

    __slots__ = (
        "_ahead", "_circumstances", "_gatherer", "_gathering", "_indices", "_key", "_located",
        "_where", "rows",
    )  # fmt: skip

    def __init__(self, gatherer: Gatherer, indices: Sequence[Any] | Drawn, key: Key) -> None:
        self._gatherer = gatherer
        self._indices = indices
        self._key = key
        self._ahead: Future[Any] | None = None
        self._located: Located | None = None  # counted from the start
        self._where: Located | None = None  # as the dataset says it
        self._gathering: _C.Gathering | None = None
        self.rows: list[int] | None = None
        """Those that are not in memory; None if the batch cannot be gathered at all."""
        source = gatherer.source
        try:
            located = source.locate(indices)
            self._gathering = gatherer.gather(located)
            self._located = self._where = located
        except Exception:  # when its turn comes, it will be the dataset's
            return
        self.rows = self._gathering.missing()
        if self.rows is None:
            self._count_from_start()
        if self.rows and 2 * len(self.rows) > len(located.given) and source.asks_servers():
            # A worker copies what comes straight into the batch.
            self._gathering, self.rows = None, None
        if gatherer.prepares and self.rows == []:
            self._circumstances = os.getpid(), Modes.now()
            rows = len(located.given)
            self._ahead = gatherer.ahead(self._prepared, rows, self._circumstances[1])

    def finish(self, answers: list[Rest | None] | None = None) -> Any:
        """The batch, with what workers gave of its rows; or MISS: it must be made by who can load
        samples, since some are gone or cannot be gathered."""
        gatherer = self._gatherer
        if not (answers or self.rows or gatherer.prepares or gatherer.sees_changes):
            batch = _C.MISS if self._gathering is None else finished(self._gathering, 0)
            return batch if batch is not _C.MISS else self._missing()
        if gatherer.sees_changes:
            if not gatherer.gathers():
                return _C.MISS  # samples have to be transformed since, or otherwise
            if self._where and not gatherer.is_as_it_was(self._where, self._indices):
                return _C.MISS
        if answers:
            batch = self._completed_by(answers)
        elif self._ahead is not None:
            batch = self._made_ahead(self._ahead)
        elif self._gathering is not None and not self.rows:
            batch = self._prepared()
        else:
            batch = _C.MISS
        if gatherer.sees_changes:
            batch = self._if_current(batch)
        return self._missing() if batch is _C.MISS else gatherer.completed(batch, self._key)

    def _missing(self) -> Any:
        """What was on disk may not have come."""
        for samples in self._gatherer.source.samples:
            samples.watch_below()
        return _C.MISS

    def _prepared(self) -> Any:
        assert self._gathering is not None
        return self._gatherer.prepared(finished(self._gathering, 0), self._key)

    def _made_ahead(self, ahead: Future[Any]) -> Any:
        process, modes = self._circumstances
        if process == os.getpid():
            batch = ahead.result()
            if modes == Modes.now():
                return batch
        # Anew: in a child of fork(2), where that thread is not, or because the program entered or
        # left a mode since.
        self._gathering = self._gather_again()
        return self._prepared() if self._gathering.missing() == [] else _C.MISS

    def _completed_by(self, answers: list[Rest | None]) -> Any:
        rests = [answer for answer in answers if answer is not None]
        source = self._gatherer.source
        if len(rests) < len(answers) or self._located is None or self._gathering is None:
            return _C.MISS
        # A worker may have another dataset or other indices: it was started before they were set.
        assert self._where is not None
        of = (source.instances(), *self._where.numbers())
        if any(rest.of != of for rest in rests) or not source.is_used():
            return _C.MISS
        counted = [sum(counts) for counts in zip(*(rest.counted for rest in rests), strict=True)]
        packed = [rest.packed for rest in rests if rest.packed is not None]
        batch = finished(self._gathering, counted, None, packed)
        return self._gatherer.prepared(batch, self._key)

    def _count_from_start(self) -> None:
        """Where some indices are counted from the end, and it is known that they are."""
        samples = self._gatherer.source.samples
        if len(samples) > 1 or self._located is None:
            return
        places = samples[0].counted_from_start(self._located.indices)
        if places is not None:
            self._located = Located(places)
            self._gathering = self._gather_again()
            self.rows = self._gathering.missing()

    def _gather_again(self) -> _C.Gathering:
        assert self._located is not None
        return self._gatherer.gather(self._located)

    def _if_current(self, batch: Any) -> Any:
        """The batch, unless what was gathered ahead has been cleared since. Of samples that are in
        memory, but of different shapes, it is made here."""
        gathering, self._gathering = self._gathering, None
        if batch is not _C.MISS and gathering is not None and gathering.is_current():
            return batch
        samples = self._gatherer.source.samples
        if self._located is None or len(samples) > 1:
            return _C.MISS
        if batch is not _C.MISS:
            again = self._gather_again()
            if again.missing() == []:
                return self._gatherer.prepared(finished(again, 0), self._key)
        indices = self._located.indices
        indices = indices.tolist() if isinstance(indices, Tensor) else indices
        found = samples[0].in_memory(indices)
        if found is None:
            return _C.MISS
        if (fusing := self._gatherer.fusing) is not None:
            found = fusing.samples(found, indices)
        return self._gatherer.prepared(default_collate(found), self._key)


class _Raised:
    """What a program's function raised, for the thread that asks for the batch."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def take(self) -> Exception:
        """It has a traceback, which has this: without a circle both end when they should."""
        error, self._error = self._error, None
        assert error is not None
        return error


def _in_modes(modes: Modes, prepare: Callable[[], Any]) -> Any:
    with modes.entered():
        return prepare()


def _use_device(index: int | None) -> None:
    """A new thread begins with the first device, whatever the one that started it uses."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def _knows_order(batches: Any) -> bool:
    """Whether the sampler can be asked for a batch that is not the last before its time: it draws
    what it draws when the first is asked for, or from a generator that nobody else sees."""
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    if type(sampler) is SubsetRandomSampler:
        sampler = sampler.indices  # looked up one by one; a list may be edited meanwhile
    known = (RandomSampler, SequentialSampler, WeightedRandomSampler, DistributedSampler)
    return type(sampler) in (*known, tuple, range)
