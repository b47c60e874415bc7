"""Datasets that call a transform as people write them, for until_random."""

from __future__ import annotations

import collections
import dataclasses
import random
import warnings

import numpy as np
import torch
from differential import random_states
from torch.utils.data import Dataset

Pair = collections.namedtuple("Pair", "picture label")


class Step(torch.nn.Module):
    """Adds a number, and counts how often."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount
        self.calls = 0

    def forward(self, picture):
        self.calls += 1
        return picture + self.amount


class Noise(torch.nn.Module):
    def forward(self, picture):
        return picture + torch.randint(1000, ()) * 1000


class Pictures(Dataset):
    """Calls its transform as people do."""

    classes = ("cat", "dog")

    def __init__(self, transform, shape="tuple"):
        self.transform = transform
        self.shape = shape
        self.loads = []

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.loads.append(i)
        picture = torch.full((2,), i)
        if self.shape == "two views":
            return self.transform(picture), self.transform(picture), i
        if self.shape == "same twice":
            given = self.transform(picture)
            return given, {"again": given}
        if self.shape == "beside":
            return self.transform(picture), picture
        if self.shape == "number":
            return self.transform(i), i
        if self.shape == "changed":
            return self.transform(picture) * 2
        given = self.transform(picture)
        return {
            "tuple": (given, i),
            "alone": given,
            "dict": {"label": i, "more": [{"picture": given}]},
            "named": Pair(given, i),
        }[self.shape]


class Joint(Dataset):
    """`transforms` of image and target, as torchvision's."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __len__(self):
        return 4

    def __getitem__(self, i):
        image, target = self.transforms(torch.full((2,), i), i)
        return image, target


def steps():
    return torch.nn.Sequential(Step(1), Step(10), Noise(), Step(100))


def shown(sample):
    """Values and types."""
    if isinstance(sample, torch.Tensor):
        return sample.tolist()
    if isinstance(sample, dict):
        return {key: shown(value) for key, value in sample.items()}
    if isinstance(sample, np.ndarray):
        return "array", sample.tolist()
    if dataclasses.is_dataclass(sample):
        return type(sample).__name__, shown(vars(sample))
    if isinstance(sample, (tuple, list)):
        return type(sample).__name__, [shown(value) for value in sample]
    return sample


def agrees(dataset, plain, warning=None):
    """Asserts that samples and random numbers are those of the dataset, epoch after epoch; and that
    no more than this is warned about, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            seen = []
            for source in (plain, dataset):
                torch.manual_seed(epoch)
                random.seed(epoch)
                np.random.seed(epoch)
                seen.append([shown(source[i]) for i in range(len(plain))])
                seen.append(random_states())
            assert seen[:2] == seen[2:]
    texts = [str(each.message) for each in caught]
    assert len(texts) == (warning is not None), texts
    for text in texts:
        assert "is not cached, and loaded every time: " in text and warning in text
        assert "pass them as CachedDataset(transform=...)" in text and "\n" not in text
