"""Batches without a detour: collate and DataLoader for a CachedDataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from stocache import _C
from stocache._dataset.samples import Rest, Whole, as_numbers
from stocache._torch import batch_transform as transforms
from stocache._torch import compat
from stocache._torch.batch_transform import BatchTransform, Key
from stocache._torch.order import Drawn
from stocache._torch.progress import copied
from stocache.cached_dataset import CachedDataset

Indices = list[Any] | Tensor
ToIndices = Callable[[Sequence[int]], list[int]]
"""How indices of a subset become those of the CachedDataset under it."""

# Batches from this size on are gathered by a thread while the one before is being used.
_WORTH_A_THREAD = 1 << 20


def collate(samples: Any) -> Any:
    """As default_collate. A ``stocache.DataLoader`` that has it gathers batches natively."""
    return default_collate(samples)


class DataLoader(compat.Loader):
    """torch's DataLoader with ``collate_fn=stocache.collate``, which gathers batches in this
    process from what is in memory. Workers only load what is missing: nothing, once all samples are
    in memory.

    Where a transform has to run, the workers do their work as always. Order and random numbers are
    those of torch's DataLoader.

    ``batch_transform`` is a function that gets every collated batch, and whose result is handed out
    in its place. If it has a parameter ``generator``, it gets a torch.Generator that is the same
    for the same batch of the same epoch, wherever the batch is made, and may run ahead of its turn.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        batch_transform: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, *args, **options)
        if self.collate_fn is default_collate:  # not so without batches (batch_size=None)
            self.collate_fn = collate
        if batch_transform is not None:
            transforms.check(batch_transform, self, not isinstance(dataset, IterableDataset))
        self.batch_transform = batch_transform

    def _stocache_source(self) -> tuple[CachedDataset, ToIndices] | None:
        """Where batches can be gathered natively: nobody wants the single samples."""
        if self.collate_fn is not collate or self.batch_sampler is None:
            return None
        # Workers see nothing that is set here while they live.
        source = _cached_source(self.dataset, frozen=self.num_workers > 0)
        return source if source is not None and source[0]._stocache_gathers() else None

    def _stocache_gatherer(
        self, source: tuple[CachedDataset, ToIndices] | None
    ) -> _Gatherer | None:
        """Makes the batches of an epoch that begins now, if that can be done here."""
        # What a function does in workers (a transform that it sets, say) it cannot do here.
        if self.worker_init_fn is not None and self.num_workers:
            return None
        if source is None or self._stocache_source() is None:
            return None
        samples = source[0]._stocache
        if not samples.is_settled():
            return None
        complete = samples.is_complete()
        # What is in memory now must be there when its batch is made.
        if not complete and (samples.recycles() or not self.num_workers or not self.in_order):
            return None
        return _Gatherer(*source, self, complete)

    def _stocache_view(self, source: tuple[CachedDataset, ToIndices] | None) -> Any:
        """The dataset as one that gives whole batches."""
        if self.batch_transform is None:
            return None if source is None else _Batches(self.dataset)
        transform = BatchTransform(self.batch_transform)
        if self.num_workers:
            context = self.multiprocessing_context or torch.multiprocessing
            transform.check_pickles(context.get_start_method())
        return _Batches(self.dataset, None if source is not None else self.collate_fn, transform)


