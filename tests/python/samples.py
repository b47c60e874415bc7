"""What the sample of every index looks like, how to tell a whole one from a torn one, and the
datasets that serve them. Spawned workers import this module by name, so it holds no fixtures."""

from __future__ import annotations

import stocache
import torch
from stocache._dataset.samples import finished
from torch.utils.data import Dataset

GIB = 1024**3

# One word of a sample names its own place, so that a single word from another sample, another
# version or another position is noticed:
#
#   63      47        24         0
#   +-------+---------+----------+
#   | index | version | position |
#   +-------+---------+----------+
INDEX_SHIFT = 47
VERSION_SHIFT = 24
VERSION_MASK = (1 << (INDEX_SHIFT - VERSION_SHIFT)) - 1


def whole(idx: int, words: int, version: int = 0) -> torch.Tensor:
    """The sample of `idx`: int64 words that each say which sample, version and position."""
    return torch.arange(words) + ((idx << INDEX_SHIFT) | (version << VERSION_SHIFT))


def complaint(idx: int, row: torch.Tensor) -> str | None:
    """None when `row` is some version of sample `idx` from its first word to its last."""
    version = (int(row[0]) >> VERSION_SHIFT) & VERSION_MASK
    wrong = (row != whole(idx, row.numel(), version)).nonzero()
    if len(wrong) == 0:
        return None
    at = int(wrong[0])
    return f"sample {idx}: word {at} of {row.numel()} is {int(row[at]):#x}, version {version}"


def gathered_natively(dataset: stocache.CachedDataset, indices) -> object:
    """The batch of these samples out of memory, or ``_C.MISS``."""
    return finished(dataset._stocache.records.gather(indices, 1, False), 0)


def limit_gib(dataset_len: int, words: int) -> float:
    """A size limit that holds every sample of int64 words, and not much more."""
    return (dataset_len * (8 * words + 1) + 4096) / GIB


def words_cache(length: int, words: int, **options) -> stocache.SharedCache:
    """A quiet cache with room for every sample of int64 words."""
    options.setdefault("verbose", False)
    limit = limit_gib(length, words)
    return stocache.SharedCache(limit, length, (words,), torch.int64, **options)


class CachedSamples(Dataset):
    """The dataset of the original README: look in the cache, else make and store."""

    def __init__(self, length: int, words: int, **options) -> None:
        self.length = length
        self.words = words
        self.cache = stocache.SharedCache(
            limit_gib(length, words), length, (words,), torch.int64, verbose=False, **options
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int):
        x = self.cache.get_slot(idx)
        hit = x is not None
        if x is None:
            x = whole(idx, self.words)
            self.cache.set_slot(idx, x)
        return idx, hit, x


class Views(CachedSamples):
    """Returns the view itself, which is what DataLoader(batch_size=None) passes on."""

    def __getitem__(self, idx: int):
        return super().__getitem__(idx)[2]


class Batches(CachedSamples):
    """Indexed by a list of samples; a batch is one native call."""

    def __getitem__(self, indices):
        batch, found = self.cache.get_many(indices)
        if not bool(found.all()):
            fresh = torch.stack([whole(int(i), self.words) for i in indices])
            self.cache.set_many(indices, fresh)
            batch = torch.where(found[:, None], batch, fresh)
        return torch.as_tensor(indices), batch


class Raising(Dataset):
    """Makes one named mistake with its cache, in whichever process the sample is asked for."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.cache = stocache.SharedCache(0.001, 8, (4,), verbose=False)
        self.cache.set_slot(0, torch.zeros(4, dtype=torch.uint8))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, idx: int):
        MISTAKES[self.mistake][1](self.cache)
        return idx


class TwoWords(Exception):
    """Made from two words, so it cannot be made again from its message."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class RaisingTwoWords(Raising):
    def __getitem__(self, idx: int):
        raise TwoWords("on", "purpose")


def _too_large(cache) -> None:
    stocache.SharedCache(2**30, 2**40, (1024,), verbose=False)


# name -> the exception that reaches the main process, and the call that raises it
MISTAKES = {
    "index beyond the dataset": (IndexError, lambda c: c.get_slot(8)),
    "second set": (RuntimeError, lambda c: c.set_slot(0, torch.ones(4, dtype=torch.uint8))),
    "empty slot": (RuntimeError, lambda c: c.get_slot(1, allow_empty_slot=False)),
    "another shape": (ValueError, lambda c: c.set_slot(1, torch.ones(5, dtype=torch.uint8))),
    "not a tensor": (TypeError, lambda c: c.set_slot(1, [1, 2, 3, 4])),
    "larger than the machine": (MemoryError, _too_large),
}
