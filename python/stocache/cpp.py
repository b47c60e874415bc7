"""Where a C++ project finds what it needs to build against this stocache."""

from __future__ import annotations

from stocache import _load

_PREFIX = _load.prefix()

cmake_prefix_path = str(_PREFIX / "share" / "cmake")
"""For CMake's ``-DCMAKE_PREFIX_PATH=``, so that ``find_package(stocache)`` finds it."""


def include_path() -> str:
    """The folder of ``stocache/stocache.h``, for other build systems."""
    return str(_PREFIX / "include")
