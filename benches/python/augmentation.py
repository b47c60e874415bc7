"""Fused augmentation against its speed targets: one table, exit status 1 if one is missed.

python benches/python/augmentation.py [--only crop resized ...] [--with-ffcv]
    [--with-plot] [--rounds N] [--json PATH]

Every epoch is warm and shuffled, over the same memory. torchvision's transforms run in 2 workers
that live on, of torch's DataLoader, and in a row of its own of stocache.DataLoader, which spares
their batches two copies; where they are fused, the batches are made in this process. Samples are
(uint8 tensor of 3x256x256, int), but for the epochs over JPEGs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import stocache
import torch
from measure import Side, Table, Timings, caption, interleave, run, show_seconds
from PIL import Image
from stocache import CachedDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tqdm import tqdm

SIDE = 256
CROP = 224
SAMPLES = 2048
BATCH = 256
WORKERS = 2
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MIB = 2**20
PLOT = Path(__file__).resolve().parents[2] / "build" / "augmentation-epoch.png"

paths_made: list[str] = []
"""Of every cache made here, to see at the end that none was left behind."""


class InMemory(Dataset[tuple[Tensor, int]]):
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        return self.values[idx], idx


def images(samples: int) -> Tensor:
    """Noise, of which no step is faster or slower than of photographs."""
    return torch.randint(0, 256, (samples, 3, SIDE, SIDE), dtype=torch.uint8)


def numbers(dtype: torch.dtype = torch.float32) -> list[Any]:
    return [v2.ToDtype(dtype, scale=True), v2.Normalize(MEAN, STD)]


CROPPED = [v2.RandomCrop(CROP), v2.RandomHorizontalFlip()]
RESIZED = [v2.RandomResizedCrop(CROP, antialias=True), v2.RandomHorizontalFlip()]
JITTERED = [*RESIZED, v2.ColorJitter(0.4, 0.4, 0.4, 0.1)]


@contextlib.contextmanager
def cached(dataset: Dataset[Any], sample_bytes: int) -> Iterator[CachedDataset[Any]]:
    """All of it in memory, closed at the end. The transform is set by who makes a loader."""
    samples = len(dataset)  # type: ignore[arg-type]
    room = samples * (sample_bytes + 256) + 4 * MIB
    made = CachedDataset(dataset, room, fingerprint="bench", verbose=False)
    if made.path is not None:
        paths_made.append(made.path)
    try:
        made.warm(progress=False)
        if not made.is_complete():
            raise RuntimeError(f"not all samples fit: {made.stats()}")
        yield made
    finally:
        made.close()


def with_transform(ours: CachedDataset[Any], transform: Any) -> CachedDataset[Any]:
    """Over the same memory, with a transform of its own."""
    other = object.__new__(CachedDataset)
    vars(other).update(vars(ours))
    other.transform = transform
    return other


def loader_of(
    ours: CachedDataset[Any], transform: Any, batch: int = BATCH, kind: Any = stocache.DataLoader
) -> Iterable[Any]:
    dataset = with_transform(ours, transform)
    made: Iterable[Any] = kind(
        dataset, batch, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    return made


def epoch(loader: Iterable[Any], samples: int) -> Side:
    def side() -> float:
        seen = 0
        start = time.perf_counter()
        for batch, _ in loader:
            seen += len(batch)
        elapsed = time.perf_counter() - start
        if seen != samples:
            raise RuntimeError(f"an epoch had {seen} samples, wanted {samples}")
        return elapsed

    return side


def check(fused: Iterable[Any], peer: Iterable[Any], samples: int) -> None:
    """A fast epoch of the wrong numbers is no result: the same samples, shapes, types, and about
    the same mean as torchvision's."""
    means = []
    for loader in (fused, peer):
        seen, total, kind = [], 0.0, set()
        for batch, places in loader:
            seen += places.tolist()
            total += float(batch.float().mean()) * len(batch)
            kind.add((batch.dtype, tuple(batch.shape[1:])))
        if sorted(seen) != list(range(samples)):
            raise RuntimeError(f"an epoch had {len(set(seen))} samples of {samples}")
        means.append((kind, total / samples))
    (ours, mean), (theirs, other) = means
    if ours != theirs or abs(mean - other) > 0.2:
        raise RuntimeError(f"fused {ours} with mean {mean}, torchvision's {theirs} with {other}")


