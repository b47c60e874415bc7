"""A CachedDataset seen batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, default_collate


class Collated:
    """A batch in the place of its samples, on the way to ``collate``."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def collate(samples: Any) -> Any:
    """As default_collate. A DataLoader that has it, torch's or one that is made of torch's, gets
    batches of a CachedDataset that were gathered natively: ``collate_fn=stocache.collate``."""
    return samples.batch if type(samples) is Collated else default_collate(samples)


class View(Dataset[Any]):
    """Stands for a CachedDataset in front of a loader: attributes are those of the latter, also
    where a worker_init_fn sets them."""

    cached: Any

    def __init__(self, cached: Any) -> None:
        object.__setattr__(self, "cached", cached)

    def __len__(self) -> int:
        return len(self.cached)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "cached" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.cached, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cached, name, value)


class Loads(View):
    """Loads samples into the cache without handing them out."""

    def __getitem__(self, index: int) -> None:
        samples = self.cached._stocache
        if not samples.records.contains(index):
            samples.load(index, asked_for=False)


class Batches(View):
    """Its items are batches: ``view[[3, 1, 2]]`` is what default_collate makes of these samples.

    torch's loaders ask for such items with ``batch_size=None`` and a sampler of lists.
    """

    def __getitem__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, int):
            raise TypeError(
                f"index {indices} of a view of batches; a list of indices is needed: give the "
                "DataLoader sampler=BatchSampler(...) and batch_size=None"
            )
        if self.cached._stocache_gathers():
            indices = list(indices) if hasattr(indices, "__next__") else indices
            return self.cached._stocache.batch(indices, self.cached._stocache_fusing(indices))
        return self.cached._stocache.stacked(self.cached.__getitems__(indices))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self[indices]
