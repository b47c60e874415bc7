"""Batches without a detour: collate and DataLoader for a CachedDataset."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from stocache import _C
from stocache.cached_dataset import CachedDataset, Collated

Place = Callable[[Sequence[int]], list[int]]
"""How indices of a subset become those of the CachedDataset under it."""

# Batches from this size on are gathered by a thread while the one before is being used.
_WORTH_A_THREAD = 1 << 20
# So many. With one, nobody would gather while the training loop takes it and asks for the next.
_AHEAD = 2


def collate(samples: Any) -> Any:
    """As default_collate, for ``DataLoader(cached, collate_fn=stocache.collate)``.

    Where the samples come straight from a CachedDataset and have equal shapes, the batch was
    gathered natively, column by column, into memory that is used again.
    """
    return samples.batch if isinstance(samples, Collated) else default_collate(samples)


class DataLoader(TorchDataLoader[Any]):
    """torch's DataLoader with ``collate_fn=stocache.collate``, which gathers batches in this
    process once all samples are in memory: then there is nothing left for workers to do.

    Where a sample is missing, or a transform has to run, the workers do their work as always.
    """

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        super().__init__(dataset, *args, **options)
        if self.collate_fn is default_collate:  # not so without batches (batch_size=None)
            self.collate_fn = collate

    def __iter__(self) -> Any:
        source = _cached_source(self.dataset)
        if source is None or self.collate_fn is not collate or self.batch_sampler is None:
            return super().__iter__()
        cached, place = source
        if cached.transform is not None or not cached.is_complete():
            return super().__iter__()
        return self._gather(cached, place)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return _WorkersIter(self)

    def _gather(self, cached: CachedDataset, place: Place) -> Iterator[Any]:
        threads = max(1, len(os.sched_getaffinity(0)))
        # As torch: pinned where there is something to pin for, and a number drawn for the workers,
        # so that the order of the samples is the same.
        pinned = self.pin_memory and torch.accelerator.is_available()
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)

        def batch(indices: Sequence[int]) -> Any:
            places = place(indices)
            made = cached.collated(places, threads)
            if made is _C.MISS:  # of different shapes
                made = default_collate(cached.__getitems__(places))
            return pin_memory(made) if pinned else made  # type: ignore[no-untyped-call]

        assert self.batch_sampler is not None  # asked in __iter__
        order = iter(self.batch_sampler)
        first = next(order, None)
        if first is None:
            return
        stats = cached.stats()
        if len(first) * stats.used_bytes < _WORTH_A_THREAD * max(1, stats.filled):
            yield batch(first)
            yield from map(batch, order)
            return
        with ThreadPoolExecutor(1, "stocache-gather") as ahead:
            coming = deque([ahead.submit(batch, first)])
            for indices in order:
                coming.append(ahead.submit(batch, indices))
                if len(coming) > _AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()


class _WorkersIter(_MultiProcessingDataLoaderIter):
    """Gives back the memory of its workers when they have ended: later there may be nobody who
    receives or drops a batch, which does the same."""

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        if not sys.is_finalizing():
            _C.batch_sweep()


def _cached_source(dataset: Any) -> tuple[CachedDataset, Place] | None:
    """The CachedDataset under ``dataset`` and its subsets, and how their indices become its own."""
    if isinstance(dataset, CachedDataset):
        return dataset, list
    if type(dataset) is Subset:
        under = _cached_source(dataset.dataset)
        if under is not None:
            cached, place = under
            chosen = dataset.indices
            return cached, lambda indices: place([chosen[i] for i in indices])
    return None


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor crosses to another process: a batch of ours by its ticket, or inside the message
    if it is small; others as torch does it."""
    ticket = _C.batch_ticket(tensor) if type(tensor) is torch.Tensor else None
    if ticket is None:
        return tuple(reduce_tensor(tensor))  # type: ignore[no-untyped-call]
    return (_C.batch_copy if len(ticket) == 3 else _C.batch_tensor, ticket)


ForkingPickler.register(torch.Tensor, _reduce)
