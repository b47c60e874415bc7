"""Attributes of the wrapped dataset: read freely, and never a way past the cache."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import stocache
import torch
from torch.utils.data import DataLoader, Dataset


class Table:
    """Has the methods of a dataset of Hugging Face."""

    column_names = ("x",)
    num_rows = 8

    def __init__(self, numbers):
        self.numbers = list(numbers)
        self.format = None

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, idx):
        return {"x": self.numbers[idx]}

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]

    def unique(self, column):
        return sorted({row[column] for row in map(self.__getitem__, range(len(self)))})

    def shuffle(self, seed=None):
        return Table(reversed(self.numbers))

    def map(self, function):
        return Table(map(function, self.numbers))

    def select(self, indices):
        return Table(self.numbers[idx] for idx in indices)

    filter = sort = shard = take = skip = train_test_split = with_format = shuffle
    with_transform = remove_columns = rename_column = cast_column = flatten_indices = shuffle

    def set_format(self, kind):
        self.format = kind

    set_transform = reset_format = set_format


class Medical(Dataset):
    """Has the method of MONAI's CacheDataset."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx]

    def set_data(self, data):
        self.data = data


class Pictures(Dataset):
    """Has the attributes of torchvision's and timm's datasets."""

    classes = ("cat", "dog")

    def __init__(self, transform=None):
        self.transform = transform
        self.targets = [0, 1] * 4

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        picture = torch.full((3,), idx)
        return picture if self.transform is None else self.transform(picture)

    def find(self, name):
        return self.classes.index(name)


def create_loader(dataset, size):
    """As timm's: replaces the transform of the dataset that it is given."""
    dataset.transform = lambda picture: picture[:size]
    return DataLoader(dataset, 4)


MAKING_OTHERS = [
    "shuffle", "map", "select", "filter", "sort", "shard", "take", "skip", "train_test_split",
    "with_format", "with_transform", "remove_columns", "rename_column", "cast_column",
    "flatten_indices", "set_format", "set_transform", "reset_format",
]  # fmt: skip


@pytest.mark.parametrize("name", MAKING_OTHERS)
def test_methods_that_make_other_samples_are_refused(cached, name):
    dataset = cached(Table(range(8)))
    with pytest.raises(AttributeError) as caught:
        getattr(dataset, name)
    text = str(caught.value)
    assert f"{name}() of the wrapped Table" in text and f"CachedDataset(dataset.{name}" in text
    assert "\n" not in text and not hasattr(dataset, name)
    assert callable(getattr(dataset.dataset, name)), "who means it can reach it"


def test_without_the_refusal_what_they_return_is_not_cached(cached, monkeypatch):
    # the control of the test above
    monkeypatch.setattr(
        stocache.cached_dataset.attributes, "check_forwarded", lambda *arguments: None
    )
    dataset = cached(Table(range(8)))
    assert type(dataset.shuffle()) is Table


def test_other_attributes_are_read(cached):
    table = cached(Table(range(8)))
    assert table.column_names == ("x",) and table.num_rows == 8
    assert table.unique("x") == list(range(8)) and table.numbers is table.dataset.numbers
    pictures = cached(Pictures())
    assert pictures.classes == ("cat", "dog") and pictures.targets == [0, 1] * 4
    assert pictures.find("dog") == 1 and pictures.transform is None
    assert not hasattr(pictures, "no_such_thing")


def test_data_that_is_merely_called_so_is_read(cached):
    source = Medical([1, 2])
    source.map = {"a": 1}
    assert cached(source).map == {"a": 1}


def test_old_samples_are_not_served_after_set_data(cached):
    source = Medical([torch.zeros(2), torch.zeros(2)])
    dataset = cached(source)
    dataset[:2]
    with pytest.raises(AttributeError, match="set_data"):
        dataset.set_data([torch.ones(2)] * 2)
    with pytest.raises(AttributeError) as caught:
        dataset.data = [torch.ones(2)] * 2
    text = str(caught.value)
    assert "data belongs to the wrapped Medical" in text and "clear()" in text
    assert "data" not in vars(dataset) and not dataset[0].any()
    # the remedy that it names
    dataset.dataset.data = [torch.ones(2)] * 2
    dataset.clear()
    assert dataset[0].all()


def test_a_transform_that_could_mean_either_is_refused(cached):
    own = cached(Pictures(), transform=lambda picture: picture + 1)
    for dataset in (own, cached(Pictures())):
        before = dataset.transform
        with pytest.raises(AttributeError) as caught:
            create_loader(dataset, 2)
        text = str(caught.value)
        assert "the wrapped Pictures has one of its own" in text and "\n" not in text
        assert dataset.transform is before and dataset.dataset.transform is None
    assert own[3].tolist() == [4, 4, 4]


def test_a_transform_that_can_mean_only_one_is_set(cached):
    dataset = cached([1, 2, 3])
    dataset.transform = lambda number: number * 10
    assert dataset[:3] == [10, 20, 30] and dataset.stats().loads == 3
    dataset.transform = None
    assert dataset[:3] == [1, 2, 3]


def test_a_subclass_has_attributes_of_its_own():
    class Named(stocache.CachedDataset):
        def __init__(self, source):
            super().__init__(source, "8MiB", verbose=False)
            self.classes = ["one"]
            self.extra = 5

    with contextlib.closing(Named(Pictures())) as dataset:
        assert dataset.classes == ["one"] and Pictures.classes == ("cat", "dog")
        dataset.extra = 6
        assert dataset.extra == 6 and not hasattr(dataset.dataset, "extra")


def test_notes_of_a_program_stay_on_the_wrapper(cached):
    dataset = cached(Table(range(8)))
    dataset.note = "mine"
    for twin in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert twin.note == "mine" and not hasattr(twin.dataset, "note")
        assert twin[1] == {"x": 1}
