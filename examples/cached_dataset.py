"""Two epochs over a slow source, without and with `CachedDataset`.

    python examples/cached_dataset.py

The dataset below knows nothing of a cache. One line puts one around it; the loader and the training
loop are the same in both runs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from stocache import CachedDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 1000
CLASSES = 10
BATCH_SIZE = 50
EPOCHS = 2


class SlowPictures(Dataset[dict[str, Any]]):
    """Stands for pictures on a slow disk: 3 ms each, and always the same result."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> dict[str, Any]:
        time.sleep(0.003)
        label = idx % CLASSES
        generator = torch.Generator().manual_seed(idx)
        picture = torch.randint(0, 128, (3, 32, 32), dtype=torch.uint8, generator=generator)
        picture[:, 3 * label : 3 * label + 3] += 100  # what there is to learn
        return {"picture": picture, "label": label, "file": f"{idx:05}.jpg"}


def brighten(sample: dict[str, Any]) -> dict[str, Any]:
    """Random augmentation comes after the cache, or every epoch would see the same."""
    brightness = 0.8 + 0.4 * torch.rand(())
    return {**sample, "picture": sample["picture"].float() / 255 * brightness}


class Augmented(Dataset[dict[str, Any]]):
    """The same without a cache."""

    def __init__(self, dataset: Dataset[dict[str, Any]]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return brighten(self.dataset[idx])


def train(dataset: Dataset[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds of every epoch, and the share of right answers in the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        dataset,
        BATCH_SIZE,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    seconds = []
    for _ in range(EPOCHS):
        right = 0
        start = time.perf_counter()
        for batch in loader:
            answers: Tensor = model(batch["picture"])
            loss = nn.functional.cross_entropy(answers, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((answers.argmax(1) == batch["label"]).sum())
        seconds.append(time.perf_counter() - start)
    return seconds, right / SAMPLES


def main() -> None:
    plain, plain_right = train(Augmented(SlowPictures()))

    cached = CachedDataset(SlowPictures(), "64MiB", transform=brighten)  # the one line
    fast, fast_right = train(cached)
    stats = cached.stats()

    print(f"{'':14} | {'epoch 1':>8} | {'epoch 2':>8} | right answers")
    for name, seconds, right in (
        ("without cache", plain, plain_right),
        ("with cache", fast, fast_right),
    ):
        cells = " | ".join(f"{each:6.2f} s" for each in seconds)
        print(f"{name:14} | {cells} | {right:.0%}")
    print(stats)
    assert stats.loads == SAMPLES  # each was loaded once, by whichever worker came first


if __name__ == "__main__":
    main()
