"""CachedDataset: any dataset, any sample, one line."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from stocache import _html
from stocache._cluster import options as clusters
from stocache._cluster.address import safely
from stocache._dataset import attributes, images, splitting, telling
from stocache._dataset.apart import apart, in_workers
from stocache._dataset.augmenting import Fusing, Numbering, fusing, number_of
from stocache._dataset.batches import Batches, Collated, Loads, collate
from stocache._dataset.comparing import RANDOM, SAME, STALE, UNCUT, UNKNOWN, compare
from stocache._dataset.loader import DatasetLoader
from stocache._dataset.samples import Records, Samples
from stocache._dataset.stats import CachedDatasetStats
from stocache._sharing.change import check_on_change
from stocache._sharing.dataset import open_records
from stocache._sharing.disk import checked, folder_of
from stocache._sharing.job import caller_of
from stocache._torch.fetching import goes_to
from stocache.augment import Pipeline
from stocache.sizes import huge_pages_word, show_bytes

Sample = TypeVar("Sample", covariant=True)
Self = TypeVar("Self", bound="CachedDataset[Any]")


class CachedDataset(Dataset[Sample]):
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
        disk: Likewise on the disk at ``disk_path``, below memory; half of what is free there, if
            only the path is given.
        disk_path: A folder on a disk of this node, an SSD best. Samples that do not fit into memory
            are written there, and the next run with the same dataset finds them.
        key: A function of an index: what that sample is made from, such as its path and time of
            change. On disk samples are known by it, so a list of files that became longer, or has
            another order, keeps what is still the same.
        compression: "zstd" or "lz4" packs samples on disk, each by itself; ``stocache.plan()`` says
            what that buys. None leaves them as they are.
        temporary: The disk level goes with its last process, instead of staying for the next run.
        cluster: Servers below memory and disk, which all nodes reach: "redis://host:port,host:port"
            of Redis or Valkey servers that run, or "spawn" for one on this node. What a node loads
            is sent there, and other nodes, and later runs, find it under ``name``.
        capacity_per_node: With cluster="spawn", the most that this node's server may take.
        ttl: How many seconds values stay on the servers; None: until they are cleared or evicted.
        dataset_size: About how much all samples take on servers. With ``capacity_per_node`` it says
            how many servers one copy needs; a node then uses so many of its neighbours, and no
            others. None: all servers hold one copy.
        transform: Runs on every sample that is handed out, cached or not. Random augmentation
            belongs here; what ``dataset`` does is done once. A function gets the whole sample, and
            so does a transform of torchvision's v2, which finds the images in it; one of
            torchvision's first version gets the first image, or the first tensor, alone. One of
            ``stocache.fuse`` runs natively, while a ``stocache.DataLoader`` gathers its batches.
        transform_sample: The same, but gets the whole sample whatever it is. One of the two.
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
            they are asked for, and compared; and how many that were just stored, where random
            numbers were drawn to load them. 0: none, and not one of a thousand either.
        allow_pickle: Store also objects of other types, pickled.
        strict: Raise an error where a sample is of a type that cannot be stored, or was stored and
            cannot be read. Otherwise it is loaded and handed out, and warned about once.
        shared: False keeps a rank's cache to itself and its workers.
        backing: "shm", "memfd" or "auto", as for SharedCache.
        huge_pages: True, False or "auto", as for SharedCache.
        verbose: Print what fits and what hit rate to expect, once the first samples are stored.
        backend, dataset_name, hosts, cluster_mode, writer_buffer_size: The same as ``cluster`` and
            ``name`` in the words of Bagua: ``CachedDataset(dataset, "redis", "pano", hosts=…)``.
    """

    def __init__(
        self,
        dataset: Any,
        memory: int | float | str = 0.5,
        dataset_name: str | None = None,
        writer_buffer_size: int = 20,
        *,
        backend: str | None = None,
        hosts: list[dict[str, Any]] | None = None,
        cluster_mode: bool = True,
        cluster: str | None = None,
        capacity_per_node: int | float | str | None = None,
        ttl: float | None = None,
        dataset_size: int | str | None = None,
        disk: int | float | str | None = None,
        disk_path: str | os.PathLike[str] | None = None,
        key: Callable[[int], Any] | None = None,
        compression: str | None = None,
        temporary: bool = False,
        transform: Callable[[Any], Any] | None = None,
        transform_sample: Callable[[Any], Any] | None = None,
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
        given = (("transform", transform), ("transform_sample", transform_sample))
        for what, function in given:
            if function is not None and not callable(function):
                raise TypeError(f"{what} is {safely(function)}; a function of one sample is needed")
        if transform is not None and transform_sample is not None:
            raise ValueError(
                "transform and transform_sample are both given; use transform_sample alone, for a "
                "function that gets the whole sample and does both"
            )
        for what, word in (("policy", policy), ("fingerprint", fingerprint), ("backing", backing)):
            if not isinstance(word, str):
                raise TypeError(f"{what} is {safely(word)}; a str is needed")
        is_plain = isinstance(name, str) and name and name.isprintable() and "@" not in name
        if name is not None and not is_plain:
            raise ValueError(
                f"name {safely(name)} is not allowed: "
                "use 1 to 100 letters, digits, dots, dashes and underscores"
            )
        check_on_change(on_change)
        if isinstance(probe, bool) or not isinstance(probe, int):
            raise TypeError(f"probe is {safely(probe)}; a number of samples is needed")
        if probe < 0:
            raise ValueError(f"probe is {probe}; use 0 or more samples")
        if memory == "redis" and backend is None:  # Bagua's second argument is its backend
            memory, backend = 0.5, "redis"
        servers = clusters.of_words(
            cluster, capacity_per_node, ttl, backend=backend, hosts=hosts,
            cluster_mode=cluster_mode, dataset_name=dataset_name,
            writer_buffer_size=writer_buffer_size, dataset_size=dataset_size,
        )  # fmt: skip
        records = Records()
        opened = open_records(
            records, dataset, memory, name=name, keep=bool(keep), mark=fingerprint,
            on_change=on_change, policy=policy, shared=shared, backing=backing,
            huge_pages=huge_pages_word(huge_pages), caller=caller_of(self),
            disk=checked(disk, disk_path, key, compression, temporary),
            cluster=servers, label=dataset_name or name,
            part=self._stocache_part(dataset),
        )  # fmt: skip
        created = opened == "created"
        on_disk, folder = records.disk_stats(), folder_of(records)
        if folder is not None:
            if news := records.news():
                telling.warn(news)
            if not on_disk["writes"]:
                telling.of_only_read(records, folder)
        in_memory = 0 if created else records.stats()["filled"]
        found = servers is not None or on_disk["filled"] or in_memory
        # All that is private is in one object: names of subclasses meet no others of ours.
        self._stocache = Samples(
            dataset, records, len(dataset), allow_pickle=bool(allow_pickle), strict=bool(strict),
            probe=probe if found else 0, looks=probe,
            named=name is not None, says_what_fits=bool(verbose) and created,
            verbose=bool(verbose),
        )  # fmt: skip
        vars(self).update(
            dataset=dataset, transform=transform_sample or images.for_samples(transform)
        )

    @classmethod
    def until_random(
        cls: type[Self],
        dataset: Any,
        memory: int | float | str = 0.5,
        *,
        steps: int | None = None,
        **options: Any,
    ) -> Self:
        """Caches what comes before the first random step of the dataset's own ``transform``, runs
        the rest on every sample that is handed out, and prints where it was cut.

        For a ``Compose`` of MONAI or torchvision, or ``torch.nn.Sequential``, as ``transform`` (or
        torchvision's ``transforms``) of a dataset or of what a ``Subset`` is of. A step that is not
        known counts as random; ``steps`` says how many to run before the cache instead. Where the
        dataset does more with what its transform gave than to hand it on, its samples pass the
        cache by. ``options`` are those of CachedDataset.
        """
        for what in ("transform", "transform_sample"):
            if options.get(what) is not None:
                raise TypeError(
                    f"{what} is given to until_random, which takes it from the dataset; add the "
                    "step to the dataset's"
                )
        found = splitting.split(
            dataset,
            steps,
            checks=0 if options.get("probe") == 0 else 1,
            allow_pickle=bool(options.get("allow_pickle")),
        )
        with found.as_cached():
            made = cls(found.dataset, memory, transform_sample=found.rest, **options)
        if options.get("verbose", True):
            made._stocache.tell_once(telling.WHERE_CUT, found.told)
        return made

    # Samples

    def __len__(self) -> int:
        return self._stocache.length

    @overload
    def __getitem__(self, index: slice | list[int] | range) -> list[Sample]: ...
    @overload
    def __getitem__(self, index: Any) -> Sample: ...
    def __getitem__(self, index: Any) -> Any:
        """A sample; a list of them for a slice or a list of indices."""
        transform = vars(self)["transform"]
        if type(index) is not int and _is_many(index):
            chosen = _listed(index, self._stocache.length)
            samples = self._stocache.get_many(chosen, transform is not None)
            return samples if transform is None else self._stocache_transformed(samples, chosen)
        sample = self._stocache.get(index, transform is not None)
        return sample if transform is None else self._stocache_transformed([sample], [index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch; misses are loaded together. A DataLoader calls this."""
        if attributes.defines_items_anew(type(self)):
            return [self[index] for index in indices]
        if goes_to(collate):
            return Collated(self.batches[indices])
        transform = vars(self)["transform"]
        if transform is None:
            return self._stocache.get_many(indices, whole=True)
        indices = list(indices) if hasattr(indices, "__next__") else indices
        return self._stocache_transformed(self._stocache.get_many(indices, to_edit=True), indices)

    def _stocache_transformed(self, samples: list[Any], indices: Iterable[Any]) -> list[Any]:
        """As they are handed out."""
        fusing = self._stocache_fusing(indices)
        if fusing is not None:
            numbers = [number_of(index, self._stocache.length) for index in indices]
            return fusing.samples(samples, numbers)
        return self._stocache.transformed(vars(self)["transform"], samples, indices)

    def __iter__(self) -> Iterator[Sample]:
        """Ends at the length, or before it where the dataset does, by an IndexError."""
        for index in range(len(self)):
            try:
                sample = self[index]
            except IndexError:
                return
            yield sample

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What runs on every sample that is handed out."""
        given: Callable[[Any], Any] | None = images.as_given(vars(self).get("transform"))
        return given

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        if not hasattr(self.dataset, "transform"):
            vars(self)["transform"] = images.for_samples(transform)
        elif self.dataset.transform is None and isinstance(transform, Pipeline):
            vars(self)["transform"] = transform
        elif (
            transform is not None
            and self.dataset.transform is None
            and images.is_of_torchvision(transform)
        ):
            # It gets images there and here, so that it means the same; timm's loaders set it.
            vars(self)["transform"] = images.OnImage(transform)
        else:
            raise attributes.refuse_transform(self.dataset)

    @property
    def batches(self) -> Batches:
        """The same samples by the batch: ``dataset.batches[[3, 1, 2]]``, gathered natively."""
        return Batches(self)

    def _stocache_part(self, dataset: Any) -> str:
        """Which part of the data this is, where the fingerprint does not tell: processes with
        another do not share it."""
        return ""

    def _stocache_gathers(self) -> bool:
        """Whether batches may be gathered natively: nobody wants the single samples."""
        kind = type(self)
        return (
            (vars(self)["transform"] is None or self._stocache_pipeline() is not None)
            and self._stocache.is_used()
            and kind.__getitem__ is CachedDataset.__getitem__
            and kind.__getitems__ is CachedDataset.__getitems__
        )

    def _stocache_pipeline(self) -> Pipeline | None:
        """The transform, if it is one that was fused."""
        transform = vars(self).get("transform")
        return transform if isinstance(transform, Pipeline) else None

    def _stocache_fusing(self, indices: Iterable[Any]) -> Fusing | None:
        """The same, as it is to be applied to these samples now."""
        pipeline = self._stocache_pipeline()
        if pipeline is None:
            return None
        return fusing(pipeline, self._stocache.passes, indices, self._stocache_numbering())

    def _stocache_numbering(self) -> Numbering | None:
        """What random numbers of samples follow from, if not from their indices here."""
        return None

    # Attributes

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: the dataset's own attributes stay reachable.
        if name.startswith("__") or "_stocache" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        pipeline = self._stocache_pipeline() if name == "set_epoch" else None
        if pipeline is not None and not hasattr(self.dataset, name):
            return pipeline.set_epoch
        value = getattr(self.dataset, name)
        attributes.check_forwarded(self.dataset, name, value)
        return self._stocache.set_epoch if name == "set_epoch" and callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        made = "_stocache" in vars(self)
        if made and attributes.set_on_dataset(self, _OURS, name, value):
            return
        if made and name == "dataset" and value is not self.dataset:
            if get_worker_info() is None:
                object.__setattr__(self, "_stocache", self._stocache.with_source(value))
            else:  # the same one, opened anew
                self._stocache.source = value
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
        one. No sample is loaded in this process.

        In a job of several ranks with a cluster each sample is loaded by one of those that call
        this, after torch.distributed's init_process_group(); the others' come from the servers.
        """
        samples = self._stocache
        wanted = range(samples.length) if indices is None else [samples.place(i) for i in indices]
        missing = samples.missing(wanted)
        if missing:
            options = (num_workers, multiprocessing_context, worker_init_fn)
            loaded = samples.warmed(wanted, lambda some: in_workers(Loads(self), some, *options))
            for _ in _with_progress(loaded, missing) if progress else loaded:
                pass
        return self.stats()

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begins to read these samples from disk, in the order in which they will be asked for
        here, so that they are there then. Returns at once, and loads nothing. A process has one
        such order: the next call ends it. ``stocache.DataLoader`` does so by itself."""
        self._stocache.records.prefetch([self._stocache.place(i) for i in indices])

    def verify(self, samples: int = 16) -> int:
        """Loads some of the cached samples again, in a process of its own, and compares; returns
        how many were compared.

        Raises a ValueError if the dataset now gives other samples than those in the cache, and
        warns if it gives another sample every time: random augmentation belongs in ``transform``.
        """
        if samples < 0:
            raise ValueError(f"samples is {samples}; use 0 or more")
        source, records = self.dataset, self._stocache.records
        allow_pickle = self._stocache.allow_pickle
        cached = [i for i in _some(len(self), samples * 64) if records.contains(i)]
        chosen = cached[:samples]

        def outcomes() -> list[str]:
            found: list[str] = []
            for index in chosen:
                found.append(compare(records, source, index, allow_pickle))
                if found[-1] in (STALE, RANDOM, UNCUT):
                    break
            return found

        found = apart(outcomes) if chosen else []
        if STALE in found:
            raise telling.stale(records, chosen[len(found) - 1])
        if RANDOM in found:
            telling.warn(telling.random_text(chosen[len(found) - 1]))
        elif UNCUT in found:
            telling.warn(
                f"sample {chosen[len(found) - 1]} is cached up to the first random step, and "
                "cannot be cut there now: something about the dataset has changed; clear() empties "
                "the cache"
            )
        elif UNKNOWN in found:
            telling.warn(
                f"{found.count(UNKNOWN)} of {len(chosen)} samples cannot be compared with the "
                "cached ones: they hold objects that do not say what they consist of, whose "
                "classes need an __eq__, or the cached ones cannot be read"
            )
        return found.count(SAME)

    def stats(self) -> CachedDatasetStats:
        """Counts of all processes so far."""
        return self._stocache.stats()

    def cluster_servers(self) -> list[dict[str, Any]]:
        """Of each server: what this process saw, and what it holds, for which it is asked now."""
        return self._stocache.records.cluster_servers(True)

    @property
    def cache_loader(self) -> DatasetLoader:
        """In the words of Bagua: ``get``, ``num_keys`` and ``store``."""
        return DatasetLoader(self._stocache)

    def is_complete(self) -> bool:
        """Whether every sample is cached."""
        return self._stocache.is_complete()

    def clear(self) -> None:
        """Empties the cache."""
        self._stocache.clear()

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until what goes to disk is there; says whether it is, after so many seconds at the
        most. A process does so at its end."""
        return self._stocache.records.flush(timeout)

    def close(self) -> None:
        """Detaches this process. The last process to detach removes the cache from memory; what is
        on disk stays."""
        self._stocache.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._stocache.records.is_open()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def delete(self) -> None:
        """Closes it, and removes what is on disk and what ``keep`` has left in memory. Others that
        use it go on with what they have."""
        self._stocache.delete()

    @property
    def name(self) -> Any:
        """The name under which other processes can join; the dataset's, if it has one."""
        return getattr(self.dataset, "name", self._stocache.records.location()["name"])

    @property
    def path(self) -> Any:
        """The file in /dev/shm, or None for a memfd; the dataset's, if it has one."""
        return getattr(self.dataset, "path", self._stocache.records.location()["path"] or None)

    def __repr__(self) -> str:
        if self.closed:
            return f"{type(self).__name__}({self.dataset!r}, closed)"
        stats = self._stocache.stats()
        filled = f"{stats.filled} of {stats.dataset_len} samples"
        return (
            f"{type(self).__name__}({self.dataset!r}, {filled} in "
            f"{show_bytes(stats.used_bytes)} of {show_bytes(stats.data_bytes)})"
        )

    def _repr_html_(self) -> str:
        if self.closed:
            return _html.table(repr(self), [])
        stats = self._stocache.stats()
        title = f"{type(self).__name__} of {type(self.dataset).__name__}"
        return _html.table(title, stats._levels(), str(stats))


# The attributes that every CachedDataset has.
_OURS = frozenset(("dataset", "transform", "_stocache"))


def _some(length: int, count: int) -> list[int]:
    """Up to ``count`` different indices, at random."""
    return random.SystemRandom().sample(range(length), min(length, count))


def _with_progress(loaded: Any, count: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to fail
        return loaded
    return tqdm(loaded, "warming the cache", count, unit=" samples")


def _is_many(index: Any) -> bool:
    return isinstance(index, (slice, list, range)) or getattr(index, "ndim", 0) == 1


def _listed(index: Any, length: int) -> Sequence[Any]:
    if isinstance(index, slice):
        return range(length)[index]
    chosen = index if isinstance(index, (list, range)) else index.tolist()
    if any(isinstance(i, bool) for i in chosen):
        raise TypeError("a list of bool cannot choose samples; use their indices")
    return chosen
