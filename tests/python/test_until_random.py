"""A dataset whose transform is random from some step on: what comes before is cached."""

from __future__ import annotations

import collections
import random

import pytest
import torch
from stocache import CachedDataset
from stocache._dataset import splitting
from torch.utils.data import DataLoader, Dataset, Subset

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


@pytest.fixture
def cut():
    made = []

    def make(dataset, memory="16MiB", **options):
        options = {"verbose": False, **options}
        made.append(CachedDataset.until_random(dataset, memory, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


SHAPES = ["tuple", "alone", "dict", "named", "two views", "same twice", "beside"]


def shown(sample):
    """Values, types and which objects are one."""
    if isinstance(sample, torch.Tensor):
        return sample.tolist()
    if isinstance(sample, dict):
        return {key: shown(value) for key, value in sample.items()}
    if isinstance(sample, (tuple, list)):
        return type(sample).__name__, [shown(value) for value in sample]
    return sample


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 2])
def test_samples_and_random_numbers_are_those_of_the_dataset(cut, shape, count):
    plain = Pictures(steps(), shape)
    dataset = cut(Pictures(steps(), shape), steps=count)
    for _ in range(3):
        torch.manual_seed(5)
        expected = [shown(plain[i]) for i in range(6)]
        torch.manual_seed(5)
        assert [shown(dataset[i]) for i in range(6)] == expected
        torch.manual_seed(5)
        assert list(map(shown, dataset.__getitems__(range(6)))) == expected
    assert dataset.stats().loads == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_dataset(cut, workers):
    dataset = cut(Pictures(steps()), steps=2)
    for epoch in range(3):
        batches = []
        for source in (Pictures(steps()), dataset):
            torch.manual_seed(epoch)
            loader = DataLoader(source, 2, shuffle=True, num_workers=workers)
            batches.append([shown(batch) for batch in loader])
        assert batches[0] == batches[1]
    assert dataset.stats().loads == 6


def test_the_dataset_itself_stays_as_it_is(cut):
    transform = steps()
    source = Pictures(transform)
    before = dict(vars(source))
    dataset = cut(source, steps=2)
    for _ in range(2):
        dataset[1]
    assert vars(source) == before and source.transform is transform
    assert len(transform) == 4
    assert (transform[0].calls, transform[3].calls) == (1, 2), "its steps are the same objects"
    source.loads.clear()
    assert source[1][0].tolist() != [1, 1] and source.loads == [1]


def test_control_a_transform_that_is_cached_whole_is_random_once(cut):
    with pytest.warns(RuntimeWarning, match="gives another sample"):
        dataset = cut(Pictures(steps()), steps=4)
        assert dataset.transform is None
        assert len({tuple(dataset[1][0].tolist()) for _ in range(8)}) == 1
    dataset = cut(Pictures(steps()), steps=2)
    assert len({tuple(dataset[1][0].tolist()) for _ in range(8)}) > 1


def test_unknown_steps_count_as_random(cut, capsys):
    dataset = cut(Pictures(steps()), verbose=True)
    assert "cached before all steps of Pictures.transform; after the cache: Step" in (
        capsys.readouterr().out
    )
    dataset[1]
    assert dataset.dataset.dataset.transform.steps is None


def test_it_says_where_it_was_cut_once(cut, capsys):
    cut(Pictures(steps()), steps=2, verbose=True)
    line = capsys.readouterr().out
    assert line == (
        "Cached are 2 of 4 steps of Pictures.transform (Step, Step); "
        "after the cache: Noise, Step.\n"
    )


def test_subsets_and_attributes(cut):
    source = Pictures(steps())
    dataset = cut(Subset(Subset(source, [1, 3, 5]), [2, 0]), steps=2)
    assert len(dataset) == 2
    torch.manual_seed(0)
    sample = dataset[0]
    torch.manual_seed(0)
    assert shown(sample) == shown(source[5])
    assert cut(source, steps=2).classes == ("cat", "dog")
    assert source.transform is not None and type(source.transform) is torch.nn.Sequential


def moved(image, target):
    return image + random.randrange(10), target + 1


def test_a_transform_of_image_and_target(cut):
    plain, dataset = Joint(moved), cut(Joint(moved))
    for _ in range(2):
        for source in (plain, dataset):
            random.seed(3)
            assert shown(source[2])[1][1] == 3
        random.seed(3)
        expected = shown(plain[2])
        random.seed(3)
        assert shown(dataset[2]) == expected


def both_of(dataset):
    sample = dataset[3]
    return sample[0].tolist(), sample[1].tolist()


@pytest.mark.parametrize("first", [[], [torch.nn.Identity()]])
def test_what_went_in_stays_as_it_is(cut, first):
    dataset = cut(Pictures(torch.nn.Sequential(*first, Step(1)), "beside"), steps=len(first))
    assert [both_of(dataset) for _ in range(2)] == [([4, 4], [3, 3])] * 2


def test_control_by_identity_alone_it_would_not(cut, monkeypatch):
    monkeypatch.setattr(splitting, "_another", lambda value: value)
    dataset = cut(Pictures(torch.nn.Sequential(Step(1)), "beside"), steps=0)
    assert both_of(dataset) == ([4, 4], [4, 4])


def test_a_number_that_stands_at_two_places_is_told(cut):
    dataset = cut(Pictures(torch.nn.Sequential(Step(1)), "number"), steps=0)
    with pytest.raises(ValueError, match="3, stands at 2 places") as caught:
        dataset[3]
    assert "\n" not in str(caught.value)


def test_what_is_changed_after_the_transform_is_told(cut):
    dataset = cut(Pictures(steps(), "changed"), steps=2)
    with pytest.raises(ValueError, match="is not part of its sample") as caught:
        dataset[0]
    assert "transform of Pictures" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        ([1, 2], {}, TypeError("without a transform")),
        (Pictures(None), {}, TypeError("without a transform")),
        (Pictures(steps()), {"steps": 5}, ValueError("has 4")),
        (Pictures(steps()), {"steps": True}, ValueError("has 4")),
        (Pictures(steps()), {"transform": print}, TypeError("takes it from the dataset")),
    ],
)
def test_bad_arguments(cut, dataset, options, error):
    with pytest.raises(type(error), match=str(error)) as caught:
        cut(dataset, **options)
    assert "\n" not in str(caught.value)


def test_a_cut_dataset_is_known_again_under_a_name(cut):
    options = {"steps": 2, "name": "until-random", "keep": True, "on_change": "clear"}
    first = cut(Pictures(steps()), **options)
    first[0]
    first.close()
    # Random steps are no part of what is cached.
    other = Pictures(torch.nn.Sequential(Step(1), Step(10), Step(7)))
    again = cut(other, **options)
    assert again.stats().filled == 1
    again.close()
    changed = cut(Pictures(torch.nn.Sequential(Step(2), Step(10), Noise())), **options)
    assert changed.stats().filled == 0
    changed.delete()


def test_a_cut_dataset_can_be_verified(cut):
    dataset = cut(Pictures(steps()), steps=2)
    dataset.warm(progress=False)
    assert dataset.verify() == 6
