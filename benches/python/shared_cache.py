"""SharedCache against its speed and memory targets: one table, exit status 1 if one is missed.

python benches/python/shared_cache.py [--only hit fill ...] [--rounds N] [--with-demo] [--json PATH]
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import mmap
import multiprocessing as mp
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import Side, Table, interleave, run, show_seconds, timed
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

# stocache and stocaching are imported where they are used: the memory row compares a job with a
# cache to one without, and the latter must not carry the libraries of the former.
if TYPE_CHECKING:
    from stocache import SharedCache

SMALL = (3, 32, 32)  # 3 KB
LARGE = (3, 224, 224)  # 150 KB
BATCH = 256
GIB = 2**30
MIB = 2**20

paths_made: list[str] = []
"""Of every cache made here or in a child process, to see at the end that none was left behind."""


def new_cache(samples: int, dims: tuple[int, ...], gib: float | None = None) -> SharedCache:
    """A cache of uint8 samples with a slot for each (or of `gib` GiB)."""
    from stocache import SharedCache

    limit = gib if gib is not None else (samples * (bytes_of(dims) + 1) + 1) / GIB
    cache = SharedCache(limit, samples, dims, torch.uint8, verbose=False)
    if len(cache) != samples:
        raise RuntimeError(f"the cache has {len(cache)} slots, wanted {samples}")
    if cache.path is not None:
        paths_made.append(cache.path)
    return cache


def bytes_of(dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def batches(samples: int) -> Iterator[list[int]]:
    """Shuffled batches without end. Every side draws its own, so none finds the samples of its
    neighbour still in the processor's cache."""
    order = list(range(samples))
    while True:
        random.shuffle(order)
        for start in range(0, samples - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


# --- one hit ------------------------------------------------------------------------------------


def one_hit(table: Table, progress: tqdm[None], rounds: int) -> None:
    import stocaching

    samples, hits = 20_000, 10_000
    values = noise(samples, *SMALL)
    with contextlib.redirect_stdout(io.StringIO()):  # it announces itself on stdout
        peer = stocaching.SharedCache(1, samples, SMALL, torch.uint8)
    peer.array.copy_(values)
    peer.aux_array.fill_(1)
    order = [random.randrange(samples) for _ in range(hits)]

    with new_cache(samples, SMALL) as cache:
        for i in range(samples):
            cache.set_slot(i, values[i])
        for i in order[:100]:
            for found in (cache.get_slot(i), peer.get_slot(i)):
                if found is None or not torch.equal(found, values[i]):
                    raise RuntimeError(f"sample {i} did not come back as it was stored")

        # The call as users write it, attribute look-up and loop included, on every side.
        def ours() -> None:
            for i in order:
                cache.get_slot(i)

        def plain() -> None:
            for i in order:
                values[i]

        def theirs() -> None:
            for i in order:
                peer.get_slot(i)

        sides = {"ours": timed(ours), "plain": timed(plain), "theirs": timed(theirs)}
        times = interleave(sides, rounds, progress)

    each = {side: show_seconds(times.median(side) / hits) for side in sides}
    to_plain = times.ratio("ours", "plain")
    table.at_most(
        "one hit: get_slot / tensor[i]",
        to_plain,
        0.35,
        f"{to_plain:.2f}  ({each['ours']} / {each['plain']})",
    )
    to_peer = times.ratio("theirs", "ours")
    table.at_least(
        "one hit: stocaching 0.2.1 / get_slot",
        to_peer,
        8,
        f"{to_peer:.1f} x  ({each['theirs']} / {each['ours']})",
        " x",
    )


# --- a batch ------------------------------------------------------------------------------------


def small_batch(table: Table, progress: tqdm[None], rounds: int) -> None:
    """What get_many replaces is `torch.stack([array[i] for i in indices])`.

    The target is for samples that the processor's own cache holds: beyond that both sides wait for
    the same memory, and the ratio says more about the machine than about the code. The rows below
    the target show that case too, and torch.stack alone, with views made beforehand.
    """
    calls, near, far = 20, 500, 20_000
    values = noise(far, *SMALL)
    out = torch.zeros(BATCH, *SMALL, dtype=torch.uint8)
    near_batches, far_batches = batches(near), batches(far)

    with new_cache(far, SMALL) as cache:
        for i in range(far):
            cache.set_slot(i, values[i])
        check_batch(cache, values, next(far_batches), out)

        def over(
            work: Callable[[Any], object],
            draw: Iterator[list[int]],
            prepare: Callable[[list[int]], Any] = list,
        ) -> Side:
            def side() -> float:
                prepared = [prepare(next(draw)) for _ in range(calls + calls)]
                # The other sides had the processor's cache meanwhile: have it back first.
                for item in prepared[:calls]:
                    work(item)
                start = time.perf_counter()
                for item in prepared[calls:]:
                    work(item)
                return time.perf_counter() - start

            return side

        def views(indices: list[int]) -> list[torch.Tensor]:
            return [values[i] for i in indices]

        def gather(indices: list[int]) -> object:
            return cache.get_many(indices, out=out)

        def stack(indices: list[int]) -> torch.Tensor:
            return torch.stack(views(indices))

        sides = {
            "ours": over(gather, near_batches),
            "no out": over(cache.get_many, near_batches),
            "stack": over(stack, near_batches),
            "stack alone": over(torch.stack, near_batches, views),
            "ours far": over(gather, far_batches),
            "stack far": over(stack, far_batches),
        }
        times = interleave(sides, rounds, progress)

    each = {side: show_seconds(times.median(side) / calls) for side in sides}

    def against(slow: str, fast: str) -> tuple[float, str]:
        ratio = times.ratio(slow, fast)
        return ratio, f"{ratio:.1f} x  ({each[slow]} / {each[fast]})"

    ratio, words = against("stack", "ours")
    table.at_least("256 x 3 KB: torch.stack of views / get_many(out=)", ratio, 8, words, " x")
    table.info("the same without out", *against("stack", "no out"))
    table.info("torch.stack alone, views made before / get_many", *against("stack alone", "ours"))
    table.info("out of 60 MB, more than caches hold", *against("stack far", "ours far"))


def large_batch(table: Table, progress: tqdm[None], rounds: int) -> None:
    samples, size = 768 * MIB // bytes_of(LARGE), bytes_of(LARGE)
    source = noise(64, *LARGE)
    draw = batches(samples)
    out = torch.zeros(BATCH, *LARGE, dtype=torch.uint8)
    memmove, to = ctypes.memmove, out.data_ptr()

    with new_cache(samples, LARGE) as cache:
        for i in range(samples):
            cache.set_slot(i, source[i % len(source)])
        check_batch(cache, source, next(draw), out)
        whole = cache.array
        first, stride = whole.data_ptr(), whole.stride(0)
        # The first touch of a page through a mapping is a fault, not a copy: get it over with, on
        # both sides, should each have a mapping of its own.
        for start in range(0, samples, BATCH):
            ids = range(min(start, samples - BATCH), min(start + BATCH, samples))
            cache.get_many(ids, out=out)
            memmove(to, first + ids.start * stride, BATCH * size)

        def gather(threads: int) -> float:
            indices = next(draw)
            start = time.perf_counter()
            cache.get_many(indices, out=out, threads=threads)
            return time.perf_counter() - start

        def copy_rows() -> float:
            rows = [(to + k * size, first + i * stride) for k, i in enumerate(next(draw))]
            start = time.perf_counter()
            for target, origin in rows:
                memmove(target, origin, size)
            return time.perf_counter() - start

        def copy_block() -> float:
            origin = first + random.randrange(samples - BATCH) * stride
            start = time.perf_counter()
            memmove(to, origin, BATCH * size)
            return time.perf_counter() - start

        sides = {
            "ours": lambda: gather(1),
            "rows": copy_rows,
            "block": copy_block,
            "two": lambda: gather(2),
        }
        times = interleave(sides, 2 * rounds, progress, warmup=2)
        del whole

    def speed(side: str) -> str:
        return f"{BATCH * size / times.median(side) / GIB:.1f} GiB/s"

    def percent(slow: str, fast: str) -> tuple[float, str]:
        ratio = 100 * times.ratio(slow, fast)
        return ratio, f"{ratio:.0f} %  ({speed(fast)} / {speed(slow)})"

    ratio, words = percent("rows", "ours")
    table.at_least("256 x 150 KB: get_many(out=) / memcpy of the same rows", ratio, 85, words, " %")
    table.info("get_many(out=) / one memcpy of as many bytes in a row", *percent("block", "ours"))
    table.info("get_many(out=, threads=2) / memcpy of the same rows", *percent("rows", "two"))


def check_batch(
    cache: SharedCache, values: torch.Tensor, indices: list[int], out: torch.Tensor
) -> None:
    """A fast copy of the wrong bytes is no result."""
    wanted = values[[i % len(values) for i in indices]]
    for batch, found in (cache.get_many(indices), cache.get_many(indices, out=out)):
        if not found.all() or not torch.equal(batch, wanted):
            raise RuntimeError("get_many did not return what was stored")


# --- cold fill ----------------------------------------------------------------------------------


def cold_fill(table: Table, progress: tqdm[None], rounds: int) -> None:
    samples, size = 512 * MIB // bytes_of(LARGE), bytes_of(LARGE)
    source = list(noise(16, *LARGE))  # few: a sample that was just decoded is in the CPU's cache
    order = random.sample(range(samples), samples)
    work = [(i, source[k % len(source)]) for k, i in enumerate(order)]

    def ours() -> float:
        with new_cache(samples, LARGE) as cache:
            start = time.perf_counter()
            for i, value in work:
                cache.set_slot(i, value)
            elapsed = time.perf_counter() - start
            for i, value in work[:: samples // 8]:
                found = cache.get_slot(i)
                if found is None or not torch.equal(found, value):
                    raise RuntimeError(f"sample {i} did not come back as it was stored")
                del found
            return elapsed

    def copies() -> float:
        with fresh_mapping(samples * size) as first:
            rows = [(first + i * size, value.data_ptr()) for i, value in work]
            start = time.perf_counter()
            for target, origin in rows:
                ctypes.memmove(target, origin, size)
            return time.perf_counter() - start

    sides = {"ours": ours, "copies": copies}
    times = interleave(sides, max(3, rounds // 3), progress)
    ratio = times.ratio("ours", "copies")
    per_gib = {s: show_seconds(times.median(s) * GIB / (samples * size)) for s in sides}
    table.at_most(
        "cold fill, 150 KB: set_slot / memcpy into a new mapping",
        ratio,
        0.7,
        f"{ratio:.2f}  ({per_gib['ours']} / {per_gib['copies']} per GiB)",
    )


@contextlib.contextmanager
def fresh_mapping(size: int) -> Iterator[int]:
    """Address of `size` bytes of a new tmpfs file that has no name and no pages yet."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as mapping:
            anchor = ctypes.c_char.from_buffer(mapping)
            try:
                yield ctypes.addressof(anchor)
            finally:
                del anchor  # a mapping with a borrower cannot be closed
    finally:
        os.close(fd)


# --- construct and attach -----------------------------------------------------------------------


def construct(table: Table, progress: tqdm[None], rounds: int) -> None:
    # Small samples are the hard case: 8 GiB of them have 2.8 million states to keep.
    samples = 8 * GIB // (bytes_of(SMALL) + 1)
    children = max(3, rounds // 5)
    progress.reset(2 * children)
    made = []
    for _ in range(children):
        made.append(in_fresh_process(construct_here, samples, SMALL))
        progress.update()
    paths_made.extend(path for _, _, path in made)
    took = statistics.median(seconds for seconds, _, _ in made)
    touched = max(touched for _, touched, _ in made)
    table.less_than("construct 8 GiB: time", took * 1e3, 20, show_seconds(took), " ms")
    table.less_than(
        "construct 8 GiB: memory touched", touched / MIB, 16, f"{touched / MIB:.1f} MiB", " MiB"
    )

    attached = []
    with new_cache(samples, SMALL, gib=8) as cache:
        cache.set_slot(7, torch.full(SMALL, 7, dtype=torch.uint8))
        handle = pickle.dumps(cache)
        for _ in range(children):
            attached.append(in_fresh_process(attach_here, handle))
            progress.update()
    took = statistics.median(attached)
    table.less_than("attach to it from a spawned process", took * 1e3, 5, show_seconds(took), " ms")


def construct_here(samples: int, dims: tuple[int, ...]) -> tuple[float, int, str]:
    """Seconds, bytes touched and the path of the first cache that this process makes."""
    import stocache  # noqa: F401  (its import is not part of the construction)

    before = memory_of(os.getpid())["Rss"]
    start = time.perf_counter()
    cache = new_cache(samples, dims, gib=8)
    elapsed = time.perf_counter() - start
    with cache:
        if cache.path is None:
            raise RuntimeError("this cache is a memfd: no file to see what was touched")
        # What is both in the file and mapped counts twice: rather too much than too little.
        touched = os.stat(cache.path).st_blocks * 512 + memory_of(os.getpid())["Rss"] - before
        return elapsed, touched, cache.path


def attach_here(handle: bytes) -> float:
    import stocache  # noqa: F401  (its import is not part of the attachment)

    start = time.perf_counter()
    cache = pickle.loads(handle)
    elapsed = time.perf_counter() - start
    with cache:
        found = cache.get_slot(7)
        if found is None or int(found.sum()) != 7 * found.numel():
            raise RuntimeError("the spawned process attached to something else")
        return elapsed


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


# --- total memory -------------------------------------------------------------------------------


class Reduced(Dataset[torch.Tensor]):
    """Reads all of a sample and returns one number, so that batches weigh nothing."""

    def __init__(self, samples: int, cache: SharedCache | None) -> None:
        self.samples = samples
        self.cache = cache
        # One buffer for all samples: what malloc keeps of temporary ones is different in every run,
        # tens of MiB per worker, and would drown what is measured.
        self.prepared = torch.empty(LARGE, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> torch.Tensor:
        value = self.cache.get_slot(idx) if self.cache is not None else None
        if value is None:
            value = self.prepared.fill_(idx % 251)
            if self.cache is not None:
                self.cache.set_slot(idx, value)
        return value.max()  # not sum(), which makes a copy eight times as large


def total_memory(table: Table, progress: tqdm[None], rounds: int) -> None:
    workers = 4
    # Both jobs at the same time: the pages of libtorch that they share with each other, and with
    # whatever else runs here, then weigh the same in both sums.
    jobs = {kind: Job(kind, workers) for kind in ("cached", "plain")}
    progress.reset(len(jobs))
    try:
        for job in jobs.values():
            job.wait_until_read()
            progress.update()
        sums = {kind: sum_memory(job.pid) for kind, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.end()
    for kind, each in sums.items():
        if each["processes"] != workers + 1:
            raise RuntimeError(f"{kind}: {each['processes']} processes, wanted {workers + 1}")
    allocated, cached, plain = jobs["cached"].allocated, sums["cached"], sums["plain"]
    # Pages of the segment that no process has mapped are memory too, but in nobody's PSS.
    unmapped = max(0, allocated - cached["Pss_Shmem"])
    above = cached["Pss"] + unmapped - plain["Pss"]
    table.at_most(
        "memory of a full 1 GiB cache, 4 workers, above no cache",
        above / GIB,
        1.03,
        f"{above / GIB:.3f} GiB  ({cached['Pss'] / GIB:.3f} - {plain['Pss'] / GIB:.3f} GiB PSS)",
        " GiB",
    )
    tables = (cached["VmPTE"] - plain["VmPTE"]) / MIB
    table.info("page tables, which PSS does not count", tables, f"{tables:.1f} MiB")


class Job:
    """A training job in its own process, that reads its data twice and then holds still."""

    def __init__(self, kind: str, workers: int) -> None:
        context = mp.get_context("spawn")
        self.allocated = 0
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_job, args=(kind, workers, theirs))
        self.process.start()
        theirs.close()  # or its end would not be seen here
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait_until_read(self) -> None:
        if not self.connection.poll(300):
            raise TimeoutError("the job did not read its data within 5 minutes")
        try:
            path, self.allocated = self.connection.recv()
        except EOFError:
            raise RuntimeError("the job ended early, see its message above") from None
        if path is not None:
            paths_made.append(path)

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self.connection.send("end")
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_job(kind: str, workers: int, connection: Connection) -> None:
    samples = GIB // (bytes_of(LARGE) + 1)
    # More workers than processors, on purpose.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(new_cache(samples, LARGE, gib=1)) if kind == "cached" else None
        loader = DataLoader(
            Reduced(samples, cache),
            64,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            # As by default on Linux; a process that was itself spawned would spawn its workers.
            multiprocessing_context="fork",
        )
        wanted = sum(idx % 251 for idx in range(samples))
        for _ in range(2):  # the first epoch fills, the second reads
            if sum(int(batch.sum()) for batch in loader) != wanted:
                raise RuntimeError("the samples did not come back as they were stored")
        if cache is not None and cache.fill_fraction != 1:
            raise RuntimeError(f"the cache is filled to {cache.fill_fraction:.3f} only")
        path = cache.path if cache is not None else None
        connection.send((path, os.stat(path).st_blocks * 512 if path else 0))
        connection.recv()
        del loader  # ends the workers before their cache


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by name: Rss, Pss, Pss_Shmem, ... and VmPTE, the page tables."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    lines += Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def sum_memory(root: int) -> dict[str, int]:
    """Over a process and all its descendants."""
    parents = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name, in brackets, may itself hold blanks and brackets.
            stat = Path(f"/proc/{pid}/stat").read_text()
            parents[int(pid)] = int(stat.rpartition(")")[2].split()[1])
    family, last = {root}, set[int]()
    while family != last:
        last = set(family)
        family |= {pid for pid, parent in parents.items() if parent in last}
    each = [memory_of(pid) for pid in family]
    names = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "VmPTE")
    return {"processes": len(family)} | {name: sum(m[name] for m in each) for name in names}


# --- the demo -----------------------------------------------------------------------------------


def demo(table: Table, progress: tqdm[None], rounds: int) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
    progress.reset(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "demo.json"
        command = [
            sys.executable,
            str(script),
            "--json",
            str(figures),
            "--plot",
            f"{folder}/demo.png",
        ]
        # Its own table is for its own readers; here stdout holds one table only.
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        result = json.loads(figures.read_text())
    progress.update()
    percent = 100 * float(result["first_epoch_overhead"]["median"])
    table.at_most("demo: first epoch above no cache", percent, 2, f"{percent:+.1f} %", " %")


# --- from C++ and TorchScript -------------------------------------------------------------------


def cpp_program(name: str, progress: tqdm[None], *arguments: int) -> list[list[float]]:
    """The columns that a program of benches/cpp prints. It is built as a user's trainer would be:
    against the installed package."""
    import stocache

    root = Path(__file__).resolve().parents[2]
    tools = Path(sys.executable).parent  # pip puts cmake and ninja next to the interpreter
    build = root / "build" / "bench-cpp"
    configure = [
        str(tools / "cmake"), "-S", str(root / "benches" / "cpp"), "-B", str(build), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        f"-DCMAKE_PREFIX_PATH={stocache.cmake_prefix_path}",
    ]  # fmt: skip
    progress.set_postfix_str("compiling")
    for command in (configure, [str(tools / "cmake"), "--build", str(build), "--target", name]):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    progress.set_postfix_str("")
    printed = subprocess.check_output([str(build / name), *map(str, arguments)], text=True)
    progress.update()
    rows = [map(float, line.split()) for line in printed.splitlines()]
    return [list(column) for column in zip(*rows, strict=True)]


def cpp_hit(table: Table, progress: tqdm[None], rounds: int) -> None:
    select, hit = cpp_program("hit", progress, rounds)
    over = statistics.median(b - a for a, b in zip(select, hit, strict=True))
    table.at_most(
        "C++, one hit: get_slot above tensor.select(0, i)",
        over,
        150,
        f"{over:+.0f} ns  ({statistics.median(hit):.0f} ns / {statistics.median(select):.0f} ns)",
        " ns",
    )


def cpp_epoch(table: Table, progress: tqdm[None], rounds: int) -> None:
    for size, side in (("3 KB", 32), ("150 KB", 224)):
        memory, *sides = cpp_program("epoch", progress, rounds, side)
        for name, took in zip(
            ("stacked()", "copies", "views"), (sides[2], *sides[:2]), strict=True
        ):
            faster = statistics.median(a / b for a, b in zip(memory, took, strict=True))
            table.info(
                f"C++ DataLoader, epoch, {size}: tensors in memory / cached, {name}",
                faster,
                f"{faster:.2f} x  "
                f"({statistics.median(memory):.1f} ms / {statistics.median(took):.1f} ms)",
            )


class ScriptedHits(torch.nn.Module):
    """Looks up every sample of `order`, and counts the hits."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__()
        self.cache = cache.scripted()

    def forward(self, order: list[int]) -> int:
        hits = 0
        for i in order:
            if self.cache.get_slot(i) is not None:
                hits += 1
        return hits


def script_hit(table: Table, progress: tqdm[None], rounds: int) -> None:
    samples, hits = 20_000, 20_000
    with new_cache(samples, SMALL) as cache:
        cache.set_many(torch.arange(samples), noise(samples, *SMALL))
        order = [random.randrange(samples) for _ in range(hits)]
        scripted = torch.jit.script(ScriptedHits(cache))
        for _ in range(3):  # the profiling executor compiles in its first runs
            if scripted(order) != hits:
                raise RuntimeError("a sample was not found")
        times = interleave({"hits": timed(lambda: scripted(order))}, rounds, progress)
        each = 1e9 * times.median("hits") / hits
    table.at_most("TorchScript, one hit, loop included", each, 1000, f"{each:.0f} ns", " ns")


# --- huge pages ---------------------------------------------------------------------------------


def huge_pages(table: Table, progress: tqdm[None], rounds: int) -> None:
    from stocache import SharedCache

    samples = 512 * MIB // bytes_of(LARGE)
    limit = (samples * (bytes_of(LARGE) + 1) + 1) / GIB
    order = random.sample(range(samples), samples)
    value = noise(*LARGE)

    def make(huge: bool, backing: str) -> SharedCache:
        return SharedCache(
            limit, samples, LARGE, backing=backing, huge_pages=huge, shared=False, verbose=False
        )

    for backing in ("shm", "memfd"):
        try:
            make(True, backing).close()
            break
        except RuntimeError as error:
            missing = str(error)
    else:
        table.notes.append(f"huge pages were not measured: {missing}")
        return

    def fill(huge: bool) -> float:
        with make(huge, backing) as cache:
            start = time.perf_counter()
            for i in order:
                cache.set_slot(i, value)
            return time.perf_counter() - start

    fills = {"huge": lambda: fill(True), "small": lambda: fill(False)}
    times = interleave(fills, max(3, rounds // 3), progress)
    ratio = times.ratio("huge", "small")
    table.info(f"huge pages ({backing}), cold fill, 150 KB: huge / small", ratio, f"{ratio:.2f}")

    with make(True, backing) as huge, make(False, backing) as small:
        caches = {"huge": huge, "small": small}
        for cache in caches.values():
            if cache.path is not None:
                paths_made.append(cache.path)
            for i in order:
                cache.set_slot(i, value)
        first = {side: lambda c=cache: first_reads(c, order)[0] for side, cache in caches.items()}
        ratio = interleave(first, rounds, progress).ratio("huge", "small")
        table.info("huge pages, first epoch of a new worker: huge / small", ratio, f"{ratio:.2f}")
        taken = {side: first_reads(cache, order)[1] for side, cache in caches.items()}
        table.info(
            "huge pages, page tables per process and GiB: huge / small",
            taken["huge"] / taken["small"],
            " / ".join(f"{taken[side] * GIB / (512 * MIB) / MIB:.2f} MiB" for side in caches),
        )
        draws = batches(samples)
        out = torch.empty(BATCH, *LARGE, dtype=torch.uint8)
        gathers = {
            side: timed(lambda c=cache: c.get_many(next(draws), out=out))
            for side, cache in caches.items()
        }
        ratio = interleave(gathers, rounds, progress).ratio("huge", "small")
        table.info("huge pages, get_many of 256: huge / small", ratio, f"{ratio:.2f}")


def first_reads(cache: SharedCache, order: list[int]) -> tuple[float, int]:
    """Seconds and bytes of page tables that a new process needs to read one byte of each page."""
    receive, send = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_read_pages, args=(cache, order, send))
    process.start()
    elapsed, tables = receive.recv()
    process.join()
    return elapsed, tables


def _read_pages(cache: SharedCache, order: list[int], send: Connection) -> None:
    def tables() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmPTE:")[2].split()[0]) << 10

    before, start = tables(), time.perf_counter()
    for i in order:
        found = cache.get_slot(i)
        assert found is not None
        found.view(-1)[::4096].max()
    send.send((time.perf_counter() - start, tables() - before))


# --- all of it ----------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Table, Any, int], None]] = {
    "hit": one_hit,
    "small": small_batch,
    "large": large_batch,
    "fill": cold_fill,
    "construct": construct,
    "memory": total_memory,
    "cpp": cpp_hit,
    "cpp-epoch": cpp_epoch,
    "script": script_hit,
    "huge": huge_pages,
    "demo": demo,
}


if __name__ == "__main__":
    extra = {"demo": "run examples/demo.py as well"}
    sys.exit(run(__doc__ or "", SECTIONS, paths_made, extra))
