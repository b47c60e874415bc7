"""A DataLoader batch as one native call: `__getitems__` with `get_many` and `set_many`.

    python examples/batch_dataset.py

PyTorch hands `__getitems__` all indices of a batch at once. The dataset below asks the cache for
all of them in one call, prepares only what is missing, and stores that in one call. The batch
leaves the cache already stacked, so nothing is left for the collate function to do.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from stocache import SharedCache
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SAMPLES = 2000
SHAPE = (3, 64, 64)
BATCH_SIZE = 50


def prepare(idx: int) -> Tensor:
    """Stands for fetching and decoding sample `idx`: slow, and always the same result."""
    time.sleep(0.002)
    generator = torch.Generator().manual_seed(idx)
    return torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator)


class BatchedSamples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.cache = SharedCache(
            size_limit_gib=0.1,
            dataset_len=SAMPLES,
            data_dims=SHAPE,
            dtype=torch.uint8,
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        batch, found = self.cache.get_many(indices)
        # Rows that are not found are zero: empty slots, or samples beyond the size limit.
        rows = (~found).nonzero().flatten().tolist()
        if rows:
            missing = [indices[row] for row in rows]
            prepared = torch.stack([prepare(idx) for idx in missing])
            batch[rows] = prepared
            self.cache.set_many(missing, prepared)
        return batch, torch.tensor(indices)


def as_is(batch: Any) -> Any:
    """The collate function: `__getitems__` has built the batch already."""
    return batch


def main() -> None:
    dataset = BatchedSamples()
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=2,
        collate_fn=as_is,
        persistent_workers=True,
    )
    before = dataset.cache.stats()
    for epoch in range(1, 4):
        start = time.perf_counter()
        for images, indices in loader:
            assert images.shape == (len(indices), *SHAPE)
        seconds = time.perf_counter() - start
        after = dataset.cache.stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        print(f"epoch {epoch}: {seconds:5.2f} s, {hits} hits, {misses} misses")
        before = after

    # What arrived is what a fresh preparation gives.
    assert all(torch.equal(x, prepare(int(i))) for x, i in zip(images, indices, strict=True))
    print(f"last batch of {len(indices)} compared with the source: equal")
    print(
        f"cache: {after.filled} of {after.capacity} slots filled, "
        f"{after.bytes / 2**20:.1f} MiB written, fill fraction {dataset.cache.fill_fraction:.2f}"
    )


if __name__ == "__main__":
    main()
