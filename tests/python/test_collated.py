"""`collate_fn=stocache.collate` in loaders of torch, and in those that are made of torch's."""

from __future__ import annotations

import pytest
import stocache
import torch
from augmented import Pictures, steps
from sources import Counted, Fixed, same
from stocache import _C
from stocache._dataset import samples as module
from stocache._dataset.batches import Collated
from stocache._torch import fetching
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, default_collate
from torch.utils.data._utils import fetch


@pytest.fixture
def native(monkeypatch):
    """The batches that this process gathered natively."""
    found, finished = [], module.finished

    def noted(*arguments):
        batch = finished(*arguments)
        if batch is not _C.MISS:
            found.append(batch)
        return batch

    monkeypatch.setattr(module, "finished", noted)
    return found


def texts(count):
    return [{"x": torch.full((4,), float(i)), "y": i, "name": f"sample {i}"} for i in range(count)]


ON_TOP = {
    "itself": lambda ds: ds,
    "Subset": lambda ds: Subset(ds, range(1, 11)),
    "Subset of Subset": lambda ds: Subset(Subset(ds, range(11, 0, -1)), [3, 1, 4, 1, 5]),
}


@pytest.mark.parametrize("top", ON_TOP)
def test_batches_are_those_of_torch_and_native(cached, native, top):
    plain, dataset = texts(12), cached(Fixed(texts(12)))
    for epoch in range(3):
        found = []
        for source, collate in ((Fixed(plain), default_collate), (dataset, stocache.collate)):
            torch.manual_seed(epoch)
            loader = DataLoader(ON_TOP[top](source), 4, shuffle=True, collate_fn=collate)
            found.append(list(loader))
            found.append(torch.get_rng_state())
        assert same(found[0], found[2]) and torch.equal(found[1], found[3])
        assert len(native) == (epoch + 1) * len(found[0]), "each batch"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_gather_them(cached, log, start):
    source = Counted(log, 22, words=2048)
    dataset = cached(source)
    expected = list(DataLoader(Counted(log + ".other", 22, words=2048), 4))
    for _ in range(3):
        options = {"num_workers": 2, "multiprocessing_context": start}
        loader = DataLoader(dataset, 4, collate_fn=stocache.collate, **options)
        assert same(list(loader), expected)
    assert source.once_each()
    assert dataset.stats().hits == 44 and dataset.stats().misses == 22


def test_samples_with_a_transform_are_stacked(cached):
    dataset = cached(Fixed([(torch.full((4,), i), i) for i in range(8)]), transform=turned)
    (batch,) = DataLoader(dataset, 8, collate_fn=stocache.collate)
    assert batch[0].tolist() == list(range(8)) and batch[1].shape == (8, 4)


def turned(sample):
    return sample[1], -sample[0]


def test_batches_of_what_is_cut_are_those_of_the_dataset(cut):
    dataset = cut(Pictures(steps()), steps=2)
    for epoch in range(2):
        found = []
        for source in (Pictures(steps()), dataset):
            torch.manual_seed(epoch)
            found.append(list(DataLoader(source, 4, shuffle=True, collate_fn=stocache.collate)))
        assert same(*found)


def test_shards_give_them_too(native):
    shard = stocache.LazyShardDataset(
        Fixed([torch.full((4,), i) for i in range(12)]), memory_size="1MiB", verbose=False
    )
    with shard:
        for _ in range(2):
            loader = DataLoader(shard, 4, collate_fn=stocache.collate)
            expected = [default_collate([shard[i] for i in range(at, at + 4)]) for at in (0, 4, 8)]
            assert same(list(loader), expected)
    assert len(native) >= 6


# Everybody else sees samples


class Mine(stocache.CachedDataset):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1

    def __getitems__(self, indices):
        found = super().__getitems__(indices)
        assert type(found) is list
        return [sample + 1 for sample in found]


class OneByOne(stocache.CachedDataset):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1


