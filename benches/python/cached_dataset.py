"""CachedDataset against its speed and memory targets: one table, exit status 1 if one is missed.

python benches/python/cached_dataset.py [--only epoch loader ...] [--with-ffcv] [--rounds N]
    [--json PATH]

Every warm epoch is shuffled, in batches of 256, with 2 workers that live on from one epoch to the
next. A sample is (uint8 tensor, int); the int is the index, so that every batch can be checked.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stocache
import stocaching
import torch
from measure import Side, Table, Timings, interleave, run, show_seconds
from stocache import CachedDataset
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from tqdm import tqdm

BATCH = 256
WORKERS = 2
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Size:
    words: str
    dims: tuple[int, ...]
    samples: int  # a multiple of BATCH: every batch has the same size

    @property
    def bytes(self) -> int:
        return torch.Size(self.dims).numel()


SMALL = Size("3 KB", (3, 32, 32), 196 * BATCH)  # as many as CIFAR-10 has
LARGE = Size("150 KB", (3, 224, 224), 12 * BATCH)
SHORT = 0.1
"""Seconds; epochs that take less are repeated."""

paths_made: list[str] = []
"""Of every cache made here, to see at the end that none was left behind."""

all_threads = torch.get_num_threads()
"""As torch would use them by itself; run() sets one."""


# --- the same samples, kept in several ways -----------------------------------------------------


class InMemory(Dataset[tuple[Tensor, int]]):
    """All samples in private memory: nothing to load, nothing to look up."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        return self.values[idx], idx


class InStocaching(Dataset[tuple[Tensor, int]]):
    """A dataset as the README of stocaching shows it; every access is a hit here."""

    def __init__(self, values: Tensor) -> None:
        limit = (values.nbytes + len(values) + 1) / GIB
        with contextlib.redirect_stdout(io.StringIO()):  # it announces itself on stdout
            self.cache = stocaching.SharedCache(limit, len(values), values.shape[1:], torch.uint8)
        self.cache.array.copy_(values)
        self.cache.aux_array.fill_(1)

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        value = self.cache.get_slot(idx)
        if value is None:
            raise RuntimeError(f"sample {idx} is missing in a warm epoch")
        return value, idx


class Slow(Dataset[tuple[Tensor, int]]):
    """A source that takes its time, as a disk or a network does: it waits and does not compute."""

    def __init__(self, samples: int, dims: tuple[int, ...], seconds: float) -> None:
        self.samples = samples
        self.dims = dims
        self.seconds = seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full(self.dims, idx % 251, dtype=torch.uint8), idx


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> int:
        return idx


def noise(size: Size) -> Tensor:
    return torch.randint(0, 256, (size.samples, *size.dims), dtype=torch.uint8)


@contextlib.contextmanager
def cached(dataset: Dataset[Any], sample_bytes: int, warm: bool = True) -> Iterator[CachedDataset]:
    """A cache with room for all of `dataset`, closed at the end."""
    samples = len(dataset)  # type: ignore[arg-type]
    room = samples * (sample_bytes + 128) + 4 * MIB
    # "auto" would digest all of the values, several times a round.
    made = CachedDataset(dataset, room, fingerprint="bench", verbose=False)
    if made.path is not None:
        paths_made.append(made.path)
    try:
        if warm:
            made.warm(progress=False)
            if not made.is_complete():
                raise RuntimeError(f"not all samples fit: {made.stats()}")
        yield made
    finally:
        made.close()


def stock_loader(
    dataset: Dataset[Any], plain: bool = False, collate_fn: Any = None, **batches: Any
) -> DataLoader[Any]:
    """torch's own loader, over the view of batches where there is a CachedDataset; ``plain`` over
    the dataset itself, sample by sample if its ``collate_fn`` is not ours."""
    options: dict[str, Any] = batches or {"batch_size": BATCH, "shuffle": True}
    if isinstance(dataset, CachedDataset) and not plain:
        order = options.get("batch_sampler") or BatchSampler(RandomSampler(dataset), BATCH, False)
        options = {"sampler": order, "batch_size": None}
        dataset = dataset.batches
    return DataLoader(
        dataset,
        **options,
        collate_fn=collate_fn,
        num_workers=WORKERS,
        persistent_workers=True,  # the starting of workers is not what is compared
    )


# --- loops --------------------------------------------------------------------------------------


def read_all(batch: Tensor) -> int:
    """Reads every byte. As 8-byte numbers, because a sum of bytes computes more than it reads."""
    if not batch.is_contiguous():
        batch = batch.permute(0, 2, 3, 1)  # as its bytes lie, if the channels come last
    return int(batch.view(-1).view(torch.int64).sum())