class _Gatherer:
    """Batches from memory, in this process. A thread gathers ahead what needs no code of the
    program. Such code (classes of samples, collate functions, indices of a subset) runs in the
    thread that asks for a batch, as without the cache; but for a function of batches that takes a
    generator, which says by that that it may run ahead."""

    missing = _C.MISS

    def __init__(
        self, cached: CachedDataset, to_indices: ToIndices, loader: DataLoader, complete: bool
    ) -> None:
        self._complete = complete  # as this epoch begins
        self.knows_order = _knows_order(loader.batch_sampler)
        self._cached = cached
        self._samples = cached._stocache
        self._to_indices = to_indices
        # Workers would not see what is set here while they run.
        self._sees_changes = loader.num_workers == 0
        self._has_workers = loader.num_workers > 0
        self._bytes_per_sample = _bytes_per_sample(cached)
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
        self._threads = max(1, len(os.sched_getaffinity(0)))
        self._ahead: ThreadPoolExecutor | None = None

    def missing_rows(self, indices: Sequence[int] | Drawn) -> Sequence[int] | None:
        """The rows that workers have to load for this batch; None if they have to find out."""
        if self._complete:
            return ()
        try:
            chosen = self._chosen(indices)
            missing = self._samples.records.missing(chosen)
            if not missing or isinstance(chosen, Tensor) or min(chosen) >= 0:
                return missing
            places = self._samples.counted_from_start(chosen)
            found = places is not None and not self._samples.records.missing(places)
            return () if found else None
        except Exception:  # the dataset's, in a worker
            return None

    def look_again(self) -> None:
        self._complete = False

    def finish(
        self, indices: Sequence[int] | Drawn, answers: list[Rest | Whole | None], key: Key
    ) -> Any:
        """A batch of which workers have loaded the rest, or ``missing``: it must be made whole by
        who can load samples, since some are gone or cannot be gathered."""
        if isinstance(answers[0], Whole):
            return self._pin(answers[0].batch)
        rests = [answer for answer in answers if isinstance(answer, Rest)]
        if len(rests) < len(answers):
            return _C.MISS
        try:
            chosen = as_numbers(self._chosen(indices))
        except Exception:  # of who has loaded them
            return _C.MISS
        # A worker may have another dataset or other indices: it was started before they were set.
        of = (self._samples.records.instance, chosen)
        if any(rest.of != of for rest in rests) or not self._samples.is_used():
            return _C.MISS
        batch = self._samples.collated(
            rests[0].places, self._threads, sum(rest.counted for rest in rests),
            packed=[rest.packed for rest in rests if rest.packed is not None],
        )  # fmt: skip
        return self._completed(self._prepared(batch, key), key)

    def start(self, indices: Sequence[int] | Drawn, key: Key = (0, 0, 0)) -> Callable[[], Any]:
        try:
            chosen = self._chosen(indices)
        except Exception:  # when its turn comes, it will be the dataset's
            return lambda: self.missing
        gather = partial(self._gather, chosen, key)
        clears = self._samples.clears
        if self._ahead is None:
            if len(chosen) * self._bytes_per_sample < _WORTH_A_THREAD:
                return partial(self._finish, chosen, key, gather, clears)
            self._ahead = ThreadPoolExecutor(1, "stocache-gather", _use_device, (self._device,))
        return partial(self._finish, chosen, key, self._ahead.submit(gather).result, clears)

    def _chosen(self, indices: Sequence[int] | Drawn) -> Indices:
        """What is asked of the cache. It stays as it is, whatever becomes of the sampler's list."""
        if not isinstance(indices, Drawn):
            return self._to_indices(indices)
        return indices.numbers if self._to_indices is list else self._to_indices(indices.listed())

    def _gather(self, chosen: Indices, key: Key) -> Any:
        return self._prepared(self._samples.collated(chosen, self._threads), key)

    def _finish(self, chosen: Indices, key: Key, gathered: Callable[[], Any], clears: int) -> Any:
        """The batch, or ``_C.MISS`` if a sample is not in memory: who loads it is not decided here.
        Likewise if samples have to be transformed since."""
        if self._sees_changes and not self._cached._stocache_gathers():
            return _C.MISS
        batch = _C.MISS
        try:
            found = gathered()
            # What was gathered ahead may have been cleared since, and stored anew.
            ahead = self._sees_changes and self._ahead is not None
            old = ahead and (
                clears != self._samples.clears or self._samples.records.missing(chosen)
            )
            if not old:
                batch = found
        except (TypeError, IndexError):
            pass  # an index that is no number is the dataset's
        if batch is _C.MISS:
            batch = self._made_otherwise(chosen, key)
        return self._completed(batch, key)

    def _made_otherwise(self, chosen: Indices, key: Key) -> Any:
        """Of samples that are in memory, but of different shapes, or counted from the end."""
        if isinstance(chosen, Tensor):
            chosen = chosen.tolist()
        if self._has_workers:  # they collate what cannot be gathered
            places = self._samples.counted_from_start(chosen)
            return _C.MISS if places is None else self._gather(places, key)
        samples = self._samples.in_memory(chosen)
        return _C.MISS if samples is None else self._prepared(default_collate(samples), key)

    def _prepared(self, batch: Any, key: Key) -> Any:
        """What can be done with a batch in any thread."""
        if batch is _C.MISS or not self._may_transform_ahead:
            return batch
        if self._transform is not None:
            try:
                batch = self._transform(batch, key)
            except Exception as error:
                return _Raised(error)
        return self._pin(batch)

    def _completed(self, batch: Any, key: Key) -> Any:
        """What is left to be done in the thread that asks for it."""
        if isinstance(batch, _Raised):
            raise batch.error
        if batch is _C.MISS or self._transform is None or self._may_transform_ahead:
            return batch
        return self._pin(self._transform(batch, key))

    def _pin(self, batch: Any) -> Any:
        return compat.pin_memory(batch) if self._pinned else batch  # type: ignore[no-untyped-call]


