"""FileCache against its speed targets: one table, exit status 1 if one is missed.

python benches/python/file_cache.py [--only copy hit epoch table evict] [--rounds N] [--json PATH]

Works in the folder for temporary files, which should be on a disk (TMPDIR says where); the section
"copy" needs about 10 GB there. Copies are neither synced here nor by `cp -r`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import Table, interleave, run, show_seconds, timed
from stocache import _C, FileCache
from torch.utils.data import DataLoader, Dataset

FILE_BYTES = 33 * 224 * 224  # 1.6 MB, as the images of cache_dataloading
COPIED = 2000
EPOCH = 500
HITS = 20_000
FAR = 0.020
LISTED = 10_000_000
USED = 1000
KEPT = 20_000
WORKERS = 4

paths_made: list[str] = []
"""Of every folder made here, to see at the end that none was left behind."""


@contextmanager
def source(files: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="stocache-bench-"))
    paths_made.append(str(folder))
    noise = np.random.default_rng(0)
    try:
        (folder / "far").mkdir()
        for i in range(files):
            (folder / "far" / f"{i:05}.tif").write_bytes(noise.bytes(FILE_BYTES))
        os.sync()
        yield folder
    finally:
        shutil.rmtree(folder)


def copying(table: Table, progress: Any, rounds: int) -> None:
    """All files, with two threads, against one `cp -r`. The time of removing them is free."""
    with source(COPIED) as folder:
        far, plain, cached = folder / "far", folder / "plain", folder / "cached"

        def copy_plainly() -> float:
            shutil.rmtree(plain, ignore_errors=True)
            os.sync()
            return timed(lambda: subprocess.run(["cp", "-r", far, plain], check=True))()

        def copy_cached() -> float:
            shutil.rmtree(cached, ignore_errors=True)
            os.sync()
            with FileCache(far, cached) as files:
                seconds = timed(lambda: files.prefetch(num_workers=2, progress=False))()
                if files.stats().copies != COPIED:
                    raise RuntimeError(f"not all were copied: {files.stats()}")
            return seconds

        times = interleave({"cp": copy_plainly, "ours": copy_cached}, min(rounds, 5), progress)
    ratio = 100 * times.ratio("cp", "ours")
    words = f"({show_seconds(times.median('ours'))} / {show_seconds(times.median('cp'))})"
    what = f"copying {COPIED} files of 1.6 MB with 2 workers, speed / cp -r"
    table.at_least(what, ratio, 95, f"{ratio:.0f} %  {words}", " %")


def hits(table: Table, progress: Any, rounds: int) -> None:
    with source(100) as folder, FileCache(folder / "far", folder / "cached") as files:
        files.prefetch(progress=False)
        names, near = list(files.files), files.folder

        def ask() -> None:
            for i in range(HITS):
                files.get_path(names[i % 100])

        def ask_by_index() -> None:
            for i in range(HITS):
                files.get_path(i % 100)

        def join() -> None:
            for i in range(HITS):
                os.path.join(near, names[i % 100])

        sides = {"ours": timed(ask), "index": timed(ask_by_index), "join": timed(join)}
        times = interleave(sides, rounds, progress)
    for side, what in (("ours", "one hit by name"), ("index", "one hit by index")):
        above = (times.median(side) - times.median("join")) / HITS * 1e6
        words = f"({show_seconds(times.median(side) / HITS)} / "
        words += f"{show_seconds(times.median('join') / HITS)})"
        table.at_most(f"{what}, above os.path.join", above, 3, f"{above:+.2f} µs  {words}", " µs")


class Files(Dataset[int]):
    """Reads whole files: from the source, from local copies, or through the cache."""

    def __init__(self, folder: Path, files: FileCache | None, far: bool) -> None:
        self.folder = folder
        self.names = sorted(os.listdir(folder))
        self.files = files
        self.far = far

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, idx: int) -> int:
        name = self.names[idx]
        if self.far and (self.files is None or name not in self.files.in_cache):
            time.sleep(FAR)  # what the source takes
        path = self.folder / name if self.files is None else self.files.get_path(idx)
        with open(path, "rb") as file:
            return len(file.read())


def epochs(table: Table, progress: Any, rounds: int) -> None:
    with source(EPOCH) as folder, FileCache(folder / "far", folder / "cached") as files:

        def epoch(dataset: Files) -> float:
            loader = DataLoader(dataset, 16, shuffle=True, num_workers=WORKERS)
            read = iter(loader)
            start = time.perf_counter()
            total = sum(int(batch.sum()) for batch in read)
            seconds = time.perf_counter() - start
            if total != EPOCH * FILE_BYTES:
                raise RuntimeError(f"{total} bytes were read, not {EPOCH * FILE_BYTES}")
            return seconds

        cached, far = Files(folder / "far", files, True), Files(folder / "far", None, True)
        first = epoch(cached)
        near = Files(Path(files.folder), None, False)
        sides = {"near": lambda: epoch(near), "cached": lambda: epoch(cached)}
        times = interleave(sides, rounds, progress)
        slow = epoch(far)
    ratio = 100 * times.ratio("near", "cached")
    words = f"({show_seconds(times.median('cached'))} / {show_seconds(times.median('near'))})"
    table.at_least(
        f"second epoch, 20 ms per file, {WORKERS} workers, speed / local files",
        ratio, 90, f"{ratio:.0f} %  {words}", " %",
    )  # fmt: skip
    table.info("the epoch without a cache", slow, show_seconds(slow))
    table.info("the first epoch, which copies", first, show_seconds(first))


def tables(table: Table, progress: Any, rounds: int) -> None:
    """What a cache for ten million names takes in /dev/shm, of which a thousand are asked for."""
    with tempfile.TemporaryDirectory(prefix="stocache-bench-") as folder:
        far, near = Path(folder) / "far", Path(folder) / "cached"
        far.mkdir()
        for i in range(USED):
            (far / f"{i}").write_bytes(b"x")
        before = segments()
        files = _C.Files()
        files.open(os.fsencode(far), os.fsencode(near), 0, "lru", "once", False, LISTED)
        empty = segments() - before
        for i in range(USED):
            files.fetch(f"{i}")
        used = segments() - before
        files.close()
    for what, taken, most in (("", empty, 1 << 20), (f", {USED} asked for", used, 8 << 20)):
        words = f"{taken / 2**20:.1f} MiB"
        name = f"/dev/shm for a list of {LISTED} files{what}"
        table.at_most(name, taken / 2**20, most / 2**20, words, " MiB")


def segments() -> int:
    """Bytes that tables of files take in /dev/shm, or elsewhere in memory."""
    found = [*Path("/dev/shm").glob("stocache-*-files-*")]
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/memfd:stocache-"):
                found.append(link)
    return sum(path.stat().st_blocks * 512 for path in found)


def evicting(table: Table, progress: Any, rounds: int) -> None:
    """A new worker that asks for one more file than there is room for."""
    with tempfile.TemporaryDirectory(prefix="stocache-bench-") as folder:
        far, near = Path(folder) / "far", Path(folder) / "cached"
        far.mkdir()
        for i in range(KEPT + rounds):
            (far / f"{i:08}-of-some-length").write_bytes(b"x")
        with FileCache(far, near, KEPT) as files:
            files.prefetch(range(KEPT), progress=False)
            seconds, read = [], []
            for i in range(rounds):
                with multiprocessing.get_context("fork").Pool(1) as worker:
                    took, count = worker.apply(in_worker, (files, KEPT + i))
                seconds.append(took)
                read.append(count)
            if files.stats().evicted != rounds:
                raise RuntimeError(f"{files.stats()}")
    what = f"bytes read to remove the first of {KEPT} copies in a process"
    count = float(np.median(read))
    table.at_most(what, count, 4096, f"{count:.0f}", "")
    table.info("the time that takes, with the copy", min(seconds), show_seconds(min(seconds)))


def in_worker(files: FileCache, which: int) -> tuple[float, int]:
    start, before = time.perf_counter(), bytes_read()
    files.get_path(which)
    return time.perf_counter() - start, bytes_read() - before


def bytes_read() -> int:
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


SECTIONS = {
    "copy": copying,
    "hit": hits,
    "epoch": epochs,
    "table": tables,
    "evict": evicting,
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", SECTIONS, paths_made))
