"""Servers of a URL one by one, for what is asked of each. The core reads the same text itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote, unquote

_PORT = 6379
_PLAIN, _TLS = "redis://", "rediss://"


@dataclass(frozen=True)
class Address:
    """Where a server is, and how to be let in."""

    host: str
    port: int
    user: str = field(repr=False)
    password: str = field(repr=False)
    scheme: str = _PLAIN

    def __str__(self) -> str:
        """As the core spells it, and without the password: for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Of this server alone, with its password."""
        user, password = quote(self.user, safe=""), quote(self.password, safe="")
        return f"{self.scheme}{f'{user}:{password}@' if password or user else ''}{self}"

    @property
    def is_encrypted(self) -> bool:
        return self.scheme == _TLS


def parse(url: str) -> list[Address]:
    """Who is let in stands before the first of them, or before each."""
    scheme = next((each for each in (_PLAIN, _TLS) if url.startswith(each)), None)
    if scheme is None:
        raise ValueError(f"{_shown(url)} is no list of servers; use redis://host:port,host:port")
    found: list[Address] = []
    user = password = ""
    places, _, _ = url.removeprefix(scheme).partition("?")
    for one in places.rstrip("/").split(","):
        login, at, place = one.strip().rpartition("@")
        if at:
            name, colon, word = login.partition(":")
            user, password = (unquote(name), unquote(word)) if colon else ("", unquote(name))
        if place.startswith("["):
            host, _, port = place[1:].partition("]")
            port = port.removeprefix(":")
        else:
            host, _, port = place.partition(":")
        if not host or not (port or str(_PORT)).isdecimal():
            raise ValueError(
                f"{place!r} in {_shown(url)} is no server; use redis://host:port,host:port"
            )
        found.append(Address(host, int(port or _PORT), user, password, scheme))
    return found


def _shown(url: str) -> str:
    """Without passwords."""
    scheme, found, places = url.rpartition("://")
    shown = ",".join(place.rpartition("@")[2] for place in places.split(","))
    return repr(f"{scheme}{found}{shown}")
