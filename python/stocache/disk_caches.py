"""Disk levels as their folders show them: what is in them, whether it is whole, and how they are
removed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from stocache import _C
from stocache._sharing.disk import about, is_temporary
from stocache.node import user_name


@dataclass(frozen=True)
class DiskCacheInfo:
    """The disk level of a dataset, as ``stocache ls PATH`` shows it."""

    path: str
    """Its folder."""
    user: str
    """Whose it is."""
    made_for: str
    """The class of the dataset, where that is known."""
    samples: int | None
    """Samples of its dataset; None if they are known by keys, or it could not be read."""
    filled: int
    """Samples that it holds."""
    used_bytes: int
    """Bytes that its files take, with room for what is to come."""
    state: str
    """"in use", "temporary, in use", "kept", or "left over": temporary, and nobody uses it."""
    used_at: float
    """When a process last began or ended to use it, as time.time() tells it; 0 if unknown."""
    mine: bool
    """Whether this user may remove it."""
    trouble: str
    """Why it could not be read."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def disk_caches(path: str | os.PathLike[str]) -> list[DiskCacheInfo]:
    """The disk level in this folder, or those in the folders below it, as ``disk_path`` has
    them."""
    path = os.path.abspath(os.fspath(path))
    here = _info(path)
    if here is not None:
        return [here]
    with os.scandir(path) as entries:
        folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    return [found for folder in folders if (found := _info(folder)) is not None]


def remove(path: str | os.PathLike[str], force: bool = False) -> None:
    """Removes the disk level in this folder. One that is in use is refused with a RuntimeError;
    with ``force`` it goes all the same, and who uses it goes on with the files that it has open."""
    _C.remove_disk(os.fsencode(os.path.abspath(path)), force)


def sweep(path: str | os.PathLike[str], unused_days: float | None = None) -> list[str]:
    """Removes what killed jobs left there: temporary levels, and files that are no part of any;
    and, if that is given, levels that nobody has used for so many days. Returns what went."""
    if unused_days is not None and unused_days < 0:
        raise ValueError(f"unused_days is {unused_days}; use 0 or more days")
    gone = []
    for found in disk_caches(path):
        if not found.mine or "in use" in found.state:
            continue
        old = unused_days is not None and time.time() - found.used_at >= unused_days * 86400
        if found.state == "left over" or (old and found.used_at > 0):
            remove(found.path)
            gone.append(found.path)
        else:
            names = _C.tidy_disk(os.fsencode(found.path))
            gone += [os.path.join(found.path, name) if name else found.path for name in names]
    return gone


def verify(
    path: str | os.PathLike[str], progress: Callable[[int], object] | None = None
) -> tuple[int, int]:
    """Reads every record of the disk level in this folder: how many there are, and how many are
    damaged. ``progress`` is told of each step how many records it was."""
    check, _ = _C.check_disk(os.fsencode(os.path.abspath(path)))
    damaged = seen = 0
    while True:
        some, bad = _C.check_step(check)
        if not some:
            return seen, damaged
        seen, damaged = seen + some, damaged + bad
        if progress is not None:
            progress(some)


def _info(folder: str) -> DiskCacheInfo | None:
    found = _C.inspect_disk(os.fsencode(folder))
    if found is None:
        return None
    temporary = is_temporary(folder)
    if found["in_use"]:
        state = "temporary, in use" if temporary else "in use"
    else:
        state = "left over" if temporary else "kept"
    unknown = found["keyed"] or found["trouble"]
    return DiskCacheInfo(
        path=folder,
        user=user_name(found["user"]),
        made_for=about(folder).partition("\n")[0],
        samples=None if unknown else found["samples"],
        filled=found["records"],
        used_bytes=found["bytes"],
        state=state,
        used_at=found["used_at"],
        mine=found["user"] == os.geteuid(),
        trouble=found["trouble"],
    )