def speed(times: Timings, side: str, samples: int) -> str:
    return f"{samples / times.median(side) / 1e3:.3g}k"


def rates(times: Timings, slow: str, fast: str, samples: int) -> str:
    return f"({speed(times, fast, samples)} / {speed(times, slow, samples)}/s)"


def at_least(
    table: Table, what: str, times: Timings, slow: str, fast: str, samples: int, limit: float
) -> None:
    ratio = times.ratio(slow, fast)
    words = f"{ratio:.1f} x  {rates(times, slow, fast, samples)}"
    table.at_least(what, ratio, limit, words, " x")


def beside_torchvision(
    table: Table, progress: tqdm[None], rounds: int, what: str, steps: list[Any], limit: float,
    samples: int, batch: int = BATCH, more: Callable[[Tensor], dict[str, Side]] | None = None,
) -> Timings:  # fmt: skip
    """The target is held against what somebody has who uses torch's DataLoader. Beside it stands
    what is left where torchvision's batches come by way of stocache.DataLoader, too."""
    values = images(samples)
    transform = v2.Compose([*steps, *numbers()])
    with cached(InMemory(values), values[0].nbytes) as ours:
        fused = loader_of(ours, stocache.fuse(transform), batch)
        stock = loader_of(ours, transform, batch, DataLoader)
        peer = loader_of(ours, transform, batch)
        for other in (stock, peer):
            check(fused, other, samples)
        sides = {
            "fused": epoch(fused, samples),
            "stock": epoch(stock, samples),
            "peer": epoch(peer, samples),
        }
        if more is not None:
            sides |= more(values)
        times = interleave(sides, rounds, progress)
        del sides, fused, stock, peer, other
        gc.collect()
    what = f"{what}, batch {batch}"
    at_least(table, f"{what} / torchvision v2", times, "stock", "fused", samples, limit)
    ratio = times.ratio("peer", "fused")
    words = f"{ratio:.1f} x  {rates(times, 'peer', 'fused', samples)}"
    table.info("the same / torchvision v2 in stocache.DataLoader", ratio, words)
    return times


# --- crop, flip, float32, normalise -------------------------------------------------------------


def crops(table: Table, progress: tqdm[None], rounds: int) -> None:
    """The bound is a plain loop that reads a crop and writes float32, on as many threads: nothing
    that reads and writes as much can take less, but by writing past the caches."""
    what = "crop 224, flip, float32, normalise"
    for batch in (128, 256):
        times = beside_torchvision(
            table, progress, rounds, what, CROPPED, 10, SAMPLES, batch,
            lambda values, batch=batch: {"bound": bound(values, batch)},
        )  # fmt: skip
        percent = 100 * times.ratio("bound", "fused")
        words = f"{percent:.0f} %  {rates(times, 'bound', 'fused', SAMPLES)}"
        table.at_least(f"{what}, batch {batch} / a plain loop", percent, 60, words, " %")
        for side, words in (
            ("stock", "torchvision v2"),
            ("peer", "the same in stocache.DataLoader"),
        ):
            ratio = times.ratio(side, "bound")
            table.info(f"a plain loop / {words}", ratio, f"{ratio:.1f} x")


