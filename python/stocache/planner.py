"""What fits into how much memory, before it is spent."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stocache import _C, _html
from stocache._dataset.apart import apart
from stocache._dataset.stats import CachedDatasetStats
from stocache._sharing.disk import WAYS, check_compression
from stocache.sizes import parse_size, show_bytes

SAMPLES = 16  # so many are measured
SECONDS = 1.0  # a slow source is not asked for all of them
# What a cache takes for itself, the index entry of a sample, and the padding of its record.
_HEAD_BYTES = 180 << 10
_ENTRY_BYTES = 18
_ALIGN = 16
# What stands in front of each (rust/core/src/records/heads.rs).
_HEAD = 16
# And what it takes more on disk, on average: padding, and its line in the log.
_ON_DISK = 56
# So many threads read from disk (rust/core/src/tiers/disk.rs), if there are so many processors.
_READERS = 4
# Who saves less has no use for it.
_WORTH = 1.05


@dataclass(frozen=True)
class Packing:
    """What ``compression=`` does with samples like those that were measured."""

    ratio: float
    """How many times as large they are as packed ones."""
    pack_seconds: float
    """Seconds that it takes to pack one, on average; once, when it is written."""
    unpack_seconds: float
    """Seconds that it takes to unpack one, whenever it is read."""
    pays_below: float
    """Bytes per second of a disk: from one that gives less, packed samples are read faster."""

    def __str__(self) -> str:
        if self.ratio < _WORTH:
            return "no gain"
        return (
            f"{self.ratio:.2g} times the room, and faster from a disk that reads less than "
            f"{show_bytes(self.pays_below)}/s"
        )


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
    deviation: float = 0
    """By how many bytes they differ: the standard deviation."""
    compression: str | None = None
    """How they are packed there."""
    packings: dict[str, Packing] = field(default_factory=dict)
    """What each ``compression`` would buy, if a disk was asked for."""
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
        packing = self.packings.get(self.compression or "")
        packed = self.mean / (packing.ratio if packing else 1)
        return min(self.dataset_len, _fit(self.memory, self.disk, self.mean, packed))

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
            + "".join(f' compression="{way}": {does}.' for way, does in self.packings.items())
        )


def plan(
    dataset: Any,
    memory: int | float | str = 0.5,
    allow_pickle: bool = False,
    disk: int | str | None = None,
    compression: str | None = None,
) -> Plan:
    """Loads a few samples, in a process of its own, and says how many fit into ``memory`` and, if
    it is given, onto ``disk``, packed by ``compression``; and what each way to pack them would buy
    there, in room and in speed."""
    check_compression(compression)
    if compression is not None and disk is None:
        raise ValueError('compression= needs disk=, such as disk="300GiB"')
    length = len(dataset)
    limit = parse_size("memory", memory)
    room = max(0, limit - _HEAD_BYTES - length * _ENTRY_BYTES)
    made: Plan = apart(lambda: measured(dataset, room, allow_pickle, disk is not None))
    if isinstance(disk, float):
        raise TypeError(f"disk is {disk!r}; of which disk is not known here: use bytes or a text")
    if disk is None:
        return made
    return replace(made, disk=parse_size("disk", disk), compression=compression)


def in_room(memory: int, disk: int, mean: float) -> int:
    """How many samples of that size a cache holds that may take so much."""
    size = mean + _ENTRY_BYTES
    return _fit(max(0, memory - _HEAD_BYTES), disk, size, size)


def _fit(memory: int, disk: int, mean: float, on_disk: float) -> int:
    return int(memory / mean) + int(disk / (on_disk + _ON_DISK))


def measured(
    dataset: Sequence[Any], memory: int = 0, allow_pickle: bool = False, packed: bool = False,
    seconds: float = SECONDS,
) -> Plan:  # fmt: skip
    """The sizes of samples spread over the dataset, in this process; of fewer, if they take more
    than so many seconds."""
    length = len(dataset)
    sizes: list[int] = []
    trials: dict[str, list[tuple[int, float, float]]] = {way: [] for way in WAYS if packed}
    failed = None
    packing = 0.0
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
        packing -= time.perf_counter()
        for way, tried in trials.items():
            tried.append(_C.try_compression(way, record))
        packing += time.perf_counter()
        if time.perf_counter() - began > seconds:
            break
    took = time.perf_counter() - began - packing
    return Plan(
        dataset_len=length,
        memory=memory,
        sampled=len(sizes),
        smallest=min(sizes, default=0),
        largest=max(sizes, default=0),
        mean=sum(sizes) / max(1, len(sizes)),
        load_seconds=took / max(1, len(sizes)),
        deviation=statistics.pstdev(sizes) if sizes else 0,
        packings={way: _packing(sizes, tried) for way, tried in trials.items() if tried},
        failed=failed,
    )


def _packing(sizes: list[int], tried: list[tuple[int, float, float]]) -> Packing:
    whole, packed = sum(sizes), sum(size for size, _, _ in tried) + _HEAD * len(tried)
    pack, unpack = (sum(times) / len(tried) for times in list(zip(*tried, strict=True))[1:])
    ratio = max(1.0, whole / packed)
    threads = min(_READERS, len(os.sched_getaffinity(0)))
    # From a disk of d bytes a second one takes whole / d, or packed / d and the time to unpack it.
    saved = (whole - packed) / len(tried)
    pays_below = threads * saved / unpack if ratio > 1 and unpack else 0.0
    return Packing(ratio, pack, unpack, pays_below)


def say(line: str, inherited: bool) -> None:
    """Prints a line. A forked process may have ``inherited`` text in the buffer of its parent, who
    will print that; and where nobody listens any more, that is no error."""
    with contextlib.suppress(OSError, ValueError):
        if inherited and type(sys.stdout) is io.TextIOWrapper:
            os.write(sys.stdout.fileno(), f"{line}\n".encode())
        else:
            print(line, flush=True)
