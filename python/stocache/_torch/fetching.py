"""To whom a dataset gives a batch of samples, where torch asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.utils.data import Subset
from torch.utils.data._utils import fetch

# All that torch's own function does with a batch is to give it to the collate function.
_WORDS = frozenset(("__getitems__", "auto_collation", "collate_fn", "dataset", "hasattr"))


def _known(code: CodeType) -> CodeType | None:
    """The function that fetches batches, if it is torch's and does no more than it did."""
    own = code.co_filename == fetch.__file__ and _WORDS.issuperset(code.co_names)
    return code if own else None


_FETCH = _known(fetch._MapDatasetFetcher.fetch.__code__)


def goes_to(function: Callable[..., Any]) -> bool:
    """Whether what the caller returns goes to this collate function, and nobody else sees it: torch
    has asked for it, itself or by way of its Subset."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code is Subset.__getitems__.__code__:
        frame = frame.f_back
    if frame.f_code is not _FETCH:
        return False
    return getattr(frame.f_locals.get("self"), "collate_fn", None) is function
