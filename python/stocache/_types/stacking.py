"""Batches of tensor subclasses, whose data was stacked natively.

What default_collate makes of such samples beside the stacked data is up to their class: a plain
tensor, or one with attributes made of those of the samples. So default_collate is called with
samples that have all their parts but no elements, and the data is put under what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from stocache._torch import collation, subclasses
from stocache._types import registry


def is_stacked(cls: type) -> bool:
    """Whether default_collate would stack objects of this class: by torch's own function; or, if
    somebody registered the class as one that stacks, by one of the library that it is of."""
    if collation.is_stacked(cls):
        return True
    entry = registry.entry_of(cls)
    if entry is None or not entry.registered:
        return False
    function = collation.function_for(cls)
    package = str(cls.__module__).partition(".")[0]
    return str(getattr(function, "__module__", "")).partition(".")[0] == package != "__main__"


def stacked(
    from_parts: Callable[..., Any], column: torch.Tensor, rests: list[tuple[Any, ...]] | None
) -> Any:
    """What default_collate makes of as many objects: ``column`` is their data, ``rests`` are their
    other parts. NotImplemented if that is something else than a tensor of their data, or an error,
    which is for who has the samples themselves."""
    # Tensors without dimensions have an element each.
    data = column[0].narrow(0, 0, 0) if column.dim() > 1 else column[0]
    try:
        if rests is None:
            samples = [from_parts(data)] * min(len(column), 2)  # all are alike
        else:
            samples = [from_parts(data, *rest) for rest in rests]
        made = default_collate(samples)
    except MemoryError:
        raise
    except Exception:
        return NotImplemented
    if not isinstance(made, torch.Tensor) or made.requires_grad:
        return NotImplemented
    if subclasses.data_of(made).shape != (len(samples), *data.shape) or made.dtype != column.dtype:
        return NotImplemented
    kind, attributes = type(made), vars(made)
    if kind is not torch.Tensor:
        column = subclasses.maker(kind)(column)
    if attributes:
        column.__dict__.update(attributes)
    return column
