"""Batches of samples that were transformed: stacked natively, as default_collate would."""

from __future__ import annotations

from typing import ClassVar

import pytest
import stocache
import torch
from kinds import MIXED, SAMPLES, outcome
from sources import Fixed, same
from stocache import _C
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate

KINDS = {**SAMPLES, **MIXED}


class Chosen:
    """A transform of the number of a sample to what is to come out."""

    def __init__(self, samples):
        self.samples = samples

    def __call__(self, idx):
        return self.samples[idx]


def as_it_is(batch):
    return batch


def batches_of(dataset, workers):
    order = BatchSampler(SequentialSampler(dataset), 4, drop_last=False)
    yield "own loader", lambda: list(stocache.DataLoader(dataset, 4, num_workers=workers))
    # torch's own default makes lists of tuples
    options = {"num_workers": workers, "batch_size": None, "collate_fn": as_it_is}
    stock = DataLoader(dataset.batches, sampler=order, **options)
    yield "torch's, dataset.batches", lambda: list(stock)
    if not workers:
        yield "dataset.batches", lambda: [dataset.batches[[0, 1, 2, 3]], dataset.batches[[4, 5]]]


@pytest.mark.parametrize("kind", KINDS)
def test_transformed_samples_of_every_kind_are_collated_as_by_torch(cached, kind):
    samples = KINDS[kind]
    expected = outcome(lambda: list(DataLoader(samples, 4)))
    dataset = cached(Fixed(list(range(6))), transform=Chosen(samples))
    # torch takes five seconds a worker to end after an error
    for workers in (0,) if isinstance(expected, type) else (0, 1):
        for way, make in batches_of(dataset, workers):
            assert same(outcome(make), expected), way
    native = outcome(lambda: dataset._stocache.records.stack(list(samples[:4]), 1, False))
    if kind in SAMPLES and "bytes" not in kind:
        assert native is not _C.MISS, "these are stacked natively"
    if native is not _C.MISS:
        assert same(native, expected[0] if isinstance(expected, list) else expected)


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_batches_have_the_memory_format_that_torch_gives_them(cached, dims):
    form = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}[dims]

    def change(idx):
        return torch.arange(2.0**dims).view([2] * dims).to(memory_format=form) + idx

    dataset = cached(Fixed(list(range(4))), transform=change)
    (ours,) = stocache.DataLoader(dataset, 4)
    (theirs,) = DataLoader([change(idx) for idx in range(4)], 4)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_batches_that_somebody_holds_are_not_written_to(cached):
    dataset = cached(
        Fixed(list(range(64))), transform=lambda idx: torch.full((1 << 16,), float(idx))
    )
    for workers in (0, 2):
        held = list(stocache.DataLoader(dataset, 4, num_workers=workers))
        numbers = [row for batch in held for row in batch]
        assert all(bool((row == idx).all()) for idx, row in enumerate(numbers))


def test_memory_is_used_again(cached):
    dataset = cached(Fixed(list(range(64))), transform=lambda idx: torch.full((1 << 16,), 1.0))
    addresses = {batch.data_ptr() for batch in stocache.DataLoader(dataset, 4)}
    assert len(addresses) <= 3


def test_gradients_are_kept_where_torch_keeps_them(cached):
    weight = torch.ones(3, requires_grad=True)
    dataset = cached(Fixed(list(range(8))), transform=lambda idx: weight * idx)
    (batch, _) = stocache.DataLoader(dataset, 4)
    assert batch.requires_grad
    batch.sum().backward()
    assert weight.grad.tolist() == [6.0] * 3
    assert dataset._stocache.records.stack([weight * 2], 1, False) is _C.MISS


def test_a_transform_that_gives_what_it_was_given_cannot_reach_the_cache(cached):
    dataset = cached(Fixed([torch.full((1 << 16,), float(idx)) for idx in range(8)]))
    dataset.transform = lambda sample: sample
    for _ in range(2):
        for n, batch in enumerate(stocache.DataLoader(dataset, 4)):
            assert batch[:, 0].tolist() == [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]
            batch.zero_()


class Shortens(dict):
    """A sample whose own code takes others away while they are stacked."""

    samples: ClassVar[list] = []

    def __iter__(self):
        self.samples.clear()
        return super().__iter__()

    def keys(self):
        self.samples.clear()
        return super().keys()


def test_a_list_that_changes_while_it_is_stacked_does_no_harm(cached):
    dataset = cached([1, 2, 3])
    Shortens.samples = samples = [Shortens(a=1), *({"a": torch.ones(1000)} for _ in range(50))]
    assert dataset._stocache.records.stack(samples, 1, False) is _C.MISS
    with pytest.raises(TypeError):
        dataset._stocache.records.stack((1, 2), 1, False)
    assert dataset._stocache.records.stack([], 1, False) is _C.MISS


def test_a_closed_cache_still_collates(cached):
    dataset = cached([torch.ones(3), torch.zeros(3)], transform=lambda sample: sample)
    samples = dataset[:2]
    dataset.close()
    assert torch.equal(dataset._stocache.stacked(samples), default_collate(samples))
