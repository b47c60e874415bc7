"""CacheLoader and RedisStore, by the names and in the words of Bagua."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from stocache import _C
from stocache._cluster.options import (
    CAPACITY_PER_NODE,
    Cluster,
    check_writer_buffer_size,
    of_bagua,
)
from stocache._dataset import telling

_FLUSH_SECONDS = 4.0
_NAME = "store"


class RedisStore:
    """Values of any type that CachedDataset stores, by text keys, on Redis or Valkey servers.

    Args:
        hosts: Servers that run, each ``{"host": …, "port": …}`` with ``username`` and ``password``
            if they ask for them; None starts one on this node, or joins it.
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
        self._servers.open(*cluster.arguments(_NAME, _C.fingerprint_of(_NAME)))
        self._told = False
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
        found = self._servers.get(_digest(key))
        self._tell()
        if found is None:
            return default
        schema, record = found
        try:
            return _C.codec_decode(schema, record, False)
        except (ValueError, ImportError, AttributeError):  # of a class that is no more
            return default

    def mset(self, mapping: Mapping[str, Any]) -> None:
        """Sends several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def mget(self, keys: Iterable[str]) -> list[Any]:
        """The values in the order of the keys; None where there is none."""
        return [self.get(key) for key in keys]

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
        self._servers.flush(_FLUSH_SECONDS)
        self._servers.close()

    def _tell(self) -> None:
        if news := self._servers.news():
            telling.warn(news)


class CacheLoader:
    """Values that are computed once and kept on servers: ``loader.get(key, load_fn)``.

    Args:
        backend: "redis".
        dataset_name: In front of every key, so that several loaders share the servers.
        writer_buffer_size: Bagua's. Values are sent at once here, without waiting, and what waits
            to be sent has a bound in bytes.
        kwargs: Those of :class:`RedisStore`: ``hosts``, ``cluster_mode``, ``capacity_per_node``.
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if backend != "redis":
            raise ValueError(f'backend is {backend!r}; use "redis"')
        check_writer_buffer_size(writer_buffer_size)
        self.backend = backend
        self.dataset_name = dataset_name
        self.store = RedisStore(**kwargs)

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """The value of ``key``; ``load_fn(key)``, which is kept, if there is none. A kept None is a
        value, too."""
        name = f"{self.dataset_name}_{key}"
        value = self.store.get(name, _C.MISS)
        if value is not _C.MISS:
            return value
        value = load_fn(key)
        try:
            self.store.set(name, value)
        except Exception as error:  # the value counts, not whether it can be kept
            if not self.store._told:
                self.store._told = True
                telling.warn(f"values such as that of key {key!r} are not kept: {error}")
        return value

    def num_keys(self) -> int:
        """How many values the store has, those of other loaders included."""
        return self.store.num_keys()


def _digest(key: Any) -> bytes:
    return hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _reopened(cluster: Cluster) -> RedisStore:
    store = RedisStore.__new__(RedisStore)
    store._open(cluster)
    return store


def _flush(store: weakref.ref[RedisStore]) -> None:
    with contextlib.suppress(Exception):  # it was shut down
        if (mine := store()) is not None:
            mine.flush(_FLUSH_SECONDS)
