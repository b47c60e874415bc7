"""Options and fixtures of the Python tests, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import glob
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Spawned workers and child scripts import samples.py by name, whatever the current directory and
# pytest's import mode are.
sys.path.insert(0, str(HERE))

import kernel  # noqa: E402
import zygote  # noqa: E402


def own_shm_for_this_run() -> None:
    """Where permitted, the whole run gets a /dev/shm of its own, of the usual size: it neither
    sees nor disturbs the caches of other programs, and what it leaves behind is surely its own."""
    size = os.statvfs("/dev/shm")
    with contextlib.suppress(OSError):
        kernel.mount_shm(f"size={size.f_frsize * size.f_blocks}")


# A shell that starts a run in the background has it ignore Ctrl-C, and so all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

own_shm_for_this_run()  # before torch starts threads, which would stay behind in the old namespace

torch = pytest.importorskip("torch")
import stocache  # noqa: E402
from far import make_far  # noqa: E402
from probe import probe_answer, probe_program, start_probe  # noqa: E402, F401

# A forked child hangs in OpenMP when its parent has ever run a parallel region. One thread in the
# parent keeps every forked child of every test usable, as DataLoader does for its workers.
torch.set_num_threads(1)

SERIAL = itertools.count()


def pytest_addoption(parser):
    parser.addoption(
        "--long", action="store_true", help="run the fault tests at their full counts (hours)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


CALL_FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "parts(n): with --long the test is n tests, each with one part of every count"
    )


def parts_of(node) -> int:
    """Into how many tests a long test is divided, so that several processes can share it."""
    marker = node.get_closest_marker("parts")
    return marker.args[0] if marker and node.config.getoption("--long") else 1


def pytest_generate_tests(metafunc):
    if (parts := parts_of(metafunc.definition)) > 1:
        metafunc.fixturenames.append("part")
        metafunc.parametrize("part", range(parts))


@pytest.fixture
def scale(request, record_property):
    """scale(quick, full): the count to use in this run."""
    long = request.config.getoption("--long")
    parts = parts_of(request.node)

    def chosen(quick, full):
        if long and type(full) is int:
            full //= parts
            record_property("count", full)
        return full if long else quick

    return chosen


def pytest_terminal_summary(terminalreporter):
    """A long run ends with its counts, and leaves them where `make test-long` asks for them."""
    lines = []
    for report in terminalreporter.getreports("passed"):
        counts = [str(n) for name, n in report.user_properties if name == "count"]
        if counts and report.when == "call":
            lines.append(f"{report.nodeid.rpartition('/')[2]}: {', '.join(counts)}")
    if lines:
        terminalreporter.section("counts")
        terminalreporter.write("\n".join(lines) + "\n")
        if path := os.environ.get("STOCACHE_COUNTS"):
            with open(path, "a") as file:
                file.write("\n".join(lines) + "\n")


# What must not be left behind


def shm_objects() -> set[str]:
    return set(glob.glob("/dev/shm/stocache-*"))


KEEPERS = ("multiprocessing.resource_tracker", "forkserver", zygote.__file__)


def child_pids() -> dict[int, str]:
    """This process's children, without the helpers that it keeps for its lifetime."""
    found = {}
    ours = ((pid, state) for pid, state, parent, _ in processes() if parent == os.getpid())
    for pid, state in ours:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue  # it ended while we looked
        cmdline = words.decode(errors="replace")
        keeper = any(name in cmdline for name in KEEPERS)
        if not keeper:
            found[pid] = f"{cmdline.strip() or '?'} (state {state})"
    return found


