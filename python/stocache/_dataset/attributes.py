"""Which attributes of the wrapped dataset are reached through ours."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import get_worker_info

# Methods that return another dataset, which would not be cached, or that change what the samples
# are, of which the cache would know nothing: those of Hugging Face's datasets, MONAI's set_data.
_OTHER_SAMPLES = frozenset((
    "add_column", "add_item", "batch", "cast", "cast_column", "class_encode_column", "filter",
    "flatten", "flatten_indices", "formatted_as", "map", "remove_columns", "rename_column",
    "rename_columns", "repeat", "reset_format", "select", "select_columns", "set_data",
    "set_format", "set_transform", "shard", "shuffle", "skip", "sort", "take",
    "to_iterable_dataset", "train_test_split", "with_format", "with_transform",
))  # fmt: skip


def check_forwarded(dataset: Any, name: str, value: Any) -> None:
    """Raises an AttributeError if ``dataset.name`` leads past the cache."""
    if name in _OTHER_SAMPLES and callable(value):
        raise AttributeError(
            f"{name}() of the wrapped {type(dataset).__name__} makes other samples, which this "
            f"cache does not hold; call it before: CachedDataset(dataset.{name}(...), ...)"
        )


def set_on_dataset(wrapper: Any, ours: frozenset[str], name: str, value: Any) -> bool:
    """Whether ``wrapper.name = value`` means the wrapped dataset, and was done there. Raises an
    AttributeError if cached samples may depend on it. ``ours`` are names of the wrapper."""
    if name.startswith("__") or name in ours or name in vars(wrapper):
        return False
    kind = type(wrapper)
    plain, known = kind.__module__.partition(".")[0] == "stocache", hasattr(wrapper.dataset, name)
    # What a subclass of others calls its own is its own, and so is what it keeps private.
    own = not plain and (name.startswith("_") or hasattr(kind, name))
    if get_worker_info() is not None and not own and (plain or known):
        # A worker_init_fn means the dataset of this worker.
        with contextlib.suppress(AttributeError):
            setattr(wrapper.dataset, name, value)
            return True
    elif plain and known:
        raise refuse_attribute(wrapper, name)
    return False


def refuse_transform(dataset: Any) -> AttributeError:
    kind = type(dataset).__name__
    return AttributeError(
        f"transform cannot be set: the wrapped {kind} has one of its own, which runs before the "
        f"cache, and CachedDataset(transform=...) runs after it on whole samples; set the "
        f"{kind}'s before it is wrapped, or pass the other to CachedDataset"
    )


def refuse_attribute(wrapper: Any, name: str) -> AttributeError:
    clear = "clear()" if hasattr(wrapper, "clear") else ".store.clear()"
    return AttributeError(
        f"{name} belongs to the wrapped {type(wrapper.dataset).__name__}, and cached samples may "
        f"depend on it; set it before caching, or set .dataset.{name} and call {clear}"
    )


def defines_items_anew(kind: type) -> bool:
    """Whether a class brings a ``__getitem__`` of its own and inherits its ``__getitems__``: then
    only the former says what its samples are."""
    for parent in kind.__mro__:
        if "__getitems__" in vars(parent):
            return False
        if "__getitem__" in vars(parent):
            return True
    return False