def bound(values: Tensor, batch: int) -> Side:
    function = compiled().crops
    threads = len(os.sched_getaffinity(0))
    to = torch.zeros(batch, 3, CROP, CROP)
    address = ctypes.c_void_p

    def side() -> float:
        order = torch.randperm(len(values))
        offsets = torch.randint(0, SIDE - CROP + 1, (2, len(values)))
        corners = offsets[0] * SIDE + offsets[1]
        start = time.perf_counter()
        for first in range(0, len(values), batch):
            function(
                address(values.data_ptr()), address(order[first:].data_ptr()),
                address(corners[first:].data_ptr()), ctypes.c_int64(batch), ctypes.c_int64(SIDE),
                ctypes.c_int64(CROP), address(to.data_ptr()), ctypes.c_int64(threads),
            )  # fmt: skip
        return time.perf_counter() - start

    return side


def compiled() -> Any:
    """For this processor: it may use all that it has."""
    source = Path(__file__).parent.parent / "cpp" / "crop.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "crop.so"
        command = [os.environ.get("CXX", "c++"), "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*command, "-pthread", str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


# --- the other pipelines ------------------------------------------------------------------------


def resized(table: Table, progress: tqdm[None], rounds: int) -> None:
    what = "RandomResizedCrop 224, flip, normalise"
    beside_torchvision(table, progress, rounds, what, RESIZED, 6, SAMPLES // 2)


def jittered(table: Table, progress: tqdm[None], rounds: int) -> None:
    what = "the same with ColorJitter"
    beside_torchvision(table, progress, rounds, what, JITTERED, 5, SAMPLES // 4)


def halves(table: Table, progress: tqdm[None], rounds: int) -> None:
    """Half of the bytes are written. Each side has a cache of its own, whose batches it uses again:
    an epoch of eight batches is no measure of what the kernel takes to give memory."""
    values = images(SAMPLES)
    transform = v2.Compose([*CROPPED, *numbers()])
    with (
        cached(InMemory(values), values[0].nbytes) as one,
        cached(InMemory(values), values[0].nbytes) as other,
    ):
        loaders = {
            "float32": loader_of(one, stocache.fuse(transform)),
            "bfloat16": loader_of(other, stocache.fuse(transform, dtype=torch.bfloat16)),
        }
        sides = {side: epoch(loader, SAMPLES) for side, loader in loaders.items()}
        times = interleave(sides, rounds, progress)
        del sides, loaders
        gc.collect()
    what = "crop 224, flip, normalise, bfloat16 / float32"
    at_least(table, what, times, "float32", "bfloat16", SAMPLES, 1.3)


# --- epochs over JPEGs --------------------------------------------------------------------------


class Folder(Dataset[tuple[Image.Image, int]]):
    """JPEGs of the size of ImageNet's, decoded as torchvision's ImageFolder does it."""

    def __init__(self, folder: Path, count: int, transform: Any = None) -> None:
        self.folder = folder
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> tuple[Any, int]:
        with Image.open(self.folder / f"{idx}.jpg") as image:
            made = image.convert("RGB")
        return (made if self.transform is None else self.transform(made)), idx


def write_jpegs(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:375, 0:500] / 500
    for idx in range(count):
        waves = np.sin(2 * np.pi * (rng.uniform(2, 9) * x + rng.uniform(2, 9) * y))
        pixels = 128 + waves[..., None] * rng.uniform(20, 90, 3) + rng.normal(0, 12, (375, 500, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
            folder / f"{idx}.jpg", quality=90
        )


JPEGS = 512


def over_jpegs(steps: list[Any], progress: tqdm[None], rounds: int) -> Timings:
    """What somebody gains who trains on JPEGs: epochs without a cache, with it, and fused."""
    transform = v2.Compose([v2.ToImage(), *steps])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jpegs(folder, JPEGS)
        with cached(Folder(folder, JPEGS), 375 * 500 * 3 + 64) as ours:
            loaders: dict[str, Iterable[Any]] = {
                "plain": DataLoader(
                    Folder(folder, JPEGS, transform),
                    64,
                    shuffle=True,
                    num_workers=WORKERS,
                    persistent_workers=True,
                ),
                "cached": loader_of(ours, transform, 64),
                "fused": loader_of(ours, stocache.fuse(transform), 64),
            }
            check(loaders["fused"], loaders["cached"], JPEGS)
            sides = {side: epoch(loader, JPEGS) for side, loader in loaders.items()}
            times = interleave(sides, rounds, progress)
            del sides, loaders
            gc.collect()
    return times


def epochs(table: Table, progress: tqdm[None], rounds: int) -> None:
    times = over_jpegs([*RESIZED, *numbers()], progress, rounds)
    each = {side: show_seconds(times.median(side)) for side in ("plain", "cached", "fused")}
    for side, what in (("cached", "cached"), ("fused", "cached and fused")):
        ratio = times.ratio("plain", side)
        words = f"{ratio:.1f} x  ({each[side]} / {each['plain']})"
        table.info(f"epoch of {JPEGS} JPEGs, RandomResizedCrop, uncached / {what}", ratio, words)


def plot(table: Table, progress: tqdm[None], rounds: int) -> None:
    """An epoch over JPEGs, without cache, with it, and with it and fused."""
    mpl.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    pipelines = {
        "flip, normalise": [v2.CenterCrop(CROP), v2.RandomHorizontalFlip(), *numbers()],
        "RandomResizedCrop, flip,\nnormalise": [*RESIZED, *numbers()],
        "the same with\nColorJitter": [*JITTERED, *numbers()],
    }
    sides = {"plain": "no cache", "cached": "cached", "fused": "cached, fused"}
    colours = ("#bbbbbb", "#e0a458", "#1f6f9f")
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for place, steps in enumerate(pipelines.values()):
        times = over_jpegs(steps, progress, min(rounds, 3))
        for k, (side, colour) in enumerate(zip(sides, colours, strict=True)):
            seconds = times.median(side)
            at = place + 0.27 * (k - 1)
            axes.bar(at, seconds, 0.25, color=colour, label=None if place else sides[side])
            words = show_seconds(seconds)
            axes.annotate(words, (at, seconds), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(pipelines)), list(pipelines))
    axes.set_ylabel("warm epoch (s)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    caption(figure, f"Epochs of {JPEGS} JPEGs of 500x375, 2 workers.")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=150)
    plt.close(figure)
    print(f"plot: {PLOT}")


# --- beside FFCV --------------------------------------------------------------------------------


def beside_ffcv(table: Table, progress: tqdm[None], rounds: int) -> None:
    """RandomResizedCrop, flip, normalise of decoded images, each library with its own pipeline.
    FFCV's file is in the page cache, and its code compiled, by an epoch that is not counted."""
    import ffcv_peer  # here, because only the environment of `make bench-ffcv` has FFCV

    values = images(SAMPLES)
    with (
        cached(InMemory(values), values[0].nbytes) as ours,
        tempfile.TemporaryDirectory() as folder,
    ):
        file = ffcv_peer.write(values, Path(folder), WORKERS)["RGBImageField"]
        theirs = ffcv_peer.augmented(file, SAMPLES, BATCH, WORKERS, CROP, MEAN, STD)
        fused = loader_of(ours, stocache.fuse(v2.Compose([*RESIZED, *numbers()])))
        sides = {"fused": epoch(fused, SAMPLES), "ffcv": epoch(theirs, SAMPLES)}
        times = interleave(sides, rounds, progress)
        del sides, fused, theirs
        gc.collect()
    what = "RandomResizedCrop 224, flip, normalise / FFCV 1.0.2"
    at_least(table, what, times, "ffcv", "fused", SAMPLES, 1)


SECTIONS: dict[str, Callable[[Table, Any, int], None]] = {
    "crop": crops,
    "resized": resized,
    "jitter": jittered,
    "bfloat16": halves,
    "epoch": epochs,
    "ffcv": beside_ffcv,
    "plot": plot,
}

EXTRA = {
    "ffcv": "compare with FFCV as well, which make bench-ffcv installs",
    "plot": "save a plot of epochs over JPEGs",
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", SECTIONS, paths_made, EXTRA))
