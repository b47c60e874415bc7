"""A process that has torch already and forks the scripts that the tests run.

To import torch takes a script longer than what most of them are about. A forked one runs its file
by the interpreter's own function for that, and ends as the interpreter ends. stocache it imports
itself. test_zygote.py compares it with one that was started fresh."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

# What the interpreter, the C library or torch look at when they start.
AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "TORCH", "PYTORCH", "CUDA_")


def at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_START)}


class Zygote:
    """Lives as long as this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Pipes as a script has, since Python looks at what it is given; no terminal's Ctrl-C.
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def fork(self, command: list[str], cwd: Path, environment: dict[str, str]) -> Forked:
        stdin, to = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        status, told = os.pipe()
        request = json.dumps([command, str(cwd), environment]).encode()
        try:
            socket.send_fds(self.requests, [request], [stdin, stdout, stderr, told])
        finally:
            for fd in (stdin, stdout, stderr, told):
                os.close(fd)
        return Forked(command, (to, out, err), status)


@functools.cache
def mine(pid: int) -> Zygote:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return Zygote({**os.environ, "PYTHONPATH": path})


def suits(environment: dict[str, str]) -> bool:
    """Whether a script with this environment starts as the zygote did."""
    return at_start(environment) == at_start(mine(os.getpid()).environment)


def fork(command: list[str], cwd: Path, environment: dict[str, str]) -> Forked:
    """As Popen with pipes and a session of its own, for [interpreter, file, argument, ...]."""
    return mine(os.getpid()).fork(command, cwd, environment)


class Forked:
    """What tests ask of a Popen, for a child of a zygote."""

    def __init__(self, command: list[str], pipes: tuple[int, int, int], status: int) -> None:
        self.args = command
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = map(open, pipes, "wrr")
        self.status = os.fdopen(status, "rb", buffering=0)
        self.pid = self._told()

    def _told(self) -> int:
        """The next number that the zygote says of it."""
        said = self.status.read(4)
        assert len(said) == 4, "the zygote died"
        return int.from_bytes(said, sys.byteorder)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._told())
            self.status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Gives it a few words, and takes all that it says until it ends."""
        end = time.monotonic() + timeout if timeout else None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it reads no more, or was told so
            self.stdin.write(text)
            self.stdin.close()
        said: dict = {pipe: b"" for pipe in (self.stdout, self.stderr) if not pipe.closed}
        reading = set(said)
        while reading:
            ready = select.select(list(reading), [], [], end and max(0, end - time.monotonic()))[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            for pipe in ready:
                more = os.read(pipe.fileno(), 1 << 16)
                said[pipe] += more
                if not more:
                    reading.remove(pipe)
        self.wait(end and max(0, end - time.monotonic()))
        out, err = (
            said[pipe].decode(pipe.encoding).replace("\r\n", "\n").replace("\r", "\n")
            for pipe in (self.stdout, self.stderr)
        )
        return out, err


# In the zygote


def serve(requests: socket.socket) -> list:
    """Forks for each request, and says of each child how it ended. Returns in the children only,
    with the request; ends when nobody can ask any more."""
    answers: dict[int, int] = {}  # by pid
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            woken.recv(1 << 12)
            for pid, answer in list(answers.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    tell(answer, status)
                    os.close(answers.pop(pid))
        if requests in ready:
            message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                for fd in (*fds, *answers.values()):
                    os.close(fd)
                for end in (requests, woken, wake):
                    end.close()
                return json.loads(message)
            answers[pid] = fds.pop()
            tell(answers[pid], pid)
            for fd in fds:
                os.close(fd)


def tell(answer: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(answer, number.to_bytes(4, sys.byteorder))


def run(command: list[str], cwd: str, environment: dict[str, str]) -> None:
    """What the interpreter does that is started with this command."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    file = command[1]
    sys.orig_argv, sys.argv, sys.path[0] = command, command[1:], os.path.dirname(file)
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    # By chance, as the one that was forked from had been; random does so itself.
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    libc = ctypes.CDLL(None)
    # To free what torch's libraries hold takes longer than most scripts: the process ends before
    # that, after what was registered since, and with the output of C written.
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(os.fsencode(file), b"rb"))
    # Shows an exception that nobody caught, and does not return from sys.exit.
    if ctypes.pythonapi.PyRun_SimpleFileExFlags(stream, os.fsencode(file), True, None) != 0:
        # Shown already. What the interpreter does after an exception, which is another thing after
        # Ctrl-C, it does for this one.
        sys.excepthook = lambda *_: None
        raise sys.last_value


if __name__ == "__main__":
    import torch

    gc.freeze()  # at their end, scripts need not look through what torch has made
    run(*serve(socket.socket(fileno=int(sys.argv[1]))))
