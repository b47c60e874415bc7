"""stocache: training samples in shared memory, for every process of a job.

>>> from stocache import SharedCache, get_shm_size
"""

from stocache import _load

_load.load()

from stocache._C import UnsupportedSample  # noqa: E402
from stocache._dataset.batches import collate  # noqa: E402
from stocache._dataset.stats import CachedDatasetStats, ClusterStats, DiskStats  # noqa: E402
from stocache._torch.ops import handle  # noqa: E402
from stocache._types.registry import register_type  # noqa: E402
from stocache.augment import Pipeline, fuse  # noqa: E402
from stocache.bilevel import BiLevelCachedDataset  # noqa: E402
from stocache.cache_loader import CacheLoader  # noqa: E402
from stocache.cached_dataset import CachedDataset  # noqa: E402
from stocache.cpp import cmake_prefix_path, include_path  # noqa: E402
from stocache.file_cache import DataCache, FileCache, FileCacheStats  # noqa: E402
from stocache.lazy_shard import LazyShardDataset  # noqa: E402
from stocache.loader import DataLoader  # noqa: E402
from stocache.local_store import LocalStore  # noqa: E402
from stocache.node import get_shm_size, sweep  # noqa: E402
from stocache.planner import Plan, plan  # noqa: E402
from stocache.shared_cache import SharedCache, SharedCacheStats  # noqa: E402
from stocache.stores import ClusterStore, RedisStore  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "BiLevelCachedDataset",
    "CacheLoader",
    "CachedDataset",
    "CachedDatasetStats",
    "ClusterStats",
    "ClusterStore",
    "DataCache",
    "DataLoader",
    "DiskStats",
    "FileCache",
    "FileCacheStats",
    "LazyShardDataset",
    "LocalStore",
    "Pipeline",
    "Plan",
    "RedisStore",
    "SharedCache",
    "SharedCacheStats",
    "UnsupportedSample",
    "cmake_prefix_path",
    "collate",
    "fuse",
    "get_shm_size",
    "handle",
    "include_path",
    "plan",
    "register_type",
    "sweep",
]
