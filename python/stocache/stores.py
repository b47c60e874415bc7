"""RedisStore and ClusterStore, by the names and in the words of Bagua."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from stocache import _C
from stocache._cluster.address import parse, safely
from stocache._cluster.options import Cluster, of_bagua
from stocache._cluster.spawn import CAPACITY_PER_NODE
from stocache._dataset import telling
from stocache._sharing.sameness import digest

_FLUSH_SECONDS = 4.0
_NAME = "store"


class RedisStore:
    """Values of any type that CachedDataset stores, by text keys, on Redis or Valkey servers.

    Args:
        hosts: Servers that run, each ``{"host": …, "port": …}`` with ``username`` and ``password``
            if they ask for them; None starts one on this node, or joins it, for this job alone:
            other jobs have values of their own there.
        cluster_mode: False keeps each node to a server of its own.
        capacity_per_node: The most that a server started here may take.
    """

    def __init__(
        self,
        hosts: list[dict[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int | str = CAPACITY_PER_NODE,
    ) -> None:
        self._open(of_bagua("redis", hosts, cluster_mode, capacity_per_node))

    def _open(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._servers = _C.Servers()
        # Other jobs have nothing to do with what is on servers that this one runs.
        whose = digest(_NAME, cluster.job) if cluster.job else _NAME
        self._servers.open(*cluster.arguments(_NAME, _C.fingerprint_of(whose)))
        self._of_one: dict[str, RedisStore] = {}
        register_after_fork(self, RedisStore._flush_at_end)
        self._flush_at_end()

    def _flush_at_end(self) -> None:
        """What was set is there before this process ends, also one of multiprocessing."""
        Finalize(None, _flush, (weakref.ref(self),), exitpriority=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self._cluster,))

    def set(self, key: str, value: Any) -> None:
        """Sends a value, and does not wait. Values of types that are not stored are a TypeError."""
        schema, record = _C.codec_encode(value, False)
        self._servers.put(_digest(key), schema, record)
        self._tell()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` if there is none."""
        return self._get_many([key], default)[0]

    def _get_many(self, keys: list[str], default: Any) -> list[Any]:
        found = self._servers.get_many(b"".join(map(_digest, keys)))
        self._tell()
        return [default if value is None else _decoded(*value, default) for value in found]

    def mset(self, mapping: Mapping[str, Any]) -> None:
        """Sends several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def mget(self, keys: Iterable[str]) -> list[Any]:
        """The values in the order of the keys; None where there is none. All servers are asked
        before the first answer is waited for."""
        return self._get_many(list(keys), None)

    def route(self, key: str) -> RedisStore:
        """The store of the one server that has the value of a key."""
        address = self._servers.address_of(_digest(key))
        if address not in self._of_one:
            places = parse(self._cluster.url)
            mine = next((place for place in places if str(place) == address), None)
            if mine is None or len(places) == 1:
                return self
            self._of_one[address] = _reopened(replace(self._cluster, url=mine.url))
        return self._of_one[address]

    def num_keys(self) -> int:
        """How many values there are. Servers that do not answer have none."""
        self.flush()
        return sum(each["samples"] or 0 for each in self._servers.servers(True))

    def clear(self) -> None:
        """Removes these values, and no others, from all servers."""
        self._servers.clear()

    def status(self) -> bool:
        """Whether all servers answer."""
        return all(each["samples"] is not None for each in self._servers.servers(True))

    def servers(self) -> list[dict[str, Any]]:
        """What this process saw of each server, and what that holds."""
        return self._servers.servers(True)

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until what was set is there; says whether it is."""
        return self._servers.flush(timeout)

    def shutdown(self) -> None:
        """Lets the servers go. One that was started here ends with the last process that uses
        it."""
        for store in (*self._of_one.values(), self):
            with contextlib.suppress(RuntimeError):  # it was let go already
                store._flush_and_tell()
            store._servers.close()

    def _flush_and_tell(self) -> None:
        """What did not go in time is told: nobody will be asked for it any more."""
        if not self.flush(_FLUSH_SECONDS):
            while news := self._servers.news():
                telling.warn(news)

    def _tell(self) -> None:
        if news := self._servers.news():
            telling.warn(news)


class ClusterStore:
    """Several stores as one: each key has its own, in the words of Bagua.

    Args:
        stores: Such as :class:`RedisStore`. Who gives the same number of them in the same order
            finds the same values; one more at the end takes its share from all, and no other
            value moves.
    """

    def __init__(self, stores: Sequence[Any]) -> None:
        given, stores = stores, list(stores)
        if not stores or not all(callable(getattr(store, "mget", None)) for store in stores):
            raise ValueError(
                f"stores is {safely(given)}; use a list of stores, such as [RedisStore()]"
            )
        self.stores = stores

    def route(self, key: str) -> Any:
        """The store of a key."""
        return self.stores[self._route(key)]

    def _route(self, key: str) -> int:
        if len(self.stores) == 1:
            return 0
        mine = _digest(key)
        places = range(len(self.stores))
        return max(places, key=lambda at: _score(mine, at))

    def _by_store(self, keys: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for key in keys:
            found.setdefault(self._route(key), []).append(key)
        return found

    def set(self, key: str, value: Any) -> None:
        """Gives a value to its store."""
        self.route(key).set(key, value)

    def get(self, key: str, *default: Any) -> Any:
        """The value, or ``default`` if there is none."""
        return self.route(key).get(key, *default)

    def mset(self, mapping: Mapping[str, Any]) -> None:
        """Several values, to each store those that are its own."""
        for at, keys in self._by_store(mapping).items():
            self.stores[at].mset({key: mapping[key] for key in keys})

    def mget(self, keys: Iterable[str]) -> list[Any]:
        """The values in the order of the keys; None where there is none. Each store is asked
        once."""
        keys = list(keys)
        found: dict[str, Any] = {}
        for at, mine in self._by_store(dict.fromkeys(keys)).items():
            found.update(zip(mine, self.stores[at].mget(mine), strict=True))
        return [found[key] for key in keys]

    def num_keys(self) -> int:
        """How many values they have together."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        """Removes the values of all stores."""
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        """Whether all of them answer."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        """Lets all of them go."""
        for store in self.stores:
            store.shutdown()


def _digest(key: Any) -> bytes:
    return hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _score(digest: bytes, at: int) -> bytes:
    """Who scores highest has it (rendezvous hashing)."""
    return hashlib.blake2b(digest, digest_size=8, salt=at.to_bytes(16, "little")).digest()


def _decoded(schema: bytes, record: bytes, default: Any) -> Any:
    try:
        return _C.codec_decode(schema, record, False)
    except Exception:  # of a class that is no more, or that takes no such parts any more
        return default


def _reopened(cluster: Cluster) -> RedisStore:
    store = RedisStore.__new__(RedisStore)
    store._open(cluster)
    return store


def _flush(store: weakref.ref[RedisStore]) -> None:
    with contextlib.suppress(Exception):  # it was shut down
        if (mine := store()) is not None:
            mine._flush_and_tell()
