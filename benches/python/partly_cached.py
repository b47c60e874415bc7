"""Epochs of a dataset of which a share is in memory: a table, exit status 1 if a target is missed.

python benches/python/partly_cached.py [--only free waiting] [--rounds N] [--json PATH]
    [--with-plot]

Samples of 150 KB, shuffled batches of 128, 2 workers that live on from one epoch to the next. The
same source, share and loop for stocache.DataLoader and for stocaching, whose dataset is written as
its README shows it, under torch's DataLoader.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import stocache
import stocaching
import torch
from measure import Side, Table, caption, interleave, run, show_seconds
from stocache import CachedDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

SAMPLES = 2048
DIMS = (3, 224, 224)
BYTES = torch.Size(DIMS).numel()
BATCH = 128
WORKERS = 2
SHARES = (25, 50, 75, 90)
SHORT = 0.4
"""Seconds; epochs that take less are repeated."""
PLOT = Path(__file__).resolve().parents[2] / "build" / "partly-cached.png"

paths_made: list[str] = []
"""Of every cache made here, to see at the end that none was left behind."""


class Source(Dataset[tuple[Tensor, int]]):
    """Takes so long for a sample, waiting as for a disk; with 0, no longer than to make it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full(DIMS, idx % 251, dtype=torch.uint8), idx


class WithStocaching(Dataset[tuple[Tensor, int]]):
    """A dataset as the README of stocaching shows it: what has no slot is loaded every time."""

    def __init__(self, source: Source, samples: int) -> None:
        self.source = source
        limit = (samples * BYTES + SAMPLES + 1) / 2**30
        with contextlib.redirect_stdout(io.StringIO()):  # it announces itself on stdout
            self.cache = stocaching.SharedCache(limit, SAMPLES, DIMS, torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        value = self.cache.get_slot(idx)
        if value is None:
            value, _ = self.source[idx]
            self.cache.set_slot(idx, value)
        return value, idx


@contextlib.contextmanager
def cached(source: Source, samples: int) -> Iterator[CachedDataset]:
    """A cache that these many samples have filled."""
    made = CachedDataset(source, SAMPLES * (BYTES + 128) + 4 * 2**20, fingerprint="bench",
                         verbose=False)  # fmt: skip
    record = stored(made, [0]) if samples else 0
    made.close()
    room = 2**20 + 64 * SAMPLES + samples * record
    made = CachedDataset(source, room, fingerprint="bench", verbose=False)
    if made.path is not None:
        paths_made.append(made.path)
    try:
        made.warm(indices=random.sample(range(SAMPLES), samples), progress=False)
        yield made
    finally:
        made.close()


def stored(dataset: CachedDataset, indices: list[int]) -> int:
    """What these samples take."""
    for idx in indices:
        dataset[idx]
    return dataset.stats().used_bytes


def epoch(loader: Iterable[Any]) -> Side:
    """One epoch, in which every sample is looked at and comes once."""

    def side() -> float:
        seen = 0
        start = time.perf_counter()
        for batch, places in loader:
            seen += len(batch)
            if not bool((batch[:, 0, 0, 0] == places % 251).all()):
                raise RuntimeError("a batch holds other samples than it says")
        elapsed = time.perf_counter() - start
        if seen != SAMPLES:
            raise RuntimeError(f"an epoch had {seen} samples, wanted {SAMPLES}")
        return elapsed

    return side


def torchs(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)


def ours(dataset: CachedDataset) -> Any:
    return stocache.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )


def fill(loader: Iterable[Any]) -> None:
    for _ in loader:
        pass