def epoch(loader: Iterable[Any], samples: int, read: bool = False) -> Side:
    """One epoch that counts the samples, or reads all of their bytes as well."""

    def side() -> float:
        seen = total = 0
        start = time.perf_counter()
        for batch, _ in loader:
            seen += len(batch)
            if read:
                total += read_all(batch)
        elapsed = time.perf_counter() - start
        if seen != samples:
            raise RuntimeError(f"an epoch had {seen} samples, wanted {samples}")
        return elapsed

    return side


def first_batch(loader: Iterable[Any]) -> Side:
    """What it takes to begin an epoch, of which an epoch of few batches is made."""

    def side() -> float:
        start = time.perf_counter()
        next(iter(loader))
        return time.perf_counter() - start

    return side


def check(loader: Iterable[Any], values: Tensor, passes: int = 1) -> None:
    """A fast epoch of the wrong bytes is no result: every sample once a pass, and as it was."""
    seen = []
    for batch, places in loader:
        if not torch.equal(batch, values[places]):
            raise RuntimeError("a batch is not what was stored")
        seen += places.tolist()
    if sorted(seen) != sorted(passes * list(range(len(values)))):
        raise RuntimeError(f"an epoch had {len(set(seen))} different samples of {len(values)}")


def speed(times: Timings, side: str, samples: int) -> str:
    thousands = samples / times.median(side) / 1e3
    return f"{thousands:.3g}k" if thousands < 1000 else f"{thousands / 1e3:.3g}M"


def at_least(
    table: Table, what: str, times: Timings, slow: str, fast: str, samples: int, limit: float
) -> None:
    """A row: how many times faster `fast` is, with the samples per second of both."""
    ratio = times.ratio(slow, fast)
    words = f"{ratio:.1f} x  ({speed(times, fast, samples)} / {speed(times, slow, samples)}/s)"
    table.at_least(what, ratio, limit, words, " x")


# --- warm epochs through a stock DataLoader -----------------------------------------------------


def stock_epochs(table: Table, progress: tqdm[None], rounds: int) -> None:
    for size, alone, reading in ((LARGE, 5, 4), (SMALL, 6, 4)):
        values = noise(size)
        with cached(InMemory(values), size.bytes) as ours:
            loaders = {
                "ours": stock_loader(ours),
                "collate": stock_loader(ours, plain=True, collate_fn=stocache.collate),
                "plain": stock_loader(ours, plain=True),
                "theirs": stock_loader(InStocaching(values)),
            }
            for loader in loaders.values():
                check(loader, values)
            sides = {side: epoch(loader, size.samples) for side, loader in loaders.items()}
            for side, loader in loaders.items():
                sides[f"{side}, read"] = epoch(loader, size.samples, read=True)
            times = interleave(sides, rounds, progress)
            # Ends the workers before the next size, and before the cache is closed.
            del sides, loaders, loader
            gc.collect()
        what = f"warm epoch, {size.words}, torch's DataLoader"
        at_least(
            table,
            f"{what}, dataset.batches / stocaching 0.2.1",
            times,
            "theirs",
            "ours",
            size.samples,
            alone,
        )
        at_least(
            table,
            f"{what}, dataset.batches / stocaching, every byte read",
            times,
            "theirs, read",
            "ours, read",
            size.samples,
            reading,
        )
        at_least(
            table,
            f"{what}, the dataset and collate_fn=stocache.collate / stocaching",
            times,
            "theirs",
            "collate",
            size.samples,
            alone,
        )
        ratio = times.ratio("theirs", "plain")
        words = f"{ratio:.1f} x  ({speed(times, 'plain', size.samples)}/s)"
        table.info("the same over the dataset itself / stocaching", ratio, words)


# --- warm epochs through stocache.DataLoader ----------------------------------------------------


