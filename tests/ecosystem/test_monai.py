"""MONAI's MetaTensor: affine, metadata, the operations that were applied."""

from __future__ import annotations

import numpy as np
import torch
from checks import batches_are_those_of_torch, comes_back
from differential import picture
from monai.data import DataLoader as MonaiLoader
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirst, Flip, Spacing
from sources import Fixed


def scan(i: int) -> MetaTensor:
    affine = torch.diag(torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    meta = {"filename_or_obj": f"{i}.nii", "spatial_shape": np.array([8, 8, 4]), "id": i}
    image = MetaTensor(torch.full((8, 8, 4), float(i)), affine=affine, meta=meta)
    return Compose(
        [EnsureChannelFirst(channel_dim="no_channel"), Spacing((2, 2, 1)), Flip(spatial_axis=0)]
    )(image)


def sample(i: int) -> dict:
    return {"image": scan(i), "label": MetaTensor(torch.full((1, 4, 4), i)), "age": 30 + i}


def test_what_a_scan_carries_is_kept():
    value = scan(3)
    assert len(value.applied_operations) == 2
    got = comes_back(value)
    assert torch.equal(got.affine, value.affine)
    assert picture(got.meta) == picture(value.meta)
    assert picture(got.applied_operations) == picture(value.applied_operations)
    assert got.is_batch is value.is_batch is False


def test_transforms_can_be_inverted_after_the_cache():
    transform = Flip(spatial_axis=0)
    value = transform(MetaTensor(torch.arange(8.0).view(1, 2, 2, 2)))
    assert torch.equal(transform.inverse(comes_back(value)), transform.inverse(value))


def test_batches_are_those_of_torch(cached):
    batches_are_those_of_torch(cached, [scan(i) for i in range(10)], native=True)
    batches_are_those_of_torch(cached, [sample(i) for i in range(10)], native=True)


def test_the_loader_of_monai(cached):
    samples = [sample(i) for i in range(10)]
    dataset = cached(Fixed(samples))
    for workers in (0, 2):
        expected = [
            picture(batch) for batch in MonaiLoader(samples, batch_size=4, num_workers=workers)
        ]
        for _ in range(2):
            loader = MonaiLoader(dataset, batch_size=4, num_workers=workers)
            assert [picture(batch) for batch in loader] == expected
