"""What type checkers know of samples: `make lint` reads this, and nobody runs it."""

from __future__ import annotations

from stocache import BiLevelCachedDataset, CachedDataset
from torch import Tensor
from typing_extensions import assert_type

Pair = tuple[Tensor, int]


def use(dataset: CachedDataset[Pair], texts: BiLevelCachedDataset[str], index: int) -> None:
    assert_type(dataset[index], Pair)
    assert_type(dataset[2:4], list[Pair])
    assert_type(texts[[1, 2]], list[str])
    with dataset as same:
        assert_type(same, CachedDataset[Pair])
    for text in texts:
        assert_type(text, str)