def free(table: Table, progress: tqdm[None], rounds: int) -> None:
    """A source that costs nothing but its own work. The bound is an epoch with all samples in
    memory, and one of torch's own loader over those that are missing."""
    source = Source(0)
    for share in (90, 50):
        with cached(source, SAMPLES) as all_of_it, cached(source, SAMPLES * share // 100) as part:
            missing = part._stocache.records.missing(range(SAMPLES))
            theirs = torchs(WithStocaching(source, SAMPLES - len(missing)))
            loaders = {"ours": ours(part), "all": ours(all_of_it), "theirs": theirs}
            rest = torchs(Subset(source, missing))
            fill(theirs)
            sides: dict[str, Side] = {side: epoch(loader) for side, loader in loaders.items()}
            sides["rest"] = seconds_of(rest)
            times = interleave(sides, rounds, progress, at_least=SHORT)
            del sides, loaders, rest, theirs
            gc.collect()
        pairs = zip(*(times.seconds[side] for side in ("ours", "all", "rest")), strict=True)
        ratios = sorted(mine / (full + loading) for mine, full, loading in pairs)
        ratio = ratios[len(ratios) // 2]
        words = (
            f"{ratio:.2f} x  ({show_seconds(times.median('ours'))} / "
            f"{show_seconds(times.median('all'))} + {show_seconds(times.median('rest'))})"
        )
        what = f"{share} % in memory, source of 0 ms"
        table.at_most(f"{what}: epoch / all in memory + loading the rest", ratio, 1.3, words, " x")
        against_peer(table, what, times.ratio("theirs", "ours"), share)


def seconds_of(loader: Iterable[Any]) -> Side:
    def side() -> float:
        start = time.perf_counter()
        fill(loader)
        return time.perf_counter() - start

    return side


def against_peer(
    table: Table, what: str, ratio: float, share: int, of_bound: float = float("inf")
) -> None:
    """Never slower, and twice as fast with 90 % in memory, or as fast as the loads alone allow:
    stocaching takes so many times what they take."""
    least = 1.0
    words = f"{ratio:.2f} x"
    if share == 90:
        least = round(min(2, of_bound / 1.15), 2)
        words += "" if least == 2 else f"  (with loads alone: {of_bound:.2f} x)"
    table.at_least(f"{what}: stocaching 0.2.1 / ours", ratio, least, words, " x")


def bound_of(source: Source, missing: int) -> float:
    """What the loads alone take, shared evenly among the workers."""
    start = time.perf_counter()
    for idx in range(100):
        source[idx]
    return missing * (time.perf_counter() - start) / 100 / WORKERS


def waiting(table: Table, progress: tqdm[None], rounds: int) -> None:
    """A source that waits. The bound is what its loads take if the workers share them evenly."""
    for milliseconds in (1, 3):
        source = Source(milliseconds / 1e3)
        for share in SHARES:
            mine, theirs, bound = one_share(source, share, progress, max(3, rounds // 3))
            ratio = mine / bound
            words = f"{ratio:.2f} x  ({show_seconds(mine)} / {show_seconds(bound)})"
            what = f"{share} % in memory, source of {milliseconds} ms"
            table.at_most(f"{what}: epoch / loads of the missing", ratio, 1.15, words, " x")
            against_peer(table, what, theirs / mine, share, theirs / bound)


def one_share(
    source: Source, share: int, progress: tqdm[None], rounds: int
) -> tuple[float, float, float]:
    """Seconds of an epoch of ours, of stocaching's, and of the loads alone."""
    with cached(source, SAMPLES * share // 100) as part:
        missing = len(part._stocache.records.missing(range(SAMPLES)))
        loaders = {
            "ours": ours(part),
            "theirs": torchs(WithStocaching(source, SAMPLES - missing)),
        }
        fill(loaders["theirs"])
        sides: dict[str, Side] = {side: epoch(loader) for side, loader in loaders.items()}
        sides["bound"] = lambda: bound_of(source, missing)
        times = interleave(sides, rounds, progress, at_least=SHORT)
        del sides, loaders
        gc.collect()
    return times.median("ours"), times.median("theirs"), times.median("bound")


def plot(table: Table, progress: tqdm[None], rounds: int) -> None:
    """Epoch time against the share in memory."""
    mpl.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    shares = (0, *SHARES, 100)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for milliseconds, axes in zip((1, 3), panels, strict=True):
        found = [one_share(Source(milliseconds / 1e3), share, progress, 3) for share in shares]
        for name, colour, column in (
            ("stocaching 0.2.1", "#e0a458", 1),
            ("stocache.DataLoader", "#1f6f9f", 0),
        ):
            axes.plot(shares, [line[column] for line in found], "o-", color=colour, label=name)
        axes.plot(shares, [line[2] for line in found], "--", color="#555555",
                  label="loads of the missing / workers")  # fmt: skip
        axes.set_title(f"source of {milliseconds} ms a sample", loc="left")
        axes.set_xlabel("share in memory (%)")
        axes.set_ylabel("epoch (s)")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
    panels[0].legend(frameon=False)
    caption(figure, f"Epochs of {SAMPLES} samples of 150 KB, 2 workers.")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=150)
    plt.close(figure)
    print(f"plot: {PLOT}")


SECTIONS = {"free": free, "waiting": waiting, "plot": plot}
EXTRA = {"plot": "save a plot of epoch time against the share in memory"}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", SECTIONS, paths_made, EXTRA))
