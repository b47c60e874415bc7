"""torchvision: an ImageFolder with random augmentation in its transform, in one changed line.

python examples/ecosystem/torchvision_folder.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from PIL import Image
from stocache import CachedDataset
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

transform = v2.Compose(
    [
        v2.Resize(48),
        v2.PILToTensor(),
        v2.RandomCrop(32),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)

with tempfile.TemporaryDirectory() as folder:
    for k in range(16):
        path = Path(folder) / f"class{k % 2}" / f"{k}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 56), (10 * k, 99, 0)).save(path)

    dataset = CachedDataset.until_random(ImageFolder(folder, transform), "16MiB")
    for _ in range(3):
        for images, labels in DataLoader(dataset, 4, shuffle=True):
            assert images.shape == (4, 3, 32, 32) and labels.max() <= 1

    print(dataset.classes, f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
    dataset.close()
