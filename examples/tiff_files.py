"""Train on TIFF files from a far disk, without and with a FileCache: epoch times as lines.

    python examples/tiff_files.py                        # about two minutes on two cores
    python examples/tiff_files.py --images 500 --epochs 5

As the benchmark of cache_dataloading: images of 33 x 224 x 224 and a ground truth of 24 x 224 x 224
under the same names, in two folders, read in the main process or by 4 workers. The far disk is a
folder of which every read waits 20 milliseconds (--wait); both caches share one folder on the near
disk. It prints a table, checks that all runs computed the same, and saves a plot.

Needs: torch, numpy, tifffile, tqdm, matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tifffile
import torch
from matplotlib.figure import Figure
from stocache import FileCache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

IMAGE, TRUTH = (33, 224, 224), (24, 224, 224)
BATCH = 16


class FarFolder:
    """Files that take their time, as those of a network disk do. Has what the dataset needs of a
    FileCache, so that both can be used in its place."""

    def __init__(self, folder: Path, wait: float) -> None:
        self.folder = folder
        self.files = sorted(path.name for path in folder.iterdir())
        self.wait = wait

    def get_path(self, idx: int) -> str:
        time.sleep(self.wait)
        return str(self.folder / self.files[idx])


class FarCache(FileCache):
    """A FileCache whose source takes its time."""

    wait = 0.0

    def get_path(self, which: int) -> str:
        if self.files[which] not in self.in_cache:
            time.sleep(self.wait)
        return super().get_path(which)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, images: FarFolder | FileCache, truths: FarFolder | FileCache) -> None:
        self.images, self.truths = images, truths

    def __len__(self) -> int:
        return len(self.images.files)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        image = tifffile.imread(self.images.get_path(idx))
        truth = tifffile.imread(self.truths.get_path(idx))
        return torch.from_numpy(image), torch.from_numpy(truth)


@dataclass
class Run:
    name: str
    workers: int
    colour: str
    dataset: Pairs
    seconds: list[float]
    losses: list[float]


def write_tiffs(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for part, shape in (("images", IMAGE), ("truths", TRUTH)):
        (folder / part).mkdir()
        for i in tqdm(range(count), desc=f"writing {part}", unit="file", file=sys.stderr):
            pixels = rng.integers(0, 256, size=shape, dtype=np.uint8)
            tifffile.imwrite(folder / part / f"{i:04}.tif", pixels, photometric="minisblack")


def train(run: Run, epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(IMAGE[0], TRUTH[0], kernel_size=1)
    model(torch.zeros(BATCH, IMAGE[0], 56, 56)).sum().backward()  # torch warms up, off the clock
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(run.dataset, BATCH, shuffle=True, num_workers=run.workers, generator=order)
    words = f"{run.name}, {run.workers} workers"
    for _ in tqdm(range(epochs), desc=words, unit="epoch", file=sys.stderr):
        start, total = time.perf_counter(), 0.0
        for image, truth in loader:
            # Every fourth pixel: the files are what is measured here.
            predicted = model(image[:, :, ::4, ::4].float() / 255)
            loss = nn.functional.mse_loss(predicted, truth[:, :, ::4, ::4].float() / 255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(total / len(loader))


def show(runs: list[Run], epochs: int) -> None:
    width = max(len(run.name) for run in runs)
    heads = "".join(f"{f'epoch {i + 1}':>10}" for i in range(epochs))
    print(f"{'':{width}}  workers{heads}")
    for run in runs:
        times = "".join(f"{seconds:>8.2f} s" for seconds in run.seconds)
        print(f"{run.name:{width}}  {run.workers:>7}{times}")


def plot(runs: list[Run], images: int, wait: float, path: Path) -> None:
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        style = "-" if run.workers == 0 else "--"
        label = f"{run.name}, {'main process' if run.workers == 0 else f'{run.workers} workers'}"
        epochs = range(1, len(run.seconds) + 1)
        axes.plot(epochs, run.seconds, style, marker="o", color=run.colour, label=label)
    axes.set(xlabel="epoch", ylabel="seconds per epoch", yscale="log", xticks=list(epochs))
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda seconds, _: f"{seconds:g} s")
    axes.set_title(f"{images} pairs of TIFF files, far disk: {wait * 1000:.0f} ms per file")
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=128, help="pairs of files (default: 128)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--wait", type=float, default=20, help="milliseconds per far file")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--plot", type=Path, default=Path("build/tiff_files.png"))
    options = parser.parse_args()
    if options.images < BATCH or options.epochs < 2 or options.wait < 0:
        parser.error(f"at least {BATCH} images, 2 epochs and no negative wait, please")
    wait = FarCache.wait = options.wait / 1000

    with tempfile.TemporaryDirectory(prefix="stocache-tiff-", dir=options.folder) as name:
        folder = Path(name)
        write_tiffs(folder, options.images)
        images, truths = folder / "images", folder / "truths"
        runs = []
        for workers in (0, 4):
            near = Pairs(FarFolder(images, 0), FarFolder(truths, 0))
            far = Pairs(FarFolder(images, wait), FarFolder(truths, wait))
            scratch = folder / f"scratch-{workers}"
            cached = Pairs(FarCache(images, scratch), FarCache(truths, scratch))
            runs += [
                Run("near disk", workers, "#2b8a3e", near, [], []),
                Run("far disk", workers, "#862e9c", far, [], []),
                Run("far disk, FileCache", workers, "#e8590c", cached, [], []),
            ]
        for run in runs:
            train(run, options.epochs)
        caches = [run.dataset.images for run in runs if isinstance(run.dataset.images, FileCache)]
        stats = [cache.stats() for cache in caches]
    show(runs, options.epochs)
    print(f"images: {stats[-1]}")
    plot(runs, options.images, wait, options.plot)
    print(f"plot: {options.plot}")
    if any(run.losses != runs[0].losses for run in runs):
        print("the runs computed different losses")
        return 1
    if any(each.copies != options.images for each in stats):
        print("not every file was copied once")
        return 1
    print("all runs computed the same losses, and every file was copied once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
