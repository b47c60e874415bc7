"""MONAI's MetaTensor: affine, metadata, the operations that were applied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import batches_are_those_of_torch, comes_back
from differential import picture
from monai.data import CacheDataset, Dataset, MetaTensor
from monai.data import DataLoader as MonaiLoader
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    EnsureChannelFirstd,
    Flip,
    Lambdad,
    RandFlipd,
    RandGaussianNoised,
    RandRotated,
    Rotated,
    ScaleIntensityd,
    Spacing,
    TorchVisiond,
    ToTensord,
    Transform,
)
from monai.utils import set_determinism
from sources import Fixed
from stocache import CachedDataset


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


def pipeline() -> Compose:
    return Compose(
        [
            EnsureChannelFirstd("image", channel_dim="no_channel"),
            Compose([ScaleIntensityd("image"), RandGaussianNoised("image", prob=1)]),
            RandFlipd("image", prob=0.5, spatial_axis=0),
            ToTensord("image"),
        ]
    )


def items() -> list[dict]:
    rng = np.random.RandomState(0)
    return [{"image": rng.rand(6, 5, 4).astype("f4"), "label": i} for i in range(8)]


@pytest.fixture
def seeded():
    set_determinism(seed=5)
    yield
    set_determinism(seed=None)


def alike(one: dict, other: dict) -> bool:
    """But for the addresses of transforms, which stand in what was applied."""
    for image in (one["image"], other["image"]):
        without_addresses(image.applied_operations)
    return picture(one) == picture(other)


def without_addresses(operations) -> None:
    if isinstance(operations, dict):
        operations.pop("id", None)
        operations = operations.values()
    for each in operations:
        if isinstance(each, (list, dict)):
            without_addresses(each)


def test_up_to_the_first_random_transform_as_cache_dataset_does(seeded, capsys):
    plain, source = (Dataset(items(), pipeline()) for _ in range(2))
    with CachedDataset.until_random(source, "16MiB") as dataset:
        assert "Cached are 2 of 5 steps of Dataset.transform" in capsys.readouterr().out
        for _ in range(3):
            for i in range(8):
                assert alike(dataset[i], plain[i])
        assert dataset.stats().loads == 8
        assert len({dataset[1]["image"].sum().item() for _ in range(4)}) > 1


def test_a_dataset_of_monai_that_takes_a_compose_only_passes_by(seeded):
    """Its own CacheDataset, which is a cache itself."""
    plain, source = (CacheDataset(items(), pipeline(), progress=False) for _ in range(2))
    with (
        CachedDataset.until_random(source, "16MiB", verbose=False) as dataset,
        pytest.warns(RuntimeWarning, match="CacheDataset cannot go on") as caught,
    ):
        for i in (0, 3, 0):
            set_determinism(seed=i)
            expected = plain[i]
            set_determinism(seed=i)
            assert alike(dataset[i], expected)
    assert len(caught) == 1


class Shaken(Transform):
    def __call__(self, sample):
        return {**sample, "image": sample["image"] + torch.rand(1).item()}


@pytest.mark.parametrize(
    "step",
    [
        Shaken(),
        Lambdad("image", lambda image: image + torch.rand(1).item()),
        TorchVisiond("image", name="ColorJitter", brightness=0.9),
    ],
)
def test_what_calls_a_function_of_somebody_else_counts_as_random(step, capsys):
    first = EnsureChannelFirstd("image", channel_dim="no_channel")
    source = Dataset(items(), Compose([first, step, ScaleIntensityd("image")]))
    with CachedDataset.until_random(source, "16MiB"):
        assert "Cached are 1 of 3 steps of Dataset.transform" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_monai_seeds_the_rest_as_the_whole(seeded, workers):
    source = Dataset(items(), pipeline())
    cut = Dataset(items(), pipeline())
    with CachedDataset.until_random(cut, "16MiB", verbose=False) as dataset:
        for epoch in range(2):
            batches = []
            for each in (source, dataset):
                torch.manual_seed(epoch)
                loader = MonaiLoader(each, batch_size=4, num_workers=workers)
                batches.append(list(loader))
            for one, other in zip(*batches, strict=True):
                assert alike(one, other)


def test_what_ran_after_the_cache_can_be_inverted():
    transform = Compose(
        [
            EnsureChannelFirstd("image", channel_dim="no_channel"),
            RandFlipd("image", prob=1, spatial_axis=0),
        ]
    )
    with CachedDataset.until_random(Dataset(items(), transform), "16MiB") as dataset:
        for _ in range(2):
            sample = dataset[3]
            assert not np.array_equal(sample["image"][0], items()[3]["image"])
            back = transform.inverse(sample)
            assert np.array_equal(back["image"].squeeze(), items()[3]["image"])


def test_what_is_cached_is_known_again_though_every_process_has_other_random_states(seeded):
    options = {"name": "monai-until-random", "keep": True, "verbose": False}
    for filled in (0, 1):
        set_determinism(seed=filled)
        dataset = CachedDataset.until_random(Dataset(items(), pipeline()), "16MiB", **options)
        assert dataset.stats().filled == filled
        dataset[0]
        dataset.close()
    CachedDataset.until_random(Dataset(items(), pipeline()), "16MiB", **options).delete()


def resampled(lazy, by_itself=False) -> Compose:
    first = EnsureChannelFirstd("image", channel_dim="no_channel")
    turn = Rotated("image", (0.3, 0.2, 0.1), lazy=by_itself)
    return Compose([first, turn, RandRotated("image", prob=1, range_x=0.5)], lazy=lazy)


LAZY = {
    "lazy": ((True,), "before all steps"),
    "by its steps": ((None, True), "before all steps"),
    "not lazy": ((False,), "Cached are 2 of 3 steps"),
    "not lazy, with a step that would be": ((False, True), "Cached are 1 of 3 steps"),
}


@pytest.mark.parametrize("how", LAZY)
def test_what_is_resampled_once_for_all_is_not_cut_inside(seeded, capsys, how):
    options, told = LAZY[how]
    plain, source = (Dataset(items(), resampled(*options)) for _ in range(2))
    with CachedDataset.until_random(source, "16MiB") as dataset:
        assert told in capsys.readouterr().out
        for _ in range(2):
            for i in range(8):
                assert alike(dataset[i], plain[i])
        assert dataset.stats().loads == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_monai_seeds_what_is_nested_as_the_whole(seeded, workers):
    """A nested Compose that is cached draws a seed as well."""

    def make():
        first = Compose([Compose([EnsureChannelFirstd("image", channel_dim="no_channel")])])
        rest = Compose([RandGaussianNoised("image", prob=1), RandFlipd("image", prob=0.5)])
        return Dataset(items(), Compose([first, Compose([ScaleIntensityd("image")]), rest]))

    with CachedDataset.until_random(make(), "16MiB", verbose=False) as dataset:
        for epoch in range(2):
            batches = []
            for each in (make(), dataset):
                torch.manual_seed(epoch)
                batches.append(list(MonaiLoader(each, batch_size=4, num_workers=workers)))
            for one, other in zip(*batches, strict=True):
                assert alike(one, other)
        assert dataset.stats().filled == 8