class Around:
    """A dataset of somebody's that hands batches on."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        found = self.dataset.__getitems__(indices)
        assert type(found) is list
        return [sample + 1 for sample in found]


def as_a_list(samples):
    assert type(samples) is list
    return stocache.collate(samples)


SEEN = {
    "another collate function": lambda ds: DataLoader(ds, 4, collate_fn=as_a_list),
    "a function that calls it": lambda ds: DataLoader(
        ds, 4, collate_fn=lambda samples: as_a_list(samples[::-1]).flip(0)
    ),
    "torch's own": lambda ds: DataLoader(ds, 4),
    "no batches": lambda ds: DataLoader(
        ds, batch_size=None, sampler=BatchSampler(range(8), 4, False), collate_fn=as_a_list
    ),
}


@pytest.mark.parametrize("how", SEEN)
def test_other_functions_get_samples(cached, how):
    dataset = cached(Fixed([torch.full((2,), i) for i in range(8)]))
    for _ in range(2):
        assert torch.cat(list(SEEN[how](dataset)))[:, 0].tolist() == list(range(8))
        assert type(dataset.__getitems__([1, 2])) is list


@pytest.mark.parametrize("kind", [Mine, OneByOne])
def test_subclasses_get_samples(kind):
    with kind([torch.full((2,), i) for i in range(8)], "16MiB", verbose=False) as dataset:
        for _ in range(2):
            batches = list(DataLoader(dataset, 4, collate_fn=stocache.collate))
            assert torch.cat(batches)[:, 0].tolist() == list(range(1, 9))


def test_a_dataset_around_it_gets_samples(cached):
    dataset = cached(Fixed([torch.full((2,), i) for i in range(8)]))
    for _ in range(2):
        batches = list(DataLoader(Around(dataset), 4, collate_fn=stocache.collate))
        assert torch.cat(batches)[:, 0].tolist() == list(range(1, 9))


def counting(self, indices):
    data = self.dataset.__getitems__(indices)
    assert type(data) is list and len(data) == len(indices)
    return self.collate_fn(data)


def test_a_fetcher_that_is_not_torchs_gets_samples(cached, monkeypatch):
    """A profiler's, say, which counts samples."""
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", counting)
    dataset = cached(Fixed([torch.full((2,), i) for i in range(8)]))
    for _ in range(2):
        batches = list(DataLoader(dataset, 4, collate_fn=stocache.collate))
        assert torch.cat(batches)[:, 0].tolist() == list(range(8))


def test_torchs_fetcher_is_known():
    """With another torch that does more with what it gets, samples are collated one by one."""
    assert fetching._FETCH is fetch._MapDatasetFetcher.fetch.__code__
    assert fetching._known(counting.__code__) is None

    def fetch_and_look(self, indices):
        data = self.dataset.__getitems__(indices)
        self.seen = len(data)
        return self.collate_fn(data)

    code = fetch_and_look.__code__.replace(co_filename=fetch.__file__)
    assert fetching._known(code) is None


def test_control_who_gives_it_to_everybody_is_seen(cached, monkeypatch):
    monkeypatch.setattr("stocache.cached_dataset.goes_to", lambda function: True)
    dataset = cached(Fixed([torch.full((2,), i) for i in range(8)]))
    with pytest.raises(AssertionError):
        list(SEEN["another collate function"](dataset))
    assert type(dataset.__getitems__([0])) is Collated


@pytest.mark.parametrize("sampler", [lambda n: BatchSampler(RandomSampler(range(n)), 3, False)])
def test_errors_are_those_of_the_dataset(cached, sampler):
    class Broken(Fixed):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    dataset = cached(Broken([torch.full((2,), i) for i in range(8)]))
    for _ in range(2):
        loader = DataLoader(dataset, batch_sampler=sampler(8), collate_fn=stocache.collate)
        with pytest.raises(OSError, match="disk on fire"):
            list(loader)
