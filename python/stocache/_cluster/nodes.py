"""Servers of all nodes of a job: each node runs one, and all ranks learn of all of them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from stocache._cluster import spawn
from stocache._cluster.secret import secret
from stocache._dataset import telling
from stocache._sharing import ranks
from stocache._sharing.launcher import job_or_program, local_ranks
from stocache.sizes import show_bytes

ADDRESS_VARIABLE = "STOCACHE_CLUSTER_ADDRESS"


@dataclass(frozen=True)
class Agreed:
    """What the ranks of a job have agreed on. Nothing of it is for the eyes of people."""

    url: str = field(repr=False)
    secret: bytes | None = field(repr=False)
    """None: that of each."""
    asked: tuple[int, str]
    """What this node's server was started with: its capacity_per_node, its policy."""
    least: int
    """The smallest capacity of all, as far as nodes have the memory."""
    place: int = 0
    """Of this node's server among all."""
    count: int = 1
    """So many servers."""
    job: str = field(default="", repr=False)
    """Which job this is: others have the same server."""


# Once for a job: the next dataset has the same servers, also if not all ranks make one.
_agreed: Agreed | None = None


def servers(capacity: int, several: bool, policy: str = spawn.NO_EVICTION) -> Agreed:
    """The servers of this job's nodes, or of this node alone, started unless they run."""
    number, count = ranks.rank_and_ranks(None, None)
    here = local_ranks()
    if not several or count <= here:
        server = spawn.join(capacity, policy=policy)
        mine = Agreed(
            spawn.url_of([server]), None, _asked(server), server["capacity"], job=job_or_program()
        )
        return _told(mine, (capacity, policy))
    global _agreed
    if _agreed is None:
        if not ranks.can_ask(count) or get_worker_info() is not None:
            raise ValueError(
                f"this job has {count} ranks, {here} of them on this node, and they cannot agree "
                "on servers: call torch.distributed.init_process_group() before, and do this in "
                "each rank, not in its workers; or start servers yourself and name all of them "
                '(cluster="redis://host:port,host:port", or hosts=); or keep each node to its own '
                "(cluster_mode=False)"
            )
        _agreed = _agree(number, count, capacity, policy)
    return _told(_agreed, (capacity, policy))


def _asked(server: dict[str, Any]) -> tuple[int, str]:
    return server["asked"], server["policy"]


def _told(agreed: Agreed, asked: tuple[int, str]) -> Agreed:
    if agreed.asked != asked:
        (capacity, policy), words = agreed.asked, []
        if capacity != asked[0]:
            words.append(f"capacity_per_node={show_bytes(capacity)}")
        if policy != asked[1]:
            words.append(f"the policy {policy}")
        telling.warn(
            f"the server of this node was started with {' and '.join(words)}, which counts; it "
            "ends with its last user"
        )
    return agreed


def _agree(number: int, count: int, capacity: int, policy: str) -> Agreed:
    """Two rounds: where everybody is, then what they run. Trouble of one is told to all."""
    places = _round(number, count, lambda: (_machine(), _towards_master()))
    address = spawn.LOOPBACK if len({machine for machine, _ in places}) == 1 else None

    def run() -> tuple[dict[str, Any], tuple[bytes, str] | None]:
        mine = address or _address(places[number], places)
        server = spawn.join(capacity, mine, policy)
        return server, (secret(), job_or_program()) if number == 0 else None

    found = _round(number, count, run)
    each = [(server["host"], server["port"]) for server, _ in found]
    different = list(dict.fromkeys(each))
    of_all, job = found[0][1]
    return Agreed(
        spawn.url_of([server for server, _ in found]), of_all, _asked(found[number][0]),
        min(server["capacity"] for server, _ in found), different.index(each[number]),
        len(different), job,
    )  # fmt: skip


def of_this_node() -> tuple[int, int]:
    """Which node this is, of how many, without asking anybody: each has as many ranks."""
    number, count = ranks.rank_and_ranks(None, None)
    found = ranks.presumed(number, count)
    return found.node, len(found.ranks_on)


def _round(number: int, count: int, act: Any) -> list[Any]:
    """What each rank came to; an error if one of them has trouble, in all of them."""
    try:
        said: tuple[str, Any] = ("", act())
    except Exception as error:
        said = (f"rank {number}: {error}", None)
    answers = ranks.exchanged(said, count)
    assert answers is not None, "can_ask was asked"
    for trouble, _ in answers:
        if trouble:
            raise RuntimeError(trouble)
    return [answer for _, answer in answers]


def _machine() -> str:
    """The same for those that reach each other by loopback: pretended nodes, say."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text().strip() if boot.exists() else socket.gethostname()
    with contextlib.suppress(OSError):
        known += os.readlink("/proc/self/ns/net")
    return known


def _towards_master() -> str:
    """The address of this node on the way to the first; empty if nobody says where that is."""
    master = os.environ.get("MASTER_ADDR")
    return _towards(master) if master else ""


def _towards(host: str) -> str:
    """The address from which this node would talk to that host. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def _address(mine: tuple[str, str], places: list[tuple[str, str]]) -> str:
    """Where this node's server listens: where the others reach it."""
    given = os.environ.get(ADDRESS_VARIABLE)
    if given:
        return _checked(given)
    if _reaches_others(mine[1]):
        return mine[1]
    # The first node may know itself by loopback alone: on the way to another, then.
    for machine, place in places:
        if machine != mine[0] and _reaches_others(place):
            towards = _towards(place)
            if _reaches_others(towards):
                return towards
    raise ValueError(
        f"nothing says at which address other nodes reach this one (MASTER_ADDR is "
        f"{os.environ.get('MASTER_ADDR')!r}); set {ADDRESS_VARIABLE} to it, on each node its own"
    )


def _reaches_others(address: str) -> bool:
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_unspecified)


def _checked(given: str) -> str:
    wrong = f"{ADDRESS_VARIABLE} is {given!r}; use the address of one interface of this node"
    try:
        if ip_address(given).is_unspecified:
            raise ValueError(f"{wrong}: all of them would expose the server")
    except ValueError as error:
        if str(error).startswith(wrong):
            raise
        # A name, then: servers are known by numbers, so that all nodes spell them the same.
        try:
            given = str(socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            raise ValueError(f"{wrong}, as a number such as 10.0.0.1") from None
    try:
        spawn.free_port(given)
    except OSError as error:
        raise ValueError(f"{wrong} ({error.strerror})") from None
    return given
