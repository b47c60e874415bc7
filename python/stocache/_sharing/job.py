"""Which processes of a node belong together: the name of a cache that nobody named.

Ranks that torchrun starts on a node share a cache without being told to, if they construct it at
the same place, with the same geometry, for the same data. "The same place" is the call stack, so
that the training set and the validation set of one script never meet. "The same data" is judged by
the contents of the dataset that constructs the cache: ranks that read different shards differ
there, and must not share, for sample 0 of one is not sample 0 of the other.

A dataset may go on setting attributes after it made its cache, so it is looked at twice: when the
cache is constructed, and again before its first use, its first fork and its first pickling. Only
then do the ranks meet, under a name that takes both looks into account.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

import torch

from stocache import _C
from stocache._sameness import digest

# How often this process has constructed a cache at the same place: the k-th of one rank belongs to
# the k-th of another.
_constructed: Counter[str] = Counter()


class Settles(Protocol):
    """A cache that must be settled before it is used."""

    def _settle(self) -> None: ...


_unsettled: weakref.WeakSet[Any] = weakref.WeakSet()


def job() -> str | None:
    """What identifies this job on this node, or None if it has a single rank or no launcher."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_WORLD_SIZE", "1") != "1":
        # The run id alone is not enough: without a rendezvous it is always "none".
        parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        return "torchrun:" + ":".join(env.get(part, "") for part in parts)
    return None


def dataset_name(job: str, policy: str, fingerprint: str) -> str:
    """The name of a CachedDataset that nobody named: the ranks that wrap equal datasets meet."""
    worker = torch.utils.data.get_worker_info()
    place = digest(job, policy, fingerprint, worker and worker.id)
    _constructed[place] += 1
    return f"job-{place}-{_constructed[place]}"


class Meeting:
    """Under which name the ranks of a job meet, for a cache constructed in ``caller``."""

    def __init__(self, job: str, geometry: tuple[Any, ...], caller: FrameType | None) -> None:
        # Workers that each make a cache of their own may each have data of their own.
        worker = torch.utils.data.get_worker_info()
        place = digest(job, geometry, list(_stack(caller)), worker and worker.id)
        _constructed[place] += 1
        self.place = f"{place}-{_constructed[place]}"
        owner = _owner(caller)
        self.owner = None if owner is None else weakref.ref(owner)
        self.contents = digest(owner)
        # Until it is settled; where no dataset is at work there is nothing to wait for.
        self.name = f"job-{self.place}" + (f"-first-{self.contents}" if self.owner else "")

    def settle(self) -> str:
        """The name after a second look, with a warning if other ranks hold other data."""
        owner = self.owner() if self.owner else None
        if owner is not None:
            self.name = f"job-{self.place}-{digest(self.contents, owner)}"
            self.warn_if_others_differ(type(owner).__name__)
        return self.name

    def warn_if_others_differ(self, owner: str) -> None:
        _C.sweep()  # what a killed job left behind says nothing about this one
        with contextlib.suppress(OSError):
            ours = f"-job-{self.place}-"
            others = [entry.partition(ours)[2] for entry in os.listdir("/dev/shm") if ours in entry]
            settled = {other for other in others if not other.startswith("first-")}
            if settled - {self.name.partition(f"job-{self.place}-")[2]}:
                warnings.warn(
                    f"the ranks of this node hold {owner} with different contents, so each keeps a "
                    "cache of its own; if they have the same samples at the same indices, pass "
                    "name= to share one, or shared=False to say that they have not",
                    RuntimeWarning,
                    stacklevel=2,
                )


def settle_before_fork(cache: Settles) -> None:
    """Has ``cache`` settled at the latest when this process forks."""
    _unsettled.add(cache)


def _settle_all() -> None:
    for cache in list(_unsettled):
        _unsettled.discard(cache)
        cache._settle()


os.register_at_fork(before=_settle_all)


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _owner(frame: FrameType | None) -> object | None:
    """The innermost dataset whose method is running: the first argument of a function."""
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        owner = frame.f_locals.get(names[0]) if names else None
        if isinstance(owner, torch.utils.data.Dataset):
            return owner
        frame = frame.f_back
    return None
