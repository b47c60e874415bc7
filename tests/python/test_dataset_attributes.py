"""Attributes of the wrapped dataset: read freely, and never a way past the cache."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import warnings

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


def test_old_samples_are_not_served_after_set_data(wrapped):
    source = Medical([torch.zeros(2), torch.zeros(2)])
    dataset = wrapped(source)
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
    (dataset if hasattr(dataset, "clear") else dataset.store).clear()
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


# Names that are anybody's


@pytest.fixture(params=["CachedDataset", "BiLevelCachedDataset", "LazyShardDataset"])
def wrapped(request, cached, tmp_path):
    """A dataset in one of ours; with its samples in their order."""

    def make(dataset):
        if request.param == "CachedDataset":
            return cached(dataset)
        if request.param == "BiLevelCachedDataset":
            made = stocache.BiLevelCachedDataset(
                dataset, "8MiB", "8MiB", tmp_path / "disk", verbose=False
            )
        else:
            made = stocache.LazyShardDataset(dataset, False, None, "8MiB", verbose=False)
        request.addfinalizer(made.close)
        return made

    return make


class Handles(Dataset):
    """Opened by a worker_init_fn under names that a CachedDataset might think its own."""

    path = stats = _file = _records = _load = _transform = None

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        return idx + sum(getattr(self, name) or 0 for name in NAMES)


NAMES = ("path", "stats", "_file", "_records", "_load", "_transform")


def opens(worker):
    dataset = torch.utils.data.get_worker_info().dataset
    for name in NAMES:
        setattr(dataset, name, 100)


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_whatever_a_worker_sets_reaches_the_source(wrapped, kind):
    for source in (Handles(), wrapped(Handles())):
        loader = kind(source, 2, num_workers=1, worker_init_fn=opens)
        assert torch.cat(list(loader)).tolist() == [600, 601, 602, 603]


def test_control_by_an_underscore_they_stay_on_the_wrapper(cached, monkeypatch):
    def as_it_was(self, name, value):
        if name.startswith("_") or name in vars(self) or hasattr(type(self), name):
            return object.__setattr__(self, name, value)
        return setattr(self.dataset, name, value)

    dataset = cached(Handles())
    monkeypatch.setattr(stocache.CachedDataset, "__setattr__", as_it_was)
    with pytest.raises(AttributeError, match="path"):
        list(DataLoader(dataset, 2, num_workers=1, worker_init_fn=opens))
    gc.collect()  # the workers end with the exception


def test_a_path_of_the_source_is_refused_by_name(wrapped):
    with pytest.raises(AttributeError, match="path belongs to the wrapped Handles"):
        wrapped(Handles()).path = "elsewhere"


def test_control_a_wrapper_that_keeps_what_is_set_serves_old_samples(wrapped, monkeypatch):
    dataset = wrapped(Medical([torch.zeros(2), torch.zeros(2)]))
    monkeypatch.setattr(type(dataset), "__setattr__", object.__setattr__)
    dataset.data = [torch.ones(2)] * 2
    assert not dataset[0].any()


def opens_anew(worker):
    torch.utils.data.get_worker_info().dataset.dataset = [7, 7, 7, 7]


def test_a_worker_may_open_the_whole_dataset_anew(wrapped):
    dataset = wrapped(Handles())
    loader = DataLoader(dataset, 2, num_workers=1, worker_init_fn=opens_anew)
    assert torch.cat(list(loader)).tolist() == [7, 7, 7, 7]


def test_the_dataset_of_a_shard_is_not_replaced():
    with contextlib.closing(
        stocache.LazyShardDataset(Handles(), False, None, "8MiB", verbose=False)
    ) as shard:
        with pytest.raises(AttributeError, match="construct it anew"):
            shard.dataset = [1, 2, 3, 4]
        assert shard[0] == 0


def test_a_subclass_of_a_shard_has_names_of_its_own():
    class Named(stocache.LazyShardDataset):
        def __init__(self, source):
            super().__init__(source, False, None, "8MiB", verbose=False)
            self._store = self._share = self._terms = self._epoch = self._visits = "mine"

    with contextlib.closing(Named(Handles())) as shard:
        shard.set_epoch(2)
        assert shard[3] == 3 and len(shard) == 4 and shard._store == "mine"


class Busy(stocache.CachedDataset):
    """A subclass that knows nothing of our names."""

    def __init__(self, source):
        self.dataset = source
        super().__init__(self.dataset, "8MiB", verbose=False)
        self._transform = self._records = self._length = self._strict = self._uncompared = "mine"
        self._file = None

    def _load(self, path):
        raise AssertionError("nobody asked for this")

    _get = _store = _place = _places = _hand_out = _copied = _load_many = _load_missing = _load
    _filled_up = _compare_first = _complain = _warn_once = _say_what_fits = _load
    collated = gathers = is_settled = get_many = records = _load

    def __getitem__(self, index):
        if self._file is None:
            self._file = "opened"  # by whoever reads first
        return super().__getitem__(index)


class Filed(Pictures):
    _file = "the source's own"


def test_a_subclass_meets_no_name_of_ours():
    private = [name for name in vars(stocache.CachedDataset) if re.match("_[^_]", name)]
    private.remove("_repr_html_")  # a name of notebooks'
    assert private and all(name.startswith("_stocache_") for name in private)
    with contextlib.closing(Busy(Filed())) as dataset:
        dataset.warm(progress=False)
        for workers in (0, 1):
            for kind in (DataLoader, stocache.DataLoader):
                batches = list(kind(dataset, 4, num_workers=workers))
                assert torch.cat(batches)[:, 0].tolist() == list(range(8))
        assert dataset.verify() == 8 and dataset.is_complete() and dataset.stats().loads == 8
        assert dataset.batches[[1, 2]][:, 0].tolist() == [1, 2] and len(dataset[2:4]) == 2
        assert dataset._transform == "mine" and dataset.transform is None
        assert dataset._file == "opened" and dataset.dataset._file == "the source's own"
        twin = pickle.loads(pickle.dumps(dataset))
        assert twin._length == "mine" and int(twin[3][0]) == 3


def test_copies_have_transforms_of_their_own(cached):
    dataset = cached([1, 2, 3])
    twin = copy.copy(dataset)
    twin.transform = str
    assert twin[:] == ["1", "2", "3"] and dataset[:] == [1, 2, 3]


def test_another_dataset_in_its_place_is_asked(cached):
    dataset = cached([1, 2, 3])
    twin = copy.copy(dataset)
    assert twin[:] == [1, 2, 3]
    with pytest.warns(RuntimeWarning, match="replaced by a list"):
        twin.dataset = [4, 5, 6, 7]
    assert twin[1] == 5 and twin[:] == [4, 5, 6, 7] and len(twin) == 4
    assert dataset[:] == [1, 2, 3] and dataset.dataset == [1, 2, 3]
    dataset.clear()
    assert twin[:2] == [4, 5] and dataset[:] == [1, 2, 3], "nothing of the other was stored"


def test_control_to_ask_another_dataset_alone_mixes_them(cached):
    dataset = cached([1, 2, 3])
    twin = copy.copy(dataset)
    dataset[0]
    twin._stocache.source = [4, 5, 6]
    assert dataset[:] == [1, 5, 6]


def test_a_worker_may_open_its_dataset_anew(cached):
    dataset = cached(Table(range(8)))

    def opened_anew(_worker):
        torch.utils.data.get_worker_info().dataset.dataset = Table(range(8))

    list(DataLoader(dataset, 4, num_workers=1, worker_init_fn=opened_anew))
    assert dataset.is_complete()


# Epochs


class Curriculum(Dataset):
    """Gives other samples in every epoch. Workers see the number too."""

    def __init__(self):
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        return 100 * int(self.epoch) + idx

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)


def trained(dataset, kind=DataLoader, **options):
    """As accelerate and others do it."""
    loader, seen = kind(dataset, 4, **options), []
    for epoch in range(3):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        seen.append(torch.cat(list(loader)).tolist())
    return seen


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
], ids=str)  # fmt: skip
def test_every_epoch_has_its_own_samples(cached, options):
    expected = [[100 * epoch + idx for idx in range(8)] for epoch in range(3)]
    for kind in (DataLoader, stocache.DataLoader):
        dataset = cached(Curriculum())
        dataset.warm(progress=False)
        with pytest.warns(RuntimeWarning, match="set_epoch") as seen:
            assert trained(dataset, kind, **options) == expected
        (told,) = (str(each.message) for each in seen if "set_epoch" in str(each.message))
        assert "wrapped Curriculum" in told and "transform" in told and "\n" not in told


def test_control_forwarding_alone_mixes_epochs(cached):
    dataset = cached(Curriculum())
    dataset[:4]
    dataset.dataset.set_epoch(1)
    assert dataset[:] == [0, 1, 2, 3, 104, 105, 106, 107]


def test_without_epochs_there_is_nothing_to_set(cached):
    assert not hasattr(cached(Pictures()), "set_epoch")
    source = Pictures()
    source.set_epoch = 7
    assert cached(source).set_epoch == 7, "data that is merely called so"


def test_a_subclass_may_know_that_epochs_change_nothing():
    class Knows(stocache.CachedDataset):
        def set_epoch(self, epoch):
            self.dataset.set_epoch(epoch)

    with (
        warnings.catch_warnings(),
        contextlib.closing(Knows(Curriculum(), "8MiB", verbose=False)) as dataset,
    ):
        warnings.simplefilter("error")
        assert trained(dataset) == [list(range(8))] * 3
