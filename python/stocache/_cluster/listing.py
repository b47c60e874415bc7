"""What is on servers, whoever put it there: for `stocache ls --cluster`.

Asks with a few commands of its own and changes nothing. A value is not looked at, only its name
and its length.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from stocache._cluster.address import Address, parse

_PREFIX = b"stocache:"
_AT_ONCE = 1000  # names that are asked for, or about
_PINGS = 100
_PATIENCE = 5.0  # seconds for an answer
_LONGEST_TALK = 60.0  # seconds for all that is asked of a server
_LONGEST = 1 << 20  # of an answer, in bytes or in parts
_DEEPEST = 4  # lists in lists
_MOST_LISTS = 1 << 20  # of names; who gives more has no end


class _Refused(Exception):
    """A server says no, in its own words."""


class _TooLong(Exception):
    """A server talks without an end."""


@dataclass
class DatasetInfo:
    """A dataset on a server, as its values' names show it."""

    name: str
    fingerprint: str
    samples: int = 0
    bytes: int | None = 0
    """None: this user may not ask for it."""


@dataclass
class ServerInfo:
    """A server as `stocache ls --cluster` shows it."""

    address: str
    version: str = ""
    used_bytes: int = 0
    max_bytes: int = 0
    """0: it has no bound."""
    policy: str = ""
    """What it does when it is full."""
    latency: dict[str, float] = field(default_factory=dict)
    """Seconds for an answer of no bytes: p50, p90, p99."""
    datasets: list[DatasetInfo] = field(default_factory=list)
    trouble: str = ""
    """Why it could not be asked."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def servers(url: str) -> list[ServerInfo]:
    """Each server of the URL, in its order. One in trouble says so."""
    return [_asked(address) for address in parse(url)]


def _asked(address: Address) -> ServerInfo:
    found = ServerInfo(str(address))
    try:
        with contextlib.closing(_Connection(address)) as connection:
            found.latency = _latency(connection)
            _tell_of_itself(connection, found)
            found.datasets = _datasets(connection)
    except _TooLong:
        found.trouble = f"it takes longer than {_LONGEST_TALK:.0f} s to say what it holds"
    except (OSError, EOFError, _Refused) as error:
        found.trouble = _plain(str(error)) or type(error).__name__
    except (ValueError, TypeError, AttributeError):  # what it says makes no sense
        found.trouble = "it is no Redis server, or one of another kind"
    return found


class _Reads(io.RawIOBase):
    """What comes, for so long: also of a server that sends a byte now and then."""

    def __init__(self, socket: socket.socket, until: float) -> None:
        self._socket, self._until = socket, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if time.monotonic() > self._until:
            raise _TooLong
        return self._socket.recv_into(buffer)


class _Connection:
    """Questions and answers, each with a bound on its time and its length."""

    def __init__(self, address: Address) -> None:
        until = time.monotonic() + _LONGEST_TALK
        self._socket = socket.create_connection((address.host, address.port), _PATIENCE)
        try:
            if address.is_encrypted:
                files = dict(address.files)
                context = ssl.create_default_context(cafile=files.get("ca"))
                if "cert" in files:
                    context.load_cert_chain(files["cert"], files.get("key"))
                self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
            self._file = io.BufferedReader(_Reads(self._socket, until), 1 << 16)
            if address.password:
                user = [address.user] if address.user else []
                try:
                    self.ask("AUTH", *user, address.password)
                except _Refused as error:  # it may repeat the password
                    raise _Refused(_of_login(str(error), address)) from None
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def ask(self, *words: str | bytes) -> Any:
        (answer,) = self.ask_all([words])
        if isinstance(answer, _Refused):
            raise answer
        return answer

    def ask_all(self, commands: list[tuple[str | bytes, ...]]) -> list[Any]:
        """Sends them all, then reads the answers."""
        sent = b""
        for words in commands:
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            sent += b"*%d\r\n" % len(parts)
            sent += b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(sent)
        return [self._answer() for _ in commands]

    def _answer(self, depth: int = 0) -> Any:
        line = self._file.readline(_LONGEST)
        if not line.endswith(b"\r\n"):
            raise EOFError("it closes the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            return _Refused(f"it says {rest.decode('utf-8', 'replace')!r}")
        length = int(rest)
        if kind == b":":
            return length
        if kind not in (b"$", b"*") or length > _LONGEST or depth > _DEEPEST:
            raise ValueError
        if length < 0:
            return None
        if kind == b"*":
            return [self._answer(depth + 1) for _ in range(length)]
        words = self._file.read(length + 2)
        if len(words) != length + 2:
            raise EOFError("it closes the connection")
        return words[:-2]


def _of_login(said: str, address: Address) -> str:
    code = re.search(r"[A-Z]+", said)
    known = f"{address.user} {address.password}"
    if code and code[0] not in known:
        return f"it says {code[0]} to the login"
    return "it does not let us in"


def _latency(connection: _Connection) -> dict[str, float]:
    seconds = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.ask("PING")
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    return {f"p{part}": seconds[part * _PINGS // 100] for part in (50, 90, 99)}


def _tell_of_itself(connection: _Connection, found: ServerInfo) -> None:
    (answer,) = connection.ask_all([("INFO",)])
    if isinstance(answer, _Refused):
        return  # not everybody may ask
    lines = answer.decode("utf-8", "replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    valkey = fields.get("valkey_version")
    found.version = _plain(
        f"Valkey {valkey}" if valkey else f"Redis {fields.get('redis_version', '?')}"
    )
    found.used_bytes = int(fields.get("used_memory", 0))
    found.max_bytes = int(fields.get("maxmemory", 0))
    found.policy = _plain(fields.get("maxmemory_policy", ""))


def _plain(text: str) -> str:
    """Without what would do something to a terminal: others write to servers, too."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _datasets(connection: _Connection) -> list[DatasetInfo]:
    found: dict[tuple[str, str], DatasetInfo] = {}
    seen: set[bytes] = set()
    for names in _names(connection):
        new = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(new)  # a name may come twice
        lengths = connection.ask_all([("STRLEN", name) for name in new])
        for name, length in zip(new, lengths, strict=True):
            parts = _plain(name.decode("utf-8", "replace")).split(":")
            which = (parts[1], parts[2]) if len(parts) == 4 else ("?", "")
            dataset = found.setdefault(which, DatasetInfo(*which))
            dataset.samples += 1
            if isinstance(length, _Refused) or dataset.bytes is None:
                dataset.bytes = None
            else:
                dataset.bytes += length
    return sorted(found.values(), key=lambda each: (each.name, each.fingerprint))


def _names(connection: _Connection) -> Iterator[list[bytes]]:
    cursor = b"0"
    for _ in range(_MOST_LISTS):
        cursor, names = connection.ask(
            "SCAN", cursor, "MATCH", _PREFIX + b"*", "COUNT", str(_AT_ONCE)
        )
        if names:
            yield names
        if cursor == b"0":
            return
    raise ValueError
