"""Scans with metadata (MetaTensor): affine and applied operations are kept, also in batches.

python examples/ecosystem/monai_scans.py
"""

from __future__ import annotations

from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirst, ScaleIntensity, Spacing
from stocache import CachedDataset, DataLoader
from torch.utils.data import Dataset

prepare = Compose(
    [EnsureChannelFirst(channel_dim="no_channel"), Spacing((2.0, 2.0, 2.0)), ScaleIntensity()]
)


class Scans(Dataset[Any]):
    """Stands for files that take long to load and to resample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, idx: int) -> Any:
        voxels = torch.rand(32, 32, 16, generator=torch.Generator().manual_seed(idx))
        scan = MetaTensor(voxels, affine=torch.eye(4), meta={"filename_or_obj": f"{idx}.nii"})
        return {"image": prepare(scan), "label": idx % 2}


dataset = CachedDataset(Scans(), "64MiB", verbose=False)
for _ in range(2):
    for batch in DataLoader(dataset, 4, shuffle=True):
        assert batch["image"].shape == (4, 1, 16, 16, 8)

image = batch["image"]
print(type(image).__name__, image.meta["filename_or_obj"][0].endswith(".nii"), image.is_batch)
print(len(dataset[5]["image"].applied_operations), "operations can be inverted")
print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
