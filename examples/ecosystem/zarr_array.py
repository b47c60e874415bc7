"""Zarr: an array whose chunks are read once, by a worker that opens it for itself.

python examples/ecosystem/zarr_array.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.array: Any = None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, idx: int) -> Any:
        if self.array is None:
            self.array = zarr.open(self.path, mode="r")
        return torch.from_numpy(np.asarray(self.array[idx])), idx


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volumes.zarr"
        volumes = zarr.create_array(path, shape=(32, 8, 16, 16), chunks=(4, 8, 16, 16), dtype="f4")
        volumes[:] = np.arange(32, dtype="f4")[:, None, None, None]
        dataset = CachedDataset(Volumes(path), "16MiB", verbose=False)
        for _ in range(3):
            for batch, numbers in DataLoader(dataset, 8, shuffle=True, num_workers=2):
                assert torch.equal(batch[:, 0, 0, 0], numbers.float())
        print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
        dataset.close()


if __name__ == "__main__":
    main()
