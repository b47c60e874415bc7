"""LazyShardDataset: each rank or node keeps its own part of a dataset."""

from __future__ import annotations

import math
import operator
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from stocache import _C
from stocache._dataset.apart import apart, in_workers
from stocache._dataset.attributes import check_forwarded, defines_items_anew, set_on_dataset
from stocache._dataset.augmenting import Numbering
from stocache._dataset.batches import Collated, Loads, collate
from stocache._dataset.stats import CachedDatasetStats
from stocache._sharding.shard import Deal, Shard, Visits, chunk_of, rows_of, shard_of
from stocache._sharding.shares import Report, Share, Terms, check_agreement, share_of
from stocache._sharing import ranks as _ranks
from stocache._sharing.disk import Keys, size_of_all
from stocache._sharing.fingerprint import fingerprint as look_at
from stocache._sharing.launcher import find_job
from stocache._sharing.ranks import whole
from stocache._torch.fetching import goes_to
from stocache.bilevel import Counter, Level
from stocache.cached_dataset import CachedDataset
from stocache.planner import SECONDS, Plan, measured, say
from stocache.sizes import parse_size, show_bytes

_MODES = ("rank", "node", "disk")
_WORD = (1 << 64) - 1
_OURS = frozenset(("dataset", "transform", "_stocache"))
# Who asks for these means the cache: the dataset may be a list, or a CachedDataset, and have such.
_OF_THE_STORE = frozenset(("batches", "clear", "is_complete", "prefetch", "until_random", "verify"))


