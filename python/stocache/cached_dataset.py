"""CachedDataset: any dataset, any sample, one line."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from stocache import _C
from stocache._dataset import attributes
from stocache._dataset.apart import apart, in_workers
from stocache._dataset.batches import Batches, Loads
from stocache._dataset.comparing import RANDOM, SAME, STALE, UNKNOWN, Countdown, compare
from stocache._dataset.stats import CachedDatasetStats
from stocache._sharing.change import check_on_change
from stocache._sharing.dataset import open_records
from stocache._sharing.job import caller_of
from stocache._torch.ipc import is_worker
from stocache.planner import SAMPLES, Plan, say
from stocache.sizes import huge_pages_word, show_bytes

# How long to wait at least for another process that is loading the same sample, before loading it
# too. It is longer where loading takes longer (rust/core/src/records/waiting.rs).
_PATIENCE_SECONDS = 0.5
# Into how many regions "lru" divides the memory (rust/core/src/layout.rs).
_LRU_REGIONS = 32
# What is told once per node.
_WHAT_FITS, _UNSUPPORTED, _TOO_LARGE, _RANDOM = range(4)


class _Records(_C.Records):
    """The native store, which joins the same memory in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rejoin, (self.arguments(),))


def _rejoin(arguments: tuple[Any, ...]) -> _Records:
    records = _Records()
    records.open(*arguments)
    return records


