"""The view of a CachedDataset whose items are batches."""

from __future__ import annotations

import pickle

import pytest
import stocache
import torch
from sources import Counted, Fixed, same
from stocache import _C
from stocache._dataset import samples as module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)


def batched(dataset, view, size=4, sampler=SequentialSampler, **options):
    """torch's own loader over a view."""
    batches = BatchSampler(sampler(dataset), size, False)
    return DataLoader(view, sampler=batches, batch_size=None, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_takes_batches_from_the_view(cached, log, workers):
    source = Counted(log, 22, words=2048)
    dataset = cached(source)
    expected = list(DataLoader(Counted(log + ".other", 22, words=2048), 4))
    for _ in range(3):
        found = list(batched(dataset, dataset.batches, num_workers=workers))
        assert same(found, expected)
    seen = [batch[0] for batch in batched(dataset, dataset.batches, sampler=RandomSampler)]
    assert sorted(torch.cat(seen).tolist()) == list(range(22))
    part = Subset(dataset, range(10, 22))
    (first, *_) = batched(part, Subset(dataset.batches, range(10, 22)), num_workers=workers)
    assert first[0].tolist() == [10, 11, 12, 13], "torch's Subset hands lists on"
    assert source.once_each()
    stats = dataset.stats()
    assert stats.misses == 22 and stats.hits + stats.misses == 22 * 4 + 12


def test_what_can_be_gathered_is_gathered(cached, monkeypatch):
    dataset = cached(Fixed([torch.full((4,), idx) for idx in range(8)]))
    gathered = []
    native = module.finished
    noted = lambda *args: gathered.append(native(*args)) or gathered[-1]  # noqa: E731
    monkeypatch.setattr(module, "finished", noted)
    for _ in range(2):
        assert dataset.batches[[1, 2, -1]][:, 0].tolist() == [1, 2, 7]
    assert all(batch is not _C.MISS for batch in gathered) and len(gathered) == 2


def test_what_cannot_be_gathered_is_collated(cached):
    samples = [torch.ones(idx % 2 + 1) for idx in range(8)]
    dataset = cached(Fixed(samples))
    for _ in range(2):
        assert same(dataset.batches[[0, 2]], default_collate([samples[0], samples[2]]))
        with pytest.raises(RuntimeError):
            dataset.batches[[0, 1]]
    doubled = cached(Fixed(samples), transform=lambda row: row * 2)
    assert doubled.batches[[0, 2]].tolist() == [[2], [2]]

    class Adds(stocache.CachedDataset):
        def __getitem__(self, index):
            return super().__getitem__(index) + 100

    own = Adds(Fixed(samples), "8MiB", verbose=False)
    assert own.batches[[0, 2]].tolist() == [[101], [101]]
    own.close()


def test_the_view_looks_like_its_dataset(cached):
    source = Fixed([1, 2, 3])
    source.classes = ("a", "b")
    view = cached(source).batches
    assert len(view) == 3 and view.classes == ("a", "b") and view.dataset is source
    assert not hasattr(view, "no_such_thing")
    twin = pickle.loads(pickle.dumps(view))
    assert twin[[2, 0]].tolist() == [3, 1] and twin.classes == ("a", "b")
    with pytest.raises(IndexError):
        view[[3]]
