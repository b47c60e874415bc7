"""What torch.compile and torch.export must know of torch.ops.stocache.

The operators themselves are in csrc/ops.cpp. A graph is traced with fake tensors, so every operator
has a fake twin here that says what shape and dtype it returns. It reads that off the handle:
tracing neither needs nor opens a cache. And every operator has effects: it reads and changes a
cache that is not among its arguments, so calls must be neither dropped, nor merged, nor reordered.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

Fakes = tuple[torch.Tensor, torch.Tensor]
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
_SAFE_PACKAGES = (2, 13)
_HANDLE = re.compile(r"([^:]*):(\w+)\[([0-9,]*)\]")


def handle(name: str, data_dims: Sequence[int], dtype: torch.dtype) -> str:
    """How a graph refers to the cache ``name``: with what its samples look like.

    >>> handle("imagenet", (3, 224, 224), torch.uint8)
    'imagenet:uint8[3,224,224]'
    """
    return f"{name}:{str(dtype).removeprefix('torch.')}[{','.join(map(str, data_dims))}]"


def _sample(cache: str) -> tuple[list[int], torch.dtype]:
    match = _HANDLE.fullmatch(cache)
    dtype = getattr(torch, match[2], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{cache!r} does not say what its samples look like, which a graph must know; use "
            "cache.handle, or stocache.handle(name, data_dims, dtype)"
        )
    return [int(dim) for dim in match[3].split(",") if dim], dtype


def _open(cache: str, *arguments: Any, **options: Any) -> None:
    return None


def _get(cache: str, index: int) -> Fakes:
    dims, dtype = _sample(cache)
    return torch.empty(dims, dtype=dtype), torch.empty((), dtype=torch.bool)


def _device(*given: torch.Tensor) -> torch.device:
    """Results are on the CPU, except for meta tensors, of which there is nothing to compute."""
    return torch.device("meta" if any(x.device.type == "meta" for x in given) else "cpu")


def _rows(indices: torch.Tensor) -> Any:
    if indices.dim() != 1:
        raise ValueError(f"indices has {indices.dim()} dimensions; one is needed")
    return indices.shape[0]


def _set(
    cache: str, index: int, value: torch.Tensor, allow_overwrite: bool = False
) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool, device=_device(value))


def _get_many(cache: str, indices: torch.Tensor) -> Fakes:
    dims, dtype = _sample(cache)
    rows, device = _rows(indices), _device(indices)
    return (
        torch.empty((rows, *dims), dtype=dtype, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )


def _set_many(
    cache: str, indices: torch.Tensor, batch: torch.Tensor, allow_overwrite: bool = False
) -> torch.Tensor:
    return torch.empty(_rows(indices), dtype=torch.bool, device=_device(indices, batch))


def _stats(cache: str) -> torch.Tensor:
    return torch.empty(13, dtype=torch.int64)


def _nothing(cache: str) -> None:
    return None


def _ordered(op: Any, inductor: Any) -> Callable[..., Any]:
    """How inductor lowers the operator: as it would, and after the effects that came before.

    Some versions of torch note that order under the names of buffers, in additional_star_deps, and
    their scheduler looks for the names of operations. So nothing would keep a get behind the set
    before it once the scheduler sorts the calls, for memory or for CUDA graphs.
    """
    from torch._inductor.virtualized import V

    own = inductor.fallback_handler(op, add_to_fallback_set=False)

    def lower(*arguments: Any, **options: Any) -> Any:
        before = len(V.graph.operations)
        made = own(*arguments, **options)
        previous = V.graph.effectful_ops.get(_EffectType.ORDERED)
        noted = getattr(V.graph, "additional_star_deps", None)
        if previous is not None and noted is not None:
            for operation in V.graph.operations[before:]:
                noted[operation.get_operation_name()].add(previous.get_name())
        return made

    return lower


def _check_package() -> None:
    """Raises if an AOTInductor package is being made by a torch whose packages go on after an
    operator has failed, with nothing for its result."""
    from torch._inductor.virtualized import V

    if _VERSION < _SAFE_PACKAGES and getattr(V.graph, "aot_mode", False):
        raise RuntimeError(
            f"torch {_VERSION[0]}.{_VERSION[1]} makes AOTInductor packages that go on after an "
            f"operator has failed, so none is made with stocache's; use torch "
            f"{_SAFE_PACKAGES[0]}.{_SAFE_PACKAGES[1]} or newer, or torch.export.save"
        )


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which also tells inductor of the operators, should it have been loaded by now.

    Loading it takes seconds, so `import stocache` does not. This is early enough: inductor calls
    the fake of an operator as it lowers it, and only those after the first have an order to keep.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        if inductor := sys.modules.get("torch._inductor.lowering"):
            _check_package()
            for name in _FAKES:
                op = getattr(torch.ops.stocache, name).default
                if op not in inductor.lowerings:
                    inductor.register_lowering(op, type_promotion_kind=None)(_ordered(op, inductor))
        return fake(*arguments, **options)

    return call


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

with warnings.catch_warnings():
    # Parts of torch are loaded here that look for numpy, and say so where there is none.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    # Not public yet, and the one way there is in every torch from 2.9 on.
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    from torch.fx.node import has_side_effect

    # The end of the order in a graph. Versions that have not noted this drop the last call of it.
    has_side_effect(torch.ops.prims._sink_tokens.default)
    for _name, _fake in _FAKES.items():
        torch.library.register_fake(f"stocache::{_name}", _traced(_fake))
        _register_effectful_op(getattr(torch.ops.stocache, _name).default, _EffectType.ORDERED)
