"""Pickles of what the codec leaves to pickle, with tensors by content.

torch pickles a tensor with its whole storage: a view of 12 KiB into 12 MiB takes 12 MiB. Here only
the view's own elements are stored. Two views of one memory come back as two tensors with a memory
each, as they do from pickle anyway; one tensor that occurs twice comes back as one.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch

from stocache._torch.compat import as_plain_tensors

_PROTOCOL = 5


def dumps(value: Any) -> bytes:
    """As ``pickle.dumps``; ``pickle.loads`` is enough to load it."""
    pickled = io.BytesIO()
    _Pickler(pickled, _PROTOCOL).dump(value)
    return pickled.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and type(value) not in copyreg.dispatch_table:
            return reduced(value)
        return NotImplemented


def reduced(tensor: torch.Tensor) -> Any:
    """What ``tensor.__reduce_ex__`` gives, but over a storage of the tensor's own elements."""
    given = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
    if not isinstance(given, tuple):
        return given
    function, arguments, *rest = given
    # Of a subclass: what makes the plain tensor, the class, the arguments for that, the state.
    nested = len(arguments) == 4 and isinstance(arguments[2], tuple)
    plain = arguments[2] if nested else arguments
    # Storage, offset, sizes, strides and more. What is made of other tensors has no storage here.
    if len(plain) < 4 or not is_storage(plain[0]):
        return given
    own = _in_memory_of_its_own(tensor)
    if own is None:
        return given
    exact = own.__reduce_ex__(_PROTOCOL)[1]  # type: ignore[no-untyped-call]
    plain = (*exact[:4], *plain[4:])
    return (function, (*arguments[:2], plain, arguments[3]) if nested else plain, *rest)


def is_storage(value: Any) -> bool:
    return isinstance(value, (torch.UntypedStorage, torch.TypedStorage))


def _in_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same elements without those around them; None if there are none around them."""
    with as_plain_tensors():
        plain = tensor.detach()
        if plain.is_quantized or plain.is_conj() or plain.is_neg():
            return None
        elements = plain.numel()
        extent = 0
        if elements:
            extent = 1 + sum((n - 1) * s for n, s in zip(plain.size(), plain.stride(), strict=True))
        if min(elements, extent) * plain.element_size() >= plain.untyped_storage().nbytes():
            return None
        if extent > elements:  # with gaps between them
            return plain.clone(memory_format=torch.contiguous_format)
        # Dense in some order, or some of them several times (expand, unfold): as they lie.
        flat = plain.as_strided((extent,), (1,), plain.storage_offset()).clone()
        return flat.as_strided(plain.size(), plain.stride())
