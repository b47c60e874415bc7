"""BiLevelCachedDataset, by the name and in the words of BiLevelCache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stocache.cached_dataset import CachedDataset, Sample


class BiLevelCachedDataset(CachedDataset[Sample]):
    """Samples in memory, what does not fit there on a local disk, and when both are full, what was
    not used for longest leaves.

    Args:
        data: Any map-style dataset.
        memory_cache_size: Bytes in memory, or as ``CachedDataset(memory=...)`` takes them.
        disk_cache_size: Bytes on disk, likewise.
        disk_cache_path: A folder on the local disk. It may be removed at any time, also while a
            job uses it.
        options: Any other of CachedDataset.
    """

    def __init__(
        self,
        data: Any,
        memory_cache_size: int | float | str = 0.5,
        disk_cache_size: int | float | str = 0.5,
        disk_cache_path: str | os.PathLike[str] = "./bicache",
        **options: Any,
    ) -> None:
        options.setdefault("policy", "lru")
        super().__init__(
            data, memory_cache_size, disk=disk_cache_size, disk_path=disk_cache_path, **options
        )

    @property
    def memory_cache(self) -> Level:
        """``memory_cache.hits.value`` and ``.misses.value``."""
        return Level(Counter(lambda: self._memory()[0]), Counter(lambda: self._memory()[1]))

    @property
    def disk_cache(self) -> Level:
        """Likewise. Who is asked here is what memory had not."""
        return Level(Counter(lambda: self._disk()[0]), Counter(lambda: self._disk()[1]))

    def _memory(self) -> tuple[int, int]:
        stats = self.stats()
        below = self._disk()[0]
        return max(0, stats.hits - below), stats.misses + below

    def _disk(self) -> tuple[int, int]:
        stats = self.stats()
        return 0 if stats.disk is None else stats.disk.hits, stats.misses


@dataclass(frozen=True)
class Level:
    """What became of the samples that one level was asked for, by all processes."""

    hits: Counter
    misses: Counter


class Counter:
    """A number that goes on, as BiLevelCache's examples read it."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    @property
    def value(self) -> int:
        return self._read()

    def __repr__(self) -> str:
        return f"Counter({self.value})"
