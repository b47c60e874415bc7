"""One sample as a fused pipeline augments it: python examples/augmented.py --plot augmentation.png

Shows the sample, and what comes of it in seven epochs.
"""

from __future__ import annotations

import argparse

import torch
from stocache import CachedDataset, fuse
from torchvision.transforms import v2


def landscape(size: int = 240) -> torch.Tensor:
    """A sky with a sun, hills and a house, so that crops and flips are seen; uint8."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    image = torch.stack([0.45 + 0.4 * y, 0.65 + 0.25 * y, 0.95 - 0.1 * y])
    for centre, height, colour in ((0.15, 0.55, (0.35, 0.5, 0.4)), (0.7, 0.65, (0.25, 0.55, 0.25))):
        hill = y > height + 0.35 * (x - centre) ** 2 + 0.01 * torch.sin(40 * x)
        image = torch.where(hill, torch.tensor(colour)[:, None, None] * (1.3 - 0.5 * y), image)
    sun = (x - 0.78) ** 2 + (y - 0.22) ** 2 < 0.09**2
    image = torch.where(sun, torch.tensor([1.0, 0.85, 0.3])[:, None, None], image)
    wall = (x > 0.2) & (x < 0.42) & (y > 0.6) & (y < 0.82)
    roof = (y > 0.45) & (y < 0.6) & ((x - 0.31).abs() < 0.9 * (y - 0.45))
    door = (x > 0.28) & (x < 0.34) & (y > 0.7) & (y < 0.82)
    for part, colour in (
        (wall, (0.9, 0.85, 0.7)),
        (roof, (0.7, 0.2, 0.15)),
        (door, (0.3, 0.2, 0.1)),
    ):
        image = torch.where(part, torch.tensor(colour)[:, None, None], image)
    return (image.clamp(0, 1) * 255).to(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", default="augmentation.png", help="where the picture goes")
    options = parser.parse_args()
    augment = fuse(
        v2.Compose(
            [
                v2.RandomResizedCrop(160, scale=(0.3, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.4, 0.4, 0.4, 0.08),
                v2.RandomGrayscale(0.15),
                v2.RandomErasing(0.4, value=127),
            ]
        ),
        seed=3,
    )
    print(augment)
    epochs = 7
    with CachedDataset([landscape()], "4MiB", transform=augment, verbose=False) as dataset:
        shown = []
        for epoch in range(epochs):
            augment.set_epoch(epoch)
            shown.append(dataset[0])
            steps = [step["op"] for step in augment.parameters(landscape(), 0)]
            print(f"epoch {epoch}: {', '.join(steps)}")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, epochs + 1, figsize=(12, 1.8))
    titles = ["the sample", *(f"epoch {epoch}" for epoch in range(epochs))]
    for place, title, image in zip(axes, titles, [landscape(), *shown], strict=True):
        place.imshow(image.permute(1, 2, 0))
        place.set_title(title, fontsize=9)
        place.axis("off")
    figure.tight_layout(pad=0.4)
    figure.savefig(options.plot, dpi=110, bbox_inches="tight", pad_inches=0.05)
    print(f"saved {options.plot}")


if __name__ == "__main__":
    main()
