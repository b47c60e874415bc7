"""Warm epochs through a stock DataLoader: stocache and what else keeps samples in memory.

python benches/python/peers.py [--epochs N] [--plot PATH] [--json PATH]

Prints thousand samples per second and the ratio to TensorDataset, which has everything in private
memory and nothing to look up, and saves a bar plot of the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import stocache
import stocaching
import torch
from measure import Side, interleave, machine, machine_line, progress_bar, show_grid
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 256
GIB = 2**30
SIZES = {
    "3 KB": (49_152, (3, 32, 32)),
    "150 KB": (4_096, (3, 224, 224)),
}
WORKERS = (0, 2)
BASELINE = "TensorDataset"
KINDS = {
    BASELINE: "#9aa5b1",
    "stocaching 0.2.1": "#e0a458",
    "stocache get_slot": "#6fb1d6",
    "stocache get_many": "#1f6f9f",
}


class PerSample(Dataset[torch.Tensor]):
    """A dataset as the README of either cache shows it; every access is a hit here."""

    def __init__(self, cache: Any, samples: int) -> None:
        self.cache = cache
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> torch.Tensor:
        value = self.cache.get_slot(idx)
        if value is None:
            raise RuntimeError(f"sample {idx} is missing in a warm epoch")
        return value


class PerBatch(PerSample):
    """The DataLoader hands all indices of a batch over at once; what it gets is collated."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        batch, found = self.cache.get_many(indices)
        if not found.all():
            raise RuntimeError("a sample is missing in a warm epoch")
        return batch


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Result:
    size: str
    workers: int
    kind: str
    samples_per_second: float
    ratio: float  # to BASELINE, the median over the epochs


@contextlib.contextmanager
def filled(samples: int, dims: tuple[int, ...]) -> Iterator[dict[str, Dataset[Any]]]:
    """The same samples, held in every way that is compared."""
    values = torch.randint(0, 256, (samples, *dims), dtype=torch.uint8)
    limit = (values.nbytes + samples + 1) / GIB
    with contextlib.redirect_stdout(io.StringIO()):  # it announces itself on stdout
        peer = stocaching.SharedCache(limit, samples, dims, torch.uint8)
    with stocache.SharedCache(limit, samples, dims, torch.uint8, verbose=False) as cache:
        for i, value in enumerate(values):
            peer.set_slot(i, value)
            cache.set_slot(i, value)
        yield {
            BASELINE: TensorDataset(values),
            "stocaching 0.2.1": PerSample(peer, samples),
            "stocache get_slot": PerSample(cache, samples),
            "stocache get_many": PerBatch(cache, samples),
        }


def epoch(loader: DataLoader[Any], samples: int) -> Side:
    def side() -> float:
        seen = 0
        start = time.perf_counter()
        for batch in loader:
            # TensorDataset's samples are tuples, of one tensor here.
            seen += len(batch[0] if isinstance(batch, list) else batch)
        elapsed = time.perf_counter() - start
        if seen != samples:
            raise RuntimeError(f"an epoch had {seen} samples, wanted {samples}")
        return elapsed

    return side


def measure_all(epochs: int) -> list[Result]:
    results = []
    for size, (samples, dims) in SIZES.items():
        with filled(samples, dims) as datasets:
            for workers in WORKERS:
                loaders = {
                    kind: DataLoader(
                        dataset,
                        BATCH,
                        shuffle=True,
                        num_workers=workers,
                        # Starting workers is not what is compared; the epoch that warms up does.
                        persistent_workers=workers > 0,
                        collate_fn=as_it_is if isinstance(dataset, PerBatch) else None,
                    )
                    for kind, dataset in datasets.items()
                }
                sides = {kind: epoch(loader, samples) for kind, loader in loaders.items()}
                with progress_bar(f"{size}, {workers} workers") as progress:
                    times = interleave(sides, epochs, progress)
                del sides, loaders  # ends the workers
                for kind in datasets:
                    speed = samples / times.median(kind)
                    ratio = times.ratio(BASELINE, kind)
                    results.append(Result(size, workers, kind, speed, ratio))
            del datasets
    return results


def groups_of(results: list[Result]) -> dict[tuple[str, int], dict[str, Result]]:
    groups: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        groups.setdefault((result.size, result.workers), {})[result.kind] = result
    return groups


def show(results: list[Result]) -> str:
    groups = groups_of(results)
    header = ("x TensorDataset (k samples/s)", *(f"{s}, {w} workers" for s, w in groups))
    lines = []
    for kind in KINDS:
        cells = [group[kind] for group in groups.values()]
        shown = (f"{c.ratio:.2f} x ({c.samples_per_second / 1e3:.3g})" for c in cells)
        lines.append((kind, *shown))
    return show_grid(header, lines)


def plot(results: list[Result], caption: str, path: Path) -> None:
    mpl.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    groups = groups_of(results)
    width = 0.8 / len(KINDS)
    top = max(result.ratio for result in results)
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
        for k, (kind, colour) in enumerate(KINDS.items()):
            cells = [group[kind] for group in groups.values()]
            places = [g + (k - (len(KINDS) - 1) / 2) * width for g in range(len(groups))]
            axes.bar(places, [c.ratio for c in cells], width * 0.92, color=colour, label=kind)
            for place, cell in zip(places, cells, strict=True):
                axes.text(
                    place,
                    cell.ratio + top * 0.012,
                    f"{cell.ratio:.2f} x\n{cell.samples_per_second / 1e3:.3g}k",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                    color="#333333",
                )
        axes.axhline(1, color=KINDS[BASELINE], linewidth=0.8, linestyle="--", zorder=0)
        axes.set_xticks(
            range(len(groups)),
            [f"{size} samples\n{workers} workers" for size, workers in groups],
        )
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, top * 1.14)
        axes.set_ylabel("speed / TensorDataset")
        axes.set_title(
            "Warm epochs through a stock DataLoader, shuffled batches of 256",
            loc="left",
            fontweight="bold",
            pad=42,
        )
        axes.text(0, 1.015, caption, transform=axes.transAxes, fontsize=8, color="#777777")
        axes.legend(ncols=len(KINDS), loc="lower left", bbox_to_anchor=(-0.01, 1.04), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.grid(True, color="#eeeeee", zorder=-1)
        axes.set_axisbelow(True)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main() -> int:
    build = Path(__file__).resolve().parents[2] / "build"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=7, help="counted ones, of every kind")
    parser.add_argument("--plot", type=Path, default=build / "peers.png", metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the numbers as well")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}, must be 1 or more")

    caption = machine_line()  # the load before this run, not the one it makes
    print(caption, flush=True)
    torch.manual_seed(0)
    results = measure_all(options.epochs)
    print(show(results))
    plot(results, caption, options.plot)
    print(f"plot: {options.plot}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        saved = {"machine": machine(), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(saved, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
