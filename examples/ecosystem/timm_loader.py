"""timm: `create_loader` sets the dataset's transform; here it runs after the cache.

python examples/ecosystem/timm_loader.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image
from stocache import CachedDataset
from timm.data import create_dataset, create_loader


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for k in range(16):
            path = Path(folder) / f"class{k % 2}" / f"{k}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (48, 40), (10 * k, 99, 0)).save(path)

        pictures = create_dataset("folder", root=folder)
        dataset = CachedDataset(pictures, "16MiB", verbose=False)  # decoded once
        loader = create_loader(
            dataset, (3, 32, 32), 4, is_training=True, use_prefetcher=False, num_workers=1
        )
        for _ in range(3):
            for images, labels in loader:
                assert images.shape == (4, 3, 32, 32) and labels.max() <= 1

        print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
        dataset.close()


if __name__ == "__main__":
    main()
