"""Pictures with boxes and masks, as torchvision's own types: they stay what they are.

python examples/ecosystem/torchvision_detection.py
"""

from __future__ import annotations

from typing import Any

import torch
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2


class Detection(Dataset[Any]):
    """Stands for decoded pictures."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, idx: int) -> Any:
        picture = tv_tensors.Image(torch.full((3, 64, 64), idx, dtype=torch.uint8))
        boxes = tv_tensors.BoundingBoxes(
            [[8, 8, 24, 32]], format="XYXY", canvas_size=(64, 64), dtype=torch.float32
        )
        return picture, {"boxes": boxes, "label": idx % 10}


augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomResizedCrop((48, 48))])
dataset = CachedDataset(Detection(), "64MiB", transform=augment, verbose=False)

for _ in range(2):
    for pictures, targets in DataLoader(dataset, 8, shuffle=True):
        assert pictures.shape == (8, 3, 48, 48) and targets["boxes"].shape == (8, 1, 4)

picture, target = dataset[3]
print(type(picture).__name__, type(target["boxes"]).__name__, target["boxes"].canvas_size)
print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
