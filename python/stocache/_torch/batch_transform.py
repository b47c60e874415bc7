"""A program's function of whole batches, which runs wherever a batch is made."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

Key = tuple[int, int, int]
"""Which batch it is: the seed of the workers, how many epochs had it before, and its number."""


class BatchTransform:
    """The function, and whether it draws only from the generator that it is given: then it may run
    ahead of its turn, in any thread or process, and gives the same."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.takes_generator = _takes_generator(function)

    def __call__(self, batch: Any, key: Key) -> Any:
        try:
            if not self.takes_generator:
                return self.function(batch)
            return self.function(batch, generator=generator_of(key))
        except StopIteration as error:  # which would end the epoch without a word
            raise RuntimeError(f"batch_transform {self.function!r} raised StopIteration") from error

    def check_pickles(self, start_method: str | None) -> None:
        """Workers that are not forked get it by pickle."""
        if start_method == "fork":
            return
        try:
            ForkingPickler.dumps(self.function)
        except Exception as error:
            raise TypeError(
                f"batch_transform {self.function!r} cannot be sent to workers that are started "
                f"by {start_method} ({error}); define it at the top of a module, or use "
                'multiprocessing_context="fork"'
            ) from error


def check(function: Any, loader: Any, is_map_style: bool) -> None:
    """Whether a loader can have such a function."""
    if not callable(function):
        raise TypeError(f"batch_transform is {function!r}; a function of one batch is needed")
    if not is_map_style:
        raise TypeError(
            f"batch_transform is given for a {type(loader.dataset).__name__}, which is an "
            "IterableDataset; a map-style dataset is needed, or do it in collate_fn"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "batch_transform is given with batch_size=None, where there are no batches; give a "
            "batch_size or a batch_sampler, or do it in the dataset"
        )


def generator_of(key: Key) -> torch.Generator:
    """The same for the same batch, wherever it is made; others for all other batches."""
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _takes_generator(function: Any) -> bool:
    if isinstance(function, functools.partial) and "generator" in function.keywords:
        return False  # it has one
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        found = inspect.signature(function).parameters.get("generator")
    except (TypeError, ValueError):  # of a native function nothing is known
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)
