"""Preprocessing with a cache inside, written in Python and run in C++.

    make demo-cpp                                     # builds the runner
    python examples/torchscript/preprocess.py         # about 10 seconds on two cores

A scripted module holds the cache: it returns a sample that is cached, or prepares and stores it.
torch.jit.save writes the cache's name with the module, not the samples. Loading it, here in C++,
joins the cache of that name, so the runner finds what this process has prepared.

Needs: torch, tqdm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from stocache import SharedCache
from torch import Tensor, nn
from tqdm import tqdm

BUILD = Path(__file__).resolve().parents[2] / "build"
SAMPLES = 256
SIDE = 64  # pixels of a prepared sample


class Preprocess(nn.Module):
    """Sample `index`, ready for a model: float32, (3, SIDE, SIDE)."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__()
        # A cache lives as long as some process has it open. If this module is loaded later,
        # "empty" starts with an empty cache; with "error", loading would fail.
        self.cache = cache.scripted(if_gone="empty")
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, index: int) -> Tensor:
        pixels = self.cache.get_slot(index)  # a view of shared memory, or None
        if pixels is None:
            pixels = self.prepare(index)
            self.cache.set_slot(index, pixels)  # does nothing if somebody else was faster
        # Cached as uint8, a quarter of the memory; this is cheap enough to do every time.
        return (pixels / 255 - self.mean) / self.std

    @torch.jit.export
    def prepare(self, index: int) -> Tensor:
        """The slow part: decodes and resizes. A formula stands for the file."""
        y = torch.arange(480).view(1, 480, 1)
        x = torch.arange(640).view(1, 1, 640)
        channel = torch.arange(3).view(3, 1, 1)
        decoded = (index * 7 + channel * 50 + x * (index % 5) + y * (index % 3)).remainder(256)
        size = self.cache.data_dims()[1:]
        resized = nn.functional.interpolate(
            decoded.unsqueeze(0).float(), size=size, mode="bilinear", antialias=True
        )
        return resized.squeeze(0).round().to(torch.uint8)

    @torch.jit.export
    def samples(self) -> int:
        return self.cache.dataset_len()

    @torch.jit.export
    def stats(self) -> dict[str, int]:
        """Counts of all processes that use the cache."""
        return self.cache.stats()


def main() -> int:
    parser = argparse.ArgumentParser(description="Save a module with a cache; run it in C++.")
    parser.add_argument("--module", type=Path, default=BUILD / "preprocess.pt", help="to save to")
    parser.add_argument(
        "--runner", type=Path, default=BUILD / "examples/torchscript/run_module", help="the program"
    )
    parser.add_argument("--no-run", action="store_true", help="only save the module")
    options = parser.parse_args()
    if not options.no_run and not options.runner.exists():
        parser.error(f"there is no {options.runner}; `make demo-cpp` builds it")
    options.module.parent.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # samples are small: more threads would wait for each other
    cache = SharedCache(
        size_limit_gib=0.1,
        dataset_len=SAMPLES,
        data_dims=(3, SIDE, SIDE),
        name=f"preprocess-{os.getpid()}",
        verbose=False,
    )
    with cache:
        module = torch.jit.script(Preprocess(cache))
        half = range(0, SAMPLES, 2)
        for index in tqdm(half, "preparing every other sample", disable=not sys.stdout.isatty()):
            module(index)
        print(f"Python prepared {cache.stats().filled} of {SAMPLES} samples")
        torch.jit.save(module, options.module)
        print(f"module saved to {os.path.relpath(options.module)}", flush=True)
        if options.no_run:
            return 0

        # The cache is open here while the runner uses it. To have it outlive this process, say
        # keep=True above; it is then in /dev/shm until somebody removes the file cache.path.
        status = subprocess.run([options.runner, options.module]).returncode
        if status != 0:
            return status

        # What C++ has stored is what Python would have prepared.
        equal = sum(torch.equal(cache[i], module.prepare(i)) for i in range(SAMPLES))
        print(f"check: {equal} of {SAMPLES} samples in the cache equal a fresh preparation")
        return 0 if equal == SAMPLES else 1


if __name__ == "__main__":
    sys.exit(main())
