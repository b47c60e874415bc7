"""Batches drawn as one tensor are those of torch's samplers, and so are the numbers drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from stocache._torch import order
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def steps(batches, generator):
    """What is given at each step, and what both generators are then, to the end and beyond."""
    torch.manual_seed(7)
    seen = []
    while True:
        indices = order.listed(next(batches, None))
        state = None if generator is None else generator.get_state().tolist()
        seen.append((indices, state, torch.get_rng_state().tolist()))
        if indices is None:
            return seen


def both(samples, size, drop_last, shuffle, own_generator, draw=order.drawn):
    """The same epoch as torch gives it, and as it is drawn."""
    for make in (iter, draw):
        generator = torch.Generator().manual_seed(samples) if own_generator else None
        source = range(samples)
        sampler = (
            RandomSampler(source, generator=generator) if shuffle else SequentialSampler(source)
        )
        yield steps(make(BatchSampler(sampler, size, drop_last)), generator)


@settings(max_examples=150, deadline=None)
@given(
    some.integers(1, 400), some.integers(1, 50), some.booleans(), some.booleans(), some.booleans()
)
def test_every_batch_and_every_number_drawn_is_torchs(samples, size, drop_last, shuffle, own):
    torchs, ours = both(samples, size, drop_last, shuffle, own)
    assert ours == torchs


def test_more_batches_than_are_cut_out_at_once_are_torchs():
    torchs, ours = both(2 * order._AT_ONCE * 3 + 1, 3, False, True, False)
    assert ours == torchs


def test_an_empty_dataset_has_no_batch():
    assert list(order.drawn(BatchSampler(SequentialSampler([]), 4, False))) == []


@pytest.mark.parametrize("own_generator", [False, True])
def test_control_drawing_too_little_or_too_early_is_noticed(own_generator):
    def early(batches):
        return iter([*order.drawn(batches)])

    def without_the_last_draw(batches):
        source, generator = batches.sampler.data_source, batches.sampler.generator
        if generator is None:
            generator = torch.Generator()  # and no seed is drawn for it
        for numbers in torch.randperm(len(source), generator=generator).split(batches.batch_size):
            yield order.Drawn(numbers)

    for draw in (early, without_the_last_draw):
        torchs, ours = both(10, 4, False, True, own_generator, draw)
        assert ours != torchs


class Reversed(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Pairs(BatchSampler):
    def __iter__(self):
        return iter([[0, 0]])


OTHERS = {
    "a subclass of a sampler": BatchSampler(Reversed(range(9)), 2, False),
    "a subclass of BatchSampler": Pairs(SequentialSampler(range(9)), 2, False),
    "with replacement": BatchSampler(RandomSampler(range(9), replacement=True), 2, False),
    "fewer": BatchSampler(RandomSampler(range(9), num_samples=5), 2, False),
    "more": BatchSampler(RandomSampler(range(9), num_samples=18), 2, False),
    "some": BatchSampler(SubsetRandomSampler(range(9)), 2, False),
    "weighted": BatchSampler(WeightedRandomSampler([1.0] * 9, 4), 2, False),
    "a range": BatchSampler(range(9), 2, False),
    "a list of batches": [[1, 2], [3]],
}


@pytest.mark.parametrize("batches", OTHERS)
def test_other_samplers_are_asked_themselves(batches):
    assert order.drawn(OTHERS[batches]) is None
