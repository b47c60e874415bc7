"""Which processes of a node belong together: the name of a cache that nobody named.

Ranks of one job on a node (``launcher.py``) share a cache without being told to, if they construct
it at the same line, with the same geometry, for the same data. "The same line" is the call stack,
so that the training set and the validation set of one script never meet. "The same data" is judged
by the contents of the dataset that constructs the cache: ranks that read different shards differ
there, and must not share, for sample 0 of one is not sample 0 of the other.

A dataset may go on setting attributes after it made its cache, so it is looked at twice: when the
cache is constructed, and again before its first use, its first fork and its first pickling. Only
then do the ranks meet, under a name that takes both looks into account.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

import torch

from stocache import _C
from stocache._sharing.sameness import contents, digest

# How often this process has constructed a cache at the same site: the k-th of one rank belongs to
# the k-th of another.
_constructed: Counter[str] = Counter()


class Provisional(Protocol):
    """A cache whose ranks agree on its name before it is used."""

    def _agree_on_name(self) -> None: ...


_provisional: weakref.WeakSet[Any] = weakref.WeakSet()


def count(site: str) -> int:
    """How often this process has constructed a cache there, this one included."""
    _constructed[site] += 1
    return _constructed[site]


class Rendezvous:
    """The name under which ranks find each other without a message, for a cache constructed in
    ``caller``."""

    def __init__(self, job: str, geometry: tuple[Any, ...], caller: FrameType | None) -> None:
        # Workers that each make a cache of their own may each have data of their own.
        worker = torch.utils.data.get_worker_info()
        site = digest(job, geometry, list(stack(caller)), worker and worker.id)
        self.site = f"{site}-{count(site)}"
        owner = _owner(caller)
        self.owner = None if owner is None else weakref.ref(owner)
        self.contents = contents(owner, where=type(owner).__name__)
        # Until the second look; where no dataset is at work there is nothing to wait for.
        self.name = f"job-{self.site}" + (f"-first-{self.contents.digest}" if self.owner else "")

    def final_name(self) -> str:
        """The name after a second look, with a warning if other ranks hold other data."""
        owner = self.owner() if self.owner else None
        if owner is None:
            return self.name
        what = type(owner).__name__
        again = contents(owner, where=what)
        self.name = f"job-{self.site}-{digest(self.contents.digest, again.digest)}"
        unseen = self.contents.unseen + again.unseen
        if unseen:
            self.name += f"-{os.getpid()}"
            _warn(
                f"{unseen[0]} cannot be looked into, so nothing says whether the ranks of this "
                "node hold the same samples, and each keeps a cache of its own"
            )
        elif self.others_differ():
            _warn(
                f"the ranks of this node hold {what} with different contents, so each keeps a "
                "cache of its own"
            )
        return self.name

    def others_differ(self) -> bool:
        """Whether another rank is here with other contents."""
        _C.sweep()  # what a killed job left behind says nothing about this one
        ours = f"-job-{self.site}-"
        with contextlib.suppress(OSError):
            others = [entry.partition(ours)[2] for entry in os.listdir("/dev/shm") if ours in entry]
            final = {other for other in others if not other.startswith("first-")}
            return bool(final - {self.name.partition(f"job-{self.site}-")[2]})
        return False


def _warn(trouble: str) -> None:
    warnings.warn(
        f"{trouble}; if they have the same samples at the same indices, pass name= to share one, "
        "or shared=False to say that they have not",
        RuntimeWarning,
        stacklevel=4,
    )


def agree_before_fork(cache: Provisional) -> None:
    """Has ``cache`` find its name at the latest when this process forks."""
    _provisional.add(cache)


def _agree_all() -> None:
    for cache in list(_provisional):
        _provisional.discard(cache)
        cache._agree_on_name()


os.register_at_fork(before=_agree_all)


def caller_of(made: object) -> FrameType | None:
    """The frame that constructs an object: the first one outside its own __init__ methods."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is made:
        frame = frame.f_back
    return frame


def stack(frame: FrameType | None) -> Iterator[str]:
    """The lines that lead here."""
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _owner(frame: FrameType | None) -> object | None:
    """The innermost dataset whose method is running: the first argument of a function."""
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        owner = frame.f_locals.get(names[0]) if names else None
        if issubclass(type(owner), torch.utils.data.Dataset):  # asks the object nothing
            return owner
        frame = frame.f_back
    return None
