"""What this node has and what is on it."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import sys
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from stocache import _C

_GIB = 1 << 30


def get_shm_size() -> int:
    """Size of /dev/shm in whole GiB, rounded down.

    A larger one can be had with ``mount -o remount,size=128G /dev/shm``; without that,
    ``SharedCache`` uses memory outside /dev/shm where it is too small.
    """
    stat = os.statvfs("/dev/shm")
    return stat.f_frsize * stat.f_blocks // _GIB


def sweep() -> list[str]:
    """Removes caches in /dev/shm that no process uses and nobody keeps; returns their file names.

    Runs at every creation of a cache too, and at the exit of a process that closed one while others
    used it. Other users' caches are never touched.
    """
    return _C.sweep()


def _leave_when_it_ends(_: object) -> None:
    Finalize(None, _C.leave, exitpriority=-20)  # after all that still uses a cache


# Workers end by os._exit, without the exit handlers that remove what nobody uses any more. If they
# outlive the cache of their parent, its memory would be taken until that ends.
register_after_fork(sys.modules[__name__], _leave_when_it_ends)
if multiprocessing.parent_process() is not None:
    _leave_when_it_ends(None)


@dataclass(frozen=True)
class CacheInfo:
    """A cache on this node, as ``stocache ls`` shows it."""

    name: str
    """What its user calls it."""
    path: str
    """Its file in /dev/shm; empty if it has none."""
    user: str
    """Whose it is."""
    kind: str
    """"slots" (SharedCache), "records" (CachedDataset), "disk" (the table of its disk level) or
    "files" (FileCache's)."""
    made_for: str
    """The class of the dataset, where that is known."""
    limit_bytes: int
    """Bytes that it may take."""
    used_bytes: int
    """Bytes that it takes now."""
    samples: int
    """Samples of its dataset."""
    filled: int | None
    """Samples that it holds, where that is known."""
    state: str
    """"in use", "in use, kept", "kept" or "left over"; "unused" if another user's."""
    pids: list[int]
    """Processes that use it, as far as they can be seen from here."""
    mine: bool
    """Whether this user may remove it."""
    trouble: str
    """Why it could not be read."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def caches() -> list[CacheInfo]:
    """Every cache on this node, also those of other users."""
    return [_info(found) for found in _C.list_caches()]


def remove(name: str, force: bool = False) -> list[str]:
    """Removes the cache of that name; returns the files that went.

    One that is in use is refused with a RuntimeError. With ``force`` its name goes all the same:
    the processes that use it go on, who opens the name later makes another cache, and this one
    ends with its last process even if it was to be kept.
    """
    return _C.remove_cache(name, force)


def _info(found: dict[str, Any]) -> CacheInfo:
    mine = found["user"] == os.geteuid()
    if found["trouble"] and not mine:  # whether it is kept cannot be seen
        state = "in use" if found["in_use"] else "unused"
    elif found["in_use"]:
        state = "in use, kept" if found["keep"] else "in use"
    else:
        state = "kept" if found["keep"] else "left over"
    return CacheInfo(
        name=found["name"],
        path=found["path"],
        user=user_name(found["user"]),
        kind=found["kind"],
        made_for=found["notes"].partition("\n")[0],
        limit_bytes=found["limit_bytes"],
        used_bytes=found["used_bytes"],
        samples=found["samples"],
        filled=None if found["filled"] < 0 else found["filled"],
        state=state,
        pids=found["pids"],
        mine=mine,
        trouble=found["trouble"],
    )


def user_name(number: int) -> str:
    """Or the number, if nobody has it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
