"""stocache: training samples in shared memory, for every process of a job.

>>> from stocache import SharedCache, get_shm_size
"""

from stocache import _load

_load.load()

from stocache.node import get_shm_size, sweep  # noqa: E402
from stocache.shared_cache import SharedCache, SharedCacheStats  # noqa: E402

__version__ = "0.1.0"
__all__ = ["SharedCache", "SharedCacheStats", "get_shm_size", "sweep"]
