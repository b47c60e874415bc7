"""The order of an epoch's batches as torch's own samplers draw it, without a number of Python's for
each sample.

The same numbers are drawn from the same generators at the same moments as by torch's code: when the
first batch is asked for, and when more is asked for than full batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stocache import _C

# So many batches are cut out of the order in one call.
_AT_ONCE = 64


class Drawn:
    """The indices of a batch, which nobody else has."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def listed(self) -> list[int]:
        """As torch hands them out."""
        return self.numbers.tolist()


def listed(indices: Any) -> Any:
    """The indices of a batch as its sampler gives them."""
    return indices.listed() if type(indices) is Drawn else indices


def drawn(batches: Any) -> Iterator[Drawn] | None:
    """What ``iter(batches)`` gives; None where only that can tell."""
    if type(batches) is not BatchSampler:
        return None
    sampler = batches.sampler
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return None
    elif type(sampler) is not SequentialSampler:
        return None
    return _drawn(batches, sampler)


def _drawn(batches: BatchSampler, sampler: RandomSampler | SequentialSampler) -> Iterator[Drawn]:
    size = batches.batch_size
    samples = len(sampler.data_source)
    generator = None
    if isinstance(sampler, SequentialSampler):
        order = _C.on_one_thread(lambda: torch.arange(samples, device="cpu"))
    else:
        generator = sampler.generator
        own = generator
        if own is None:
            own = torch.Generator()
            own.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = _permutation(samples, own)
    full = samples // size * size
    for first in range(0, full, _AT_ONCE * size):
        for numbers in order[first : min(full, first + _AT_ONCE * size)].view(-1, size).unbind():
            yield Drawn(numbers)
    if generator is not None:
        # torch draws once more before it finds that there are enough.
        _permutation(samples, generator)
    if full < samples and not batches.drop_last:
        yield Drawn(order[full:])


def _permutation(samples: int, generator: torch.Generator) -> torch.Tensor:
    """On one thread: the others that torch would wake for a moment's work look for more of it for
    milliseconds, on the processors that are to copy the first batches."""
    return _C.on_one_thread(lambda: torch.randperm(samples, generator=generator).cpu())
