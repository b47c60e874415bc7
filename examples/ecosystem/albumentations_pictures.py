"""albumentations: decoded pictures are cached, and augmented whenever they are handed out.

python examples/ecosystem/albumentations_pictures.py
"""

from __future__ import annotations

from typing import Any

import albumentations
import numpy as np
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 16

    def __getitem__(self, idx: int) -> Any:
        image = np.full((32, 32, 3), idx, np.uint8)  # decoded from a file, say
        return self.transform(image=image)["image"], idx


augment = albumentations.Compose(
    [albumentations.RandomCrop(24, 24), albumentations.HorizontalFlip()]
)
dataset = CachedDataset.until_random(Pictures(augment), "16MiB")
for _ in range(3):
    for images, _labels in DataLoader(dataset, 4, shuffle=True):
        assert images.shape == (4, 24, 24, 3)

print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