def processes() -> Iterator[tuple[int, str, int, int]]:
    """Number, state, parent and group of every process."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            yield int(entry), fields[0], int(fields[1]), int(fields[2])


def groups() -> list[tuple[int, str]]:
    """Process group and state of every process."""
    return [(group, state) for _, state, _, group in processes()]


def mount_points() -> set[str]:
    return {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}


def own_cgroups() -> set[str]:
    mine = f"/sys/fs/cgroup/memory/**/stocache-test-{os.getpid()}-*"
    return set(glob.glob(mine, recursive=True))


def held_by_strangers(path: str) -> bool:
    """Whether a process that is no descendant of this one has `path` open, so it is not ours."""
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == path and not descends_from_us(int(link.split("/")[2])):
                return True
        except OSError:
            continue
    return False


def descends_from_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fails a test that leaves a cache in /dev/shm, a process, a mount or a cgroup behind."""
    checks = (shm_objects, mount_points, own_cgroups)
    before = [check() for check in checks]
    children = set(child_pids())
    yield
    # Older ones of torch end the workers of an epoch that failed by a signal, after 5 s each: what
    # these hold goes when somebody looks.
    kills_workers = torch.__version__ < (2, 13)
    deadline = time.monotonic() + (60 if kills_workers else 10)
    objects = shm_objects() - before[0]
    while True:
        if kills_workers:
            stocache.sweep()
        objects &= shm_objects()  # what came later is another program's
        multiprocessing.active_children()  # waits for those that have ended
        left = [path for path in objects if not held_by_strangers(path)]
        left += [f"mount {m}" for m in mount_points() - before[1]]
        left += [f"cgroup {c}" for c in own_cgroups() - before[2]]
        orphans = {pid: what for pid, what in child_pids().items() if pid not in children}
        if not left and not orphans:
            return
        if time.monotonic() > deadline or request.node.stash.get(CALL_FAILED, True):
            break
        gc.collect()  # a cache in a cycle is not left behind; too slow to do after every test
        time.sleep(0.02)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left += [f"process {pid}: {what}" for pid, what in orphans.items()]
    # A failed test keeps its caches alive in its traceback; its failure is report enough.
    if not request.node.stash.get(CALL_FAILED, True):
        pytest.fail("left behind: " + "; ".join(left))


# Helpers


