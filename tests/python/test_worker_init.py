"""What a ``worker_init_fn`` does counts in every epoch, whatever the cache holds by then."""

import pytest
import stocache
import torch
from stocache import loader as module
from torch.utils.data import DataLoader, Subset


def doubled(sample):
    return sample * 2


def set_transform(_worker):
    torch.utils.data.get_worker_info().dataset.transform = doubled


@pytest.mark.parametrize("workers", [1, 2])
def test_a_transform_that_workers_set_is_applied_in_every_epoch(cached, workers):
    dataset = cached([torch.full((3,), float(i)) for i in range(8)], "16MiB")
    loader = stocache.DataLoader(dataset, 4, num_workers=workers, worker_init_fn=set_transform)
    expected = 2 * torch.arange(8.0).view(8, 1).expand(8, 3)
    for _ in range(3):
        assert torch.equal(torch.cat(list(loader)), expected)


def test_control_without_the_function_a_complete_cache_is_gathered_here(cached):
    dataset = cached([torch.full((3,), float(i)) for i in range(8)], "16MiB")
    loader = stocache.DataLoader(dataset, 4, num_workers=1)
    list(loader)
    assert loader._stocache_gatherer(loader._stocache_source()) is not None


def only_the_last(_worker):
    subset = torch.utils.data.get_worker_info().dataset
    subset.indices = [subset.indices[-1]] * len(subset.indices)


def seen(kind, dataset):
    loader = kind(Subset(dataset, [3, 4, 5]), 2, num_workers=1, worker_init_fn=only_the_last)
    return [[int(number) for number in batch] for batch in loader]


def test_indices_that_workers_set_on_a_subset_are_used(cached):
    numbers = list(range(8))
    assert seen(stocache.DataLoader, cached(numbers)) == seen(DataLoader, numbers) == [[5, 5], [5]]


def test_control_a_subset_of_its_own_under_the_loader_does_not_see_them(cached, monkeypatch):
    def beside(subset):
        return Subset(subset.dataset.batches, subset.indices)

    monkeypatch.setattr(module, "WholeBatches", beside)
    assert seen(stocache.DataLoader, cached(list(range(8)))) == [[3, 4], [5]]
