"""Train on a folder of JPEGs, with decoded images in memory and augmentation fused.

    python examples/imagenet_like.py                          # writes a small folder of its own
    python examples/imagenet_like.py --data /data/imagenet/train --memory 64GiB --workers 8 \\
        --side 224 --batch 256 --model resnet50

Two lines are not those of any other training script: `CachedDataset`, which keeps what ImageFolder
decoded, and `stocache.fuse`, which runs the random transforms natively while batches are made. The
augmentation of a sample is a function of (seed, epoch, index): with other numbers of workers or
ranks, and after a restart, it is the same.

Needs: torch, torchvision, numpy, pillow.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import stocache
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def augmentation(side: int) -> stocache.Pipeline:
    return stocache.fuse(
        v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop(side, scale=(0.35, 1), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.2, 0.2, 0.2),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
    )


def validation(side: int) -> stocache.Pipeline:
    return stocache.fuse(
        v2.Compose(
            [
                v2.ToImage(),
                v2.Resize(side * 8 // 7, antialias=True),
                v2.CenterCrop(side),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
    )


def write_images(folder: Path, count: int) -> None:
    """JPEGs of several sizes; how fine their stripes are is the class to learn."""
    rng = np.random.default_rng(0)
    for number in range(count):
        label = number % 4
        height, width = (int(side) for side in rng.integers(100, 180, 2))
        y, x = np.mgrid[0:height, 0:width] / 100
        angle = rng.uniform(0, np.pi)
        waves = np.sin(2 * np.pi * 2 ** (label + 1) * (x * np.cos(angle) + y * np.sin(angle)))
        pixels = (
            128 + waves[..., None] * rng.uniform(40, 90, 3) + rng.normal(0, 10, (*waves.shape, 3))
        )
        where = folder / f"class{label}"
        where.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        image.save(where / f"{number:05d}.jpg", quality=90)


def small_network(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, following in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels, following, 3, 2, 1), nn.BatchNorm2d(following), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with a folder per class")
    parser.add_argument("--images", type=int, default=320, help="how many to write without --data")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="256MiB", help="bytes, or such as 64GiB")
    parser.add_argument("--model", default="small", help="small, or one of torchvision's")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as own:
        folder = options.data
        if folder is None:
            folder = Path(own)
            write_images(folder, options.images)
        train(folder, options)


def train(folder: Path, options: argparse.Namespace) -> None:
    images = torchvision.datasets.ImageFolder(folder)
    chosen = torch.randperm(len(images)).tolist()
    held_out = len(images) // 5
    parts = [
        torch.utils.data.Subset(images, chosen[held_out:]),
        torch.utils.data.Subset(images, chosen[:held_out]),
    ]
    training = stocache.CachedDataset(
        parts[0], options.memory, transform=augmentation(options.side), verbose=False
    )
    testing = stocache.CachedDataset(
        parts[1], options.memory, transform=validation(options.side), verbose=False
    )
    loader = stocache.DataLoader(
        training, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
    )
    tests = stocache.DataLoader(testing, options.batch, num_workers=options.workers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes = len(images.classes)
    if options.model == "small":
        model = small_network(classes)
    else:
        model = torchvision.models.get_model(options.model, num_classes=classes)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(options.epochs):
        begun, waited, total = time.perf_counter(), 0.0, 0.0
        model.train()
        asked = begun
        for pixels, labels in loader:
            waited += time.perf_counter() - asked
            loss = nn.functional.cross_entropy(model(pixels.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
            asked = time.perf_counter()
        seconds = time.perf_counter() - begun
        print(
            f"epoch {epoch + 1}: loss {total / max(1, len(loader)):.3f}, "
            f"{accuracy(model, tests, device):.0%} of {len(testing)} right, "
            f"{len(loader) * options.batch / seconds:.0f} images/s, "
            f"{waited / seconds:.0%} of the time waiting for data",
            flush=True,
        )
    print(training.stats())
    testing.close()
    training.close()


@torch.no_grad()
def accuracy(model: nn.Module, tests: stocache.DataLoader, device: str) -> float:
    model.eval()
    right = total = 0
    for pixels, labels in tests:
        right += int((model(pixels.to(device)).argmax(1).cpu() == labels).sum())
        total += len(labels)
    return right / max(1, total)


if __name__ == "__main__":
    main()
