"""Copies of samples, whatever they are made of."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from stocache import _C


def as_stored(sample: Any, allow_pickle: bool = False) -> Any:
    """A copy, as the cache gives it back; what it does not store, itself."""
    with contextlib.suppress(Exception):
        return _C.codec_decode(*_C.codec_encode(sample, allow_pickle), allow_pickle)
    return sample


def copy_of(sample: Any, allow_pickle: bool = False) -> Any:
    """A copy, as the cache would give it if it can; what cannot be copied at all, itself."""
    with contextlib.suppress(Exception):
        encoded = _C.codec_encode(sample, allow_pickle)
        return _C.codec_decode(*encoded, allow_pickle)
    with contextlib.suppress(Exception):
        return copy.deepcopy(sample)
    return sample
