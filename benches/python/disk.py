"""The disk level against plain reads and its peers: one table, exit status 1 if a target is missed.

python benches/python/disk.py [--only reads epochs writes opens sources shares rates packed ahead]
    [--rounds N] [--json PATH] [--with-many]

Works in the folder for temporary files, which must be on a disk (TMPDIR says where), and takes
about 3 GB there. A read is cold if no byte of its file is in the page cache before, which is
checked. The limit is plain preads of the same records, in the same order, from one file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diskcache
import lmdb
import matplotlib as mpl
import numpy as np
import stocache
import torch
from measure import Table, Timings, caption, interleave, run, show_seconds
from stocache import CachedDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SIZES = {"150 KB": (150_528, 4000), "3 KB": (3072, 60_000)}
"""Bytes of a sample, and how many there are."""
PROCESSES = 2
BATCH = 64
GROUP = 96 * 2**20
"""Memory of the control group in which data are larger than memory, page cache included."""
LMDB_128 = "LMDB at 128 KiB of read-ahead"
READERS: list[str] = []
"""The command of benches/readers, if it could be built."""
PLOT = Path(__file__).resolve().parents[2] / "build" / "memory-and-disk.png"

paths_made: list[str] = []
"""Of every folder made here, to see at the end that none was left behind."""


class Samples(Dataset[Tensor]):
    """Bytes that do not compress, a piece of one buffer for each index; after a wait, as for a far
    disk."""

    def __init__(self, size: int, count: int, seconds: float = 0) -> None:
        self.size, self.count, self.seconds = size, count, seconds
        self.noise = torch.from_numpy(
            np.random.default_rng(size).integers(0, 256, size + count, dtype=np.uint8)
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.noise[idx : idx + self.size].clone()

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(self.count))

    def first_bytes(self, indices: Any) -> Tensor:
        return self.noise[torch.as_tensor(indices)]


class Masks(Samples):
    """What compresses well: few different numbers of 8 bytes, in stretches."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__(size, count)
        numbers = self.noise.long()[: size // 8 + count] % 8
        self.words = numbers.repeat_interleave(16)

    def __getitem__(self, idx: int) -> Tensor:
        return self.words[idx : idx + self.size // 8].clone().view(torch.uint8)

    def first_bytes(self, indices: Any) -> Tensor:
        return self.words[torch.as_tensor(indices)].to(torch.uint8)


# The page cache


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def resident(path: Path) -> int:
    """Bytes of a file that are in the page cache: cachestat(2)."""
    counts, everything = _Counts(), _Range(0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDONLY)
    try:
        if libc.syscall(451, fd, ctypes.byref(everything), ctypes.byref(counts), 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat(2) needs Linux 6.5")
    finally:
        os.close(fd)
    return counts.cached * os.sysconf("SC_PAGE_SIZE")


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def make_cold(folder: Path) -> None:
    """Nothing of these files is in the page cache."""
    os.sync()
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if left := resident(path):
            raise RuntimeError(f"{left} bytes of {path} stay in the page cache")


def make_warm(folder: Path) -> None:
    """All of these files is in the page cache, also what is read past it."""
    for path in files_in(folder):
        path.read_bytes()
        if (found := resident(path)) < path.stat().st_blocks * 512 // 2:
            raise RuntimeError(f"only {found} bytes of {path} are in the page cache")


# The sides. Each is a folder, and a function that opens it and gives one that reads a batch.

Reader = Callable[[list[int]], Any]


class Side:
    at_once = BATCH
    """So many samples are asked for at once."""
    reads_ahead_kib: int | None = None
    """What its disk is to read ahead; None: whatever it does."""
    tells = 1
    """Where data are larger than memory, one of so many samples tells how long all would take."""

    def __init__(self, folder: Path, source: Samples) -> None:
        self.folder, self.source = folder, source
        folder.mkdir()
        self.fill()

    def fill(self) -> None:
        raise NotImplementedError

    def open(self) -> Reader:
        """In the process that reads."""
        raise NotImplementedError

    def into_batch(self, indices: list[int], read: Callable[[int, memoryview], None]) -> Tensor:
        batch = np.empty((len(indices), self.source.size), dtype=np.uint8)
        for row, idx in enumerate(indices):
            read(idx, memoryview(batch[row]))
        return torch.from_numpy(batch)


class Preads(Side):
    """One file, records of one size: the least that reading can be without a trick."""

    def fill(self) -> None:
        with open(self.folder / "all", "wb") as file:
            for sample in self.source:
                file.write(sample.numpy())

    def open(self) -> Reader:
        fd = os.open(self.folder / "all", os.O_RDONLY)
        size = self.source.size

        def read(idx: int, row: memoryview) -> None:
            if os.preadv(fd, [row], idx * size) != size:
                raise RuntimeError("the file ends early")

        return lambda indices: self.into_batch(indices, read)


class OneFileEach(Side):
    def fill(self) -> None:
        for idx, sample in enumerate(self.source):
            (self.folder / str(idx)).write_bytes(sample.numpy())

    def open(self) -> Reader:
        folder = str(self.folder)

        def read(idx: int, row: memoryview) -> None:
            with open(f"{folder}/{idx}", "rb", buffering=0) as file:
                file.readinto(row)

        return lambda indices: self.into_batch(indices, read)


class Lmdb(Side):
    tells = 16  # on a disk that reads 8 MiB ahead, all of 3 KB would take minutes

    def fill(self) -> None:
        room = 2 * self.source.count * (self.source.size + 4096)
        with lmdb.open(str(self.folder), map_size=room) as env, env.begin(write=True) as all_of_it:
            for idx, sample in enumerate(self.source):
                all_of_it.put(b"%08d" % idx, memoryview(sample.numpy()))

    def open(self) -> Reader:
        env = lmdb.open(str(self.folder), readonly=True, lock=False)
        transaction = env.begin(buffers=True)

        def read(idx: int, row: memoryview) -> None:
            row[:] = transaction.get(b"%08d" % idx)

        return lambda indices: self.into_batch(indices, read)


class Lmdb128(Lmdb):
    """As disks read ahead where nobody has set it otherwise."""

    reads_ahead_kib = 128
    tells = 1


class DiskCache(Side):
    def fill(self) -> None:
        with diskcache.Cache(str(self.folder), size_limit=2**40) as cache, cache.transact():
            for idx, sample in enumerate(self.source):
                cache[idx] = sample.numpy().tobytes()

    def open(self) -> Reader:
        cache = diskcache.Cache(str(self.folder))

        def read(idx: int, row: memoryview) -> None:
            row[:] = cache[idx]

        return lambda indices: self.into_batch(indices, read)


class Redb(Side):
    """By a program of its own, which copies values into a batch and tells of their first bytes."""

    def fill(self) -> None:
        command = [*READERS, "fill", str(self.folder), str(self.source.size)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as filling:
            assert filling.stdin is not None
            for sample in self.source:
                filling.stdin.write(sample.numpy())
        if filling.returncode:
            raise RuntimeError("redb was not filled")

    def open(self) -> Reader:
        return asked("redb", self.folder)


def asked(what: str, folder: Path) -> Reader:
    """A program that reads what it is asked for; of each, the first byte comes back."""
    pipe = subprocess.PIPE
    program = subprocess.Popen([*READERS, what, str(folder)], stdin=pipe, stdout=pipe)

    def read(indices: list[int]) -> Tensor:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(np.array([len(indices), *indices], dtype=np.uint64).tobytes())
        program.stdin.flush()
        answer = program.stdout.read(len(indices))
        return torch.frombuffer(bytearray(answer), dtype=torch.uint8)[:, None]

    read([0])  # it has opened what it reads
    return read


class Ours(Side):
    """Samples on disk alone: memory has no room for one."""

    compression: str | None = None

    def fill(self) -> None:
        with contextlib.closing(self.cached()) as dataset:
            dataset.warm(progress=False)
            if not dataset.flush() or dataset.stats().disk.filled != len(self.source):
                raise RuntimeError(f"not all samples are on disk: {dataset.stats()}")

    def cached(self, memory: int = 1) -> CachedDataset:
        room = self.source.count * (self.source.size + 1024) + 2**26
        return CachedDataset(
            self.source, memory, disk=room, disk_path=self.folder, fingerprint="bench", probe=0,
            verbose=False, compression=self.compression,
        )  # fmt: skip

    def open(self) -> Reader:
        dataset = self.cached()
        return dataset.batches.__getitem__


class Level(Ours):
    """The level's own reads, without batches and without Python."""

    at_once = 2**40

    def open(self) -> Reader:
        (folder,) = (path.parent for path in self.folder.rglob("store"))
        return asked("level", folder)


class Zstd(Ours):
    compression = "zstd"


class Lz4(Ours):
    compression = "lz4"


PEERS: dict[str, type[Side]] = {
    "preads": Preads, "one file each": OneFileEach, "LMDB": Lmdb, LMDB_128: Lmdb128, "redb": Redb,
    "diskcache": DiskCache, "ours": Ours, "level": Level, "zstd": Zstd, "lz4": Lz4,
}  # fmt: skip
ALIKE = {LMDB_128: "LMDB", "level": "ours"}
"""Sides that read what another one wrote."""


@contextlib.contextmanager
def folder_on_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="stocache-bench-"))
    paths_made.append(str(folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def sides_of(source: Samples, *names: str) -> Iterator[dict[str, Side]]:
    with folder_on_disk() as folder:
        sides: dict[str, Side] = {}
        for name in names:
            if name in ALIKE:
                sides[name] = PEERS[name].__new__(PEERS[name])
                sides[name].folder, sides[name].source = sides[ALIKE[name]].folder, source
            else:
                sides[name] = PEERS[name](folder / name.replace(" ", "-"), source)
        yield sides


def read_ahead_of(folder: Path) -> Path:
    """The file that says how much the disk of a folder reads ahead."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not (place / "queue").exists():  # a part of a disk
        place = place.parent
    return place / "queue" / "read_ahead_kb"


@contextlib.contextmanager
def reading_ahead(folder: Path, kib: int | None) -> Iterator[None]:
    """Files that are opened here are read ahead so far."""
    if kib is None:
        yield
        return
    path = read_ahead_of(folder)
    before = path.read_text()
    path.write_text(str(kib))
    try:
        yield
    finally:
        path.write_text(before)


def peers_here(table: Table) -> list[str]:
    """Those that can be measured; of the others it is said why not."""
    found = []
    try:
        path = read_ahead_of(Path(tempfile.gettempdir()))
        path.write_text(path.read_text())
        found.append(LMDB_128)
    except OSError as error:
        table.notes.append(f"{LMDB_128}: not measured, for its disk cannot be told so ({error})")
    if READERS:
        found.append("redb")
    else:
        table.notes.append("redb: not measured, for benches/readers could not be built")
    return found


def build_readers() -> list[str]:
    """The command of benches/readers, which is built if need be; none if that cannot be."""
    root = Path(__file__).resolve().parents[2]
    command = ["cargo", "build", "--release", "--quiet", "--manifest-path"]
    command += [str(root / "benches" / "readers" / "Cargo.toml"), "--target-dir"]
    command += [str(root / "build" / "readers")]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(command, check=True)
        return [str(root / "build" / "readers" / "release" / "readers")]
    return []


# Reading, two processes


def read_all(side: Side, warm: bool = False, group: Path | None = None) -> float:
    """Seconds for every record once, in an order that nobody knows before, by two processes."""
    make_warm(side.folder) if warm else make_cold(side.folder)
    with reading_ahead(side.folder, side.reads_ahead_kib):
        return _read_all(side, group)


def _read_all(side: Side, group: Path | None) -> float:
    tells = side.tells if group else 1
    order = random.sample(range(len(side.source)), len(side.source) // tells)
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(PROCESSES + 1)
    parts = [order[k::PROCESSES] for k in range(PROCESSES)]
    readers = [
        context.Process(target=_read_part, args=(side, part, begin, group)) for part in parts
    ]
    for reader in readers:
        reader.start()
    begin.wait(60)
    start = time.perf_counter()
    for reader in readers:
        reader.join()
    elapsed = time.perf_counter() - start
    if any(reader.exitcode for reader in readers):
        raise RuntimeError("a reader failed")
    return elapsed * tells


def _read_part(side: Side, part: list[int], begin: Any, group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    read = side.open()
    begin.wait(60)
    for at in range(0, len(part), side.at_once):
        indices = part[at : at + side.at_once]
        batch = read(indices)
        if not torch.equal(batch[:, 0], side.source.first_bytes(indices)):
            raise RuntimeError("a batch holds other bytes than it should")


def remove_group(group: Path) -> None:
    """Once all programs in it have ended, for which nobody has waited."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)
    group.rmdir()


@contextlib.contextmanager
def small_memory() -> Iterator[Path]:
    """A control group whose page cache is smaller than the data. Version 1 or 2, whichever is
    there."""
    places = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
    for place, limit in places:
        group = Path(place) / f"stocache-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / limit).write_text(str(GROUP))
            except OSError:
                continue
            yield group
            return
        finally:
            remove_group(group)
    raise RuntimeError("no control group can be made here: data larger than memory not measured")


def spread(times: Timings, side: str, other: str) -> str:
    """The least and the most of the ratios."""
    pairs = zip(times.seconds[side], times.seconds[other], strict=True)
    ratios = sorted(100 * a / b for a, b in pairs)
    return f"{statistics.median(ratios):.0f} %  ({ratios[0]:.0f} to {ratios[-1]:.0f} %)"


def report_reads(table: Table, what: str, times: Timings, least: float) -> None:
    for side in times.seconds:
        share = 100 * times.ratio("preads", side)
        words = spread(times, "preads", side)
        words += f"; {show_seconds(times.median('preads'))} / {show_seconds(times.median(side))}"
        if side == "ours":
            table.at_least(f"{what}: ours / preads", share, least, words, " %")
        elif side != "preads":
            table.info(f"{what}: {side} / preads", share, words)


def reads(table: Table, progress: Any, rounds: int) -> None:
    """Samples per second as a share of plain preads."""
    few = max(3, rounds // 3)
    targets = {"150 KB": (120, 75, 150), "3 KB": (250, 0, 200)}
    for name, (size, count) in SIZES.items():
        cold, warm, larger = targets[name]
        names = ["preads", "one file each", "LMDB", *peers_here(table), "ours"]
        with sides_of(Samples(size, count), *names) as sides:
            each = {key: lambda side=side: read_all(side) for key, side in sides.items()}
            times = interleave(each, few, progress, warmup=0)
            report_reads(table, f"{name}, cold", times, cold)
            if warm:
                each = {key: lambda side=side: read_all(side, True) for key, side in sides.items()}
                times = interleave(each, few, progress)
                report_reads(table, f"{name}, in the page cache", times, warm)
            with small_memory() as group:
                each = {
                    key: lambda side=side: read_all(side, group=group)
                    for key, side in sides.items()
                }
                times = interleave(each, few, progress, warmup=0)
            report_reads(table, f"{name}, larger than memory", times, larger)
            if name == "150 KB" and LMDB_128 in sides:
                ratio = times.ratio(LMDB_128, "ours")
                words = f"{ratio:.2f} x"
                what = f"{name}, larger than memory: {LMDB_128} / ours"
                table.at_least(what, ratio, 2, words, " x")


# Epochs through loaders


class AsDataset(Dataset[Tensor]):
    """A peer's samples, opened in the worker."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.read: Reader | None = None

    def __len__(self) -> int:
        return len(self.side.source)

    def __getitem__(self, idx: int) -> Tensor:
        self.read = self.read or self.side.open()
        return self.read([idx])[0]


def epoch(loader: Any, count: int) -> float:
    start = time.perf_counter()
    seen = sum(len(batch) for batch in loader)
    elapsed = time.perf_counter() - start
    if seen != count:
        raise RuntimeError(f"an epoch had {seen} samples, wanted {count}")
    return elapsed


def epochs(table: Table, progress: Any, rounds: int) -> None:
    """From disk alone, cold, the same loop over each; and against the level's own reads."""
    targets = {"150 KB": 2, "3 KB": 4}
    level = ["level"] if READERS else []
    peers = [peer for peer in peers_here(table) if peer == LMDB_128]
    for name, (size, count) in SIZES.items():
        with (
            sides_of(Samples(size, count), "LMDB", *peers, "diskcache", "ours", *level) as sides,
            contextlib.closing(sides["ours"].cached()) as dataset,  # type: ignore[attr-defined]
        ):
            loaders = {
                key: DataLoader(AsDataset(side), BATCH, shuffle=True, num_workers=PROCESSES)
                for key, side in sides.items()
                if key not in ("ours", "level")
            }
            loaders["ours"] = stocache.DataLoader(
                dataset, BATCH, shuffle=True, num_workers=PROCESSES
            )

            def cold_epoch(key: str, loaders: Any = loaders, sides: Any = sides) -> float:
                make_cold(sides[key].folder)
                with reading_ahead(sides[key].folder, sides[key].reads_ahead_kib):
                    return epoch(loaders[key], len(sides[key].source))

            each: dict[str, Any] = {key: lambda key=key: cold_epoch(key) for key in loaders}
            if level:
                each["level"] = lambda sides=sides: read_all(sides["level"])
            times = interleave(each, max(3, rounds // 3), progress, warmup=0)
        what = f"epoch from disk, {name}, cold"
        if level:
            share = 100 * times.ratio("level", "ours")
            words = spread(times, "level", "ours")
            table.at_least(f"{what}: speed / the level's own reads", share, 80, words, " %")
        else:
            table.notes.append("the level's own reads: not measured, as redb")
        least = {"LMDB": 1.2, LMDB_128: 1.2, "diskcache": targets[name]}
        for peer in filter(sides.__contains__, least):
            ratio = times.ratio(peer, "ours")
            words = f"{ratio:.2f} x  ({show_seconds(times.median(peer))} / "
            words += f"{show_seconds(times.median('ours'))})"
            table.at_least(f"{what}: {peer} / ours", ratio, least[peer], words, " x")


# Writing


Writer = contextlib.AbstractContextManager[Callable[[], object]]


def until_on_disk(folder: Path, writer: Callable[[Path], Writer]) -> float:
    """What it takes to write a folder until all of it is on the disk itself."""
    inside = folder / "written"
    inside.mkdir(mode=0o700)
    with writer(inside) as write:
        os.sync()
        start = time.perf_counter()
        write()
        os.sync()
        elapsed = time.perf_counter() - start
    shutil.rmtree(inside)
    os.sync()
    return elapsed


@contextlib.contextmanager
def plain_writer(source: Samples, folder: Path) -> Iterator[Callable[[], object]]:
    piece = memoryview(source.noise.numpy()[: min(2**20, len(source.noise))])

    def write() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            left = len(source) * source.size
            while left > 0:
                left -= file.write(piece[:left])

    yield write


@contextlib.contextmanager
def writer_of(kind: type[Side], source: Samples, folder: Path) -> Iterator[Callable[[], object]]:
    yield lambda: kind(folder / "side", source)


@contextlib.contextmanager
def warming_writer(source: Samples, folder: Path) -> Iterator[Callable[[], object]]:
    side = Ours.__new__(Ours)
    side.folder, side.source = folder, source
    with contextlib.closing(side.cached()) as dataset:
        yield lambda: (dataset.warm(progress=False), dataset.flush())
        if dataset.stats().disk.filled != len(source):
            raise RuntimeError(f"not all samples are on disk: {dataset.stats()}")


@contextlib.contextmanager
def level_writer(source: Samples, folder: Path) -> Iterator[Callable[[], object]]:
    """Without Python: claimed, sealed, put and flushed."""
    command = [*READERS, "write", str(folder / "level"), str(source.size), str(len(source))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdout.read(1)  # it has opened the level
        into, out_of = program.stdin, program.stdout
        yield lambda: (into.write(b"x"), into.flush(), out_of.read(1))
    if program.returncode:
        raise RuntimeError("the level was not written")


def writes(table: Table, progress: Any, rounds: int) -> None:
    """Until all of it is on the disk itself."""
    for name, (size, count) in SIZES.items():
        source = Samples(size, count)
        each: dict[str, Callable[[Path], Writer]] = {
            "plain": functools.partial(plain_writer, source),
            "one file each": functools.partial(writer_of, OneFileEach, source),
            "LMDB": functools.partial(writer_of, Lmdb, source),
            "warm()": functools.partial(warming_writer, source),
        }
        if READERS:
            each["ours"] = functools.partial(level_writer, source)
        with folder_on_disk() as folder:
            sides = {
                key: functools.partial(until_on_disk, folder, writer)
                for key, writer in each.items()
            }
            times = interleave(sides, max(3, rounds // 3), progress, warmup=1)
        for key in each:
            share, words = 100 * times.ratio("plain", key), spread(times, "plain", key)
            what = f"writing {name}, durable: {key} / one sequential file"
            if key == "ours":
                table.at_least(what, share, 80, words, " %")
            elif key != "plain":
                table.info(what, share, words)
        if not READERS:
            table.notes.append("writing without Python: not measured, as redb")


# Opening


def opens(table: Table, progress: Any, rounds: int) -> None:
    count = 100_000
    with sides_of(Samples(8, count), "ours") as sides:
        side: Any = sides["ours"]

        def reopen() -> float:
            start = time.perf_counter()
            dataset = side.cached()
            elapsed = time.perf_counter() - start
            if dataset.stats().disk.filled != count:
                raise RuntimeError(f"not all were found: {dataset.stats()}")
            dataset.close()
            return elapsed

        report_opening(
            table, count, interleave({"open": reopen}, max(3, rounds // 3), progress), 0.2
        )


def many(table: Table, progress: Any, rounds: int) -> None:
    """Without Python, which would take many minutes to write them; with the first read."""
    count = 10_000_000
    if not READERS:
        table.notes.append(f"opening {count:,} samples: not measured, as redb")
        return
    with folder_on_disk() as folder:
        with level_writer(Samples(32, count), folder) as write:
            write()
        ask_for_one = np.array([1, 0], dtype=np.uint64).tobytes()
        command = [*READERS, "level", str(folder / "level")]
        pipe = subprocess.PIPE

        def reopen() -> float:
            start = time.perf_counter()
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as program:
                assert program.stdin is not None and program.stdout is not None
                program.stdin.write(ask_for_one)
                answer = program.stdout.read(1)
                elapsed = time.perf_counter() - start
            if len(answer) != 1 or program.returncode:
                raise RuntimeError("the level was not opened")
            return elapsed

        report_opening(table, count, interleave({"open": reopen}, max(3, rounds // 3), progress), 2)


def report_opening(table: Table, count: int, times: Timings, limit: float) -> None:
    seconds = times.median("open")
    what = f"opening a level of {count:,} samples"
    table.at_most(what, seconds, limit, show_seconds(seconds), " s")


# A slow source, shares, hit rates


def sources(table: Table, progress: Any, rounds: int) -> None:
    """The first epoch, in which everything is written behind."""
    size, _ = SIZES["150 KB"]
    source = Samples(size, 1000, 0.003)
    with folder_on_disk() as folder:

        def plainly() -> float:
            loader = DataLoader(source, BATCH, shuffle=True, num_workers=PROCESSES)
            return epoch(loader, len(source))

        def ours() -> float:
            side = Ours.__new__(Ours)
            side.folder, side.source = folder / "ours", source
            side.folder.mkdir()
            with contextlib.closing(side.cached()) as dataset:
                loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=PROCESSES)
                elapsed = epoch(loader, len(source))
                if dataset.stats().disk.filled != len(source) and not dataset.flush():
                    raise RuntimeError(f"not all samples are on disk: {dataset.stats()}")
            shutil.rmtree(side.folder)
            return elapsed

        times = interleave({"plain": plainly, "ours": ours}, max(3, rounds // 3), progress)
    more = 100 * (times.ratio("ours", "plain") - 1)
    words = f"{more:+.1f} %  ({show_seconds(times.median('ours'))} / "
    words += f"{show_seconds(times.median('plain'))})"
    what = "first epoch, source of 3 ms, written to disk: more than without a cache"
    table.at_most(what, more, 5, words, " %")


def shares(table: Table, progress: Any, rounds: int) -> None:
    """Epochs with a share of the samples in memory and the rest on disk: no cliff between."""
    mpl.use("Agg")  # there may be no display
    from matplotlib import pyplot as plt

    size, count = SIZES["150 KB"]
    parts = (0, 25, 50, 75, 100)
    with sides_of(Samples(size, count), "ours") as sides, contextlib.ExitStack() as stack:
        side: Any = sides["ours"]
        each = {}
        for part in parts:
            room = 2**20 + 64 * count + count * (size + 256) * part // 100
            dataset = stack.enter_context(contextlib.closing(side.cached(room)))
            dataset.warm(progress=False)
            loader = stocache.DataLoader(dataset, BATCH, shuffle=True, num_workers=PROCESSES)
            for _ in range(2):  # what comes up into memory comes up
                epoch(loader, count)

            def cold_epoch(loader: Any = loader) -> float:
                make_cold(side.folder)
                return epoch(loader, count)

            each[str(part)] = cold_epoch
        times = interleave(each, max(3, rounds // 3), progress)
    found = [times.median(str(part)) for part in parts]
    between = [found[0] + (found[-1] - found[0]) * part / 100 for part in parts]
    ratio = found[2] / between[2]
    disk, half, memory = (show_seconds(found[i]) for i in (0, 2, -1))
    words = f"{ratio:.2f} x  ({disk} on disk, {half} half, {memory} in memory)"
    what = "half in memory, half on disk: epoch / middle of the two"
    table.at_most(what, ratio, 1.1, words, " x")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(parts, found, "o-", color="#1f6f9f", label="stocache.DataLoader")
    axes.plot(parts, between, "--", color="#555555", label="straight line")
    axes.set_xlabel("share in memory, the rest on disk (%)")
    axes.set_ylabel("epoch (s)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    caption(figure, f"{count} samples of 150 KB, cold page cache.")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=150)
    plt.close(figure)
    table.notes.append(f"plot: {PLOT}")


def rates(table: Table, progress: Any, rounds: int) -> None:
    """Shuffled epochs, replayed with each policy; and what an oracle would reach."""
    size, count, turns = 4096, 2000, 5
    source = Samples(size, count)
    for part in (10, 35, 50, 80):
        orders = [random.Random(turn).sample(range(count), count) for turn in range(turns)]
        found = {policy: replay(source, policy, part, orders) for policy in ("freeze", "lru")}
        found["optimum"] = optimum(orders, count * part // 100)
        words = ", ".join(f"{key} {100 * value:.1f} %" for key, value in found.items())
        what = f"hit rate with {part} % in memory: freeze, in points below the share"
        table.at_most(what, part - 100 * found["freeze"], 3, words, " points")


def replay(source: Samples, policy: str, part: int, orders: list[list[int]]) -> float:
    """The share of hits after the first epoch."""
    room = 2**16 + len(source) * 64 + len(source) * (source.size + 96) * part // 100
    with contextlib.closing(
        CachedDataset(source, room, policy=policy, fingerprint="bench", verbose=False)
    ) as dataset:
        for idx in orders[0]:
            dataset[idx]
        before = dataset.stats()
        for order in orders[1:]:
            for idx in order:
                dataset[idx]
        after = dataset.stats()
    asked = sum(map(len, orders[1:]))
    return (after.hits - before.hits) / asked


def optimum(orders: list[list[int]], room: int) -> float:
    """Belady's: what is needed latest makes room, or is not stored at all."""
    asked = [idx for order in orders for idx in order]
    when_next = [len(asked)] * len(asked)
    last: dict[int, int] = {}
    for at in range(len(asked) - 1, -1, -1):
        when_next[at] = last.get(asked[at], len(asked))
        last[asked[at]] = at
    held: dict[int, int] = {}
    hits = 0
    for at, idx in enumerate(asked):
        if idx in held:
            hits += at >= len(orders[0])
        held[idx] = when_next[at]
        if len(held) > room:
            del held[max(held, key=held.__getitem__)]
    return hits / (len(asked) - len(orders[0]))


# Packed, and ahead of use


def packed(table: Table, progress: Any, rounds: int) -> None:
    """What compression buys where samples compress: room, and speed of this disk."""
    size, count = SIZES["150 KB"][0], 2000
    with sides_of(Masks(size, count), "ours", "zstd", "lz4") as sides:
        room = {}
        for key, side in sides.items():
            with contextlib.closing(side.cached()) as dataset:  # type: ignore[attr-defined]
                room[key] = dataset.stats().disk.used_bytes
        each = {key: lambda side=side: read_all(side) for key, side in sides.items()}
        times = interleave(each, max(3, rounds // 3), progress, warmup=0)
    for way in ("zstd", "lz4"):
        less = room["ours"] / room[way]
        words = f"{less:.1f} x the room, {times.ratio('ours', way):.2f} x the speed, cold"
        table.at_least(f"masks of int64, compression={way!r}: room", less, 4, words, " x")


def ahead(table: Table, progress: Any, rounds: int) -> None:
    """Samples one by one, in an order that was announced or was not."""
    for name, (size, _) in SIZES.items():
        with (
            sides_of(Samples(size, 2000), "ours") as sides,
            contextlib.closing(sides["ours"].cached()) as dataset,  # type: ignore[attr-defined]
        ):

            def one_by_one(announce: bool, dataset: Any = dataset, sides: Any = sides) -> float:
                make_cold(sides["ours"].folder)
                order = random.sample(range(len(dataset)), len(dataset))
                start = time.perf_counter()
                if announce:
                    dataset.prefetch(order)
                for idx in order:
                    dataset[idx]
                return time.perf_counter() - start

            each = {
                "as they come": lambda go=one_by_one: go(False),
                "announced": lambda go=one_by_one: go(True),
            }
            times = interleave(each, max(3, rounds // 3), progress, warmup=0)
        ratio = times.ratio("as they come", "announced")
        words = spread(times, "as they come", "announced")
        what = f"{name}, one by one, cold: prefetch() / without"
        table.at_least(what, ratio, 1.2, words, " x")


SECTIONS = {
    "reads": reads, "epochs": epochs, "writes": writes, "opens": opens,
    "sources": sources, "shares": shares, "rates": rates, "packed": packed, "ahead": ahead,
    "many": many,
}  # fmt: skip
EXTRA = {"many": "open a level of 10 million samples: about 2 GB"}


if __name__ == "__main__":
    READERS += build_readers()
    sys.exit(run(__doc__ or "", SECTIONS, paths_made, EXTRA))
