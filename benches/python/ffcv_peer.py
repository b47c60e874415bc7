"""FFCV 1.0.2 as a peer of the benchmarks: its files, and its loaders over them.

FFCV has two fields that keep bytes as they are. It compiles the decoder of NDArrayField for one
thread, whatever the number of workers, and that of RGBImageField, which gives images of three
channels with the channels last, for all of them. So there is a file with each.

To import this takes FFCV, which only the environment of `make bench-ffcv` has.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.decoders import (
    NDArrayDecoder,
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from torch import Tensor


@contextlib.contextmanager
def torch_threads_kept() -> Iterator[None]:
    """FFCV sets the number of torch's threads for the caller too; other sides go on with theirs."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Indexed:
    """What FFCV's writer asks for: a list of arrays, and of images with their channels last."""

    values: Tensor
    images: bool

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, idx: int) -> tuple[Any, int]:
        value = self.values[idx]
        return (value.permute(1, 2, 0).contiguous() if self.images else value).numpy(), int(idx)


def write(values: Tensor, folder: Path, workers: int) -> dict[str, Path]:
    """Samples (value, index) into a file per field, each of them on disk and in the page cache."""
    kinds = {
        "NDArrayField": NDArrayField(np.dtype("uint8"), tuple(values.shape[1:])),
        "RGBImageField": RGBImageField(write_mode="raw"),
    }
    files = {field: folder / f"{field}.beton" for field in kinds}
    for field, kind in kinds.items():
        fields = {"value": kind, "place": IntField()}
        writer = DatasetWriter(str(files[field]), fields, num_workers=workers)
        with contextlib.redirect_stderr(io.StringIO()):  # it has a progress bar of its own
            writer.from_indexed_dataset(Indexed(values, images=field == "RGBImageField"))
        with files[field].open("rb") as file:
            os.fsync(file.fileno())  # or it is written back while somebody's time is taken
    return files


def loader(
    file: Path, field: str, samples: int, passes: int, batch: int, workers: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Epochs of (batch, places), `passes` over all samples shuffled together; places are a column.

    Batches are views of FFCV's buffers, which it overwrites a few batches later. Images are views
    as well: their channels come last in memory.
    """
    decoders = {
        "NDArrayField": lambda: [NDArrayDecoder(), ToTensor()],
        "RGBImageField": lambda: [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()],
    }
    with torch_threads_kept():
        made = Loader(
            str(file),
            batch,
            num_workers=workers,
            os_cache=True,
            order=OrderOption.RANDOM,
            indices=np.tile(np.arange(samples, dtype=np.uint64), passes),
            pipelines={"value": decoders[field](), "place": [IntDecoder(), ToTensor()]},
        )
    return Epochs(made)


def augmented(
    file: Path, samples: int, batch: int, workers: int, side: int, mean: list[float],
    std: list[float],
) -> Iterable[tuple[Tensor, Tensor]]:  # fmt: skip
    """Epochs of images that FFCV's own pipeline cuts, resizes, mirrors and normalises."""
    scaled = [np.array(numbers) * 255 for numbers in (mean, std)]
    images = [
        RandomResizedCropRGBImageDecoder((side, side)),
        RandomHorizontalFlip(),
        NormalizeImage(*scaled, np.float32),
        ToTensor(),
        ToTorchImage(),
    ]
    with torch_threads_kept():
        made = Loader(
            str(file),
            batch,
            num_workers=workers,
            os_cache=True,
            order=OrderOption.RANDOM,
            indices=np.arange(samples, dtype=np.uint64),
            pipelines={"value": images, "place": [IntDecoder(), ToTensor()]},
        )
    return Epochs(made)


@dataclass(frozen=True)
class Epochs:
    loader: Loader

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with torch_threads_kept():
            return iter(self.loader)