def own_loader(table: Table, progress: tqdm[None], rounds: int) -> None:
    """The limit is one index_select per batch, in the same process, into a buffer that is used
    again: nothing that gathers shuffled rows can do less. With one thread or all of torch's,
    whichever is faster: on a busy machine threads wait for each other. Its indices are tensors
    already; ours are drawn in the epoch, as in every DataLoader."""
    for size, of_limit in ((LARGE, 129), (SMALL, 80)):
        values = noise(size)
        with cached(InMemory(values), size.bytes) as ours:
            order = Same(size.samples)
            fast = stocache.DataLoader(ours, BATCH, shuffle=True, num_workers=WORKERS)
            peer = stock_loader(InStocaching(values))
            check(fast, values)
            sides: dict[str, Side] = {
                "ours": epoch(fast, size.samples),
                "limit": selecting(values, order, all_threads),
                "limit, 1 thread": selecting(values, order, 1),
                "theirs": epoch(peer, size.samples),
                "ours, read": epoch(fast, size.samples, read=True),
                "theirs, read": epoch(peer, size.samples, read=True),
                "ours, first": first_batch(fast),
            }
            times = interleave(sides, rounds, progress, at_least=SHORT)
            del sides, fast, peer
            gc.collect()
        what = f"warm epoch, {size.words}, stocache.DataLoader"
        limit = min(("limit, 1 thread", "limit"), key=times.median)
        ratio = 100 * times.ratio(limit, "ours")
        words = f"({speed(times, 'ours', size.samples)} / {speed(times, limit, size.samples)}/s)"
        table.at_least(f"{what} / index_select", ratio, of_limit, f"{ratio:.0f} %  {words}", " %")
        for side, words in (("limit, 1 thread", "1 thread"), ("limit", f"{all_threads} threads")):
            ratio = 100 * times.ratio(side, "ours")
            table.info(f"the same / index_select with {words}", ratio, f"{ratio:.0f} %")
        if size is SMALL:
            at_least(table, f"{what} / stocaching", times, "theirs", "ours", size.samples, 10)
        else:
            ratio = times.ratio("theirs", "ours")
            table.info("the same / stocaching", ratio, f"{ratio:.1f} x")
        ratio = times.ratio("theirs, read", "ours, read")
        table.info("the same / stocaching, every byte read", ratio, f"{ratio:.1f} x")
        seconds = times.median("ours, first")
        words = f"{show_seconds(seconds)} of {show_seconds(times.median('ours'))}"
        table.info("the same, until the first batch is there", seconds, words)


class Same:
    """A batch sampler whose order is known ahead, so that others can use the same batches."""

    def __init__(self, samples: int, passes: int = 1) -> None:
        self.seed = 0
        self.samples = samples
        self.passes = passes  # over all samples, shuffled together

    def __len__(self) -> int:
        return self.samples * self.passes // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        self.seed += 1  # every epoch its own
        generator = torch.Generator().manual_seed(self.seed)
        # The samplers that DataLoader(shuffle=True) makes, for their cost is part of the epoch.
        order = RandomSampler(range(self.samples * self.passes), generator=generator)
        batches = iter(BatchSampler(order, BATCH, drop_last=False))
        if self.passes == 1:
            return batches
        return ([i % self.samples for i in batch] for batch in batches)


def selecting(values: Tensor, order: Same, threads: int) -> Side:
    labels = torch.arange(len(values))
    batch = torch.zeros(BATCH, *values.shape[1:], dtype=torch.uint8)
    places = torch.zeros(BATCH, dtype=torch.int64)

    def side() -> float:
        indices = [torch.tensor(chosen) for chosen in order]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            start = time.perf_counter()
            for chosen in indices:
                torch.index_select(values, 0, chosen, out=batch)
                torch.index_select(labels, 0, chosen, out=places)
            return time.perf_counter() - start
        finally:
            torch.set_num_threads(before)

    return side


