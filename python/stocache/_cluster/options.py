"""The cluster below a cache, as the user asks for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from stocache import _C
from stocache._cluster import nodes, spawn
from stocache._cluster.address import parse, query_of, safely, shown
from stocache._cluster.cells import cell, in_cell
from stocache._cluster.secret import secret
from stocache.sizes import parse_size

# In the words of redis-py.
_SSL = "ssl"
_SPAWN = "spawn"
_SSL_FILES = {"ssl_ca_certs": "ca", "ssl_certfile": "cert", "ssl_keyfile": "key"}
_USE = 'use "redis://host:port,host:port", or "spawn" for a server on each node'


@dataclass(frozen=True)
class Cluster:
    """Servers, as ``redis://…``, with passwords."""

    url: str = field(repr=False)
    ttl: float | None = None
    secret: bytes | None = field(default=None, repr=False)
    """What the ranks of a job agreed on; None: that of this process."""
    job: str = field(default="", repr=False)
    """Whose servers these are, if a job runs them: those of other jobs may be the same."""

    def arguments(self, name: str, fingerprint: str) -> tuple[str, str, str, bytes, int]:
        """What the native side opens them with. The name is for people; whose samples they are, the
        fingerprint alone says."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "dataset"
        millis = 0 if self.ttl is None else max(1, int(self.ttl * 1000))
        return (self.url, plain, fingerprint, self.secret or secret(), millis)

    def open_below(self, records: _C.Records, name: str, fingerprint: str) -> None:
        records.open_cluster(*self.arguments(name, fingerprint))


def checked(
    cluster: Any, capacity_per_node: Any = None, ttl: Any = None, cluster_mode: Any = True,
    dataset_size: Any = None,
) -> Cluster | None:  # fmt: skip
    """What was asked for, if anything. A server of this node is started, unless there is one."""
    if cluster is None:
        for what, value in (
            ("capacity_per_node", capacity_per_node), ("ttl", ttl), ("dataset_size", dataset_size),
        ):  # fmt: skip
            if value is not None:
                raise ValueError(f"{what}= needs cluster=; {_USE}")
        return None
    if not isinstance(cluster, str):
        raise TypeError(f"cluster is a {type(cluster).__name__}; {_USE}")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float))):
        raise TypeError(f"ttl is {safely(ttl)}; a number of seconds is needed, or None")
    if ttl is not None and not 0 < ttl < 1e9:
        raise ValueError(f"ttl is {ttl}; use more than 0 seconds, or None to keep values")
    if cluster.partition(":")[0] == _SPAWN:
        policy = _policy(cluster)
        found = _spawned(capacity_per_node, cluster_mode, dataset_size, policy)
        return replace(found, ttl=ttl)
    if not cluster.startswith(("redis://", "rediss://")):
        raise ValueError(f"cluster is {shown(cluster)}; {_USE}")
    return Cluster(_of_those_that_run(cluster, capacity_per_node, dataset_size), ttl)


def _policy(cluster: str) -> str:
    """What the servers do when they are full: that of "spawn:allkeys-lru"."""
    policy = cluster.partition(":")[2]
    if cluster != _SPAWN and policy not in spawn.POLICIES:
        allowed = ", ".join(f"{_SPAWN}:{each}" for each in spawn.POLICIES)
        raise ValueError(f"cluster is {cluster!r}; use {_SPAWN}, {allowed}")
    return policy or spawn.NO_EVICTION


def _of_those_that_run(url: str, capacity_per_node: Any, dataset_size: Any) -> str:
    """Those of this node's cell, if it is said how large that has to be."""
    if capacity_per_node is not None and dataset_size is None:
        raise ValueError(
            f"capacity_per_node is {safely(capacity_per_node)}, but the servers are running "
            'already; set maxmemory there, or use cluster="spawn"; with dataset_size= it says '
            "which of them this node uses"
        )
    if dataset_size is None:
        return url
    if capacity_per_node is None:
        raise ValueError(
            "dataset_size= needs capacity_per_node=, what one server has room for: together they "
            "say how many servers hold one copy"
        )
    node, count = nodes.of_this_node()
    size = parse_size("dataset_size", dataset_size)
    capacity = parse_size("capacity_per_node", capacity_per_node)
    return in_cell(url, *cell(len(parse(url)), size, capacity, node, count))


