"""What a CachedDataset tells its user: one line, and once."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from stocache import _C
from stocache._dataset.stats import CachedDatasetStats
from stocache.sizes import show_bytes

# Into how many regions "lru" divides the memory (segment/records_layout.rs).
_FEWEST_REGIONS, _MOST_REGIONS, _LARGE_REGION = 32, 255, 256 << 20
# What is told once per node.
WHAT_FITS, _UNSUPPORTED, _TOO_LARGE, _RANDOM, _OTHER_KEYS, _WHOLE_BATCHES, _UNREADABLE = range(7)
_NO_DISK, _ONLY_READ, WHERE_CUT = 7, 8, 9
_SLOW_TRANSFORM, _UNWRITTEN = 18, 19
# From here on, eight looks that were taken (doubts.py).
FIRST_LOOK = 10


def warn(text: str) -> None:
    """A warning at the line outside of this package that led here."""
    level, frame = 1, sys._getframe()
    # Code that is run by exec() may have no name.
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("stocache."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _warn_once(records: _C.Records, what: int, text: str) -> None:
    if records.is_first_to_tell(what):
        warn(text)


def of_unsupported(records: _C.Records, index: int, error: Exception) -> None:
    text = f"sample {index} is not cached, and loaded every time: {_line_of(error)}"
    _warn_once(records, _UNSUPPORTED, text)


def of_unreadable(records: _C.Records, index: int, error: Exception) -> None:
    text = (
        f"sample {index} is cached and cannot be read, so it is loaded every time: "
        f"{_line_of(error)}; clear() makes room for it as it is now"
    )
    _warn_once(records, _UNREADABLE, text)


def _line_of(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def slow_transform(transform: Any, stats: CachedDatasetStats) -> tuple[int, str]:
    """What it is, and a line."""
    each = 1e3 * stats.transform_seconds / max(1, stats.transforms)
    return _SLOW_TRANSFORM, (
        f"The transform ({name_of(transform)}) took {stats.transform_seconds:.3g} s, {each:.3g} ms "
        f"per sample: {stats.transform_share:.0%} of the time that loading and transforming took. "
        "Transforms of torchvision v2 run natively as stocache.fuse(transform)."
    )


def name_of(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


def of_no_disk(records: _C.Records, error: Exception) -> None:
    text = f"a process that came later goes on without the disk level: {_line_of(error)}"
    _warn_once(records, _NO_DISK, text)


def of_unwritten(records: _C.Records, waiting: int) -> None:
    text = (
        f"{waiting} samples could not be written to disk before this process let go of it; the "
        "next run loads them again"
    )
    _warn_once(records, _UNWRITTEN, text)


def of_only_read(records: _C.Records, folder: str) -> None:
    text = (
        f"what is in {folder} is read, and nothing written to it from here: another dataset, job "
        "or policy writes to it, or the disk is read-only; give each its own name= or disk_path="
    )
    _warn_once(records, _ONLY_READ, text)


def of_size(records: _C.Records, index: int) -> None:
    room = records.stats()["data_bytes"]
    many = max(_FEWEST_REGIONS, min(_MOST_REGIONS, room // _LARGE_REGION))
    regions = many if records.arguments()[2] == "lru" else 1
    longest = show_bytes(room // regions)
    which = f'a part of the cache ({longest} of policy="lru")' if regions > 1 else "the cache"
    remedy = 'use policy="freeze", or more memory' if regions > 1 else "give it more memory"
    how = "loaded" if records.cluster() is None else "asked for on the servers, or loaded,"
    if records.disk() is not None:
        if records.disk_stats()["errors"]:
            return  # of which people are told, too
        which, remedy = f"{which} in memory, not taken by the disk", f"{remedy} or disk"
    text = f"sample {index} is larger than {which}, and {how} every time; {remedy}"
    _warn_once(records, _TOO_LARGE, text)


def of_key(records: _C.Records, key: Any, length: int) -> None:
    text = (
        f"index {key!r} is passed on to the dataset, and what it gives is loaded every time: only "
        f"numbers from 0 on and below {length}, its length, are cached"
    )
    _warn_once(records, _OTHER_KEYS, text)


def of_whole_batches(records: _C.Records, source: Any, why: str) -> None:
    text = (
        f"__getitems__ of the wrapped {type(source).__name__} {why}: such batches are handed on as "
        "they are, and not cached; to cache samples, wrap a dataset without __getitems__"
    )
    _warn_once(records, _WHOLE_BATCHES, text)


def of_random(records: _C.Records, index: int) -> None:
    _warn_once(records, _RANDOM, random_text(index))


def random_text(index: int) -> str:
    return (
        f"the dataset gives another sample {index} every time, and the cache keeps the first: move "
        "what is random into CachedDataset(transform=...), or use CachedDataset.until_random()"
    )


def of_epochs(source: Any) -> None:
    warn(
        f"set_epoch() of the wrapped {type(source).__name__} may change its samples, so they are "
        "not cached from here on: move what depends on the epoch into "
        "CachedDataset(transform=...); if nothing does, call .dataset.set_epoch(), or define "
        "set_epoch() in a subclass of CachedDataset"
    )


def of_replaced(source: Any) -> None:
    warn(
        f"dataset was replaced by a {type(source).__name__}: the cache holds samples of another, "
        "so they are not cached from here on; wrap it anew: CachedDataset(dataset, ...)"
    )


def of_other_rank(index: int) -> None:
    warn(
        f"sample {index} of this dataset is not the one that another rank of this node has cached, "
        "although their code and attributes are the same: from here on samples come from the "
        "dataset alone; pass shared=False to have a cache of this rank's own"
    )


def of_other_dataset(index: int, servers: str) -> None:
    warn(
        f"sample {index} of this dataset is not the one that is cached here or on {servers}, "
        "although class, length and fingerprint are the same: from here on samples come from the "
        "dataset alone; give each dataset a name (dataset_name=) or a fingerprint of its own"
    )


def of_stale_disk(index: int, folder: str) -> None:
    warn(
        f"sample {index} in the cache is not what the dataset gives now, although its code and "
        "attributes are the same: the cache is stale, and from here on samples come from the "
        f"dataset alone; remove {folder} (dataset.delete()), or use another fingerprint"
    )


def stale(records: _C.Records, index: int) -> ValueError:
    name = records.location()["name"]
    return ValueError(
        f"sample {index} in the cache {name!r} is not what the dataset gives now: the cache is "
        "stale; empty it (clear(), after joining it with probe=0), or use another name or "
        "fingerprint"
    )
