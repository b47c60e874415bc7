"""Subclasses of torch.Tensor, and trees: how torch itself takes them apart."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

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


def untyped(storage: Any) -> torch.UntypedStorage:
    """The bytes of a storage. One that has a type warns if it is asked by its public name."""
    if isinstance(storage, torch.UntypedStorage):
        return storage
    memory: torch.UntypedStorage = storage._untyped_storage
    return memory


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


# What torch itself keeps in the attributes of a jagged tensor.
_OF_JAGGED = frozenset((
    "_dynamo_propagated_dynamic_indices", "_lengths", "_metadata_cache", "_offsets", "_ragged_idx",
    "_size", "_strides", "_values",
))  # fmt: skip


def jagged_parts(value: Any) -> tuple[Any, ...]:
    """What ``torch.nested.nested_tensor_from_jagged`` is given to make it, and its attributes."""
    bounds = value._metadata_cache
    _note_lengths(value, made_here=False)
    return (
        value.values(), value.offsets(), value.lengths(), value._ragged_idx,
        *(None if bounds.get(name) is None else int(bounds[name].shape[0])
          for name in ("min_seqlen", "max_seqlen")),
        {name: each for name, each in vars(value).items() if name not in _OF_JAGGED},
    )  # fmt: skip


# The lengths of rows that are in use, by what is in them. To torch two jagged tensors have the same
# shape, and can be added, if they have one tensor of offsets in common, or one number for it.
_lengths_in_use: WeakValueDictionary[tuple[Any, ...], torch.Tensor] = WeakValueDictionary()


def jagged(values: Any, offsets: Any, lengths: Any, dim: int, *bounds: Any) -> Any:
    """A jagged tensor, of the same shape as others whose rows have the same lengths."""
    from torch.nested._internal import nested_tensor  # which few programs need

    torchs: Any = nested_tensor
    source = offsets if lengths is None else lengths
    known = _lengths_in_use.get(_key_of(offsets, lengths))
    if known is not None and torchs._tensor_symint_registry.get(source) is None:
        torchs._tensor_symint_registry[source] = torchs.get_tensor_symint(known)
    made = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, dim, *bounds)
    _note_lengths(made, made_here=True)
    return made


def _note_lengths(value: Any, made_here: bool) -> None:
    offsets, lengths = value.offsets(), value.lengths()
    source = offsets if lengths is None else lengths
    if source.device.type == "cpu":
        key = _key_of(offsets, lengths)
        # One that is only met may have a shape of its own, with which no other can be added.
        if made_here or key not in _lengths_in_use:
            _lengths_in_use[key] = source


def _key_of(offsets: torch.Tensor, lengths: torch.Tensor | None) -> tuple[Any, ...]:
    """Of rows that lie apart it counts also where: sums are of all that lies there."""
    given = (offsets,) if lengths is None else (offsets, lengths)
    return tuple(
        (each.dtype, bytes(each.detach().contiguous().view(torch.uint8).numpy())) for each in given
    )