class LazyShardDataset(Dataset[Any]):
    """The part of ``dataset`` that this rank visits, kept on its node in memory and on disk.

    Parts are disjoint and hold all that fits. What a node does not have yet is loaded from the
    dataset when it is first visited: the shard is made while training runs.

    Args:
        dataset: Any map-style dataset or array: ``len(dataset)`` and ``dataset[i]``.
        shuffle: Deal samples out at random, and visit them in another order in every epoch. False:
            consecutive samples, in their order.
        disk_size: The most that a node may keep on disk: bytes, a text such as "300GiB", or a
            fraction such as 0.95 of what is free there. None: nothing.
        memory_size: Likewise in memory.
        overflow: By which fraction a part may be larger than what its node can keep.
        min_elements: The least samples of a rank; an error says what would fit.
        rank: The number of this rank; as torch.distributed or the launcher says.
        num_replicas: How many ranks there are; likewise.
        seed: Which samples go where, and in which order; the same for all ranks.
        mode: "rank": each rank has a part of its own. "node": the ranks of a node have one
            together, and divide it among themselves anew in every epoch. "disk": likewise, but
            each rank has memory of its own, and the disk is what they share.
        disk_cache_path: A folder on a disk of each node.
        equal: Every rank visits equally many samples.
        chunk: So many consecutive samples stay together, so that what lies in one piece is read by
            one rank; for Zarr and HDF5 arrays as they say.
        transform: Runs on every sample that is handed out.
        fingerprint: As for CachedDataset.
        verbose: Print what this rank has, and how much of it was there.
        options: Any other of CachedDataset.
    """

    def __init__(
        self,
        dataset: Any,
        shuffle: bool = True,
        disk_size: int | float | str | None = 0.95,
        memory_size: int | float | str = 0.5,
        overflow: float = 0.0,
        min_elements: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        seed: int = 0,
        mode: str = "rank",
        disk_cache_path: str | os.PathLike[str] = "./bicache",
        *,
        equal: bool = False,
        chunk: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        fingerprint: str = "auto",
        verbose: bool = True,
        **options: Any,
    ) -> None:
        dataset = rows_of(dataset)
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not map_style or isinstance(dataset, IterableDataset):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}; one with len() and dataset[i] is needed"
            )
        number, ranks = _ranks.rank_and_ranks(rank, num_replicas)
        path = os.path.join(os.path.abspath(os.fsdecode(disk_cache_path)), socket.gethostname())

        def reported() -> Report:
            together = chunk_of(dataset) if chunk is None else _checked("chunk", chunk, 1)
            terms = Terms(
                samples=len(dataset), seed=_checked("seed", seed, None) & _WORD, mode=_mode(mode),
                shuffle=bool(shuffle),
                chunk=min(_WORD, together), overflow=_overflow(overflow),
                min_elements=_checked("min_elements", min_elements, 0), equal=bool(equal),
                num_replicas=ranks,
            )  # fmt: skip
            pickles = bool(options.get("allow_pickle"))
            return _report(dataset, number, terms, memory_size, disk_size, path, pickles)

        # What a rank cannot say is said too: the others wait for an answer.
        failed: Exception | None = None
        try:
            report = reported()
        except Exception as error:
            failed = error
            report = Report.of_trouble(number, _ranks.node_name(number), error)
        reports = _ranks.exchanged(report, ranks)
        if failed is not None and (reports is None or ranks == 1):
            raise failed
        agreed = reports is not None
        if reports is not None:
            check_agreement(reports)
            reports.sort(key=lambda each: each.rank)
            me = _ranks.placed(number, [each.node for each in reports])
            nodes = list({each.node: each for each in reversed(reports)}.values())[::-1]
            nodes.sort(key=lambda each: each.rank)
            # One measures for all: the same samples take the same room.
            nodes = [_with_bytes(each, reports[0].sample_bytes) for each in nodes]
        else:
            me = _ranks.presumed(number, ranks)
            nodes = [report] * len(me.ranks_on)
        terms = report.terms
        share = share_of(me, terms, nodes, agreed)
        if not agreed:
            _check_alone(terms, share, memory_size, disk_size)
        self.dataset = dataset
        self.rank = me
        memory = nodes[me.node].memory
        deal = Deal(terms.samples, terms.chunk, terms.seed, terms.shuffle)
        shard = shard_of(dataset, deal, share.start, share.length)
        options.update(self._sharing(terms, fingerprint, options, disk_size is not None))
        if mode == "disk":
            options["shared"] = False
        if options.get("shared") is False:
            memory //= me.ranks_on[me.node]
        if disk_size is not None:
            keys = Keys(shard.keys())
            options.update(disk=nodes[me.node].disk, disk_path=path, key=keys)
        store = _Store(shard, memory, transform=transform, verbose=False, **options)
        self._stocache = _Parts(terms, share, store)
        _C.count_for(me.local)
        if verbose and me.local == 0:
            self._tell()

    def _sharing(
        self, terms: Terms, mark: str, options: dict[str, Any], on_disk: bool
    ) -> dict[str, Any]:
        """By which fingerprint the samples of this dataset are known, and who shares them."""
        if mark != "auto":
            # The user's word says nothing of which dataset it is, nor does the shard's type.
            kind = type(self.dataset)
            which = f"{kind.__module__}.{kind.__qualname__} {terms.samples}"
            return {"fingerprint": f"{mark} {which}"}
        alone = find_job() is None or options.get("shared") is False
        if alone and not on_disk and options.get("name") is None:
            return {"fingerprint": "of one process"}  # nobody else asks for it
        found = look_at(self.dataset)
        if found.unseen:
            raise ValueError(
                f"fingerprint: {found.unseen[0]} cannot be looked into, so nothing says whether "
                "what is kept are the samples of this dataset; pass fingerprint= with a text that "
                "you change whenever the samples change"
            )
        return {"fingerprint": f"{found.text} {os.getcwd()}"}

    def _tell(self) -> None:
        share, stats, rank = self._stocache.share, self.stats(), self.rank
        samples = self._stocache.terms.samples
        nodes = len(rank.ranks_on)
        keeps = f"{show_bytes(stats.data_bytes)} of memory"
        there = ""
        if stats.disk is not None:
            keeps += f" and {show_bytes(stats.disk.data_bytes)} on disk"
            there = f"; {stats.disk.filled} of them are there already"
        left = samples - share.total
        say(
            f"{f'Node {rank.node} of {nodes}' if nodes > 1 else 'This node'} keeps {share.length} "
            f"of {samples} samples in up to {keeps}{there}. Rank {rank.number} of {rank.ranks} "
            f"visits {share.visits} in an epoch"
            + (f"; {left} of the dataset are nobody's." if left else "."),
            False,
        )

    # Samples

    def __len__(self) -> int:
        return self._stocache.share.visits

    def __getitem__(self, index: Any) -> Any:
        """A sample; a list of them for a slice or a list of indices."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        if isinstance(index, (list, range)) or getattr(index, "ndim", 0) == 1:
            chosen = index if isinstance(index, (list, range)) else index.tolist()
            if any(isinstance(each, bool) for each in chosen):
                raise TypeError("a list of bool cannot choose samples; use their indices")
            return self._stocache.store[self._positions(chosen)]
        return self._stocache.store[self.visits().position(self._inside(index))]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch. A DataLoader calls this."""
        if defines_items_anew(type(self)):
            return [self[index] for index in indices]
        if goes_to(collate):
            return Collated(self._stocache.store.batches[self._positions(indices)])
        return self._stocache.store.__getitems__(self._positions(indices))

    def _inside(self, index: Any) -> int:
        number, visits = operator.index(index), self._stocache.share.visits
        if not -visits <= number < visits:
            raise IndexError(f"index {number} of {visits} samples of this rank")
        return number + visits if number < 0 else number

    def counted_from_start(self, indices: Iterable[Any]) -> list[int]:
        """Numbers of samples of this rank; an IndexError if one is none."""
        return [self._inside(index) for index in indices]

    def _positions(self, indices: Iterable[Any]) -> list[int]:
        numbers = torch.tensor(self.counted_from_start(indices), dtype=torch.int64, device="cpu")
        found: list[int] = self.visits().positions(numbers).tolist()
        return found

    def visits(self) -> Visits:
        """Which positions of the store this rank visits, in this epoch and in which order."""
        epoch, ours = self.epoch, self._stocache
        if ours.visits is None or ours.visits.epoch != epoch:
            share, terms = ours.share, ours.terms
            ours.visits = Visits(
                share.first, share.held, share.holder, share.step, share.offset, share.visits,
                terms.seed, epoch, terms.shuffle,
            )  # fmt: skip
        return ours.visits

    def indices(self) -> Tensor:
        """The samples of the dataset that this rank visits in this epoch, in order."""
        positions = self.visits().positions(torch.arange(len(self), device="cpu"))
        store: Shard = self._stocache.store.dataset
        return store.deal.in_order(store.start, store.length)[positions]

    @property
    def epoch(self) -> int:
        return int(self._stocache.epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Another order; in the modes "node" and "disk" also another part of what the node has.
        Workers that go on see it too."""
        self._check_length()
        number = _checked("epoch", epoch, 0)
        if number >= 1 << 63:
            raise ValueError(f"epoch is {number}; use less than 2**63")
        self._stocache.epoch.fill_(number)

    def _check_length(self) -> None:
        then, now = self._stocache.terms.samples, len(self.dataset)
        if now != then:
            raise ValueError(
                f"the dataset had {then} samples and has {now} now; its parts were "
                "dealt out for the former: construct LazyShardDataset anew"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the epoch, and for whom it counts. Where in it a loader was, its own
        state says."""
        terms = self._stocache.terms
        return {
            "epoch": self.epoch, "samples": terms.samples, "seed": terms.seed, "mode": terms.mode,
            "shuffle": terms.shuffle, "chunk": terms.chunk, "equal": terms.equal,
            "num_replicas": terms.num_replicas, "rank": self.rank.number,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on in the epoch of the state."""
        own = self.state_dict()
        differing = [what for what in own if what != "epoch" and state.get(what) != own[what]]
        if differing:
            words = [f"{what} was {state.get(what)!r} and is {own[what]!r}" for what in differing]
            raise ValueError(f"the state is that of another shard: {', '.join(words)}")
        self.set_epoch(state["epoch"])

    # The cache

    def warm(
        self,
        num_workers: int = 0,
        progress: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> CachedDatasetStats:
        """Loads what this rank visits ahead of training, by workers, then what other ranks of the
        node have not loaded: that of a rank that died, say. Every rank calls this; one of them
        shows how far the node is."""
        self._check_length()
        samples, share = self._stocache.store._stocache, self._stocache.share
        end = share.first + share.held
        mine = range(share.first + share.offset, end, share.step)
        rest = [k for k in range(share.length) if k not in mine]
        missing = [k for k in (*mine, *rest) if not samples.records.contains(k)]
        bar = _bar(len(missing)) if progress and self.rank.local == 0 else None
        before = self.stats().loads
        loader = in_workers(
            Loads(self.store), missing, num_workers, multiprocessing_context, worker_init_fn
        )
        for _ in loader if missing else ():
            if bar is not None:
                bar.update(max(0, min(bar.total, self.stats().loads - before) - bar.n))
        if bar is not None:
            bar.update(bar.total - bar.n)
            bar.close()
        return self.stats()

    def stats(self) -> CachedDatasetStats:
        """Counts of all processes of the node that share memory with this one."""
        return self._stocache.store.stats()

    @property
    def memory_cache(self) -> Level:
        """``memory_cache.hits.value`` and ``.misses.value`` of this rank and its workers."""
        hits, misses = Counter(lambda: self._memory()[0]), Counter(lambda: self._memory()[1])
        return _Memory(hits, misses, _Values(self))

    @property
    def disk_cache(self) -> Level:
        """Likewise. Who is asked here is what memory had not."""
        return Level(Counter(lambda: self._look_ups()[2]), Counter(lambda: self._look_ups()[1]))

    def _look_ups(self) -> tuple[int, int, int]:
        return self._stocache.store._stocache.records.look_ups_of(self.rank.local)

    def _memory(self) -> tuple[int, int]:
        hits, misses, below = self._look_ups()
        return max(0, hits - below), misses + below

    @property
    def store(self) -> CachedDataset[Any]:
        """What the node keeps, by position."""
        return self._stocache.store

    def flush(self, timeout: float = 60.0) -> bool:
        """As CachedDataset.flush()."""
        return self._stocache.store.flush(timeout)

    def close(self) -> None:
        """Detaches this process; what is on disk stays."""
        self._stocache.store.close()

    def delete(self) -> None:
        """Closes it, and removes what its node has on disk."""
        self._stocache.store.delete()

    def __enter__(self) -> LazyShardDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Attributes

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What runs on every sample that is handed out."""
        return self._stocache.store.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._stocache.store.transform = transform

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: the dataset's own attributes stay reachable.
        if name.startswith(("__", "_stocache")) or "_stocache" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _OF_THE_STORE:
            raise AttributeError(
                f"a LazyShardDataset has no {name}; its .store has, for the {len(self.store)} "
                "samples of this node by their positions there"
            )
        value = getattr(self.dataset, name)
        check_forwarded(self.dataset, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_stocache" in vars(self):
            if name == "dataset" and value is not self.dataset:
                self._set_dataset(value)
            elif set_on_dataset(self, _OURS, name, value):
                return
        object.__setattr__(self, name, value)

    def _set_dataset(self, dataset: Any) -> None:
        if get_worker_info() is None:
            raise AttributeError(
                "the parts of a LazyShardDataset were dealt out of the dataset that it was made "
                "with; construct it anew with the other"
            )
        shard: Shard = self._stocache.store.dataset
        shard.source = dataset  # the same one, opened anew in this worker

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A copy has workers of its own.
        if not self._stocache.epoch.is_shared():  # type: ignore[no-untyped-call]
            self._stocache.epoch.share_memory_()  # type: ignore[no-untyped-call]
        _C.count_for(self.rank.local)  # a worker that was started fresh counts for its rank

    def __repr__(self) -> str:
        rank, terms = self.rank, self._stocache.terms
        return (
            f"LazyShardDataset({self.dataset!r}, {len(self)} of {terms.samples} samples, "
            f"rank {rank.number} of {rank.ranks}, mode {terms.mode!r})"
        )


class _Parts:
    """All that is private, under one name: the others are left to subclasses and datasets."""

    def __init__(self, terms: Terms, share: Share, store: _Store) -> None:
        self.terms, self.share, self.store = terms, share, store
        self.visits: Visits | None = None  # those of the last epoch that was asked for
        self.epoch = torch.zeros((), dtype=torch.int64, device="cpu")
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Memory(Level):
    _values_cache: _Values


class _Values:
    """What is cached, as an example of BiLevelCache's looks at it."""

    def __init__(self, dataset: LazyShardDataset) -> None:
        self._dataset = dataset

    def get(self, index: int, default: Any = None) -> Any:
        """The sample at ``dataset[index]`` before its transform, if it is cached."""
        samples = self._dataset.store._stocache
        position = self._dataset.visits().position(self._dataset._inside(index))
        found = samples.records.get(position, samples.allow_pickle, False)
        return default if found is _C.MISS else found


class _Store(CachedDataset[Any]):
    """What a node keeps. Ranks with another part do not share it."""

    def _stocache_numbering(self) -> Numbering | None:
        """The samples of the dataset: which of them a node has depends on the other nodes."""
        shard: Shard = self.dataset
        return shard.samples_at

    def _stocache_part(self, dataset: Any) -> str:
        return f"{dataset.start} {dataset.length} {dataset.deal}"


def _report(
    dataset: Any, number: int, terms: Terms, memory: Any, disk: Any, path: str, pickles: bool
) -> Report:
    """What this rank says of itself."""
    room = parse_size("memory_size", memory)
    on_disk = 0
    if disk is not None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        on_disk = size_of_all("disk_size", disk, path)
    size = 1.0
    # One of those who can ask each other measures.
    asks = _ranks.can_ask(terms.num_replicas)
    if number == 0 or not asks:
        # Without a word from the others, all must measure the same samples.
        alone = terms.num_replicas > 1 and not asks
        size = _sample_bytes(dataset, pickles, math.inf if alone else SECONDS)
    return Report(number, _ranks.node_name(number), terms, room, on_disk, size)


def _with_bytes(report: Report, sample_bytes: float) -> Report:
    return Report(
        report.rank, report.node, report.terms, report.memory, report.disk, sample_bytes,
        report.trouble,
    )  # fmt: skip


def _sample_bytes(dataset: Any, pickles: bool, seconds: float) -> float:
    """What a sample takes, rather too much: as many as were measured may all be smaller ones."""
    if len(dataset) == 0:
        return 1.0
    found: Plan = apart(lambda: measured(dataset, allow_pickle=pickles, seconds=seconds))
    if not found.sampled:
        raise ValueError(f"what fits is not known, because {found.failed}")
    return found.mean + 2 * found.deviation / math.sqrt(found.sampled)


def _check_alone(terms: Terms, share: Share, memory: Any, disk: Any) -> None:
    """Without a word from the others, their parts are known only where all fits, or where what fits
    is the same for all."""
    if terms.num_replicas == 1 or share.total >= terms.samples:
        return
    if isinstance(memory, float) or isinstance(disk, float):
        raise ValueError(
            f"{share.total} of {terms.samples} samples fit, and how many others hold is not known: "
            "call torch.distributed.init_process_group() before, so that ranks can agree, or give "
            "memory_size and disk_size in bytes"
        )


def _mode(mode: Any) -> str:
    if mode not in _MODES:
        raise ValueError(f'mode is {mode!r}; use "rank", "node" or "disk"')
    return str(mode)


def _overflow(overflow: Any) -> float:
    if isinstance(overflow, bool) or not isinstance(overflow, (int, float)):
        raise TypeError(f"overflow is {overflow!r}; a fraction such as 0.1 is needed")
    if not 0 <= overflow < math.inf:
        raise ValueError(f"overflow is {overflow!r}; use 0 or more")
    return float(overflow)


def _checked(what: str, number: Any, least: int | None) -> int:
    found = whole(what, number)
    if least is not None and found < least:
        raise ValueError(f"{what} is {found}; use {least} or more")
    return found


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to fail
        return None
    return tqdm(total=total, desc="warming this node's part", unit=" samples")
