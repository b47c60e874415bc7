"""CachedDataset: any dataset, any sample, one line."""

from __future__ import annotations

import operator
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from stocache import _C, _job
from stocache._fingerprint import fingerprint as fingerprint_of
from stocache.planner import Plan, measure
from stocache.sizes import parse_size, show_bytes

# How long to wait at least for another process that is loading the same sample, before loading it
# too. It is longer where loading takes longer (rust/core/src/store.rs).
_PATIENCE_SECONDS = 0.5
# Into how many regions "lru" divides the memory (rust/core/src/layout.rs).
_LRU_REGIONS = 32
_NOWHERE = ("", 0, -1)  # no process is known to have it open


@dataclass(frozen=True)
class CachedDatasetStats:
    """What a cache did so far, summed over all processes of the node that used it."""

    hits: int
    """Samples that came from memory."""
    misses: int
    """Samples that did not."""
    fills: int
    """Samples stored."""
    bytes: int
    """Bytes of samples stored."""
    waits: int
    """Waits for another process that was loading the same sample."""
    lost: int
    """Samples not stored because another process had just done it."""
    dropped: int
    """Samples not stored for lack of room."""
    loads: int
    """Samples loaded from the source."""
    load_seconds: float
    """Seconds spent loading them, over all processes."""
    too_large: int
    """Samples not stored because they are larger than the cache can hold."""
    evicted: int
    """Samples that made room for others (policy "lru")."""
    filled: int
    """Samples in memory now."""
    used_bytes: int
    """Bytes they take."""
    data_bytes: int
    """Bytes there are for them."""
    dataset_len: int
    """Samples in the dataset."""
    frozen: bool
    """No more samples are taken until clear(): the memory ran out."""

    @property
    def hit_rate(self) -> float:
        """Share of samples that came from memory; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def seconds_saved(self) -> float:
        """What loading the hits from the source would have taken."""
        return self.hits * self.load_seconds / max(1, self.loads)

    def __str__(self) -> str:
        return (
            f"{self.filled} of {self.dataset_len} samples in memory "
            f"({show_bytes(self.used_bytes)} of {show_bytes(self.data_bytes)}), "
            f"{self.hits} hits, {self.misses} misses ({self.hit_rate:.1%} hit rate), "
            f"{self.seconds_saved:.3g} s of loading saved"
            + (f", {self.too_large} too large to store" if self.too_large else "")
            + (", frozen" if self.frozen else "")
        )


class _Records(_C.Records):
    """The native store, which joins the same memory in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rejoin, (self.arguments(),))


def _rejoin(arguments: tuple[Any, ...]) -> _Records:
    records = _Records()
    records.open(*arguments)
    return records


