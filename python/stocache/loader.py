"""Batches without a detour: a DataLoader for a CachedDataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from stocache._dataset.augmenting import numbered
from stocache._dataset.batches import collate
from stocache._loading.gatherer import Gatherer
from stocache._loading.sources import Source, source_of
from stocache._loading.views import WholeBatches
from stocache._torch import batch_transform as transforms
from stocache._torch import compat
from stocache._torch.batch_transform import BatchTransform
from stocache._torch.progress import Said


class DataLoader(compat.Loader):
    """torch's DataLoader with ``collate_fn=stocache.collate``, which gathers batches in this
    process from what is in memory. Workers only load what is missing: nothing, once all samples are
    in memory.

    Where a transform has to run, workers make the batches, unless it is one of ``stocache.fuse``:
    that runs here, on native threads, while rows are copied. Order and random numbers are
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

    def _stocache_source(self) -> Source | None:
        """Where samples are cached of which batches are made natively."""
        if self.collate_fn is not collate or self.batch_sampler is None:
            return None
        # Workers see nothing that is set here while they live.
        source = source_of(self.dataset, frozen=self.num_workers > 0)
        if source is not None:
            source.gathered_at_first = source.gathers()
            source.pipeline_at_first = source.pipeline()
        return source

    def _stocache_said(self) -> tuple[int, Said] | None:
        source = source_of(self.dataset)
        if source is None:
            return None
        found = [part._stocache_pipeline() for part in source.parts]
        pipelines = [pipeline for pipeline in found if pipeline is not None]
        if not pipelines:
            return None
        # One with a seed of its own has that, whatever is said here.
        without = next((each for each in pipelines if each.seed is None), pipelines[0])
        told = next((each for each in pipelines if each.epoch is not None), None)
        if told is not None:
            said = Said(told.epoch, told.times)
        elif (epoch := source.epoch()) is not None:
            said = Said(epoch, counts=(source.samples[0],))
        else:
            said = Said(None, counts=tuple(source.samples))
        return without.seed_here(), said

    def _stocache_gatherer(self, source: Source | None) -> Gatherer | None:
        """Makes the batches of an epoch that begins now, if that can be done here."""
        # What a function does in workers (a transform that it sets, say) it cannot do here.
        if self.worker_init_fn is not None and self.num_workers:
            return None
        if source is None or self.collate_fn is not collate:
            return None
        # Workers that live on have the transform that there was, or none.
        gathers = source.gathered_at_first if self.num_workers else source.gathers()
        if not gathers or not source.is_settled():
            return None
        pipeline = source.pipeline_at_first if self.num_workers else source.pipeline()
        numbers = self._stocache_progress.augmented
        if pipeline is not None and numbers is None:  # it was not there when the epoch began
            return None
        fusing = None
        if pipeline is not None and numbers is not None:
            fusing = numbered(pipeline, numbers, source.parts[0]._stocache_numbering())
        gatherer = Gatherer(source, self, fusing)
        # Without workers, what is missing is loaded here when its turn comes.
        may_miss = self.num_workers > 0 and self.in_order
        return gatherer if gatherer.is_complete or may_miss else None

    def _stocache_view(self, source: Source | None) -> Any:
        """The dataset as one that gives whole batches."""
        if self.batch_transform is None:
            if source is not None:
                return WholeBatches(self.dataset)
            return WholeBatches(self.dataset, self.collate_fn) if self._stocache_tells() else None
        transform = BatchTransform(self.batch_transform)
        if self.num_workers:
            context = self.multiprocessing_context or torch.multiprocessing
            transform.check_pickles(context.get_start_method())
        collate_fn = None if source is not None else self.collate_fn
        return WholeBatches(self.dataset, collate_fn, transform)
