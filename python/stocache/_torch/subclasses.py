"""Subclasses of torch.Tensor, and trees: how torch itself takes them apart."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

# How a subclass of tensors is called whose values have different lengths (layout=torch.jagged).
JAGGED = "torch.nested._internal.nested_tensor.NestedTensor"


def is_flattened(cls: type) -> bool:
    """Whether the class says which tensors it consists of."""
    return is_traceable_wrapper_subclass_type(cls)


def flatten(value: Any) -> Any:
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    if not all(tensor.is_contiguous() for tensor in inner.values()):
        return NotImplemented  # they come back contiguous, and would not fit the strides
    return inner, context, tuple(value.size()), tuple(value.stride())


def unflatten(cls: Any, inner: Any, context: Any, size: Any, stride: Any) -> Any:
    return cls.__tensor_unflatten__(inner, context, torch.Size(size), stride)


def is_data(cls: Any) -> bool:
    """Whether its objects are tensors with data of their own, and operators see that data."""
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_stacked_as_data(cls: Any) -> bool:
    """Whether torch.stack of its objects is up to torch alone: a stack of their data, as the class
    that torch itself gives to results."""
    own, torchs = cls.__torch_function__, torch.Tensor.__torch_function__
    return own is _disabled_torch_function_impl or (
        getattr(own, "__func__", None) is torchs.__func__  # type: ignore[attr-defined]
    )


def data_of(value: torch.Tensor) -> torch.Tensor:
    """The same as a plain tensor, without asking its class."""
    with DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def maker(cls: type) -> Callable[[torch.Tensor], Any]:
    """Makes a tensor of the class over the data of a plain one."""
    return operator.methodcaller("as_subclass", cls)


def tree_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """How torch's pytree takes an object of this very type apart, and makes it again."""
    known = pytree.SUPPORTED_NODES.get(cls)
    return None if known is None else (known.flatten_fn, known.unflatten_fn)


def parts_of_tree(sample: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """All that is in nested containers, and how to make the same of other parts."""
    parts, shape = pytree.tree_flatten(sample)
    return parts, lambda made: pytree.tree_unflatten(made, shape)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor as they are: not sorted, nor added up."""
    return tensor._indices(), tensor._values()


def jagged_parts(value: Any) -> tuple[Any, ...]:
    """What ``torch.nested.nested_tensor_from_jagged`` is given to make it."""
    bounds = value._metadata_cache
    return (
        value.values(), value.offsets(), value.lengths(), value._ragged_idx,
        *(None if bounds.get(name) is None else int(bounds[name].shape[0])
          for name in ("min_seqlen", "max_seqlen")),
    )  # fmt: skip
