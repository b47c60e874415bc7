"""The CachedDatasets under a dataset, and which sample of which of them is at an index of it."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from stocache import _C
from stocache._dataset.augmenting import Fusing
from stocache._dataset.samples import Samples, as_numbers
from stocache._sharding.shard import Visits
from stocache._torch.order import Drawn, listed
from stocache._torch.progress import copied
from stocache.augment import Pipeline
from stocache.cached_dataset import CachedDataset
from stocache.lazy_shard import LazyShardDataset

Indices = list[Any] | Tensor


class Located:
    """Where the rows of a batch are."""

    __slots__ = ("_positions", "given", "visits", "which")

    def __init__(
        self,
        given: Indices,
        which: list[int] | Tensor | None = None,
        visits: Visits | None = None,
    ) -> None:
        self.given = given  # indices, or which visits of a rank they are
        self.which = which  # the number of each row's CachedDataset; None if there is but one
        self.visits = visits
        self._positions: Tensor | None = None

    @property
    def indices(self) -> Indices:
        """In the CachedDataset of each row."""
        if self.visits is None:
            return self.given
        if self._positions is None:
            self._positions = self.visits.positions(self.given)
        return self._positions

    def numbers(self) -> tuple[list[int], list[int] | None]:
        """To be compared, in another process too."""
        which = self.which.tolist() if isinstance(self.which, Tensor) else self.which
        return as_numbers(self.indices), which


class Source:
    """Here it is one CachedDataset."""

    gathered_at_first = True
    """Whether batches were gathered when workers were started."""
    pipeline_at_first: Pipeline | None = None
    """What made their images then."""
    loads_alone = False
    """Whether torch asks for one sample after the other, also where datasets give many at once."""

    def __init__(self, parts: list[CachedDataset[Any]]) -> None:
        self.parts = parts

    def locate(self, indices: Sequence[Any] | Drawn) -> Located:
        """Where these rows are. What is returned stays as it is, whatever becomes of the sampler's
        list. Raises what the dataset would, or anything: who loads the rows asks the dataset."""
        return Located(indices.numbers if isinstance(indices, Drawn) else list(indices))

    def is_as_it_was(self, located: Located) -> bool | None:
        """Whether these rows would be looked for in the same places now; None: nobody knows without
        looking for them."""
        return True

    @property
    def samples(self) -> list[Samples]:
        return [part._stocache for part in self.parts]

    def gathers(self) -> bool:
        """Whether batches may be gathered natively: nobody wants the single samples."""
        pipelines = [part._stocache_pipeline() for part in self.parts]
        if not all(part._stocache_gathers() for part in self.parts):
            return False
        return len(pipelines) == 1 or all(
            pipeline == pipelines[0] and (pipeline is None or part._stocache_numbering() is None)
            for pipeline, part in zip(pipelines, self.parts, strict=True)
        )

    def pipeline(self) -> Pipeline | None:
        """What makes the images of batches, if anything does."""
        return self.parts[0]._stocache_pipeline()

    def epoch(self) -> int | None:
        """What was said to the dataset, if it is one that has its own order in every epoch."""
        return None

    def fusing(self, located: Located) -> Fusing | None:
        """The same, as it is to be applied to these rows now."""
        return self.parts[0]._stocache_fusing(located.indices)

    def counted(self, located: Located) -> Tensor | None:
        """The indices, counted from the start, if some of them are counted from the end."""
        if located.visits is not None:
            return None
        indices = _as_tensor(located.indices)
        if not len(indices) or int(indices.min()) >= 0:
            return None
        lengths = torch.tensor([samples.length for samples in self.samples], device="cpu")
        of = lengths[0 if located.which is None else _as_tensor(located.which)]
        return torch.where((indices < 0) & (indices >= -of), indices + of, indices)

    def is_settled(self) -> bool:
        return all(samples.is_settled() for samples in self.samples)

    def is_used(self) -> bool:
        return all(samples.is_used() for samples in self.samples)

    def asks_servers(self) -> bool:
        """Whether who makes a batch asks servers for what is missing of it, all at once."""
        return not self.loads_alone and len(self.parts) == 1 and self.samples[0].asks_servers

    def is_complete(self) -> bool:
        return all(samples.is_complete() for samples in self.samples)

    def bytes_per_sample(self) -> float:
        stats = [samples.stats() for samples in self.samples]
        return sum(s.used_bytes for s in stats) / max(1, sum(s.filled for s in stats))

    def instances(self) -> list[str]:
        return [samples.records.instance for samples in self.samples]

    def gather(
        self, located: Located, threads: int, shared: bool = False, fusing: Fusing | None = None
    ) -> _C.Gathering:
        """A batch in the making; the rows that are in memory are copied from now on."""
        fused = None if fusing is None else fusing.native(located.indices, self.counted(located))
        if located.which is None:
            records: _C.Records = self.parts[0]._stocache.records
            visits = None if located.visits is None else located.visits.order
            return records.gather(located.given, threads, shared, visits, fused)
        stores: list[_C.Records] = [samples.records for samples in self.samples]
        return _C.gather_from(stores, located.which, located.indices, threads, shared, fused)


class _Chosen(Source):
    """A subset."""

    def __init__(self, under: Source, chosen: Any, frozen: bool) -> None:
        super().__init__(under.parts)
        self.loads_alone = under.loads_alone
        self._under = under
        self._chosen = copied(chosen) if frozen else chosen
        self._table: Tensor | None = None
        if frozen and type(chosen) is list and set(map(type, chosen)) == {int}:
            with contextlib.suppress(RuntimeError, OverflowError, ValueError):  # larger ones
                self._table = _as_tensor(chosen)

    def is_as_it_was(self, located: Located) -> bool | None:
        return None

    def locate(self, indices: Sequence[Any] | Drawn) -> Located:
        if self._table is not None and isinstance(indices, Drawn):
            return self._under.locate(Drawn(self._table[indices.numbers]))
        return self._under.locate([self._chosen[index] for index in listed(indices)])


class _Visited(Source):
    """The part of a rank. Its epoch is never that of before: workers that go on see it change."""

    def __init__(self, dataset: LazyShardDataset) -> None:
        super().__init__([dataset.store])
        self._dataset = dataset

    def epoch(self) -> int | None:
        return self._dataset.epoch

    def locate(self, indices: Sequence[Any] | Drawn) -> Located:
        if isinstance(indices, Drawn):
            numbers = indices.numbers
        else:
            numbers = _as_tensor(self._dataset.counted_from_start(indices))
        return Located(numbers, visits=self._dataset.visits())

    def is_as_it_was(self, located: Located) -> bool | None:
        return located.visits is self._dataset.visits()


class _Joined(Source):
    """Datasets one after the other."""

    def is_as_it_was(self, located: Located) -> bool | None:
        return None

    loads_alone = True

    def __init__(self, unders: list[Source], ends: Sequence[int]) -> None:
        super().__init__([part for under in unders for part in under.parts])
        self._unders = unders
        self._firsts = list(itertools.accumulate((len(u.parts) for u in unders), initial=0))
        self._starts = [0, *ends]
        self._table = _as_tensor(list(ends))

    def locate(self, indices: Sequence[Any] | Drawn) -> Located:
        if isinstance(indices, Drawn):
            return self._locate(indices.numbers)
        length = self._starts[-1]
        numbers = [operator.index(index) for index in indices]
        numbers = [number + length if number < 0 else number for number in numbers]
        if any(not 0 <= number < length for number in numbers):
            raise IndexError(f"indices {numbers} are not all of a dataset of {length} samples")
        return self._locate(_as_tensor(numbers))

    def _locate(self, numbers: Tensor) -> Located:
        if len(numbers) and int(numbers.max()) >= self._starts[-1]:  # a subset may say anything
            raise IndexError(f"index {int(numbers.max())} of {self._starts[-1]} samples")
        of = torch.bucketize(numbers, self._table, right=True)
        which, places = torch.empty_like(numbers), torch.empty_like(numbers)
        for k, under in enumerate(self._unders):
            rows = (of == k).nonzero().view(-1)
            if not len(rows):
                continue
            found = under.locate(Drawn(numbers[rows] - self._starts[k]))
            places[rows] = _as_tensor(found.indices)
            which[rows] = self._firsts[k]
            if found.which is not None:
                which[rows] += _as_tensor(found.which)
        return Located(places, which)


def source_of(dataset: Any, frozen: bool = False) -> Source | None:
    """What is under ``dataset``, where all of it is cached; ``frozen``: as that is now."""
    if isinstance(dataset, CachedDataset):
        return Source([dataset])
    if type(dataset) is LazyShardDataset:
        return _Visited(dataset)
    if type(dataset) is Subset:
        under = source_of(dataset.dataset, frozen)
        return None if under is None else _Chosen(under, dataset.indices, frozen)
    if type(dataset) is ConcatDataset:
        unders = [source_of(part, frozen) for part in dataset.datasets]
        if not unders or any(under is None for under in unders):
            return None
        return _Joined(unders, dataset.cumulative_sizes)  # type: ignore[arg-type]
    return None


def _as_tensor(indices: Indices) -> Tensor:
    if isinstance(indices, Tensor):
        return indices
    return torch.tensor(as_numbers(indices), dtype=torch.int64, device="cpu")
