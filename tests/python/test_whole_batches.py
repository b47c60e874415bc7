"""A dataset whose ``__getitems__`` gives something else than a list with a sample for each index.
Its batches are those that torch gives without a cache, and no part is taken for a sample."""

from __future__ import annotations

import collections
import warnings

import pytest
import stocache
import torch
from sources import Fixed
from stocache._dataset import together
from torch.utils.data import DataLoader, Dataset

Columns = collections.namedtuple("Columns", "x y")


class Batched(Dataset):
    """Samples are pairs; ``form`` says what a batch of them is."""

    def __init__(self, form, length=8):
        self.form = form
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        return torch.full((3,), float(idx)), idx

    def __getitems__(self, indices):
        x, y = zip(*map(self.__getitem__, indices), strict=True)
        return FORMS[self.form](torch.stack(x), torch.tensor(y))


FORMS = {
    "a dict of columns": lambda x, y: {"x": x, "y": y},
    "a tensor": lambda x, y: x,
    "a pair of columns": lambda x, y: (x, y),
    "a list of columns": lambda x, y: [x, y],
    "nested columns": lambda x, y: ({"x": x, "more": [y, y, y]}, y),
    "a column and its length": lambda x, y: (x, len(x)),
    "columns and a text": lambda x, y: [{"x": x, "of": "all"}, "all"],
    "one column": lambda x, y: [x],
    "a named tuple": lambda x, y: Columns(x, y),
    "a generator": lambda x, y: ((row, int(n)) for row, n in zip(x, y, strict=True)),
    "a text": lambda x, y: "".join(chr(97 + int(n)) for n in y),
    "None": lambda x, y: None,
}


def listed(batch):
    """A collate_fn that takes what it gets, in a form that can be compared."""
    return repr(list(batch) if hasattr(batch, "__next__") else batch)


def epochs(dataset, size, workers=0):
    loader = DataLoader(dataset, size, num_workers=workers, collate_fn=listed)
    return [list(loader) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
@pytest.mark.parametrize("form", FORMS)
def test_batches_are_those_that_torch_gives_without_a_cache(cached, form):
    for size in (1, 2, 3, 4):  # 2: as many samples as there are columns; the last of 3s are 2
        source = Batched(form)
        dataset = cached(source)
        assert epochs(dataset, size) == epochs(source, size), size
        for idx in range(8):
            assert repr(dataset[idx]) == repr(source[idx]), "nothing else was stored"


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_a_worker_that_sees_only_the_last_batch_stores_no_columns(cached):
    source = Batched("a pair of columns", 6)
    dataset = cached(source)
    assert epochs(dataset, 4, workers=2) == epochs(source, 4)
    assert [repr(dataset[idx]) for idx in range(6)] == [repr(source[idx]) for idx in range(6)]


def test_control_counting_alone_stores_columns_as_samples(cached, monkeypatch):
    monkeypatch.setattr(together, "_may_be_columns", lambda *_: False)
    monkeypatch.setattr(together.Together, "_is_next", lambda *_: False)  # would notice, too
    source = Batched("a pair of columns")
    dataset = cached(source)
    dataset.__getitems__([0, 1])
    assert dataset[0].shape == (2, 3), "the column x, and not sample 0"


def test_control_where_every_part_must_be_a_column_a_length_is_a_sample(cached, monkeypatch):
    def all_columns(parts, count):
        return all(together._may_be_column(part, count) for part in parts)

    monkeypatch.setattr(together, "_may_be_columns", all_columns)
    monkeypatch.setattr(together.Together, "_is_next", lambda *_: False)
    dataset = cached(Batched("a column and its length"))
    dataset.__getitems__([0, 1])
    assert dataset[1] == 2, "the length of the batch, and not sample 1"


class Pairs(Batched):
    """Gives nothing for a single index."""

    def __getitems__(self, indices):
        if len(indices) < 2:
            raise ValueError("two samples at least")
        return super().__getitems__(indices)


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_a_dataset_that_gives_nothing_for_another_number_ends_no_epoch(cached):
    source = Pairs("a pair of columns")
    assert epochs(cached(source), 2) == epochs(source, 2)
    with pytest.raises(ValueError, match="two samples"):  # control: it was asked, and refused
        together._is_list_of(source.__getitems__([0]), 1)


def test_it_is_told_once_and_what_to_do(cached):
    dataset = cached(Batched("a dict of columns"))
    with pytest.warns(RuntimeWarning, match="gives a dict for 4 indices") as seen:
        epochs(dataset, 4)
    (told,) = (str(each.message) for each in seen)
    assert "Batched" in told and "without __getitems__" in told and "\n" not in told
    assert dataset.stats().loads == 16 and dataset.stats().filled == 0


def test_a_transform_and_a_list_of_indices_ask_for_samples(cached):
    source = Batched("a dict of columns")
    dataset = cached(source, transform=lambda sample: sample[1] * 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataset.__getitems__([1, 2]) == [10, 20] and dataset[[3, 4]] == [30, 40]
        assert dataset.__getitems__([1, 2]) == [10, 20] and dataset.stats().filled == 4
        assert repr(cached(source)[1:3]) == repr([source[1], source[2]])


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_what_torch_cannot_collate_it_cannot_with_the_cache(cached):
    source = Batched("a dict of columns")
    for loader in (DataLoader(source, 4), stocache.DataLoader(cached(source), 4)):
        with pytest.raises(KeyError):
            list(loader)


class Rows(Fixed):
    """Gives samples, which look like columns where there are three."""

    def __init__(self):
        super().__init__([torch.full((3, 2), float(idx)) for idx in range(9)])
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(len(indices))
        return tuple(self.samples[idx] for idx in indices)


def test_samples_that_look_like_columns_are_told_apart_once(cached):
    source = Rows()
    dataset = cached(source)
    for _ in range(2):
        batches = list(stocache.DataLoader(dataset, 3))
        assert torch.equal(torch.cat(batches), torch.stack(source.samples))
    # Once with another number, and two batches the other way round.
    assert source.asked == [3, 1, 3, 3, 3, 3] and dataset.is_complete()


def test_asking_again_draws_no_number(cached):
    class Random(Rows):
        def __getitems__(self, indices):
            torch.rand(len(indices))
            return super().__getitems__(indices)

    def after(dataset):
        torch.manual_seed(1)
        dataset.__getitems__([0, 1, 2])
        return torch.rand(1).item()

    assert after(cached(Random())) == after(Random())
