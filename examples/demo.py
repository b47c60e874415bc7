"""Train a small CNN on JPEGs from a slow source, without and with a CachedDataset.

    python examples/demo.py                      # about 100 seconds on two cores
    python examples/demo.py --images 256 --rounds 1 --json build/demo.json

The script writes JPEGs to a temporary folder, reads them through `SlowFolder` (every read
waits five milliseconds, as on a network disk) and trains the same model twice, epoch by epoch
in turn: once loading every sample from the source, once keeping prepared samples in memory, by a
`CachedDataset`. It prints a table, checks that both runs computed the same thing, and saves a plot.
Then it times warm epochs with random augmentation: without a cache, with one, and with transforms
that `stocache.fuse` has fused.

Needs: torch, numpy, pillow, tqdm, matplotlib; torchvision for the epochs with augmentation.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import stocache
import torch
from matplotlib.figure import Figure
from PIL import Image
from stocache import CachedDataset, CachedDatasetStats
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler
from tqdm import tqdm

FILE_SIDE = 128  # pixels of the JPEGs on "disk"
SIDE = 96  # pixels of the prepared sample, which is what the cache keeps
CLASSES = 4
WARM_UP_IMAGES = 64  # extra images, seen only before the clock starts
CROP = 80  # pixels of what augmentation makes of a sample
AUGMENTED_IMAGES = 512  # the most of an epoch with augmentation
Sample = tuple[Tensor, int]
PLAIN_COLOUR, CACHED_COLOUR, FUSED_COLOUR = "#9aa5b1", "#0b7285", "#e8590c"


# --- The data -----------------------------------------------------------------------------------


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write `count` JPEGs of noisy stripes; the angle of the stripes is the class to learn."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:FILE_SIDE, 0:FILE_SIDE] / FILE_SIDE
    with progress(count, "writing JPEGs") as bar:
        for i in range(count):
            label = int(rng.integers(CLASSES))
            angle = np.pi * label / CLASSES
            turns = rng.uniform(5, 9) * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform()
            stripes = np.sin(2 * np.pi * turns)[..., None] * rng.uniform(25, 60, size=3)
            noise = rng.normal(0, 25, size=(FILE_SIDE, FILE_SIDE, 1))
            pixels = np.clip(rng.uniform(90, 165, size=3) + stripes + noise, 0, 255)
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(folder / f"{i:06d}_{label}.jpg", quality=90)
            bar.update()


class SlowFolder:
    """A folder of JPEGs behind a slow link.

    The wait is a real `time.sleep` before each read. It models the round trip to a network disk
    or an object store: the worker is blocked, the CPU is free. Decoding and resizing are real
    work and come on top.
    """

    def __init__(self, folder: Path, latency_s: float) -> None:
        self.paths = sorted(folder.glob("*.jpg"))
        self.labels = [int(path.stem.rpartition("_")[2]) for path in self.paths]
        self.latency_s = latency_s

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, idx: int) -> Tensor:
        """Fetch, decode and resize one image: uint8, (3, SIDE, SIDE)."""
        time.sleep(self.latency_s)
        with Image.open(self.paths[idx]) as image:
            pixels = np.array(image.convert("RGB").resize((SIDE, SIDE)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class Images(Dataset[Sample]):
    """The dataset as it was before anyone thought of a cache."""

    def __init__(self, source: SlowFolder) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Sample:
        return self.source.load(idx), self.source.labels[idx]


def cached_images(source: SlowFolder, gib: float, verbose: bool = True) -> CachedDataset[Sample]:
    """The same dataset with a cache: one line."""
    return CachedDataset(Images(source), memory=int(gib * (1 << 30)), verbose=verbose)


# --- Training -----------------------------------------------------------------------------------


class BatchList(Sampler[list[int]]):
    """Hands out the batches it was last given, so that one loader serves any part of an epoch."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.indices: Sequence[int] = ()

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield list(self.indices[start : start + self.batch_size])


@dataclass
class Pass:
    """What one timed pass over some samples gave."""

    seconds: float
    loss: float
    batch_ends: list[float] = field(repr=False)  # seconds since the start of the pass


