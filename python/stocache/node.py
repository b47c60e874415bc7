"""What this node has and what is on it."""

from __future__ import annotations

import os

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