class _Raised:
    """What a program's function raised, for the thread that asks for the batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _use_device(index: int | None) -> None:
    """A new thread begins with the first device, whatever the one that started it uses."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def _bytes_per_sample(cached: CachedDataset) -> float:
    stats = cached._stocache.stats()
    return stats.used_bytes / max(1, stats.filled)


def _knows_order(batches: Any) -> bool:
    """Whether the sampler can be asked for a batch that is not the last before its time: it draws
    what it draws when the first is asked for, or from a generator that nobody else sees."""
    if type(batches) is not BatchSampler:
        return type(batches) in (list, tuple)
    sampler = batches.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    known = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(sampler) in (*known, DistributedSampler, list, tuple, range)


def _cached_source(dataset: Any, frozen: bool = False) -> tuple[CachedDataset, ToIndices] | None:
    """The CachedDataset under ``dataset`` and its subsets, and how their indices become its own;
    ``frozen``: as these are now."""
    if isinstance(dataset, CachedDataset):
        return dataset, list
    if type(dataset) is Subset:
        under = _cached_source(dataset.dataset, frozen)
        if under is not None:
            cached, to_indices = under
            chosen = copied(dataset.indices) if frozen else dataset.indices
            return cached, lambda indices: to_indices([chosen[i] for i in indices])
    return None


class _Batches(Dataset[Any]):
    """A dataset as one that gives whole batches. What it consists of is looked at for each: a
    worker_init_fn may set the indices of a subset, or what is under it."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: BatchTransform | None = None,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn  # where batches are not gathered
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, asked: Sequence[Any] | compat.Asked) -> Any:
        indices = asked.indices if isinstance(asked, compat.Asked) else asked
        source = None if self._collate_fn is not None else _cached_source(self._dataset)
        if source is None:
            made = (self._collate_fn or default_collate)(_fetched(self._dataset, indices))
        elif isinstance(asked, compat.RestOf):
            made = source[0]._stocache.rest_of_batch(source[1](indices), asked.rows)
            if not isinstance(made, Whole):
                return made  # the training process makes a batch of it
            made = made.batch
        else:
            made = source[0].batches[source[1](indices)]
        if self._transform is not None:
            assert isinstance(asked, compat.Asked)
            made = self._transform(made, asked.key)
        return Whole(made) if isinstance(asked, compat.RestOf) else made


def _fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """As torch fetches what is to be collated."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
