"""torchvision's tv_tensors, and its transforms behind the cache."""

from __future__ import annotations

import pytest
import torch
from checks import batches_are_those_of_torch, comes_back
from sources import Fixed
from torchvision import tv_tensors
from torchvision.transforms import v2


def detection(i: int) -> tuple:
    generator = torch.Generator().manual_seed(i)
    image = tv_tensors.Image(
        torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=generator)
    )
    target = {
        "boxes": tv_tensors.BoundingBoxes(
            torch.rand(3, 4, generator=generator), format="XYWH", canvas_size=(16, 16 + i)
        ),
        "masks": tv_tensors.Mask(torch.rand(3, 16, 16, generator=generator) > 0.5),
        "labels": torch.arange(3) + i,
        "image_id": i,
    }
    return image, target


KINDS = {
    "image": lambda i: (tv_tensors.Image(torch.full((3, 8, 8), i, dtype=torch.uint8)), i),
    "mask": lambda i: tv_tensors.Mask(torch.full((8, 8), i % 2 == 0)),
    "video": lambda i: tv_tensors.Video(torch.full((2, 3, 4, 4), i, dtype=torch.uint8)),
    "boxes": lambda i: tv_tensors.BoundingBoxes(
        torch.rand(2, 4), format="CXCYWH", canvas_size=(9, i)
    ),
    "key points": lambda i: tv_tensors.KeyPoints(torch.rand(5, 2), canvas_size=(9, i)),
    "detection": detection,
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_come_back_as_they_were(kind):
    comes_back(KINDS[kind](3))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_torch(cached, kind):
    batches_are_those_of_torch(cached, [KINDS[kind](i) for i in range(10)], native=True)


def test_what_a_box_carries_is_kept():
    boxes = detection(2)[1]["boxes"]
    got = comes_back(boxes)
    assert got.format is tv_tensors.BoundingBoxFormat.XYWH and got.canvas_size == (16, 18)
    assert torch.equal(v2.functional.resize(got, [32, 32]), v2.functional.resize(boxes, [32, 32]))


def test_a_transform_after_the_cache_sees_what_it_would_without(cached):
    flip = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((8, 8))])
    dataset = cached(
        Fixed([detection(i) for i in range(4)]), transform=lambda sample: flip(*sample)
    )
    for _ in range(2):
        for i in range(4):
            image, target = dataset[i]
            want, wanted = flip(*detection(i))
            assert type(image) is tv_tensors.Image and torch.equal(image, want)
            for key in ("boxes", "masks"):
                assert type(target[key]) is type(wanted[key])
                assert torch.equal(target[key], wanted[key])
