"""LocalStore: values by text keys on one machine, in memory that its processes share and on disk.

A value lies at one of a few slots that its key may have, together with the whole digest of the key:
what lies there for another key is not this one's. So no list of keys is needed, and all processes
agree without a word.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from stocache import _C
from stocache._cluster.address import safely
from stocache._dataset import telling
from stocache._dataset.samples import Records
from stocache._sharing.disk import checked
from stocache._sharing.launcher import find_job
from stocache._sharing.sameness import digest
from stocache.sizes import parse_size

# Slots that a key may have. With every second slot taken, one value of 256 finds none.
_CHOICES = 8
# A slot for so many bytes of memory, and of disk: each takes some bytes of memory itself.
_MEMORY_PER_SLOT, _DISK_PER_SLOT = 2048, 64 << 10
_LEAST_SLOTS = 1024
_AT_ONCE = 1 << 16
_PATIENCE = 10.0  # seconds for another process that stores at the same slot


class LocalStore:
    """Values of any type that CachedDataset stores, by text keys, without a server.

    The ranks of a job on this node, and the workers of each, have one store.

    Args:
        memory: The most that it may take in memory: bytes, or a text such as "8GiB".
        disk: Likewise on the disk at ``disk_path``.
        disk_path: A folder on a disk of this node. What does not fit into memory is written there,
            and the next run finds it.
        policy: "lru" drops what was not used for longest to make room; "freeze" keeps what is
            there.
        name: Share on purpose, with any process of this user that gives the same name and sizes.
        slots: How many values there may be at the most, about twice over; None: as many as suit
            values of some KB.
    """

    def __init__(
        self,
        memory: int | str = "1GiB",
        disk: int | str | None = None,
        disk_path: str | os.PathLike[str] | None = None,
        policy: str = "lru",
        name: str | None = None,
        slots: int | None = None,
    ) -> None:
        for what, size in (("memory", memory), ("disk", disk)):
            if isinstance(size, float):
                raise TypeError(
                    f'{what} is {size!r}; use bytes or a text such as "8GiB", which is the same '
                    "for all processes"
                )
        limit = parse_size("memory", memory)
        below = checked(disk, disk_path, None, None, False)
        if below is not None and disk is None:
            raise ValueError('disk_path= needs disk=, the most to take there, such as "100GiB"')
        on_disk = 0 if disk is None else parse_size("disk", disk)
        if slots is None:
            slots = max(_LEAST_SLOTS, limit // _MEMORY_PER_SLOT + on_disk // _DISK_PER_SLOT)
        elif isinstance(slots, bool) or not isinstance(slots, int) or slots < _CHOICES:
            raise ValueError(f"slots is {safely(slots)}; use a whole number from {_CHOICES} on")
        self._slots = slots
        limit = max(limit, _C.least_memory(slots, policy))
        # What is at a slot follows from how many there are.
        mark = _C.fingerprint_of(f"values by keys, {_CHOICES} of {slots} slots")
        job = find_job()
        if name is None and job is not None:
            name = f"job-{digest(job.name, 'values by keys', limit, slots, policy, str(disk_path))}"
        self._records = Records()
        self._records.open(
            limit, slots, policy, name or "", "auto", False, mark, "no", "", 0, -1
        )  # fmt: skip
        if below is not None:
            try:
                below.open_below(
                    self._records, range(slots), "values", mark, "LocalStore\n\n", None
                )
            except BaseException:
                self._records.close()
                raise
            self._records.flush_at_end()
        self._told = False

    def set(self, key: str, value: Any) -> None:
        """Keeps a value. Values of types that are not stored are a TypeError; another value for a
        key that is there, a ValueError."""
        mine = _digest(key)
        places = self._places(mine)
        for place in self._filled(places):
            if self._at(place, mine) is not _C.MISS:
                if self._records.differs(place, (mine, value), False):
                    raise ValueError(
                        f"key {key!r} has another value already, and values stay as they are; use "
                        "another key, or clear() the store"
                    )
                return
        for place in self._records.missing(places):
            with self._records.acquire([places[place]], _PATIENCE) as acquired:
                for mine_now in acquired.to_load():
                    acquired.put(mine_now, (mine, value), False)
                    return self._tell()
        self._tell_once(
            f"the slots of some keys are all taken ({self._slots} in all), and their values are "
            "not kept; pass slots= with about twice the number of values"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` if there is none."""
        mine = _digest(key)
        for place in self._filled(self._places(mine)):
            value = self._at(place, mine)
            if value is not _C.MISS:
                return value
        self._tell()
        return default

    def mset(self, mapping: Mapping[str, Any]) -> None:
        """Keeps several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def mget(self, keys: Iterable[str]) -> list[Any]:
        """The values in the order of the keys; None where there is none."""
        return [self.get(key) for key in keys]

    def num_keys(self) -> int:
        """How many values there are."""
        empty = 0
        for first in range(0, self._slots, _AT_ONCE):
            last = min(first + _AT_ONCE, self._slots)
            empty += len(self._records.missing(range(first, last)))
        return self._slots - empty

    def clear(self) -> None:
        """Removes all values."""
        self._records.clear()

    def status(self) -> bool:
        """Whether it is open."""
        return self._records.is_open()

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until what goes to disk is there; says whether it is."""
        return self._records.flush(timeout)

    def shutdown(self) -> None:
        """Detaches this process. Memory goes with the last one that uses it; what is on disk
        stays."""
        if self._records.is_open():
            self._records.flush(_PATIENCE)
        self._records.close()

    # Slots

    def _places(self, mine: bytes) -> list[int]:
        """The slots that a key may have, which are different ones."""
        wide = hashlib.blake2b(mine, digest_size=8 * _CHOICES, person=b"slots").digest()
        part = self._slots // _CHOICES
        return [
            at * part + int.from_bytes(wide[8 * at : 8 * at + 8], "little") % part
            for at in range(_CHOICES)
        ]

    def _filled(self, places: list[int]) -> list[int]:
        empty = set(self._records.missing(places))
        return [place for at, place in enumerate(places) if at not in empty]

    def _at(self, place: int, mine: bytes) -> Any:
        """The value there, if it is that of this key."""
        try:
            (found,) = self._records.get_many([place], False)  # also from disk
        except (ValueError, ImportError, AttributeError):  # of a class that is no more
            return _C.MISS
        if found is _C.MISS or found[0] != mine:
            return _C.MISS
        return found[1]

    def _tell(self) -> None:
        if self._records.disk() is not None and (news := self._records.news()):
            telling.warn(news)

    def _tell_once(self, text: str) -> None:
        if not self._told:
            self._told = True
            telling.warn(text)


def _digest(key: Any) -> bytes:
    return hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=32).digest()
