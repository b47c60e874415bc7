"""h5py: a file that each worker opens for itself, at its first sample.

python examples/ecosystem/h5py_file.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, idx: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["rows"][idx])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.h5"
        with h5py.File(path, "w") as file:
            file["rows"] = np.arange(64 * 16, dtype="f4").reshape(64, 16)
        dataset = CachedDataset(Rows(path), "16MiB", verbose=False)
        for _ in range(3):
            for batch in DataLoader(dataset, 8, shuffle=True, num_workers=2):
                assert batch.shape == (8, 16)
        assert dataset.dataset.file is None  # nobody opened it in this process
        print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
        dataset.close()


if __name__ == "__main__":
    main()
