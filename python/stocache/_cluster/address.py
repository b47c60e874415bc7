"""Servers of a URL one by one, for what is asked of each. The core reads the same text itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlencode

_PORT = 6379
_PLAIN, _TLS = "redis://", "rediss://"
_FILES = ("ca", "cert", "key")
_KNOWN = (*_FILES, "cell")


@dataclass(frozen=True)
class Address:
    """Where a server is, and how to be let in."""

    host: str
    port: int
    user: str = field(repr=False)
    password: str = field(repr=False)
    scheme: str = _PLAIN
    files: tuple[tuple[str, str], ...] = ()
    """Of TLS: who signs certificates, and our own."""

    def __str__(self) -> str:
        """As the core spells it, and without the password: for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Of this server alone, with its password."""
        user, password = quote(self.user, safe=""), quote(self.password, safe="")
        login = f"{user}:{password}@" if password or user else ""
        return f"{self.scheme}{login}{self}{query_of(dict(self.files))}"

    @property
    def is_encrypted(self) -> bool:
        return self.scheme == _TLS


def query_of(files: dict[str, str]) -> str:
    """As it stands behind the servers."""
    return f"?{urlencode(files, safe='/', quote_via=quote)}" if files else ""


def split(url: str) -> tuple[str, str]:
    """The servers, and what stands behind them. A password may have a question mark, too."""
    for at, letter in enumerate(url):
        query = url[at + 1 :]
        known = query.startswith(tuple(f"{known}=" for known in _KNOWN))
        if letter == "?" and (known or "@" not in query):
            return url[:at], query
    return url, ""


def parse(url: str) -> list[Address]:
    """Who is let in stands before the first of them, or before each. Of a cell, those alone."""
    scheme = next((each for each in (_PLAIN, _TLS) if url.startswith(each)), None)
    if scheme is None:
        raise ValueError(f"{shown(url)} is no list of servers; use redis://host:port,host:port")
    found: list[Address] = []
    user = password = ""
    places, query = split(url.removeprefix(scheme))
    options = {}
    for part in query.split("&") if query else ():
        what, _, value = part.partition("=")
        if what not in _KNOWN or not value:
            known = ", ".join(f"{each}=" for each in _KNOWN)
            raise ValueError(f"nobody knows a word behind ? in {shown(url)}; use {known}")
        options[what] = unquote(value)
    files = tuple((what, options[what]) for what in _FILES if what in options)
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
                f"there is what is no server in {shown(url)}; use redis://host:port,host:port"
            )
        found.append(Address(host, int(port or _PORT), user, password, scheme, files))
    if "cell" in options:
        first, _, last = options["cell"].partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError(
                f"cell= is no range of servers in {shown(url)}; use one such as cell=0-3, or leave "
                "it to capacity_per_node= and dataset_size="
            )
        found = found[int(first) : int(last) + 1]
    return found


def safely(value: Any) -> str:
    """Any argument, as messages show it: servers may have been given where something else
    belongs."""
    if isinstance(value, str):
        return shown(value) if "://" in value or "@" in value else repr(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def shown(url: str) -> str:
    """What is surely none of a password: hosts and ports behind the last login."""
    scheme, _, rest = url.rpartition("://")
    _, login, places = rest.rpartition("@")
    plain = []
    for place in places.partition("?")[0].rstrip("/").split(","):
        _, colon, port = place.rpartition(":")
        plain.append(place if not colon or port.isdecimal() else "…")
    scheme = scheme if scheme in ("redis", "rediss") else "…"
    return repr(f"{scheme}://{'…@' if login else ''}{','.join(plain)}")
