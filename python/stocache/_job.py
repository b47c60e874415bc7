"""Which processes of a node belong together: the name of a cache that nobody named.

Ranks that torchrun starts on a node share a cache without being told to, if they construct it at
the same place, with the same geometry, for the same data. "The same place" is the call stack, so
that the training set and the validation set of one script never meet. "The same data" is judged by
the attributes of the dataset that constructs the cache: ranks that read different shards differ
there, and must not share, for sample 0 of one is not sample 0 of the other. In doubt nothing is
shared, which costs memory but is never wrong.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch

from stocache import _C

# How many elements of a long container are looked at. Shards of a list differ nearly everywhere.
_SAMPLE = 256
_MAX_DEPTH = 4

# How often this process has constructed a cache at the same place: the k-th of one rank belongs to
# the k-th of another.
_constructed: Counter[str] = Counter()


def random_name() -> str:
    """A name that nobody else has."""
    return f"private-{secrets.token_hex(8)}"


def job() -> str | None:
    """What identifies this job on this node, or None if it has a single rank or no launcher."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_WORLD_SIZE", "1") != "1":
        # The run id alone is not enough: without a rendezvous it is always "none".
        parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        return "torchrun:" + ":".join(env.get(part, "") for part in parts)
    return None


def shared_name(job: str, geometry: tuple[Any, ...], caller: FrameType | None) -> str:
    """The name under which the ranks of ``job`` meet, for a cache constructed by ``caller``."""
    place = _digest(job, geometry, list(_stack(caller)))
    _constructed[place] += 1
    place = f"{place}-{_constructed[place]}"
    owner = _owner(caller)
    name = f"job-{place}-{_digest(describe(owner))}"
    if owner is not None:
        _warn_if_others_differ(place, name, owner)
    return name


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _owner(frame: FrameType | None) -> object | None:
    """The innermost dataset whose method is running."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.utils.data.Dataset):
            return owner
        frame = frame.f_back
    return None


def _warn_if_others_differ(place: str, name: str, owner: object) -> None:
    _C.sweep()  # what a killed job left behind says nothing about this one
    prefix = f"stocache-{os.geteuid()}-"
    others = [
        entry
        for entry in os.listdir("/dev/shm")
        if entry.startswith(prefix) and f"-job-{place}-" in entry and not entry.endswith(name)
    ]
    if others:
        warnings.warn(
            f"the ranks of this node construct {type(owner).__name__} with different attributes, "
            "so each keeps a cache of its own; if they hold the same samples at the same indices, "
            "pass name= to share one, or shared=False to say that they do not",
            RuntimeWarning,
            stacklevel=4,
        )


def describe(value: object, depth: int = 0) -> object:
    """``value`` as nested tuples that are equal in two processes if the data are the same.

    Nothing that varies between processes by nature goes in: no addresses, no hash order. What is
    not known counts by its type alone.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return (type(value).__name__, repr(value))
    if isinstance(value, PurePath):
        return ("path", str(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth >= _MAX_DEPTH:
        return kind
    if isinstance(value, Mapping):
        return (kind, len(value), _items(list(value.items()), depth))
    if isinstance(value, (list, tuple, range)):
        return (kind, len(value), _items(value, depth))
    if isinstance(value, (set, frozenset)):
        return (kind, len(value), _items(sorted(map(repr, value)), depth))
    if isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        return (kind, tuple(value.shape), str(value.dtype), _items(flat, depth))
    if hasattr(value, "__array_interface__") and hasattr(value, "reshape"):
        return (kind, value.shape, str(value.dtype), _items(value.reshape(-1), depth))  # type: ignore[attr-defined]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return (kind, describe(attributes, depth + 1))
    return kind


def _items(items: Any, depth: int) -> tuple[object, ...]:
    step = max(1, len(items) // _SAMPLE)
    picked = [items[i] for i in range(0, len(items), step)]
    # An element of a tensor or array is a number; its own description would be long.
    return tuple(
        repr(item.item())
        if hasattr(item, "item") and not getattr(item, "shape", ())
        else describe(item, depth + 1)
        for item in picked
    )


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