class Trainer:
    """One training run: a model of its own and a loader with workers of its own.

    The workers live as long as the run and have served the warm-up samples before the first
    timed pass. Process start, imports and first-iteration costs are therefore in no figure, with
    or without a cache. Warm-up samples belong to no epoch, so none is cached before its time.
    """

    def __init__(
        self,
        dataset: Dataset[tuple[Tensor, int]],
        warm_up: Sequence[int],
        options: argparse.Namespace,
    ) -> None:
        torch.manual_seed(options.seed)  # equal weights at the start of every run
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, CLASSES),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.criterion = nn.CrossEntropyLoss()
        self.order = BatchList(options.batch_size)
        self.loader: DataLoader[tuple[Tensor, Tensor]] | None = DataLoader(
            dataset,  # type: ignore[arg-type]  # the default collate turns samples into batches
            batch_sampler=self.order,
            num_workers=options.workers,
            persistent_workers=True,
        )
        self.train(warm_up)

    def train(self, indices: Sequence[int], bar: tqdm | None = None) -> Pass:
        """Train on these samples in this order, and time it."""
        assert self.loader is not None, "this run is closed"
        self.order.indices = indices
        total_loss, batch_ends = 0.0, []
        start = time.perf_counter()
        for images, labels in self.loader:
            loss = self.criterion(self.model(images.float() / 255 - 0.5), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total_loss += loss.item() * len(labels)
            batch_ends.append(time.perf_counter() - start)
            if bar is not None:
                bar.update(len(labels))
        return Pass(time.perf_counter() - start, total_loss / len(indices), batch_ends)

    def close(self) -> None:
        """End the workers."""
        self.loader = None


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


# --- What is measured ---------------------------------------------------------------------------


@dataclass
class Comparison:
    """Two runs of the same training, epoch by epoch in turn."""

    plain: list[Pass]
    cached: list[Pass]
    hit_rates: list[float]  # of the cached run, 0..1 per epoch
    cache_setup_s: float  # constructing the cache: once, before the first epoch
    stats: CachedDatasetStats
    samples_checked: int
    samples_equal: bool

    @property
    def losses_equal(self) -> bool:
        return [p.loss for p in self.plain] == [p.loss for p in self.cached]


def compare(source: SlowFolder, options: argparse.Namespace) -> Comparison:
    """Train without and with the cache, taking turns so that a busy spell hits both."""
    warm_up = range(options.images, len(source))
    start = time.perf_counter()
    dataset = cached_images(source, options.cache_gib)
    cache_setup_s = time.perf_counter() - start
    plain = Trainer(Images(source), warm_up, options)
    cached = Trainer(dataset, warm_up, options)

    plain_passes: list[Pass] = []
    cached_passes: list[Pass] = []
    hit_rates: list[float] = []
    for epoch in range(options.epochs):
        order = shuffled(options.images, seed=options.seed + epoch)
        with progress(options.images, f"epoch {epoch + 1}/{options.epochs} without cache") as bar:
            plain_passes.append(plain.train(order, bar))
        before = dataset.stats()
        with progress(options.images, f"epoch {epoch + 1}/{options.epochs} with cache") as bar:
            cached_passes.append(cached.train(order, bar))
        after = dataset.stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        hit_rates.append(hits / (hits + misses))

    # Only now, when all figures are taken: does the cache hold what the source would give?
    probes = shuffled(options.images, seed=options.seed)[:16]
    equal = all(torch.equal(dataset[idx][0], source.load(idx)) for idx in probes)
    result = Comparison(
        plain_passes, cached_passes, hit_rates, cache_setup_s, after, len(probes), equal
    )
    plain.close()
    cached.close()
    dataset.close()
    return result


@dataclass
class Overhead:
    """Extra time of a first epoch that fills an empty cache, relative to no cache at all."""

    median: float
    low: float  # 95 % confidence interval of the median (with few pairs: their range)
    high: float
    plain_s: list[float]  # one entry per block of samples, all rounds
    cached_s: list[float]


def measure_first_epoch(source: SlowFolder, options: argparse.Namespace) -> Overhead:
    """Time first epochs in short blocks, without and with an empty cache by turns.

    The overhead is smaller than what a shared machine drifts within one epoch. So both datasets
    sit behind one loader: the same worker processes serve both sides. Each block of samples is
    timed on both sides back to back, the side that goes first changes from block to block, every
    round starts with an empty cache, and the result is the median over all pairs: a hiccup spoils
    one pair, not the figure.
    """
    block = 2 * options.workers * options.batch_size  # as many batches for every worker
    warm_up = range(options.images, len(source))
    plain_s: list[float] = []
    cached_s: list[float] = []
    for turn in range(options.rounds):
        cached = cached_images(source, options.cache_gib, verbose=False)
        # Index i is sample i from the source, index shift + i the same sample through the cache.
        shift = len(source)
        both: ConcatDataset[Sample] = ConcatDataset([Images(source), cached])
        trainer = Trainer(both, [*warm_up, *(shift + i for i in warm_up)], options)
        order = shuffled(options.images, seed=options.seed + turn)
        label = f"first epochs, round {turn + 1}/{options.rounds}"
        with progress(2 * options.images, label) as bar:
            for start in range(0, len(order), block):
                part = order[start : start + block]
                sides = [(part, plain_s), ([shift + i for i in part], cached_s)]
                if len(plain_s) % 2:
                    sides.reverse()
                for indices, seconds in sides:
                    seconds.append(trainer.train(indices, bar).seconds)
        trainer.close()
        cached.close()
    extra = sorted(c / p - 1 for p, c in zip(plain_s, cached_s, strict=True))
    # The interval goes by ranks, which assumes nothing about the noise. With fewer than six
    # pairs it is their whole range.
    cut = max(0, int((len(extra) - 1.96 * len(extra) ** 0.5) / 2))
    return Overhead(statistics.median(extra), extra[cut], extra[-1 - cut], plain_s, cached_s)


class Augmenting(Dataset[Sample]):
    """The same without a cache: what is random follows each load."""

    def __init__(self, source: SlowFolder, transform: Any) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Sample:
        return self.transform(self.source.load(idx)), self.source.labels[idx]


@dataclass
class Augmented:
    """Warm epochs of batches with random crops, flips and means; nobody trains."""

    images: int
    plain_s: list[float]  # one entry per round
    cached_s: list[float]  # torchvision's transforms, by the workers
    fused_s: list[float]

    def sides(self) -> list[tuple[str, float, str]]:
        """How each is called, its median, its colour."""
        return [
            ("without cache", statistics.median(self.plain_s), PLAIN_COLOUR),
            ("cached", statistics.median(self.cached_s), CACHED_COLOUR),
            ("cached, fused", statistics.median(self.fused_s), FUSED_COLOUR),
        ]


def measure_augmented(source: SlowFolder, options: argparse.Namespace) -> Augmented | None:
    """Epochs with augmentation, in turns; None without torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        print("no epochs with augmentation: torchvision is not installed")
        return None
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(CROP, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    count = min(options.images, AUGMENTED_IMAGES)
    memory = int(options.cache_gib * (1 << 30))
    fused = stocache.fuse(transform, seed=options.seed)
    caches = [
        CachedDataset(Images(source), memory, transform=each, verbose=False)
        for each in (transform, fused)
    ]
    times: list[list[float]] = [[], [], []]
    with contextlib.ExitStack() as stack:
        for cache in caches:
            stack.enter_context(cache)
        orders = [BatchList(options.batch_size) for _ in range(3)]
        loaders: list[Any] = [
            kind(dataset, batch_sampler=order, num_workers=options.workers, persistent_workers=True)
            for kind, dataset, order in zip(
                (DataLoader, stocache.DataLoader, stocache.DataLoader),
                (Augmenting(source, transform), *caches),
                orders,
                strict=True,
            )
        ]
        rounds = min(3, options.rounds)
        label = "epochs with augmentation"
        with progress(3 * count * (rounds + 1), label) as bar:
            for turn in range(rounds + 1):
                for loader, order, seconds in zip(loaders, orders, times, strict=True):
                    order.indices = shuffled(count, seed=options.seed + turn)
                    start = time.perf_counter()
                    seen = 0
                    for images, _ in loader:
                        assert images.shape[1:] == (3, CROP, CROP)
                        seen += len(images)
                        bar.update(len(images))
                    assert seen == count
                    if turn:  # the first starts workers, and fills the caches
                        seconds.append(time.perf_counter() - start)
        del loader, loaders
    return Augmented(count, *times)


# --- What is shown ------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(total: int, label: str) -> Iterator[tqdm]:
    """A live bar on a terminal; in a log file, one line when it is done."""
    live = sys.stdout.isatty()
    bar = tqdm(
        total=total,
        desc=f"{label:<26}",
        unit="img",
        ncols=92,
        smoothing=0,  # the rate shown is the average
        file=sys.stdout if live else io.StringIO(),
    )
    with bar:
        yield bar
        if not live:
            print(bar, flush=True)


def table(comparison: Comparison, overhead: Overhead, augmented: Augmented | None) -> str:
    lines = [f"{'':10}{'without cache':>15}{'with cache':>13}{'speed-up':>11}{'hit rate':>11}"]
    rule = "-" * len(lines[0])
    lines.append(rule)
    rows = zip(comparison.plain, comparison.cached, comparison.hit_rates, strict=True)
    for number, (p, c, rate) in enumerate(rows, start=1):
        lines.append(
            f"{f'epoch {number}':10}{p.seconds:13.2f} s{c.seconds:11.2f} s"
            f"{p.seconds / c.seconds:9.2f} x{100 * rate:9.1f} %"
        )
    plain_s, cached_s = total_seconds(comparison.plain), total_seconds(comparison.cached)
    pairs = len(overhead.plain_s)
    spread = "95 % confidence" if pairs >= 6 else "range"
    lines += [
        rule,
        f"{'total':10}{plain_s:13.2f} s{cached_s:11.2f} s{plain_s / cached_s:9.2f} x",
        "",
        f"first-epoch overhead: {100 * overhead.median:+.1f} % "
        f"(median of {pairs} pairs of blocks, {spread} "
        f"{100 * overhead.low:+.1f} to {100 * overhead.high:+.1f} %)",
        f"cache set-up: {1000 * comparison.cache_setup_s:.1f} ms, once, before epoch 1",
    ]
    if augmented is not None:
        sides = ", ".join(f"{name} {seconds:.2f} s" for name, seconds, _ in augmented.sides())
        lines.append(f"warm epoch of {augmented.images} images with augmentation: {sides}")
    return "\n".join(lines)


def total_seconds(passes: Sequence[Pass]) -> float:
    return sum(p.seconds for p in passes)


def save_plot(
    path: Path,
    comparison: Comparison,
    overhead: Overhead,
    augmented: Augmented | None,
    options: argparse.Namespace,
) -> None:
    epochs = len(comparison.plain)
    widths = [4, 4] if augmented is None else [4, 4, 2.4]
    # Not pyplot: needs no display.
    figure = Figure(figsize=(1.4 * sum(widths), 4.6), layout="constrained")
    left, right, *more = figure.subplots(1, len(widths), width_ratios=widths)
    figure.suptitle(
        f"Training on {options.images} JPEGs, {options.latency_ms:g} ms per read, "
        f"{options.workers} workers, tiny CNN on the CPU",
        fontsize=13,
    )

    width = 0.38
    sides = [
        (comparison.plain, -width / 2, PLAIN_COLOUR, "without cache"),
        (comparison.cached, width / 2, CACHED_COLOUR, "with CachedDataset"),
    ]
    for passes, shift, colour, label in sides:
        bars = left.bar(
            [n + shift for n in range(epochs)],
            [p.seconds for p in passes],
            width,
            color=colour,
            label=label,
        )
        left.bar_label(bars, fmt="%.2f s", padding=2, fontsize=9)
    ticks = [f"epoch {n + 1}\nhit rate {100 * r:.0f} %" for n, r in enumerate(comparison.hit_rates)]
    left.set_xticks(range(epochs), ticks)
    left.set_ylabel("time per epoch (s)")
    # Head room above the bars: the legend sits there.
    left.set_ylim(0, 1.3 * max(p.seconds for p in comparison.plain + comparison.cached))
    extra = f"first-epoch overhead {100 * overhead.median:+.1f} %"
    left.set_title(f"Epoch times ({extra})", fontsize=11)
    left.legend(loc="upper center", ncols=2, frameon=False)

    for passes, _, colour, label in sides:
        seconds, images = timeline(passes, options)
        right.plot(seconds, images, color=colour, linewidth=2.2, label=label)
        right.annotate(
            f"{seconds[-1]:.1f} s",
            (seconds[-1], images[-1]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    for epoch in range(1, epochs + 1):
        right.axhline(epoch * options.images, color="#d5dae0", linewidth=0.8, zorder=0)
    right.set_xlim(0, 1.06 * total_seconds(comparison.plain))
    right.set_ylim(0, 1.1 * epochs * options.images)
    right.set_xlabel("training time (s)")
    right.set_ylabel("images trained on")
    right.set_title("Progress over time (grey lines: end of an epoch)", fontsize=11)
    right.legend(loc="lower right", frameon=False)

    if augmented is not None:
        for name, seconds, colour in augmented.sides():
            bars = more[0].bar([name.replace(" ", "\n")], [seconds], 0.6, color=colour)
            more[0].bar_label(bars, fmt="%.2f s", padding=2, fontsize=9)
        more[0].set_ylabel(f"time per epoch of {augmented.images} images (s)")
        more[0].set_title("Warm epoch with augmentation", fontsize=11)

    for axes in (left, right, *more):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def timeline(passes: Sequence[Pass], options: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Images trained on against seconds of training, over all epochs of a run."""
    seconds, images = [0.0], [0]
    for epoch, p in enumerate(passes):
        start = seconds[-1]
        seconds += [start + end for end in p.batch_ends]
        images += [
            epoch * options.images + min((n + 1) * options.batch_size, options.images)
            for n in range(len(p.batch_ends))
        ]
    return seconds, images


def report(
    comparison: Comparison,
    overhead: Overhead,
    augmented: Augmented | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    plain_s, cached_s = total_seconds(comparison.plain), total_seconds(comparison.cached)
    return {
        "options": {k: v for k, v in vars(options).items() if k not in ("plot", "json")},
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "epochs": [
            {
                "without_cache_s": p.seconds,
                "with_cache_s": c.seconds,
                "speed_up": p.seconds / c.seconds,
                "hit_rate": rate,
                "loss_without_cache": p.loss,
                "loss_with_cache": c.loss,
            }
            for p, c, rate in zip(
                comparison.plain, comparison.cached, comparison.hit_rates, strict=True
            )
        ],
        "total": {
            "without_cache_s": plain_s,
            "with_cache_s": cached_s,
            "speed_up": plain_s / cached_s,
        },
        "first_epoch_overhead": asdict(overhead),
        "augmented": None if augmented is None else asdict(augmented),
        "cache_setup_s": comparison.cache_setup_s,
        "cache_stats": asdict(comparison.stats),
        "samples_equal": comparison.samples_equal,
        "losses_equal": comparison.losses_equal,
    }


# --- The command line ---------------------------------------------------------------------------


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small CNN from a slow source, without and with a CachedDataset.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--images", type=positive_int, default=1536, help="images per epoch")
    parser.add_argument("--epochs", type=positive_int, default=3, help="epochs of each run")
    parser.add_argument("--workers", type=positive_int, default=2, help="DataLoader workers")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images per step")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="wait before each read")
    parser.add_argument("--cache-gib", type=float, default=0.25, help="size limit of the cache")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="first epochs timed for the overhead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of images, weights and shuffling")
    parser.add_argument("--plot", type=Path, default=Path("build/demo.png"), help="where to save")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if options.latency_ms < 0:
        parser.error(f"--latency-ms {options.latency_ms:g} is negative")
    return options


def main() -> int:
    options = parse_options()
    for path in (options.plot, options.json):
        if path is not None:  # find out now, not after a minute of training
            path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # leaves the other cores to the workers

    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stocache-demo-") as folder:
        write_images(Path(folder), options.images + WARM_UP_IMAGES, options.seed)
        source = SlowFolder(Path(folder), options.latency_ms / 1000)
        comparison = compare(source, options)
        overhead = measure_first_epoch(source, options)
        augmented = measure_augmented(source, options)

    print(f"\n{table(comparison, overhead, augmented)}")
    verdict = "equal" if comparison.samples_equal else "DO NOT equal"
    print(f"check: {comparison.samples_checked} cached samples {verdict} a fresh load", end="; ")
    verdict = "identical" if comparison.losses_equal else "NOT identical"
    print(f"losses of both runs {verdict} ({comparison.cached[-1].loss:.4f} in the last epoch)")

    save_plot(options.plot, comparison, overhead, augmented, options)
    print(f"plot saved to {options.plot}")
    if options.json is not None:
        text = json.dumps(report(comparison, overhead, augmented, options), indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"figures saved to {options.json}")
    print(f"everything took {time.perf_counter() - began:.0f} s")
    return 0 if comparison.samples_equal and comparison.losses_equal else 1


if __name__ == "__main__":
    sys.exit(main())
