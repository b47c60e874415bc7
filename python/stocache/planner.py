"""What fits into how much memory, before it is spent."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stocache import _C, _html
from stocache._dataset.apart import apart
from stocache._dataset.stats import CachedDatasetStats
from stocache.sizes import parse_size, show_bytes

SAMPLES = 16  # so many are measured
_SECONDS = 1.0  # a slow source is not asked for all of them
# What a cache takes for itself, the index entry of a sample, and the padding of its record.
_HEAD_BYTES = 176 << 10
_ENTRY_BYTES = 18
_ALIGN = 16
# What stands in front of each (rust/core/src/records/heads.rs).
_HEAD = 16
# And what it takes more on disk, on average: padding, and its line in the log.
_ON_DISK = 56


@dataclass(frozen=True)
class Plan:
    """How much of a dataset a cache of this size holds."""

    dataset_len: int
    """Samples in the dataset."""
    memory: int
    """Bytes for samples in memory."""
    sampled: int
    """How many samples were measured."""
    smallest: int
    """Bytes of the smallest of them; 0 if only their average is known."""
    largest: int
    """Bytes of the largest; likewise."""
    mean: float
    """Bytes of one on average."""
    load_seconds: float
    """Seconds to load one on average."""
    disk: int = 0
    """Bytes for samples on disk."""
    failed: str | None = None
    """The sample that could not be loaded or stored, if there was one: none were measured after
    it."""

    @classmethod
    def of(cls, stats: CachedDatasetStats) -> Plan:
        """What the samples that were stored so far tell."""
        mean = stats.bytes / max(1, stats.fills)
        # Where they are all of one size, the padding is known; else it is half, on average.
        mean = max(_ALIGN, mean + (-mean % _ALIGN if mean.is_integer() else _ALIGN / 2)) + _HEAD
        return cls(
            dataset_len=stats.dataset_len,
            memory=stats.data_bytes,
            sampled=stats.fills,
            smallest=0,
            largest=0,
            mean=mean,
            load_seconds=stats.load_seconds / max(1, stats.loads),
            disk=stats.disk.data_bytes if stats.disk else 0,
        )

    @property
    def dataset_bytes(self) -> float:
        """What all samples take, as far as those measured tell."""
        return self.mean * self.dataset_len

    @property
    def fits(self) -> int:
        """How many samples fit, in memory and on disk together."""
        if not self.sampled:
            return 0
        on_disk = int(self.disk / (self.mean + _ON_DISK))
        return min(self.dataset_len, int(self.memory / self.mean) + on_disk)

    @property
    def hit_rate(self) -> float:
        """The hit rate to expect from the second epoch on (policy "freeze")."""
        return self.fits / max(1, self.dataset_len)

    def _repr_html_(self) -> str:
        levels: list[_html.Level] = []
        left = self.dataset_bytes if self.sampled else 0.0
        for name, of in (("memory", self.memory), ("disk", self.disk)):
            if of:
                used = min(left, of)
                left -= used
                share = used / max(1.0, self.dataset_bytes)
                levels.append((name, used, of, f"{share:.0%} of the dataset"))
        return _html.table(type(self).__name__, levels, str(self))

    def _room(self) -> str:
        below = f" in memory and {show_bytes(self.disk)} on disk" if self.disk else ""
        return f"{show_bytes(self.memory)}{below}"

    def __str__(self) -> str:
        if not self.sampled:
            return (
                f"Caching {self.dataset_len} samples in up to {self._room()}; what fits "
                f"is not known, because {self.failed or 'no sample was loaded yet'}."
            )
        sizes = show_bytes(self.mean)
        if self.smallest == 0:
            sizes += " on average"
        elif self.smallest != self.largest:
            sizes = f"{show_bytes(self.smallest)} to {show_bytes(self.largest)}"
        return (
            f"{self.dataset_len} samples of {sizes} take about {show_bytes(self.dataset_bytes)}; "
            f"the cache has {self._room()}. "
            + (
                "All of them fit."
                if self.fits == self.dataset_len
                else f"{self.fits} fit: expect a hit rate of {self.hit_rate:.0%}."
            )
            + (f" Measured: {self.sampled}, because {self.failed}." if self.failed else "")
        )


def plan(
    dataset: Any,
    memory: int | float | str = 0.5,
    allow_pickle: bool = False,
    disk: int | str | None = None,
) -> Plan:
    """Loads a few samples, in a process of its own, and says how many fit into ``memory`` and, if
    it is given, onto ``disk``."""
    length = len(dataset)
    limit = parse_size("memory", memory)
    room = max(0, limit - _HEAD_BYTES - length * _ENTRY_BYTES)
    made: Plan = apart(lambda: _measure(dataset, room, allow_pickle))
    if isinstance(disk, float):
        raise TypeError(f"disk is {disk!r}; of which disk is not known here: use bytes or a text")
    return made if disk is None else replace(made, disk=parse_size("disk", disk))


def _measure(dataset: Sequence[Any], memory: int, allow_pickle: bool) -> Plan:
    """The sizes of samples spread over the dataset."""
    length = len(dataset)
    sizes: list[int] = []
    failed = None
    began = time.perf_counter()
    for k in range(min(SAMPLES, length)):
        index = k * length // min(SAMPLES, length)
        try:
            sample = dataset[index]
        except Exception as error:  # whoever asks for this sample is told as well
            lines = str(error).splitlines() or [""]
            failed = f"sample {index} cannot be loaded ({type(error).__name__}: {lines[0]})"
            break
        try:
            _, record = _C.codec_encode(sample, allow_pickle)
        except Exception as error:
            failed = f"sample {index} cannot be stored ({str(error).partition(';')[0]})"
            break
        sizes.append(max(_ALIGN, -(-len(record) // _ALIGN) * _ALIGN) + _HEAD)
        if time.perf_counter() - began > _SECONDS:
            break
    seconds = (time.perf_counter() - began) / max(1, len(sizes))
    return Plan(
        dataset_len=length,
        memory=memory,
        sampled=len(sizes),
        smallest=min(sizes, default=0),
        largest=max(sizes, default=0),
        mean=sum(sizes) / max(1, len(sizes)),
        load_seconds=seconds,
        failed=failed,
    )


def say(line: str, inherited: bool) -> None:
    """Prints a line. A forked process may have ``inherited`` text in the buffer of its parent, who
    will print that; and where nobody listens any more, that is no error."""
    with contextlib.suppress(OSError, ValueError):
        if inherited and type(sys.stdout) is io.TextIOWrapper:
            os.write(sys.stdout.fileno(), f"{line}\n".encode())
        else:
            print(line, flush=True)
