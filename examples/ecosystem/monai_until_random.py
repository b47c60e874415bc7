"""MONAI: random transforms stay in the dataset; what comes before the first of them is cached.

python examples/ecosystem/monai_until_random.py
"""

from __future__ import annotations

import numpy as np
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, ScaleIntensityd
from stocache import CachedDataset

scans = [{"image": np.random.rand(16, 16, 8), "label": i % 2} for i in range(16)]
transform = Compose(
    [
        EnsureChannelFirstd("image", channel_dim="no_channel"),
        ScaleIntensityd("image"),
        RandFlipd("image", prob=0.5, spatial_axis=0),
    ]
)
# In the place of monai.data.CacheDataset(scans, transform), for all workers and ranks together.
dataset = CachedDataset.until_random(Dataset(scans, transform), "64MiB")
for _ in range(3):
    for batch in DataLoader(dataset, batch_size=4, shuffle=True):
        assert batch["image"].shape == (4, 1, 16, 16, 8)

print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
