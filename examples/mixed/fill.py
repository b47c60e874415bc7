"""Fill a cache by name from Python, while others read it: the C++ trainer, say.

    python examples/mixed/fill.py mine

`cpp_trainer --cache mine`, started meanwhile, finds what is stored here, and this script skips what
the trainer has stored. `run.py` starts the two together.

Needs: torch, tqdm.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from stocache import SharedCache
from torch import Tensor
from tqdm import tqdm

SIDE = 64  # pixels
CLASSES = 4
LIMIT_GIB = 1.0  # as in the trainer: stocache::Options(1)
THREADS = 2


def picture(index: int) -> tuple[Tensor, Tensor]:
    """Sample `index` and its label: the formula of examples/cpp_trainer/main.cpp."""
    label = index % CLASSES
    channel = torch.arange(3).view(3, 1, 1)
    y = torch.arange(SIDE).view(1, SIDE, 1)
    x = torch.arange(SIDE).view(1, 1, SIDE)
    values = 7 * index + 50 * channel + 8 * (label % 2) * x + 8 * (label // 2) * y
    return values.remainder(256).to(torch.uint8), torch.tensor(label)


def open_caches(name: str, samples: int) -> tuple[SharedCache, SharedCache]:
    """The two caches that `stocache::cached(dataset, Options(LIMIT_GIB).name(name))` uses.

    Samples and targets lie in a cache each. Their shapes, dtypes and numbers must be those of the
    C++ dataset; what differs is refused. The targets come out of the same limit.
    """
    target = SharedCache(LIMIT_GIB, samples, (), torch.int64, name=f"{name}-target", verbose=False)
    targets_gib = samples * (torch.int64.itemsize + 1) / 2**30  # a byte of state for each
    data = SharedCache(
        LIMIT_GIB - targets_gib, samples, (3, SIDE, SIDE), torch.uint8, name=name, verbose=False
    )
    return data, target


def fill(data: SharedCache, target: SharedCache, index: int, delay_s: float) -> bool:
    """Store sample `index` unless it is there; returns whether this process stored it."""
    if data.get_slot(index) is not None and target.get_slot(index) is not None:
        return False  # somebody was faster, and nobody needs to load it
    time.sleep(delay_s)  # the network disk
    pixels, label = picture(index)
    # set_many, because it says what was stored; where another process was faster, nothing happens.
    stored = data.set_many([index], pixels[None])
    target.set_many([index], label[None])
    return bool(stored)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill a cache by name.")
    parser.add_argument("name", help="of the cache, as in cpp_trainer --cache NAME")
    parser.add_argument("--samples", type=int, default=1000, help="in the dataset (1000)")
    parser.add_argument("--delay-ms", type=float, default=4, help="for each sample (4)")
    options = parser.parse_args()
    if options.samples < 1 or options.delay_ms < 0:
        parser.error("--samples must be at least 1, and --delay-ms at least 0")

    torch.set_num_threads(1)  # the threads below are enough
    try:
        data, target = open_caches(options.name, options.samples)
    except ValueError as error:  # the name, or a cache of that name with other samples
        parser.error(str(error))
    live = sys.stdout.isatty()
    print(f"filling {options.name!r}", flush=True)
    stored, shown = 0, time.monotonic()
    with data, target, ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(
            lambda index: fill(data, target, index, options.delay_ms / 1000),
            range(options.samples),
        )
        for number, mine in enumerate(
            tqdm(done, total=options.samples, unit="sample", file=sys.stdout, disable=not live), 1
        ):
            stored += mine
            if not live and time.monotonic() - shown > 1:  # in a log, a line per second
                shown = time.monotonic()
                print(f"{number} of {options.samples} samples, {stored} stored", flush=True)
        print(f"{stored} of {options.samples} samples stored by Python", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
