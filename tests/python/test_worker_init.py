"""What a ``worker_init_fn`` does counts in every epoch, whatever the cache holds by then."""

import pytest
import stocache
import torch


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
    assert loader.gatherer() is not None