class Collated:
    """A batch that is collated already: ``__getitems__`` gives it to ``stocache.collate``."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class CachedDataset(Dataset[Any]):
    """Keeps the samples of ``dataset`` in memory that all processes of the node share.

    >>> ds = CachedDataset([(torch.arange(4), 7), (torch.zeros(2), 8)], "16MiB", verbose=False)
    >>> ds[0]
    (tensor([0, 1, 2, 3]), 7)

    A sample may be any nesting of tensors, numpy arrays, numbers, strings, bytes, None, tuples,
    lists, dicts, named tuples, dataclasses and PIL images, of any and varying size. What comes back
    is equal to what went in, and editing it does not change the cache: a hit is a copy, and a miss
    what the dataset gave.

    Args:
        dataset: Any map-style dataset: ``len(dataset)`` and ``dataset[i]``. The same index must
            always give the same sample.
        memory: The most the cache may take: bytes, a text such as "32GiB", or a fraction such as
            0.5 of the memory that is free.
        transform: Runs on every sample that is handed out, cached or not. Random augmentation
            belongs here; what ``dataset`` does is done once.
        policy: "freeze" fills the memory and then keeps what is there, which is best for epochs
            that visit every sample once. "lru" drops what was not used for longest to make room.
        name: Share on purpose, with any process of this user on this node that gives the same name.
        keep: Leave the cache in /dev/shm when the last process exits, for the next run under the
            same name.
        fingerprint: What the cached samples depend on. "auto" looks at the dataset's code and
            attributes; any other text is taken as it is. A cache made with another is refused.
        probe: How many cached samples are recomputed and compared when a cache is joined or kept.
        allow_pickle: Store also objects of other types, pickled.
        shared: False keeps a rank's cache to itself and its workers.
        backing: "shm", "memfd" or "auto", as for SharedCache.
        verbose: Print what fits and what hit rate to expect.
    """

    def __init__(
        self,
        dataset: Any,
        memory: int | float | str = 0.5,
        *,
        transform: Callable[[Any], Any] | None = None,
        policy: str = "freeze",
        name: str | None = None,
        keep: bool = False,
        fingerprint: str = "auto",
        probe: int = 4,
        allow_pickle: bool = False,
        shared: bool = True,
        backing: str = "auto",
        verbose: bool = True,
    ) -> None:
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not map_style or isinstance(dataset, IterableDataset):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}; a map-style dataset with len() and "
                "dataset[i] is needed"
            )
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is {transform!r}; a function of one sample is needed")
        for what, word in (("policy", policy), ("fingerprint", fingerprint), ("backing", backing)):
            if not isinstance(word, str):
                raise TypeError(f"{what} is {word!r}; a str is needed")
        if name is not None and not (isinstance(name, str) and name and name.isprintable()):
            raise ValueError(
                f"name {name!r} is not allowed: "
                "use 1 to 100 letters, digits, dots, dashes and underscores"
            )
        if isinstance(probe, bool) or not isinstance(probe, int):
            raise TypeError(f"probe is {probe!r}; a number of samples is needed")
        if probe < 0:
            raise ValueError(f"probe is {probe}; use 0 or more samples")
        self.dataset = dataset
        self.transform = transform
        self._allow_pickle = bool(allow_pickle)
        self._length = len(dataset)
        if self._length == 0:
            raise ValueError("the dataset is empty; there is nothing to cache")
        limit = parse_size("memory", memory)
        mark = fingerprint_of(dataset) if fingerprint == "auto" else fingerprint
        job = _job.job() if shared and name is None else None
        chosen = name or ("" if job is None else _job.dataset_name(job, policy, mark))
        self._records = _Records()
        self._records.open(
            limit, self._length, policy, chosen, backing, bool(keep),
            _C.fingerprint_of(mark), *_NOWHERE,
        )  # fmt: skip
        opened = self._records.whereabouts()["opened"]
        if opened != "created":
            self._verify(probe)
        elif verbose:
            print(self._measure(), flush=True)

    # Samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        sample = self._get_or_load(self._place(index))
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch; misses are loaded together. A DataLoader calls this."""
        places = self._places(indices)
        missing = self._records.missing(places)
        loaded = dict(zip(missing, self._load_many([places[k] for k in missing]), strict=True))
        if self.transform is None and _collates_here(sys._getframe(1)):
            batch = self.collated(places, counted=len(missing))
            if batch is not _C.MISS:
                return Collated(batch)
        samples = [
            loaded[k] if k in loaded else self._get_or_load(place) for k, place in enumerate(places)
        ]
        return samples if self.transform is None else [self.transform(s) for s in samples]

    def collated(self, places: Sequence[int], threads: int = 1, counted: int = 0) -> Any:
        """The batch as default_collate makes it, gathered natively. ``_C.MISS`` if a sample is not
        in memory, or if these samples must be collated in Python. ``counted`` of them were counted
        as they came; the others are hits."""
        return self._records.collate(places, threads, get_worker_info() is not None, counted)

    def _get_or_load(self, place: int) -> Any:
        sample = self._records.get(place, self._allow_pickle)
        return self._load(place) if sample is _C.MISS else sample

    def _places(self, indices: Sequence[Any]) -> list[int]:
        places = list(map(operator.index, indices))
        # The usual case without a call per index.
        if places and min(places) >= 0 and max(places) < self._length:
            return places
        return [self._place(place) for place in places]

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise IndexError(
                f"index {place} is out of bounds of a dataset of {self._length} samples"
            )
        return place + self._length if place < 0 else place

    def _load(self, index: int, asked_for: bool = True) -> Any:
        """A sample that is not cached: loaded once per node, by whoever is first. If that is
        another process it is a hit, otherwise a miss if the sample was ``asked_for``."""
        loader = self._records.begin(index)
        if loader == "other":
            self._records.wait(index, _PATIENCE_SECONDS)
            loader = self._records.begin(index)
        if loader == "nobody":  # somebody has stored it meanwhile
            sample = self._records.get(index, self._allow_pickle)
            if sample is not _C.MISS:
                return sample
        self._records.note(0, int(asked_for))
        began = time.perf_counter()
        try:
            sample = self.dataset[index]
        except BaseException:
            if loader == "mine":
                self._records.abandon(index)
            raise
        self._records.note_loads(1, time.perf_counter() - began)
        if loader == "mine":
            self._records.put(index, sample, self._allow_pickle)
        return sample

    def _load_many(self, indices: list[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None or len(indices) == 1:
            return [self._load(index) for index in indices]
        mine: list[int] = []
        loaded: dict[int, Any] = {}
        try:
            for index in dict.fromkeys(indices):
                if self._records.begin(index) == "mine":
                    mine.append(index)
            if mine:
                self._records.note(0, len(mine))
                began = time.perf_counter()
                loaded = dict(zip(mine, together(mine), strict=True))
                self._records.note_loads(len(mine), time.perf_counter() - began)
            while mine:
                # Ends the claim, whatever comes of it.
                index = mine.pop()
                self._records.put(index, loaded[index], self._allow_pickle)
        finally:
            for index in mine:
                self._records.abandon(index)
        # Each is handed out once: an index that comes twice gets two samples.
        return [loaded.pop(i) if i in loaded else self._load(i) for i in indices]

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: the dataset's own attributes stay reachable.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    # The cache

    def warm(
        self,
        num_workers: int = 0,
        indices: Iterable[int] | None = None,
        progress: bool = True,
        multiprocessing_context: Any = None,
    ) -> CachedDatasetStats:
        """Fills the cache ahead of training, in parallel."""
        wanted = range(self._length) if indices is None else [self._place(i) for i in indices]
        missing = [i for i in wanted if not self._records.contains(i)]
        loader = DataLoader(
            Subset(_Loads(self), missing),
            batch_size=None,
            num_workers=num_workers,
            multiprocessing_context=multiprocessing_context,
        )
        for _ in _with_progress(loader) if progress else loader:
            pass
        return self.stats()

    def verify(self, samples: int = 16) -> int:
        """Recomputes some of the cached samples and compares; returns how many were compared.

        Raises a ValueError if the dataset now gives other samples than those in the cache, and
        warns if it gives another sample every time: random augmentation belongs in ``transform``.
        """
        return self._verify(samples)

    def _verify(self, samples: int) -> int:
        if samples < 0:
            raise ValueError(f"samples is {samples}; use 0 or more")
        cached = [i for i in _some(self._length, samples * 64) if self._records.contains(i)]
        compared = 0
        for index in cached[:samples]:
            first = self.dataset[index]
            differs = self._records.differs(index, first, self._allow_pickle)
            if differs and self._allow_pickle:  # equal objects may have different pickles
                differs = not _equal(self._records.get(index, True), first)
            if not differs:
                compared += 1
                continue
            if _C.codec_encode(first, self._allow_pickle) != _C.codec_encode(
                self.dataset[index], self._allow_pickle
            ):
                warnings.warn(
                    f"the dataset gives another sample {index} every time, and the cache keeps the "
                    "first: move what is random into CachedDataset(transform=...)",
                    RuntimeWarning,
                    stacklevel=3,  # the caller of verify() or of the constructor
                )
                return compared
            raise ValueError(
                f"sample {index} in the cache {self.name!r} is not what the dataset gives now: the "
                "cache is stale; empty it (clear(), after joining it with probe=0), or use another "
                "name or fingerprint"
            )
        return compared

    def stats(self) -> CachedDatasetStats:
        """Counts of all processes so far."""
        return CachedDatasetStats(**self._records.stats())

    def is_complete(self) -> bool:
        """Whether every sample is in memory."""
        return bool(self._records.stats()["filled"] == self._length)

    def clear(self) -> None:
        """Empties the cache."""
        self._records.clear()

    def close(self) -> None:
        """Detaches this process. The last process to detach removes the cache."""
        self._records.close()

    @property
    def name(self) -> str:
        """The name under which other processes can join."""
        return str(self._records.whereabouts()["name"])

    @property
    def path(self) -> str | None:
        """The file in /dev/shm, or None for a memfd."""
        return self._records.whereabouts()["path"] or None

    def __repr__(self) -> str:
        if not self._records.is_open():
            return f"{type(self).__name__}({self.dataset!r}, closed)"
        stats = self.stats()
        return (
            f"{type(self).__name__}({self.dataset!r}, {stats.filled} of {len(self)} samples in "
            f"{show_bytes(stats.used_bytes)} of {show_bytes(stats.data_bytes)})"
        )

    def _measure(self) -> Plan:
        """Loads a few samples, which are cached right away, to see what fits."""
        room = self._records.stats()["data_bytes"]
        plan = measure(self.dataset, room, self._allow_pickle, self._keep)
        if self._records.arguments()[2] == "lru" and plan.largest > room // _LRU_REGIONS:
            warnings.warn(
                f"samples of up to {show_bytes(plan.largest)} are larger than 1/{_LRU_REGIONS} of "
                'the cache, which is the most that policy="lru" stores; use policy="freeze", or '
                f"memory of at least {show_bytes(plan.largest * _LRU_REGIONS)}",
                RuntimeWarning,
                stacklevel=3,
            )
        return plan

    def _keep(self, index: int, sample: Any, seconds: float) -> None:
        self._records.note_loads(1, seconds)
        if self._records.begin(index) == "mine":
            self._records.put(index, sample, self._allow_pickle)


class _Loads(Dataset[None]):
    """Loads samples into a cache without handing them out."""

    def __init__(self, cached: CachedDataset) -> None:
        self.cached = cached

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: int) -> None:
        if not self.cached._records.contains(index):
            self.cached._load(index, asked_for=False)


def _some(length: int, count: int) -> list[int]:
    """Up to ``count`` different indices, at random."""
    return random.SystemRandom().sample(range(length), min(length, count))


def _with_progress(loader: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to fail
        return loader
    return tqdm(loader, "warming the cache", unit=" samples")


def _equal(one: Any, other: Any) -> bool:
    """Whether two samples are equal, as far as they can say."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return bool(_C.codec_encode(one, False) == _C.codec_encode(other, False))
    except TypeError:  # only pickle knows it
        return bool(one == other)


def _collates_here(frame: Any) -> bool:
    """Whether the samples go straight from ``frame`` to ``stocache.collate``.

    A DataLoader does not tell a dataset what becomes of a batch, so the caller is looked at:
    torch's fetcher, or torch's Subset called by it, and nothing in between that could touch a
    sample.
    """
    from stocache.loader import collate

    # A subclass of Subset may do something of its own to the samples.
    while frame is not None and type(frame.f_locals.get("self")) is Subset:
        frame = frame.f_back
    fetcher = frame.f_locals.get("self") if frame is not None else None
    return isinstance(fetcher, _BaseDatasetFetcher) and fetcher.collate_fn is collate
