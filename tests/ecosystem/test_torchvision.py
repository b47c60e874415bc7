"""torchvision's tv_tensors, and its transforms behind the cache."""

from __future__ import annotations

import contextlib

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.transforms as v1
from checks import batches_are_those_of_torch, comes_back
from differential import picture
from sources import Fixed
from stocache import CachedDataset
from stocache._dataset import splitting
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
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


class Images(datasets.VisionDataset):
    """As torchvision's own are written: image and target, each with its transform."""

    def __init__(self, transform=None, transforms=None):
        super().__init__(".", transforms=transforms, transform=transform)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        picture = PIL.Image.new("RGB", (20, 16), (i, 2 * i, 3 * i))
        picture.putpixel((i, 0), (255, 0, 0))
        return self.both(picture, i)

    def both(self, image, target):
        return (image, target) if self.transforms is None else self.transforms(image, target)


def augmentation(version):
    return version.Compose(
        [
            version.Resize(12),
            version.PILToTensor(),
            version.RandomCrop(10),
            version.RandomHorizontalFlip(),
            version.ConvertImageDtype(torch.float32),
        ]
    )


@pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_of_images_is_given_the_image(cached, version, workers):
    dataset = cached(Images(), transform=augmentation(version))
    assert type(dataset.transform) is version.Compose
    for epoch in range(2):
        batches = []
        for source in (Images(transform=augmentation(version)), dataset):
            torch.manual_seed(epoch)
            batches.append(list(DataLoader(source, 4, shuffle=True, num_workers=workers)))
        for (image, label), (wanted, expected) in zip(*batches, strict=True):
            assert torch.equal(image, wanted) and torch.equal(label, expected)
    assert dataset.stats().loads == 8


def test_control_without_the_rule_it_is_given_the_whole_sample(cached):
    dataset = cached(Images(), transform_sample=augmentation(v1))
    with pytest.raises(TypeError, match="tuple"):
        dataset[0]


def test_which_part_is_the_image(cached):
    image, other = torch.zeros(3, 4, 4), torch.ones(3, 4, 4)
    picture = PIL.Image.new("RGB", (4, 4))
    flip = v1.RandomHorizontalFlip(0)
    add = v1.Lambda(lambda image: ("seen", image))
    for sample, key in (
        ((image, other), 0),
        ((other, picture, image), 1),
        (({"label": 3, "image": image}), "image"),
        ([3, "name", tv_tensors.Image(image), picture], 2),
        ((3, np.zeros((4, 4))), 1),
    ):
        for transform in (add, v1.Compose([flip, add]), torch.nn.Sequential(flip, v1.Pad(1))):
            if transform is not add and isinstance(sample[key], np.ndarray):
                continue
            got = cached([sample], transform=transform)[0]
            assert type(got) is type(sample)
            assert got[key] is not sample[key] and type(got[key]) is not type(None)
            if isinstance(transform, torch.nn.Sequential):
                size = got[key].size if isinstance(got[key], PIL.Image.Image) else got[key].shape
                assert tuple(size)[-2:] == (6, 6)
            else:
                assert got[key][0] == "seen"
            others = [k for k in (sample if isinstance(sample, dict) else range(len(sample)))]
            assert all(type(got[k]) is type(sample[k]) for k in others if k != key)
    assert cached([image], transform=v1.Pad(1))[0].shape == (3, 6, 6)
    with pytest.raises(TypeError, match="has no image, tensor or array in it"):
        cached([(1, "a")], transform=v1.Pad(1))[0]


def test_functions_and_compositions_of_functions_get_the_whole_sample(cached):
    def swap(sample):
        return sample[::-1]

    for transform in (swap, v1.Compose([swap])):
        assert cached([(torch.zeros(1), 5)], transform=transform)[0][0] == 5


def test_a_loader_may_set_the_transform_of_images(cached):
    dataset = cached(Images())
    dataset.transform = augmentation(v1)
    assert dataset[1][0].shape == (3, 10, 10) and dataset.dataset.transform is None
    dataset.transform = augmentation(v2)
    assert dataset[1][0].shape == (3, 10, 10)
    with pytest.raises(AttributeError, match="has one of its own"):
        dataset.transform = lambda image: image
    with pytest.raises(AttributeError, match="has one of its own"):
        cached(Images(transform=v2.Resize(8))).transform = augmentation(v2)


CUTS = {
    "v1": (lambda: Images(transform=augmentation(v1)), "2 of 5 steps of Images.transform "),
    "v2": (lambda: Images(transform=augmentation(v2)), "2 of 5 steps of Images.transform "),
    "joint": (lambda: Images(transforms=augmentation(v2)), "2 of 5 steps of Images.transforms "),
    "nested": (
        lambda: Images(transform=v2.Compose([v2.Compose([v2.Resize(12), v2.ColorJitter(0.5)])])),
        "1 of 2 steps",
    ),
    "blur": (
        # It draws a number, also where there is only one to choose.
        lambda: Images(transform=v2.Compose([v2.GaussianBlur(3, 1.0), v2.RandomCrop(10)])),
        "before all steps",
    ),
    "one": (lambda: Images(transform=v2.RandomCrop(10)), "before all steps"),
}


@pytest.mark.parametrize("kind", CUTS)
def test_the_first_random_step_is_found(kind, capsys):
    make, told = CUTS[kind]
    with contextlib.closing(CachedDataset.until_random(make(), "16MiB")) as dataset:
        assert told in capsys.readouterr().out
        plain = make()
        for _ in range(2):
            torch.manual_seed(7)
            expected = [plain[i] for i in range(8)]
            torch.manual_seed(7)
            for i, (image, target) in enumerate(expected):
                got, label = dataset[i]
                assert type(got) is type(image) and label == target == i
                assert torch.equal(tv_tensors.Image(got), tv_tensors.Image(image))
        assert dataset.stats().loads == 8


class Detections(datasets.VisionDataset):
    """As CocoDetection is, whose samples torchvision's wrapper makes tv_tensors of."""

    def __init__(self, transforms):
        super().__init__(".", transforms=transforms)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        image, target = detection(i)
        return self.transforms(image, target)


def test_boxes_and_masks_beside_an_image_go_on_after_the_cache():
    steps = v2.Compose(
        [v2.Resize((12, 12)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5),
         v2.SanitizeBoundingBoxes(), v2.ToDtype(torch.float32, scale=True)]
    )  # fmt: skip
    plain = Detections(steps)
    with CachedDataset.until_random(Detections(steps), "16MiB", verbose=False) as dataset:
        for _ in range(3):
            for i in range(4):
                torch.manual_seed(i)
                expected = picture(plain[i])
                torch.manual_seed(i)
                assert picture(dataset[i]) == expected
        assert dataset.stats().loads == 4


def test_nothing_random_is_cached_whole(capsys):
    source = Images(transform=v2.Compose([v2.Resize(8), v2.PILToTensor()]))
    with contextlib.closing(CachedDataset.until_random(source, "16MiB")) as dataset:
        assert "All steps of Images.transform are cached" in capsys.readouterr().out
        assert dataset.transform is None and dataset.dataset is source


def test_real_classes_are_known():
    """Each name that counts as the same every time is one of torchvision's."""
    names = {*dir(v1), *dir(v2)}
    assert splitting._SAME_EVERY_TIME - names <= {"SetClampingMode", "SanitizeKeyPoints"}
    for name in splitting._SAME_EVERY_TIME:
        assert not name.startswith("Random")