def url_of(hosts: Any) -> str:
    """The servers of a list in Bagua's words: {"host": …, "port": …}."""
    if not isinstance(hosts, (list, tuple)) or not hosts:
        raise ValueError(
            f"hosts is {_kind(hosts)}; use a list such as "
            '[{"host": "10.0.0.1", "port": "7000"}], or None for a server on each node'
        )
    places = ",".join(_place(each) for each in hosts)
    ways = [{what: each[what] for what in (_SSL, *_SSL_FILES) if each.get(what)} for each in hosts]
    if any(way != ways[0] for way in ways):
        raise ValueError(
            "servers in hosts differ in their ssl options; all are talked to in the same way"
        )
    files = {ours: str(ways[0][what]) for what, ours in _SSL_FILES.items() if what in ways[0]}
    if files and _SSL not in ways[0]:
        raise ValueError(f'{", ".join(ways[0])} in hosts needs "ssl": True')
    return f"redis{'s' if _SSL in ways[0] else ''}://{places}{query_of(files)}"


def _kind(hosts: Any) -> str:
    """Not more of it: there may be a password."""
    return "empty" if isinstance(hosts, (list, tuple)) else f"a {type(hosts).__name__}"


def _place(host: Any) -> str:
    if not isinstance(host, dict) or not {"host"} <= set(host) <= {
        "host", "port", "username", "password", _SSL, *_SSL_FILES,
    }:  # fmt: skip
        given = sorted(host) if isinstance(host, dict) else type(host).__name__
        raise ValueError(
            f'{given!r} in hosts is no server; use {{"host": "10.0.0.1", "port": "7000"}}, with '
            '"username" and "password" if it asks for them, and "ssl", "ssl_ca_certs", '
            '"ssl_certfile" and "ssl_keyfile" for TLS'
        )
    name = str(host["host"])
    name = f"[{name}]" if ":" in name else name
    login = ""
    if host.get("password"):
        user, word = host.get("username") or "", host["password"]
        login = f"{quote(str(user), safe='')}:{quote(str(word), safe='')}@"
    return f"{login}{name}:{host.get('port', 6379)}"


def of_words(
    cluster: Any, capacity_per_node: Any, ttl: Any, *, backend: Any, hosts: Any,
    cluster_mode: Any, dataset_name: Any, writer_buffer_size: Any, dataset_size: Any = None,
) -> Cluster | None:  # fmt: skip
    """What was asked for, in our words or in Bagua's."""
    check_writer_buffer_size(writer_buffer_size)
    if dataset_name is not None and not isinstance(dataset_name, str):
        raise TypeError(f"dataset_name is {safely(dataset_name)}; a str is needed")
    if backend is None:
        if hosts is not None:
            raise ValueError('hosts= needs backend="redis"; or pass cluster="redis://host:port"')
        return checked(cluster, capacity_per_node, ttl, cluster_mode, dataset_size)
    if cluster is not None:
        raise ValueError("cluster and backend are both given; use one of them")
    found = of_bagua(backend, hosts, cluster_mode, capacity_per_node, dataset_size)
    return replace(found, ttl=ttl)


def check_writer_buffer_size(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"writer_buffer_size is {safely(size)}; a number of samples is needed")
    if size < 0:
        raise ValueError(f"writer_buffer_size is {size}; use 0 or more samples")


def of_bagua(
    backend: Any, hosts: Any, cluster_mode: Any, capacity_per_node: Any, dataset_size: Any = None
) -> Cluster:
    """The same in the words of Bagua, for whom capacities are those of servers that it starts."""
    if backend != "redis":
        raise ValueError(f'backend is {safely(backend)}; use "redis"')
    if hosts is not None:
        capacity = None if dataset_size is None else capacity_per_node
        return Cluster(_of_those_that_run(url_of(hosts), capacity, dataset_size))
    return _spawned(capacity_per_node, cluster_mode, dataset_size)


def _spawned(
    capacity_per_node: Any, cluster_mode: Any, dataset_size: Any, policy: str = spawn.NO_EVICTION
) -> Cluster:
    asked = spawn.CAPACITY_PER_NODE if capacity_per_node is None else capacity_per_node
    found = nodes.servers(parse_size("capacity_per_node", asked), bool(cluster_mode), policy)
    url = found.url
    if dataset_size is not None:
        size = parse_size("dataset_size", dataset_size)
        url = in_cell(url, *cell(found.count, size, found.least, found.place, found.count))
    return Cluster(url, secret=found.secret, job=found.job)