@pytest.fixture
def unique_name():
    """A function that returns a cache name no other test, run or user has."""
    return lambda: f"test-{os.getpid()}-{next(SERIAL)}-{random.SystemRandom().getrandbits(40):x}"


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make) is (folder, make(folder)): what the first test that asks has made, for all
    tests of the run, whichever process runs them. What is made is what JSON can hold."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
        folder, answer = base / f"once-{name}", base / f"once-{name}.json"
        with open(base / f"once-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not answer.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                answer.write_text(json.dumps(make(folder)))
        return folder, json.loads(answer.read_text())

    return made


@pytest.fixture
def seed():
    """A fresh seed, printed so that a failure can be repeated with STOCACHE_TEST_SEED."""
    value = int(os.environ.get("STOCACHE_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"STOCACHE_TEST_SEED={value}")
    return value


@pytest.fixture
def make_cache():
    """SharedCache without the start message; every cache made here is closed after the test."""
    made = []

    def make(size_limit_gib=0.01, dataset_len=8, data_dims=(4,), dtype=torch.uint8, **options):
        options.setdefault("verbose", False)
        cache = stocache.SharedCache(size_limit_gib, dataset_len, data_dims, dtype, **options)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def cached():
    """CachedDataset without the start message; every one made here is closed after the test."""
    made = []

    def make(dataset, memory="32MiB", **options):
        options.setdefault("verbose", False)
        made.append(stocache.CachedDataset(dataset, memory, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def cut():
    """Datasets cut before the first random step of their transform, closed afterwards."""
    made = []

    def make(dataset, memory="16MiB", **options):
        options = {"verbose": False, **options}
        made.append(stocache.CachedDataset.until_random(dataset, memory, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def far(tmp_path):
    """A folder with 24 files, some of them in sub-folders."""
    return make_far(tmp_path / "far", 24)


@pytest.fixture
def near(tmp_path):
    """A folder for copies, not made yet."""
    return str(tmp_path / "near")


@pytest.fixture
def log(tmp_path):
    """The file in which a source of sources.py notes its loads."""
    return str(tmp_path / "loads")


class Script:
    """A Python child that runs a script of its own, as a user's program would. It has torch before
    it starts, unless its environment could matter to that or the test asks for a fresh one."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.running: list[subprocess.Popen | zygote.Forked] = []

    def start(self, source: str, *args, prefix=(), env=None, fresh=False, **options):
        path = self.tmp_path / f"script{next(SERIAL)}.py"
        path.write_text(textwrap.dedent(source))
        environment = {**os.environ, **(env or {})}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(HERE), environment.get("PYTHONPATH")])
        )
        command = [*prefix, sys.executable, str(path), *map(str, args)]
        if fresh or prefix or options or not zygote.suits(environment):
            child = subprocess.Popen(
                command,
                cwd=self.tmp_path,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                **options,
            )
        else:
            child = zygote.fork(command, self.tmp_path, environment)
        self.running.append(child)
        return child

    def __call__(self, source: str, *args, timeout=120, check=True, **options):
        child = self.start(source, *args, **options)
        out, err = child.communicate(timeout=timeout)
        if check and child.returncode != 0:
            pytest.fail(f"script ended with {child.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def kill_group(self, child: subprocess.Popen | zygote.Forked) -> None:
        """SIGKILL for the script and everything it forked; returns when all of them are dead."""
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        while any(group == child.pid and state not in "ZX" for group, state in groups()):
            time.sleep(0.002)


@pytest.fixture
def run_script(tmp_path):
    script = Script(tmp_path)
    yield script
    for child in script.running:
        if child.poll() is None:
            script.kill_group(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()


def _report(send, function, args) -> None:
    torch.set_num_threads(1)
    try:
        send.send((True, function(*args)))
    except BaseException:
        send.send((False, traceback.format_exc()))


@pytest.fixture
def in_child():
    """in_child(f, *args) is f(*args) in a forked process. A death by signal (SIGBUS, SIGSEGV) or a
    hang fails the test instead of ending it."""
    context = multiprocessing.get_context("fork")
    started = []

    def run(function, *args, timeout=120):
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_report, args=(send, function, args))
        child.start()
        started.append(child)
        send.close()
        try:
            if not receive.poll(timeout):
                pytest.fail(f"{function.__name__} hangs: nothing after {timeout} s")
            good, value = receive.recv()
        except EOFError:
            child.join()
            pytest.fail(f"{function.__name__} died with exit code {child.exitcode}")
        finally:
            receive.close()
        child.join(timeout)
        if not good:
            pytest.fail(f"in the child:\n{value}")
        if child.exitcode != 0:
            pytest.fail(f"{function.__name__} ended with exit code {child.exitcode}")
        return value

    yield run
    for child in started:
        if child.is_alive():
            child.kill()
            child.join()


@pytest.fixture
def injected():
    """injected(f, fault) is f() in a child to which strace feeds that fault of a system call: in
    the thread that calls f; or in all of them, if the fault is one of the files ``paths``."""
    if not shutil.which("strace"):
        pytest.skip("strace is absent: failing system calls are not covered")
    fork, started = multiprocessing.get_context("fork"), []

    def run(function, fault, *paths):
        ready, gate = fork.Event(), fork.Event()
        receive, send = fork.Pipe(duplex=False)

        def body():
            ready.set()
            gate.wait(60)
            try:
                send.send((True, function()))
            except BaseException as error:
                send.send((False, repr(error)))

        child = fork.Process(target=body)
        child.start()
        started.append(child)
        send.close()
        assert ready.wait(60)
        call = fault.split(":")[0]
        command = ["strace", "-qq", "-o", "/dev/null", "-p", str(child.pid)]
        command += ["-f"] * bool(paths) + [word for path in paths for word in ("-P", str(path))]
        tracer = subprocess.Popen(
            [*command, "-e", f"trace={call}", "-e", f"inject={fault}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(tracer)
        while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{child.pid}/status").read_text():
            if tracer.poll() is not None:
                pytest.skip(f"strace may not attach ({tracer.stderr.read().strip()}): not covered")
            time.sleep(0.005)
        gate.set()
        try:
            good, value = receive.recv() if receive.poll(60) else (False, "it hangs")
        except EOFError:
            good, value = False, "it died"
        child.join(60)
        tracer.wait(60)
        tracer.stderr.close()
        receive.close()
        assert good and child.exitcode == 0, f"{fault}: {value}, exit code {child.exitcode}"
        return value

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait() if isinstance(process, subprocess.Popen) else process.join()


@pytest.fixture
def wait_until():
    """wait_until(condition, what) polls for an event that must come. Its deadline only turns a
    hang into a message."""

    def wait(condition, what: str, seconds: float = 60, nap: float = 0.002) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"still not so after {seconds} s: {what}")
            time.sleep(nap)

    return wait
