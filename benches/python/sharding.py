"""Parts of a dataset, one for each rank: a table, exit status 1 if a target is missed.

python benches/python/sharding.py [--only plan index epoch latency epochs] [--rounds N]
    [--json PATH]

Works in the folder for temporary files, and takes about 200 MB there. The plot of `epochs` goes to
build/sharding.png.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import stocache
import torch
from measure import Table, caption, interleave, run, show_seconds, timed
from stocache import BiLevelCachedDataset, CachedDataset, LazyShardDataset
from stocache._sharding.shard import Deal, Visits
from stocache._sharding.shares import Report, Terms, share_of
from stocache._sharing.ranks import Rank
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NODES, RANKS, SAMPLES = 1024, 8, 1_000_000_000
SHAPE = (3, 32, 32)
COUNT = 20_000
BATCH = 256
PLOT = Path(__file__).resolve().parents[2] / "build" / "sharding.png"

paths_made: list[str] = []
"""Of every folder made here, to see at the end that none was left behind."""


class Samples(Dataset[tuple[Tensor, int]]):
    """Of 3 KB, after a wait."""

    def __init__(self, count: int, seconds: float = 0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full(SHAPE, idx % 251, dtype=torch.uint8), idx


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        paths_made.append(path)
        yield Path(path)


def terms(mode: str, samples: int = SAMPLES) -> Terms:
    return Terms(samples, 13, mode, True, 1, 0.0, 0, False, NODES * RANKS)


def planned(mode: str, capacity: int) -> Visits:
    """The part of the last rank; every node has another capacity, so that nothing is even."""
    rank = Rank(NODES * RANKS - 1, NODES - 1, RANKS - 1, (RANKS,) * NODES)
    of = terms(mode)
    nodes = [Report(k * RANKS, str(k), of, capacity + k * 10_000, 0, 1000.0) for k in range(NODES)]
    share = share_of(rank, of, nodes, True)
    return Visits(
        share.first, share.held, share.holder, share.step, share.offset, share.visits, of.seed, 0,
        True,
    )  # fmt: skip


def _plan(mode: str, answer: Any) -> None:
    """In a process of its own, whose memory is not that of others."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    planned(mode, 900_000_000)
    took = time.perf_counter() - began
    answer.send((took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def plan(table: Table, progress: Any, rounds: int) -> None:
    context = multiprocessing.get_context("fork")
    for mode in ("rank", "node"):
        answer, ask = context.Pipe(duplex=False)
        process = context.Process(target=_plan, args=(mode, ask))
        process.start()
        ask.close()  # so that its end is noticed
        took, more = answer.recv()
        process.join()
        what = f'planning {SAMPLES:.0e} samples over {NODES} nodes of {RANKS} ranks, "{mode}"'
        table.at_most(f"{what}: time", took, 2, show_seconds(took), " s")
        table.at_most(f"{what}: memory", more, 64, f"{more:.1f} MiB", " MiB")


def index(table: Table, progress: Any, rounds: int) -> None:
    """From the number of a visit to the sample of the dataset."""
    visits = planned("rank", 1 << 62)
    deal = Deal(SAMPLES, 1, 13, True)
    numbers = torch.arange(100_000) % visits.count
    sides = {
        "visit": timed(lambda: visits.positions(numbers)),
        "both": timed(lambda: deal.in_order(0, len(numbers))),
    }
    times = interleave(sides, rounds, progress)
    each = (times.median("visit") + times.median("both")) / len(numbers)
    table.at_most("one index of a batch", 1e9 * each, 200, show_seconds(each), " ns")
    alone = interleave(
        {"one": timed(lambda: [deal.sample(visits.position(k)) for k in range(1000)])},
        rounds, progress,
    )  # fmt: skip
    table.info(
        "one index alone, from Python",
        alone.median("one"),
        show_seconds(alone.median("one") / 1000),
    )


def epoch_of(loader: Any, count: int) -> float:
    began = time.perf_counter()
    seen = sum(len(labels) for _, labels in loader)
    elapsed = time.perf_counter() - began
    if seen != count:
        raise RuntimeError(f"{seen} of {count} samples came")
    return elapsed


def epoch(table: Table, progress: Any, rounds: int) -> None:
    """Warm epochs over a part that fits, and over a dataset of as many samples."""
    with contextlib.ExitStack() as stack:
        plain = CachedDataset(Samples(COUNT // 2), "256MiB", verbose=False)
        part = LazyShardDataset(
            Samples(COUNT), memory_size="256MiB", disk_size=None, rank=0, num_replicas=2,
            verbose=False,
        )  # fmt: skip
        for dataset in (plain, part):
            stack.enter_context(contextlib.closing(dataset))
            dataset.warm(progress=False)
        for workers in (0, 2):
            sides = {}
            for name, dataset in (("plain", plain), ("part", part)):
                loader = stocache.DataLoader(
                    dataset, BATCH, shuffle=True, num_workers=workers,
                    persistent_workers=workers > 0,
                )  # fmt: skip
                epoch_of(loader, COUNT // 2)
                sides[name] = lambda loader=loader: epoch_of(loader, COUNT // 2)
            times = interleave(sides, rounds, progress)
            ratio = times.ratio("part", "plain")
            words = f"{ratio:.3f} x  ({show_seconds(times.median('part'))} / "
            words += f"{show_seconds(times.median('plain'))})"
            what = f"warm epoch over a part, {workers} workers / CachedDataset of as many samples"
            table.at_most(what, ratio, 1.05, words, " x")


def latency(table: Table, progress: Any, rounds: int) -> None:
    """One sample: from memory, from disk, from the source."""
    count, few = 4000, 200
    order = random.Random(1).sample(range(count), few)
    for name, make in (
        ("BiLevelCachedDataset", lambda path: BiLevelCachedDataset(
            Samples(count), "1MiB", "256MiB", path, verbose=False)),
        ("LazyShardDataset", lambda path: LazyShardDataset(
            Samples(count), memory_size="1MiB", disk_size="256MiB", disk_cache_path=path,
            verbose=False)),
    ):  # fmt: skip
        with folder() as path, contextlib.closing(make(path)) as dataset:
            began = time.perf_counter()
            for k in order:
                dataset[k]
            miss = (time.perf_counter() - began) / few
            before = dataset.memory_cache.hits.value
            began = time.perf_counter()
            for k in order:
                dataset[k]
            hit = (time.perf_counter() - began) / few
            in_memory = dataset.memory_cache.hits.value - before
            dataset.warm(progress=False)
            dataset.flush()
            began = time.perf_counter()
            for k in range(count):
                dataset[k]
            disk = (time.perf_counter() - began) / count
            table.info(f"{name}: a miss, stored", miss, show_seconds(miss))
            table.info(f"{name}: a hit ({in_memory} of {few} in memory)", hit, show_seconds(hit))
            table.info(f"{name}: mostly from disk", disk, show_seconds(disk))


def epochs(table: Table, progress: Any, rounds: int) -> None:
    """Wall time against data that are not cached: three epochs, 1 ms for a sample."""
    mpl.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    count, seconds = 2000, 0.001
    found: dict[str, list[float]] = {}
    sides: dict[str, Any] = {
        "not cached": lambda _: torch.utils.data.Subset(Samples(count, seconds), range(count // 2)),
        "LazyShardDataset": lambda path: LazyShardDataset(
            Samples(count, seconds), memory_size="64MiB", disk_size="256MiB",
            disk_cache_path=path, rank=0, num_replicas=2, verbose=False,
        ),
    }  # fmt: skip
    for name, make in sides.items():
        with folder() as path:
            dataset = make(path)
            loader = DataLoader(dataset, 50, num_workers=2)
            found[name] = [epoch_of(loader, count // 2) for _ in range(3)]
            if isinstance(dataset, LazyShardDataset):
                dataset.close()
    first = 100 * (found["LazyShardDataset"][0] / found["not cached"][0] - 1)
    what = "first epoch over a part: more than not cached"
    table.at_most(what, first, 10, f"{first:+.1f} %", " %")
    ratio = found["not cached"][2] / found["LazyShardDataset"][2]
    words = f"{ratio:.1f} x  ({show_seconds(found['not cached'][2])} / "
    words += f"{show_seconds(found['LazyShardDataset'][2])})"
    table.info("third epoch: not cached / part", ratio, words)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (name, times), color in zip(found.items(), ("#999999", "#1f6f9f"), strict=True):
        axes.plot([1, 2, 3], times, "o-", color=color, label=name)
    axes.set_xticks([1, 2, 3])
    axes.set_xlabel("epoch")
    axes.set_ylabel("time (s)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    caption(figure, f"{count // 2} samples of 3 KB, 1 ms each, 2 workers.")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=150)
    plt.close(figure)
    table.notes.append(f"plot: {PLOT}")


SECTIONS = {"plan": plan, "index": index, "epoch": epoch, "latency": latency, "epochs": epochs}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", SECTIONS, paths_made))