class CachedDataset(Dataset[Any]):
    """Keeps the samples of ``dataset`` in memory that all processes of the node share.

    >>> ds = CachedDataset([(torch.arange(4), 7), (torch.zeros(2), 8)], "16MiB", verbose=False)
    >>> ds[0]
    (tensor([0, 1, 2, 3]), 7)

    A sample may be any nesting of tensors, numpy arrays, numbers, strings, bytes, None, tuples,
    lists, dicts, named tuples, dataclasses and PIL images, of any and varying size. What comes back
    is equal to what went in, and editing it does not change the cache: a hit is a copy, and a miss
    what the dataset gave. ``transform`` always gets a copy.

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
        on_change: "clear" removes a cache of this name that was made for other data, if nobody uses
            it, instead of refusing it.
        probe: How many samples of a cache that was joined or kept are loaded all the same, when
            they are asked for, and compared.
        allow_pickle: Store also objects of other types, pickled.
        strict: Raise an error where a sample is of a type that cannot be stored. Otherwise it is
            handed out, counted, and warned about once.
        shared: False keeps a rank's cache to itself and its workers.
        backing: "shm", "memfd" or "auto", as for SharedCache.
        huge_pages: True, False or "auto", as for SharedCache.
        verbose: Print what fits and what hit rate to expect, once the first samples are stored.
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
        on_change: str = "error",
        probe: int = 4,
        allow_pickle: bool = False,
        strict: bool = False,
        shared: bool = True,
        backing: str = "auto",
        huge_pages: bool | str = False,
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
        check_on_change(on_change)
        if isinstance(probe, bool) or not isinstance(probe, int):
            raise TypeError(f"probe is {probe!r}; a number of samples is needed")
        if probe < 0:
            raise ValueError(f"probe is {probe}; use 0 or more samples")
        self.dataset = dataset
        self._transform = transform
        self._allow_pickle = bool(allow_pickle)
        self._strict = bool(strict)
        self._length = len(dataset)
        if self._length == 0:
            raise ValueError("the dataset is empty; there is nothing to cache")
        self._records = _Records()
        opened = open_records(
            self._records, dataset, memory, name=name, keep=bool(keep), mark=fingerprint,
            on_change=on_change, policy=policy, shared=shared, backing=backing,
            huge_pages=huge_pages_word(huge_pages), caller=caller_of(self),
        )  # fmt: skip
        created = opened == "created"
        self._made_by = os.getpid()
        self._says_what_fits = bool(verbose) and created
        # Cached samples still to be compared with the dataset's: when one is asked for, by whom it
        # is asked for, who would have loaded it without a cache.
        self._uncompared = None
        if probe and not created and self._records.stats()["filled"]:
            self._uncompared = Countdown(probe)

    # Samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """A sample; a list of them for a slice or a list of indices."""
        if type(index) is not int and _is_many(index):
            return self._hand_out(self._places(_listed(index, self._length)))
        place = self._place(index)
        if self._uncompared is not None:
            self._compare_first([place])
        sample = self._records.get(place, self._allow_pickle)
        if sample is _C.MISS:
            sample = self._load(place)
        return sample if self._transform is None else self._transform(sample)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch; misses are loaded together. A DataLoader calls this."""
        if attributes.defines_items_anew(type(self)):
            return [self[index] for index in indices]
        return self._hand_out(self._places(indices))

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What runs on every sample that is handed out."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        if hasattr(self.dataset, "transform"):
            raise attributes.refuse_transform(self.dataset)
        self._transform = transform

    @property
    def batches(self) -> Batches:
        """The same samples by the batch: ``dataset.batches[[3, 1, 2]]``, gathered natively."""
        return Batches(self)

    def gathers(self) -> bool:
        """Whether batches may be gathered natively: nobody wants the single samples."""
        kind = type(self)
        return (
            self._transform is None
            and kind.__getitem__ is CachedDataset.__getitem__
            and kind.__getitems__ is CachedDataset.__getitems__
        )

    def collated(self, places: Sequence[int], threads: int = 1, counted: int = 0) -> Any:
        """The batch as default_collate makes it, gathered natively. ``_C.MISS`` if a sample is not
        in memory, or if these samples must be collated in Python. ``counted`` of them were counted
        as they came; the others are hits."""
        return self._records.collate(places, threads, is_worker(), counted)

    def _hand_out(self, places: list[int]) -> list[Any]:
        samples = self._filled_up(places, self._load_missing(places))
        return samples if self._transform is None else [self._transform(s) for s in samples]

    def _load_missing(self, places: list[int]) -> dict[int, Any]:
        """Loads together what is not cached: the samples by their position in ``places``."""
        if self._uncompared is not None:
            self._compare_first(places)
        missing = self._records.missing(places)
        return dict(zip(missing, self._load_many([places[k] for k in missing]), strict=True))

    def _filled_up(self, places: list[int], loaded: dict[int, Any]) -> list[Any]:
        return [loaded[k] if k in loaded else self._get(place) for k, place in enumerate(places)]

    def _get(self, place: int) -> Any:
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
        with self._records.loading() as loading:
            claim = loading.begin(index)
            if claim is _C.Claim.LOADING_ELSEWHERE:
                self._records.wait(index, _PATIENCE_SECONDS)
                claim = loading.begin(index)
            if claim is _C.Claim.PRESENT:  # somebody has stored it meanwhile
                sample = self._records.get(index, self._allow_pickle)
                if sample is not _C.MISS:
                    return sample
            self._records.note(0, int(asked_for))
            began = time.perf_counter()
            sample = self.dataset[index]
            self._records.note_loads(1, time.perf_counter() - began)
            if claim is _C.Claim.LOAD_AND_STORE:
                self._store(loading, index, sample)
        return self._copied(index, sample) if asked_for else None

    def _load_many(self, indices: list[int]) -> list[Any]:
        together = self._many_at_once()
        if together is None or len(indices) == 1:
            return [self._load(index) for index in indices]
        loaded: dict[int, Any] = {}
        with self._records.loading() as loading:
            begun = ((index, loading.begin(index)) for index in dict.fromkeys(indices))
            ours = [index for index, claim in begun if claim is _C.Claim.LOAD_AND_STORE]
            if ours:
                self._records.note(0, len(ours))
                began = time.perf_counter()
                loaded = dict(zip(ours, together(ours), strict=True))
                self._records.note_loads(len(ours), time.perf_counter() - began)
            for index, sample in loaded.items():
                self._store(loading, index, sample)
        # Each is handed out once: an index that comes twice gets two samples.
        return [self._copied(i, loaded.pop(i)) if i in loaded else self._load(i) for i in indices]

    def _many_at_once(self) -> Callable[[list[int]], Iterable[Any]] | None:
        """The dataset's ``__getitems__``, if it gives the samples that ``dataset[i]`` gives."""
        kind = type(self.dataset)
        known = hasattr(kind, "__getitems__") and not attributes.defines_items_anew(kind)
        return getattr(self.dataset, "__getitems__", None) if known else None

    def _store(self, loading: _C.Loading, index: int, sample: Any) -> None:
        """Stores a sample that was begun. Whatever comes of it, the sample can be handed out."""
        try:
            outcome = loading.put(index, sample, self._allow_pickle)
        except Warning:  # asked for as an error
            raise
        except Exception as error:
            if self._strict:
                raise
            self._records.note_unsupported()
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self._warn_once(
                _UNSUPPORTED, f"sample {index} is not cached, and loaded every time: {why}"
            )
        else:
            if outcome is _C.Put.TOO_LARGE:
                self._warn_of_size(index)
        if self._says_what_fits:
            self._say_what_fits()

    def _copied(self, index: int, sample: Any) -> Any:
        """A copy for ``transform``, which may edit it: what the dataset gave may be its own."""
        if self._transform is None:
            return sample
        cached = self._records.get(index, self._allow_pickle, False)
        if cached is not _C.MISS:
            return cached
        with contextlib.suppress(Exception):
            encoded = _C.codec_encode(sample, self._allow_pickle)
            return _C.codec_decode(*encoded, self._allow_pickle)
        with contextlib.suppress(Exception):
            return copy.deepcopy(sample)
        return sample

    # Attributes

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: the dataset's own attributes stay reachable.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.dataset, name)
        attributes.check_forwarded(self.dataset, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        ours = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not ours and "dataset" in self.__dict__:
            plain, known = type(self) is CachedDataset, hasattr(self.dataset, name)
            if get_worker_info() is not None and (plain or known):
                # A worker_init_fn means the dataset of this worker.
                with contextlib.suppress(AttributeError):
                    return setattr(self.dataset, name, value)
            elif plain and known:
                raise attributes.refuse_attribute(self.dataset, name)
        object.__setattr__(self, name, value)

    # The cache

    def warm(
        self,
        num_workers: int = 0,
        indices: Iterable[int] | None = None,
        progress: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> CachedDatasetStats:
        """Fills the cache ahead of training: by workers, as a DataLoader does it, or by a single
        one. No sample is loaded in this process."""
        wanted = range(self._length) if indices is None else [self._place(i) for i in indices]
        missing = [i for i in wanted if not self._records.contains(i)]
        if missing:
            loader = in_workers(
                Loads(self), missing, num_workers, multiprocessing_context, worker_init_fn
            )
            for _ in _with_progress(loader) if progress else loader:
                pass
        return self.stats()

    def verify(self, samples: int = 16) -> int:
        """Loads some of the cached samples again, in a process of its own, and compares; returns
        how many were compared.

        Raises a ValueError if the dataset now gives other samples than those in the cache, and
        warns if it gives another sample every time: random augmentation belongs in ``transform``.
        """
        if samples < 0:
            raise ValueError(f"samples is {samples}; use 0 or more")
        cached = [i for i in _some(self._length, samples * 64) if self._records.contains(i)]
        chosen = cached[:samples]

        def outcomes() -> list[str]:
            found: list[str] = []
            for index in chosen:
                found.append(compare(self._records, self.dataset, index, self._allow_pickle))
                if found[-1] in (STALE, RANDOM):
                    break
            return found

        found = apart(outcomes) if chosen else []
        if found and found[-1] in (STALE, RANDOM):
            self._complain(chosen[len(found) - 1], found[-1])
        elif UNKNOWN in found:
            warnings.warn(
                f"{found.count(UNKNOWN)} of {len(chosen)} samples cannot be compared with the "
                "cached ones: they hold objects that do not say what they consist of; give their "
                "classes an __eq__",
                RuntimeWarning,
                stacklevel=2,
            )
        return found.count(SAME)

    def _compare_first(self, places: Sequence[int]) -> None:
        for place in places:
            if self._uncompared is None or self._uncompared.left == 0:
                self._uncompared = None
                return
            if not self._records.contains(place):
                continue
            outcome = SAME
            with contextlib.suppress(Exception):  # what cannot be loaded now was cached in time
                outcome = compare(self._records, self.dataset, place, self._allow_pickle)
            if outcome == STALE or (outcome == RANDOM and self._records.is_first_to_tell(_RANDOM)):
                self._complain(place, outcome)
            self._uncompared.count()

    def _complain(self, index: int, outcome: str) -> None:
        if outcome == RANDOM:
            warnings.warn(
                f"the dataset gives another sample {index} every time, and the cache keeps the "
                "first: move what is random into CachedDataset(transform=...)",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        name = self._records.location()["name"]
        raise ValueError(
            f"sample {index} in the cache {name!r} is not what the dataset gives now: the "
            "cache is stale; empty it (clear(), after joining it with probe=0), or use another "
            "name or fingerprint"
        )

    def stats(self) -> CachedDatasetStats:
        """Counts of all processes so far."""
        return CachedDatasetStats(**self._records.stats())

    def is_complete(self) -> bool:
        """Whether every sample is in memory."""
        return bool(self._records.stats()["filled"] == self._length)

    def is_settled(self) -> bool:
        """Whether every sample comes from memory, and none has to be compared any more."""
        left = 0 if self._uncompared is None else self._uncompared.left
        return left == 0 and self.is_complete()

    def clear(self) -> None:
        """Empties the cache."""
        self._records.clear()

    def close(self) -> None:
        """Detaches this process. The last process to detach removes the cache."""
        self._records.close()

    @property
    def name(self) -> Any:
        """The name under which other processes can join; the dataset's, if it has one."""
        return getattr(self.dataset, "name", self._records.location()["name"])

    @property
    def path(self) -> Any:
        """The file in /dev/shm, or None for a memfd; the dataset's, if it has one."""
        return getattr(self.dataset, "path", self._records.location()["path"] or None)

    def __repr__(self) -> str:
        if not self._records.is_open():
            return f"{type(self).__name__}({self.dataset!r}, closed)"
        stats = self.stats()
        return (
            f"{type(self).__name__}({self.dataset!r}, {stats.filled} of {len(self)} samples in "
            f"{show_bytes(stats.used_bytes)} of {show_bytes(stats.data_bytes)})"
        )

    # What is told

    def _say_what_fits(self) -> None:
        stats = self.stats()
        tried = stats.fills + stats.dropped + stats.too_large + stats.unsupported
        if tried >= min(SAMPLES, self._length):
            self._says_what_fits = False
            if stats.fills and self._records.is_first_to_tell(_WHAT_FITS):
                say(str(Plan.of(stats)), inherited=os.getpid() != self._made_by)

    def _warn_of_size(self, index: int) -> None:
        regions = _LRU_REGIONS if self._records.arguments()[2] == "lru" else 1
        longest = show_bytes(self._records.stats()["data_bytes"] // regions)
        which = f'a part of the cache ({longest} of policy="lru")' if regions > 1 else "the cache"
        remedy = 'use policy="freeze", or more memory' if regions > 1 else "give it more memory"
        self._warn_once(
            _TOO_LARGE,
            f"sample {index} is larger than {which}, and loaded every time; {remedy}",
        )

    def _warn_once(self, what: int, text: str) -> None:
        if self._records.is_first_to_tell(what):
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _some(length: int, count: int) -> list[int]:
    """Up to ``count`` different indices, at random."""
    return random.SystemRandom().sample(range(length), min(length, count))


def _with_progress(loader: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to fail
        return loader
    return tqdm(loader, "warming the cache", unit=" samples")


def _is_many(index: Any) -> bool:
    return isinstance(index, (slice, list, range)) or getattr(index, "ndim", 0) == 1


def _listed(index: Any, length: int) -> Sequence[Any]:
    if isinstance(index, slice):
        return range(length)[index]
    chosen = index if isinstance(index, (list, range)) else index.tolist()
    if any(isinstance(i, bool) for i in chosen):
        raise TypeError("a list of bool cannot choose samples; use their indices")
    return chosen
