"""What torch.compile and torch.export must know of torch.ops.stocache.

The operators themselves are in csrc/ops.cpp. A graph is traced with fake tensors, so every operator
has a fake twin here that says what shape and dtype it returns; they ask the cache of that name. And
every operator has effects: it reads and changes a cache that is not among its arguments, so calls
must be neither dropped, nor merged, nor reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.effects import EffectType

from stocache import _C

Fakes = tuple[torch.Tensor, torch.Tensor]
Sample = tuple[tuple[int, ...], torch.dtype]

# Caches that the graph being traced opens itself: nothing is opened while tracing.
_announced: dict[str, Sample] = {}


def _sample(cache: str) -> Sample:
    try:
        return _C.sample_of(cache)
    except RuntimeError:
        if cache in _announced:
            return _announced[cache]
        raise


def _open(
    cache: str,
    size_limit_gib: float,
    dataset_len: int,
    data_dims: Sequence[int],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    _announced[cache] = (tuple(data_dims), dtype)


def _get(cache: str, index: int) -> Fakes:
    dims, dtype = _sample(cache)
    return torch.empty(dims, dtype=dtype), torch.empty((), dtype=torch.bool)


def _device(given: torch.Tensor) -> torch.device:
    """Results are on the CPU, except for meta tensors, of which there is nothing to compute."""
    return given.device if given.device.type == "meta" else torch.device("cpu")


def _set(
    cache: str, index: int, value: torch.Tensor, allow_overwrite: bool = False
) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool, device=_device(value))


def _get_many(cache: str, indices: torch.Tensor) -> Fakes:
    dims, dtype = _sample(cache)
    rows, device = indices.shape[0], _device(indices)
    return (
        torch.empty((rows, *dims), dtype=dtype, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )


def _set_many(
    cache: str, indices: torch.Tensor, batch: torch.Tensor, allow_overwrite: bool = False
) -> torch.Tensor:
    return torch.empty(indices.shape[0], dtype=torch.bool, device=_device(indices))


def _stats(cache: str) -> torch.Tensor:
    return torch.empty(13, dtype=torch.int64)


def _nothing(cache: str) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "open": _open,
    "close": _nothing,
    "get": _get,
    "set": _set,
    "get_many": _get_many,
    "set_many": _set_many,
    "clear": _nothing,
    "stats": _stats,
}

for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"stocache::{_name}", _fake)
    # Not public yet, and the one way there is; stocache is built for exactly one torch.
    torch.library._register_effectful_op(f"stocache::{_name}", EffectType.ORDERED)
