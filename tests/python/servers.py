"""Real servers for the tests of the cluster, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stocache._cluster import spawn

# Where `make test` puts Redis itself (tools/redis-server); the other program is Valkey, mostly.
_REDIS = Path(__file__).parents[2] / "build" / "redis" / "redis-server"


def programs() -> dict[str, str]:
    """The servers that are here, by name."""
    found = {}
    with contextlib.suppress(RuntimeError):
        program = spawn.find_program()
        found["Redis" if Path(program).name == "redis-server" else "Valkey"] = program
    redis = str(_REDIS) if os.access(_REDIS, os.X_OK) else shutil.which("redis-server")
    if redis is not None:
        found["Redis"] = redis
    return found


class Server:
    """A server of its own port, without a password unless ``config`` has one."""

    def __init__(
        self, config: str = "", port: int | None = None, program: str | None = None,
        tls: bool = False, at: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        found = programs()
        if program is not None and program not in found:
            pytest.skip(f"there is no {program} here; what is asked of it is not covered")
        if not found:
            pytest.skip("there is no valkey-server or redis-server; no real server is covered")
        path = found[program] if program is not None else next(iter(found.values()))
        self.port = port or spawn.free_port()
        listens = f"port 0\ntls-port {self.port}" if tls else f"port {self.port}"
        self.at = at
        both = f"{at} 127.0.0.2" if tls else at
        self.lines = f'{listens}\nbind {both}\nsave ""\nappendonly no\n{config}\n'
        self.path = path
        self.start()

    def start(self) -> None:
        """Also again at the same port, and empty."""
        self.process = subprocess.Popen(
            [self.path, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
        )
        self.process.stdin.write(self.lines.encode())
        self.process.stdin.close()
        while True:
            try:
                socket.create_connection((self.at, self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def host(self) -> dict[str, str]:
        return {"host": "127.0.0.1", "port": str(self.port)}

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def ask(port: int, *words: str | bytes, login: tuple[str, str] | None = None) -> list[bytes]:
    """The lines of the answers of a server, to a login and to one command."""
    commands = ([("AUTH", *login)] if login else []) + [words]
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        for command in commands:
            parts = [word.encode() if isinstance(word, str) else word for word in command]
            sent = b"*%d\r\n" % len(parts)
            connection.sendall(sent + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
    return answer.split(b"\r\n")[:-1]


def _port_of_member() -> int:
    """Free, as is the one for talks among members, ten thousand above."""
    start = os.getpid() % 1000 * 10
    for step in range(10_000):
        port = 20_000 + (start + step) % 12_000
        try:
            for each in (port, port + 10_000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


@contextmanager
def native_cluster(folder: Path, program: str | None = None) -> Iterator[list[Server]]:
    """Three servers that run as one native cluster, with a third of the slots each."""
    servers: list[Server] = []
    try:
        for at, (first, last) in enumerate(((0, 5460), (5461, 10922), (10923, 16383))):
            home = folder / f"member-{at}"
            home.mkdir()
            config = f"cluster-enabled yes\ndir {home}"
            servers.append(Server(config, _port_of_member(), program))
            port = servers[-1].port
            ask(port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            ask(port, "CLUSTER", "SET-CONFIG-EPOCH", str(at + 1))
            ask(servers[0].port, "CLUSTER", "MEET", "127.0.0.1", str(port))
        deadline = time.monotonic() + 60
        while not all(
            b"cluster_state:ok" in (info := ask(each.port, "CLUSTER", "INFO"))
            and b"cluster_known_nodes:3" in info
            for each in servers
        ):
            assert time.monotonic() < deadline, "the servers do not make a cluster"
            time.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.stop()
