"""CacheLoader, by the name and in the words of Bagua."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stocache import _C
from stocache._cluster.address import safely
from stocache._cluster.options import check_writer_buffer_size
from stocache._dataset import telling
from stocache.local_store import LocalStore
from stocache.stores import RedisStore


class CacheLoader:
    """Values that are computed once and kept: ``loader.get(key, load_fn)``.

    Args:
        backend: "redis" keeps them on servers; "local" in memory that the processes of this node
            share, and on disk, without a server.
        dataset_name: In front of every key, so that several loaders share a store.
        writer_buffer_size: Bagua's. Values are sent at once here, without waiting, and what waits
            to be sent has a bound in bytes.
        kwargs: Those of :class:`RedisStore`: ``hosts``, ``cluster_mode``, ``capacity_per_node``; or
            those of :class:`LocalStore`: ``memory``, ``disk``, ``disk_path``, ``policy``, ``name``.
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if backend not in ("redis", "local"):
            raise ValueError(
                f'backend is {safely(backend)}; use "redis" for servers, "local" for this machine '
                "alone"
            )
        check_writer_buffer_size(writer_buffer_size)
        self.backend = backend
        self.dataset_name = dataset_name
        self.store: RedisStore | LocalStore
        self.store = RedisStore(**kwargs) if backend == "redis" else LocalStore(**kwargs)
        self._told = False

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
            if not self._told:
                self._told = True
                telling.warn(f"values such as that of key {key!r} are not kept: {error}")
        return value

    def num_keys(self) -> int:
        """How many values the store has, those of other loaders included."""
        return self.store.num_keys()
