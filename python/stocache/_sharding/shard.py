"""Samples by their position in a shard, and positions by the visits of an epoch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stocache import _C

_DEAL, _EPOCH = 0, 1  # what an order is for


@dataclass(frozen=True)
class Deal:
    """In which order samples are dealt out: chunk after chunk, each whole."""

    samples: int
    chunk: int
    seed: int
    shuffle: bool

    def sample(self, position: int) -> int:
        chunks = self.samples // self.chunk
        if not self.shuffle or position >= chunks * self.chunk:
            return position  # a shorter chunk stays at the end
        chunk, rest = divmod(position, self.chunk)
        return _C.permuted(chunk, chunks, self.seed, _DEAL, 0) * self.chunk + rest

    def in_order(self, start: int, length: int) -> Tensor:
        """The samples of so many positions."""
        return self.at(torch.arange(start, start + length, device="cpu"))

    def at(self, positions: Tensor) -> Tensor:
        """The samples of these."""
        if not self.shuffle:
            return positions
        chunks = self.samples // self.chunk
        found = positions.clone()
        # A shorter chunk stays at the end.
        is_whole = positions < chunks * self.chunk
        whole = positions[is_whole]
        dealt = _C.permuted(whole // self.chunk, chunks, self.seed, _DEAL, 0)
        found[is_whole] = dealt * self.chunk + whole % self.chunk
        return found


@dataclass(frozen=True)
class Visits:
    """The positions that a rank visits in one epoch."""

    first: int
    held: int
    holder: int
    step: int
    offset: int
    count: int
    """How many the rank visits."""
    seed: int
    epoch: int
    shuffle: bool

    def position(self, number: int) -> int:
        return _C.visited(number, self.order)

    def positions(self, numbers: Tensor | Sequence[int]) -> Tensor:
        """An IndexError if one of them is none of the rank's: beside them are those of others."""
        return _C.visited(numbers, self.order)

    @functools.cached_property
    def order(self) -> tuple[int, int, int, int, int, int, int, int, bool]:
        """For those who compute positions natively."""
        return (
            self.count, self.step, self.offset, self.first, self.held, self.seed,
            _EPOCH + self.epoch, self.holder, self.shuffle,
        )  # fmt: skip


class Shard(Dataset[Any]):
    """The samples that a node keeps, under their positions from 0 on."""

    def __init__(self, source: Any, deal: Deal, start: int, length: int) -> None:
        self.source, self.deal, self.start, self.length = source, deal, start, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of a shard of {self.length}")
        return self.source[self.deal.sample(self.start + position)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "source" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def samples_at(self, positions: Any) -> Tensor:
        """The samples of the source at these positions."""
        return self.deal.at(
            self.start + torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        )

    def keys(self) -> bytes:
        """What each is known by on disk, whichever part of the dataset a node has: 16 bytes."""
        keys = torch.zeros(self.length, 2, dtype=torch.int64, device="cpu")
        keys[:, 0] = self.deal.in_order(self.start, self.length)
        return keys.numpy().tobytes()


class ShardOfMany(Shard):
    """Of a source that loads many samples at once."""

    def __getitems__(self, positions: Sequence[int]) -> Any:
        return self.source.__getitems__(
            [self.deal.sample(self.start + position) for position in positions]
        )


class Rows(Dataset[Any]):
    """An array whose rows are samples, where it does not say how many it has."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def __getitem__(self, index: int) -> Any:
        return self.array[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "array" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.array, name)


def rows_of(dataset: Any) -> Any:
    """The dataset itself, if it has a length; an array of Zarr's has a shape only."""
    has_rows = hasattr(dataset, "__getitem__") and isinstance(
        getattr(dataset, "shape", None), tuple
    )
    return Rows(dataset) if has_rows and not hasattr(dataset, "__len__") else dataset


def shard_of(source: Any, deal: Deal, start: int, length: int) -> Shard:
    many = callable(getattr(source, "__getitems__", None))
    return (ShardOfMany if many else Shard)(source, deal, start, length)


def chunk_of(source: Any) -> int:
    """How many samples lie in one piece: those of a shard or chunk of a Zarr or HDF5 array."""
    for name in ("shards", "chunks"):
        sizes = getattr(source, name, None)
        if isinstance(sizes, tuple) and sizes and isinstance(sizes[0], int) and sizes[0] > 0:
            return sizes[0]
    return 1
