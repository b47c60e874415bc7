"""What workers fetch from: a dataset that gives whole batches, or what is missing of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.utils.data import Dataset, default_collate

from stocache import _C
from stocache._dataset.augmenting import said
from stocache._dataset.samples import Rest, finished
from stocache._loading.sources import Source, source_of
from stocache._torch import compat
from stocache._torch.batch_transform import BatchTransform
from stocache._torch.ipc import is_worker


class WholeBatches(Dataset[Any]):
    """What it consists of is looked at for each batch: a worker_init_fn may set the indices of a
    subset, or what is under it."""

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
        if not isinstance(asked, compat.Asked):
            return self._made(asked, asked)
        with said(asked.augmented):
            return self._made(asked, asked.indices)

    def _made(self, asked: Sequence[Any] | compat.Asked, indices: Sequence[Any]) -> Any:
        source = None if self._collate_fn is not None else source_of(self._dataset)
        if isinstance(asked, compat.RestOf):
            return None if source is None else _rest_of(source, indices, asked.rows)
        if source is None:
            made = (self._collate_fn or default_collate)(_fetched(self._dataset, indices))
        elif not source.loads_alone:
            # As torch does it: a dataset gets what the sampler gave, one under a subset a list.
            places = indices if type(source) is Source else source.locate(indices).indices
            made = source.parts[0].batches[cast("list[Any]", places)]
        else:
            made = _one_by_one(self._dataset, source, indices)
        if self._transform is None:
            return made
        assert isinstance(asked, compat.Asked)
        return self._transform(made, asked.key)


def _fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """As torch fetches what is to be collated."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _rest_of(source: Source, indices: Sequence[Any], rows: Sequence[int]) -> Rest | None:
    """What the training process does not find in memory of these rows; None if that cannot be
    sent."""
    is_worker()  # what it sends goes by ticket
    located = source.locate(indices)
    numbers, which = located.numbers()
    samples: dict[int, Any] = {}
    counted: list[int] = []
    for number, of in enumerate(source.samples):
        mine = rows if which is None else [row for row in rows if which[row] == number]
        rest = of.rest_of_batch(numbers, mine, source.loads_alone) if mine else ({}, 0)
        if rest is None:
            return None
        samples |= rest[0]
        counted.append(rest[1])
    packed = _C.pack(samples, source.pipeline() is not None) if samples else None
    return (
        None if packed is _C.MISS else Rest(packed, counted, (source.instances(), numbers, which))
    )


def _one_by_one(dataset: Any, source: Source, indices: Sequence[Any]) -> Any:
    """A batch of samples that may be of several CachedDatasets; what is missing is loaded one by
    one, as torch does it."""
    located = None
    with contextlib.suppress(Exception):  # of the dataset, below
        located = source.locate(indices)
    if located is None or not source.gathers() or not source.is_settled():
        return source.samples[0].stacked([dataset[index] for index in indices])
    fusing = source.fusing(located)
    gathering = source.gather(located, 1, is_worker(), fusing)
    counted = [0] * len(source.parts)
    places, which = located.numbers()
    assert which is not None

    def sample(row: int) -> Any:
        """As it is before its images are made."""
        if fusing is None:
            return dataset[indices[row]]
        return source.samples[which[row]].get(places[row], to_edit=False)

    loaded: dict[int, Any] = {}
    for row in gathering.missing() or ():
        loaded[row] = sample(row)
        counted[which[row]] += 1
    batch = finished(gathering, counted, loaded)
    if batch is not _C.MISS:
        return batch
    samples = [loaded[row] if row in loaded else sample(row) for row in range(len(indices))]
    if fusing is not None:
        numbers = source.counted(located)
        samples = fusing.samples(samples, places if numbers is None else numbers.tolist())
    return source.samples[0].stacked(samples)
