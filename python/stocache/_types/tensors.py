"""Tensors that are more than data in plain memory, and what torch says of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stocache._torch import subclasses
from stocache._types.registry import complete, register_type

_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = {str(layout): layout for layout in _COMPRESSED}


def _tensor_parts(tensor: torch.Tensor) -> Any:
    """Of those that are not strided, and of those with attributes."""
    if vars(tensor):
        return "attributes", tensor.detach(), vars(tensor)
    size = tuple(tensor.shape) if tensor.layout is not torch.strided else ()
    if tensor.layout is torch.sparse_coo:
        return "coo", *subclasses.coo_parts(tensor.detach()), size, tensor.is_coalesced()
    if tensor.layout in _COMPRESSED:
        compressed, plain = _COMPRESSED[tensor.layout]
        parts = tensor.detach()
        return str(tensor.layout), compressed(parts), plain(parts), parts.values(), size
    if tensor.is_nested:
        rows = [row.contiguous() for row in tensor.detach().unbind()]
        if not rows and tensor.dim() != 1:
            return NotImplemented  # of which nobody knows the other dimensions
        return "nested", rows, tensor.dtype
    return NotImplemented


def _tensor_of(kind: str, *parts: Any) -> torch.Tensor:
    if kind == "attributes":
        tensor, attributes = parts
        tensor.__dict__.update(attributes)
        return tensor  # type: ignore[no-any-return]
    if kind == "coo":
        indices, values, size, is_coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=is_coalesced, check_invariants=True
        )
    if kind == "nested":
        rows, dtype = parts
        return torch.nested.nested_tensor(rows, dtype=dtype)
    layout = _LAYOUTS[kind]
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=True
    )


def _parameter_parts(parameter: torch.nn.Parameter) -> Any:
    if vars(parameter):
        return NotImplemented
    return parameter.detach(), parameter.requires_grad


def _jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: Any, dim: int, shortest: Any,
    longest: Any, attributes: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Nobody else looks whether the rows lie within the values."""
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    if offsets[0] < 0 or (offsets.diff() < 0).any() or (ends > values.shape[dim - 1]).any():
        raise ValueError("the rows are not within the values")
    made: torch.Tensor = subclasses.jagged(values, offsets, lengths, dim, shortest, longest)
    made.__dict__.update(attributes)
    return made


def _of_torch(kind: type) -> Callable[[str], Any]:
    """Finds a constant of torch by the name that it says of itself."""

    def find(name: str) -> Any:
        found = getattr(torch, name.removeprefix("torch."))
        if type(found) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
        return found

    return find


complete("torch.Tensor", _tensor_parts, _tensor_of)
register_type(torch.nn.Parameter, _parameter_parts, torch.nn.Parameter)
register_type(subclasses.JAGGED, subclasses.jagged_parts, _jagged)
for _kind in (torch.dtype, torch.layout, torch.memory_format):
    register_type(_kind, lambda value: (str(value),), _of_torch(_kind))
register_type(torch.device, lambda device: (str(device),), torch.device)
