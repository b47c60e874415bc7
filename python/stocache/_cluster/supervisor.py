"""Runs the server of a node for as long as somebody uses it; a program of its own.

    python -I -S supervisor.py < {"folder": …, "program": …, "config": …, "address": …}

It imports nothing of stocache, and no torch. Users hold a shared lock on the file ``users``;
whoever gets an exclusive one knows that there are none, however they ended. The server dies with
this process, whatever ends it. In the folder:

    users      locked by each user
    alive      locked by the supervisor
    address    where the server is, and its password: there only while it runs
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

_EVERY = 0.5  # seconds between two looks
_PATIENCE = 10.0  # seconds until a server answers
_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _answers(address: dict[str, Any]) -> bool:
    """Whether it is the server that was started, and not another program that took its port."""
    login = f"AUTH {address['user']} {address['password']}\r\n".encode()
    with contextlib.suppress(OSError):
        place = (address["host"], address["port"])
        with socket.create_connection(place, 1) as connection:
            connection.sendall(login)
            return connection.recv(64).startswith(b"+OK")
    return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The server, once it answers."""
    server = subprocess.Popen(
        [order["program"], "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, cwd="/", preexec_fn=partial(_die_with, os.getpid()),
    )  # fmt: skip
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        server.stdin.write(order["config"].encode())
        server.stdin.close()
    until = time.monotonic() + _PATIENCE
    address = order["address"]
    while time.monotonic() < until and server.poll() is None:
        if _answers(address):
            return server
        time.sleep(0.02)
    server.kill()
    server.wait()
    raise RuntimeError(f"{order['program']} does not start (it ended with {server.returncode})")


def _write(path: str, text: str) -> None:
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def main() -> None:
    order = json.load(sys.stdin)
    if os.fork():
        os._exit(0)  # nobody's child: who started it may end
    folder = order["folder"]
    users_at, address_at = os.path.join(folder, "users"), os.path.join(folder, "address")
    users = os.open(users_at, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    alive = os.open(
        os.path.join(folder, "alive"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        if not _try_lock(alive):
            raise RuntimeError("another supervisor is running")
        server = _start(order)
    except (OSError, RuntimeError) as error:
        print(f"error {error}", flush=True)
        return
    try:
        _write(address_at, json.dumps(order["address"]))
        print("ready", flush=True)
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        while server.poll() is None and not _try_lock(users):
            time.sleep(_EVERY)
    finally:
        _remove(address_at)
        # Who waits for the lock finds a file without a name, and starts over.
        if server.poll() is None:
            _remove(users_at)
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