# --- with a transform ---------------------------------------------------------------------------

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def augment(sample: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """Crop, flip, to float, normalise: in torch's operators."""
    image, label = sample
    top, left = torch.randint(33, (2,)).tolist()
    image = image[:, top : top + 224, left : left + 224]
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    return image.float().div_(255).sub_(MEAN).div_(DEVIATION), label


class Augmented(Dataset[tuple[Tensor, int]]):
    """A dataset whose samples are transformed after they came out of stocaching."""

    def __init__(self, dataset: Dataset[tuple[Tensor, int]]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        return augment(self.dataset[idx])


def with_transform(table: Table, progress: tqdm[None], rounds: int) -> None:
    """The same function for both, in the workers. A batch is of floats, four times as large as the
    samples that it is made of, so that where batches are put together counts as much as the
    function: the bound is what that alone takes, shared by the workers. torch's DataLoader over the
    dataset itself has torch collate, as stocaching has."""
    size = Size("196 KB", (3, 256, 256), 6 * BATCH)
    values = noise(size)
    with cached(InMemory(values), size.bytes) as ours:
        ours.transform = augment
        loaders: dict[str, Any] = {
            "batches": stock_loader(ours),
            "plain": stock_loader(ours, plain=True),
            "own": stocache.DataLoader(
                ours, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
            ),
            "theirs": stock_loader(Augmented(InStocaching(values))),
        }
        sides = {side: epoch(loader, size.samples) for side, loader in loaders.items()}

        def alone() -> float:
            order = random.sample(range(size.samples), 200)
            start = time.perf_counter()
            for idx in order:
                augment((values[idx], idx))
            return (time.perf_counter() - start) / len(order) * size.samples / WORKERS

        sides["alone"] = alone
        times = interleave(sides, rounds, progress)
        del sides, loaders
        gc.collect()
    what = f"warm epoch, {size.words}, crop, flip, to float, normalise"
    for side, words in (
        ("batches", "torch's DataLoader, dataset.batches"),
        ("own", "stocache.DataLoader"),
    ):
        row = f"{what}, {words} / stocaching"
        at_least(table, row, times, "theirs", side, size.samples, 1.3)
    ratio = times.ratio("theirs", "plain")
    table.info("the same over the dataset itself / stocaching", ratio, f"{ratio:.1f} x")
    ratio = times.ratio("own", "alone")
    each = {side: show_seconds(times.median(side)) for side in ("own", "alone")}
    words = f"{ratio:.1f} x  ({each['own']} / {each['alone']})"
    table.info("stocache.DataLoader / the function alone, shared by 2 workers", ratio, words)


# --- stocache.DataLoader beside FFCV ------------------------------------------------------------


def beside_ffcv(table: Table, progress: tqdm[None], rounds: int) -> None:
    """FFCV allocates its buffers anew in every epoch, and five of twelve batches of 150 KB samples
    in fresh memory would be most of what is measured. So an epoch is 96 batches here, of several
    passes over the samples if they are large, for both; epochs of one pass are for information.
    The target is held against NDArrayField, which gives the same tensors. RGBImageField, for images
    of three channels only, gives the same bytes in another layout (channels last), and decodes with
    all threads: what FFCV can do where it applies, for information.
    FFCV's file is in the page cache, and its code compiled, by the epoch that checks the bytes."""
    import ffcv_peer  # here, because only the environment of `make bench-ffcv` has FFCV

    for size, passes, least in ((LARGE, 8, 2), (SMALL, 1, 1.2)):
        values = noise(size)
        sides: dict[str, Side] = {}
        with (
            cached(InMemory(values), size.bytes) as ours,
            tempfile.TemporaryDirectory() as folder,
        ):
            files = ffcv_peer.write(values, Path(folder), WORKERS)
            for count in sorted({1, passes}):
                samples = count * size.samples
                order = Same(size.samples, count)
                loaders: dict[str, Iterable[Any]] = {
                    "ours": stocache.DataLoader(ours, batch_sampler=order, num_workers=WORKERS)
                }
                for field, file in files.items():
                    loaders[field] = ffcv_peer.loader(
                        file, field, size.samples, count, BATCH, WORKERS
                    )
                for side, loader in loaders.items():
                    # FFCV has the places in a column.
                    check(((batch, places.view(-1)) for batch, places in loader), values, count)
                    sides[f"{side}, {count}"] = epoch(loader, samples)
                    if count == passes:
                        sides[f"{side}, read"] = epoch(loader, samples, read=True)
            times = interleave(sides, rounds, progress)
            del sides, loaders, loader
            gc.collect()

        what = f"epoch of {samples // BATCH} batches, {size.words}, stocache.DataLoader / FFCV"
        like, other = "NDArrayField", "RGBImageField"
        theirs, ours_too = f"{like}, {passes}", f"ours, {passes}"
        at_least(table, f"{what}'s {like}", times, theirs, ours_too, samples, least)
        ratio = times.ratio(f"{other}, {passes}", ours_too)
        table.info(f"the same / FFCV's {other} (channels last)", ratio, f"{ratio:.1f} x")
        ratio = times.ratio(f"{like}, read", "ours, read")
        table.info("the same, every byte read", ratio, f"{ratio:.1f} x")
        if passes > 1:
            ratio = times.ratio(f"{like}, 1", "ours, 1")
            batches = size.samples // BATCH
            table.info(f"the same, epochs of {batches} batches", ratio, f"{ratio:.1f} x")


# --- one sample ---------------------------------------------------------------------------------


def one_sample(table: Table, progress: tqdm[None], rounds: int) -> None:
    """Both sides copy 150 KB out of memory that the processor's cache does not hold."""
    size = LARGE
    values = noise(size)
    views = list(values)  # so that making a view is not part of the clone
    with cached(InMemory(values), size.bytes) as ours:
        for i in random.sample(range(size.samples), 16):
            found, label = ours[i]
            if label != i or not torch.equal(found, values[i]):
                raise RuntimeError(f"sample {i} did not come back as it was stored")
            del found

        def over(get: Callable[[int], object]) -> Side:
            def side() -> float:
                order = random.sample(range(size.samples), 1000)
                start = time.perf_counter()
                for i in order:
                    get(i)
                return (time.perf_counter() - start) / len(order)

            return side

        sides = {"ours": over(lambda i: ours[i]), "clone": over(lambda i: views[i].clone())}
        times = interleave(sides, rounds, progress)
    each = {side: show_seconds(times.median(side)) for side in sides}
    ratio = times.ratio("ours", "clone")
    table.at_most(
        "one warm ds[i], 150 KB / tensor.clone()",
        ratio,
        1.3,
        f"{ratio:.2f}  ({each['ours']} / {each['clone']})",
    )


class Picture(Tensor):
    """A tensor subclass with an attribute, as torchvision's and MONAI's are."""


def a_picture(value: Tensor) -> Tensor:
    picture = value.as_subclass(Picture)
    picture.canvas = (64, 64)  # type: ignore[attr-defined]
    return picture


def subclasses() -> dict[str, tuple[int, Callable[[Tensor], Any]]]:
    """How many bytes, and what to make of them. Those of libraries where these are installed, as
    in .venv-ecosystem."""
    kinds: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
        "12 KB of a tensor subclass": (12 << 10, a_picture)
    }
    with contextlib.suppress(ImportError):
        from torchvision import tv_tensors

        kinds["12 KB of torchvision's Image"] = (12 << 10, tv_tensors.Image)
    with contextlib.suppress(ImportError):
        from monai.data import MetaTensor

        def scan(value: Tensor) -> Any:
            meta = {
                "filename_or_obj": "a.nii",
                "spatial_shape": (64, 64),
                "original_channel_dim": 0,
            }
            return MetaTensor(value.view(torch.float32), affine=torch.eye(4), meta=meta)

        kinds["640 KB of MONAI's MetaTensor"] = (640 << 10, scan)
    return kinds


def reading(dataset: CachedDataset[Any], passes: int) -> Side:
    """Every sample in turn, so many times over; the seconds of one."""
    numbers = range(len(dataset))

    def side() -> float:
        start = time.perf_counter()
        for _ in range(passes):
            for i in numbers:
                dataset[i]
        return (time.perf_counter() - start) / (passes * len(numbers))

    return side


def sample_of_a_subclass(table: Table, progress: tqdm[None], rounds: int) -> None:
    """The same bytes as plain tensors and as objects of a subclass, both out of a cache."""
    for what, (octets, make) in subclasses().items():
        values = torch.randint(0, 256, (min(1024, (64 << 20) // octets), octets // 64, 64)).byte()
        objects = [make(value) for value in values]
        room = octets + 4096
        with cached(list(values), room) as plain, cached(objects, room) as ours:
            if (
                type(ours[5]) is not type(objects[5])
                or vars(ours[5]).keys() != vars(objects[5]).keys()
            ):
                raise RuntimeError(f"{what} did not come back as it was stored")
            # So that a side takes as long for large ones as for small ones.
            passes = max(1, 10_000 // len(values) * (12 << 10) // octets)
            sides = {"ours": reading(ours, passes), "plain": reading(plain, passes)}
            times = interleave(sides, rounds, progress)
        each = {side: show_seconds(times.median(side)) for side in ("ours", "plain")}
        ratio = times.ratio("ours", "plain")
        table.at_most(
            f"one warm ds[i], {what} / plain",
            ratio,
            1.5,
            f"{ratio:.2f}  ({each['ours']} / {each['plain']})",
        )


# --- the first and the second epoch -------------------------------------------------------------


class Part:
    """A batch sampler over a part of the dataset, which can be changed from epoch to epoch."""

    def __init__(self, batch: int, part: range) -> None:
        self.batch = batch
        self.part = part

    def __len__(self) -> int:
        return len(self.part) // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(self.part, len(self.part))
        for start in range(0, len(order), self.batch):
            yield order[start : start + self.batch]


def first_epochs(table: Table, progress: tqdm[None], rounds: int) -> None:
    """A new cache and new workers in every round: only once is an epoch the first.

    To start two workers takes as long as 30 samples of the source, more or less, and what is looked
    for is less than that. So a few samples more than those that count start the workers.
    """
    samples, batch, source_seconds = 1024, 32, 3e-3
    counted, before = range(samples), range(samples, samples + WORKERS * batch)

    @contextlib.contextmanager
    def started(dataset: Dataset[Any]) -> Iterator[Side]:
        part = Part(batch, before)
        loaders = [stock_loader(dataset, batch_sampler=part)]
        epoch(loaders[0], len(before))()
        part.part = counted
        try:
            yield lambda: epoch(loaders[0], samples)()
        finally:
            # Here nobody else holds it: its workers end now, and before their cache.
            loaders.clear()
            gc.collect()

    for size in (LARGE, SMALL):
        source = Slow(before.stop, size.dims, source_seconds)
        # As large as what is cached, or the processor's cache would hold it.
        ready = InMemory(torch.ones(before.stop, *size.dims, dtype=torch.uint8))
        seconds: list[float] = []

        def without(source: Slow = source) -> float:
            with started(source) as one:
                return one()

        def with_cache(
            source: Slow = source, size: Size = size, seconds: list[float] = seconds
        ) -> float:
            with cached(source, size.bytes, warm=False) as ours, started(ours) as one:
                first, second = one(), one()
                seconds.append(second)
                stats = ours.stats()
                if stats.loads != before.stop or stats.filled != before.stop:
                    raise RuntimeError(f"these were not a first and a second epoch: {stats}")
                return first

        def in_memory(ready: InMemory = ready) -> float:
            with started(ready) as one:
                one()
                return one()

        sides = {"without": without, "with": with_cache, "memory": in_memory}
        timed = interleave(sides, rounds, progress)
        times = Timings({**timed.seconds, "second": seconds[-rounds:]})

        above = sorted(
            100 * (a / b - 1)
            for a, b in zip(times.seconds["with"], times.seconds["without"], strict=True)
        )
        middle = statistics.median(above)
        low, high = above[len(above) // 4], above[-1 - len(above) // 4]
        table.at_most(
            f"first epoch, {size.words} after 3 ms, above no cache",
            middle,
            2,
            f"{middle:+.1f} %  (half of the rounds: {low:+.1f} to {high:+.1f} %)",
            " %",
        )
        ratio = times.ratio("second", "memory")
        each = {side: show_seconds(times.median(side)) for side in ("second", "memory")}
        table.at_most(
            f"second epoch, {size.words} / ready samples in memory",
            ratio,
            1.05,
            f"{ratio:.2f}  ({each['second']} / {each['memory']})",
        )


# --- memory -------------------------------------------------------------------------------------


def overhead(table: Table, progress: tqdm[None], rounds: int) -> None:
    """What the file in /dev/shm takes, its index and all else included."""
    kinds: Mapping[str, tuple[Dataset[Any], int]] = {
        "(3x32x32, int)": (Slow(20_000, SMALL.dims, 0), SMALL.bytes + 8),
        "(3x224x224, int)": (Slow(1_000, LARGE.dims, 0), LARGE.bytes + 8),
        "int": (Numbers(100_000), 8),
    }
    progress.reset(len(kinds))
    for what, (dataset, payload) in kinds.items():
        samples = len(dataset)  # type: ignore[arg-type]
        with cached(dataset, payload) as ours:
            if ours.path is None:
                raise RuntimeError("this cache is a memfd: no file to see what it takes")
            allocated = os.stat(ours.path).st_blocks * 512
            used = ours.stats().used_bytes
            # A file of which only the needed part is allocated: see that it grew no further.
            if allocated < used:
                raise RuntimeError(f"{allocated} bytes allocated, {used} used")
        above = allocated / samples - payload
        limit = 64 + payload / 100
        table.at_most(
            f"bytes beyond the payload of {what}",
            above,
            round(limit, 1),
            f"{above:.1f}  (record {used / samples - payload:+.0f}, "
            f"index and the rest {(allocated - used) / samples:+.1f})",
        )
        progress.update()


# --- all of it ----------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Table, Any, int], None]] = {
    "epoch": stock_epochs,
    "loader": own_loader,
    "transform": with_transform,
    "ffcv": beside_ffcv,
    "sample": one_sample,
    "subclass": sample_of_a_subclass,
    "first": first_epochs,
    "bytes": overhead,
}

EXTRA = {"ffcv": "compare with FFCV as well, which make bench-ffcv installs"}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", SECTIONS, paths_made, EXTRA))
