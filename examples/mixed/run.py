"""Python and C++ share a cache: one fills it while the other trains from it.

    make demo-cpp                     # builds the trainer
    python examples/mixed/run.py      # about 10 seconds on two cores

Starts `fill.py` and the trainer of examples/cpp_trainer at the same time, on one cache by name.
Both store what they load, and both use what the other has stored. At the end, the samples in the
cache are compared with the source, and the counts of both with each other.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from fill import open_caches, picture

HERE = Path(__file__).resolve().parent
TRAINER = HERE.parents[1] / "build" / "examples" / "cpp_trainer" / "cpp_trainer"


class Child:
    """A process whose lines are shown as they come, with its name in front."""

    def __init__(self, name: str, *command: str | Path) -> None:
        self.name = name
        self.lines: list[str] = []
        self.filling = threading.Event()
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                self.lines.append(line.rstrip())
                print(f"{self.name:7}| {self.lines[-1]}", flush=True)
                if line.startswith("filling"):
                    self.filling.set()
        self.ended = time.monotonic()
        self.filling.set()  # nobody waits for a process that has ended

    def wait(self) -> None:
        self.reader.join()
        if self.process.wait() != 0:
            raise SystemExit(f"{self.name} ended with status {self.process.returncode}")

    def stop(self) -> None:
        self.process.kill()
        self.reader.join()

    def numbers(self, pattern: str) -> list[int]:
        """The numbers in its last line."""
        found = re.search(pattern, self.lines[-1])
        if found is None:
            raise SystemExit(f"{self.name} said {self.lines[-1]!r}, which has not {pattern!r}")
        return [int(text) for text in found.groups()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Python fills a cache that a C++ trainer reads.")
    parser.add_argument("--samples", type=int, default=1000, help="in the dataset (1000)")
    parser.add_argument("--trainer", type=Path, default=TRAINER, help="the C++ trainer")
    options = parser.parse_args()
    if options.samples < 200:
        parser.error("--samples must be at least 200: fewer are stored before the trainer starts")
    if not options.trainer.exists():
        parser.error(f"there is no {options.trainer}; `make demo-cpp` builds it")

    name = f"mixed-{os.getpid()}"
    samples = options.samples
    # Open here too: it lives until the last process closes it, and we look into it at the end.
    data, target = open_caches(name, samples)
    children = []
    with data, target:
        try:
            python = Child("python", sys.executable, HERE / "fill.py", name, f"--samples={samples}")
            children.append(python)
            # Python takes seconds to import torch. Without this, the trainer would be far ahead.
            python.filling.wait()
            trainer = Child("c++", options.trainer, "--cache", name, "--samples", str(samples))
            children.append(trainer)
            for child in children:
                child.wait()
        finally:
            for child in children:
                child.stop()

        (stored,) = python.numbers(r"^(\d+) of \d+ samples stored")
        checked, loaded, found = trainer.numbers(r"check: (\d+) .*; (\d+) loaded, (\d+) found")
        for index in range(samples):
            pixels, label = picture(index)
            assert torch.equal(data[index], pixels), f"sample {index} is wrong"
            assert torch.equal(target[index], label), f"target {index} is wrong"
        fills = data.stats().fills

    overlap = min(python.ended, trainer.ended) - max(python.began, trainer.began)
    print(
        f"\nBoth ran at once for {overlap:.1f} s.\n"
        f"The C++ trainer found {found} of {samples} samples that Python had stored, "
        f"and loaded {loaded} itself.\n"
        f"check: {checked} samples equal the source in C++, {samples} in Python"
    )
    # What was found was stored by Python; and every sample was stored exactly once.
    if not (0 < found <= stored and checked == fills == samples and overlap > 0):
        print(
            f"These numbers do not fit: {stored} stored by Python, {fills} in all", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
