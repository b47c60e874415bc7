"""Sizes as people write them: bytes, "32GiB", a fraction of what is free; and of pages."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

from stocache import _C
from stocache._cluster.address import safely

_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1 << 10,
    "m": 1000**2, "mb": 1000**2, "mib": 1 << 20,
    "g": 1000**3, "gb": 1000**3, "gib": 1 << 30,
    "t": 1000**4, "tb": 1000**4, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_NEEDED = 'use a number of bytes, a text such as "32GiB", or a fraction such as 0.5 of what is free'


def parse_size(what: str, size: Any, free: Callable[[], int] | None = None) -> int:
    """The size in bytes; ``what`` is the name of the argument, for the message. A fraction is one
    of what is ``free``: of memory, unless something else is asked."""
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{what} is {safely(size)}; {_NEEDED}")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match or match[2].lower() not in _UNITS:
            raise ValueError(f"{what} is {safely(size)}; {_NEEDED}")
        number = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(
                f"{what} is {safely(size)}; a fraction is above 0 and at most 1; {_NEEDED}"
            )
        number = size * (free or free_memory)()
    else:
        number = size
    if not math.isfinite(number) or not 1 <= number < 1 << 62:
        raise ValueError(f"{what} is {safely(size)}; it must be from 1 byte to 2**62; {_NEEDED}")
    return int(number)


def free_memory() -> int:
    """Bytes that a cache can take: what the machine, the memory cgroup and SLURM leave."""
    return min([_C.free_memory(), *_slurm()])


def _slurm() -> list[int]:
    """What SLURM gave this job on this node, in case no cgroup holds it to that."""
    env = os.environ
    found = []
    try:
        if "SLURM_MEM_PER_NODE" in env:
            found.append(int(env["SLURM_MEM_PER_NODE"]) << 20)
        if "SLURM_MEM_PER_CPU" in env and "SLURM_CPUS_ON_NODE" in env:
            found.append(int(env["SLURM_MEM_PER_CPU"]) * int(env["SLURM_CPUS_ON_NODE"]) << 20)
    except ValueError:
        pass  # SLURM writes megabytes; what is not a number says nothing
    return [limit for limit in found if limit > 0]  # 0 asks for all of the node


def huge_pages_word(huge_pages: object) -> str:
    """What the native side calls True, False and "auto"."""
    if isinstance(huge_pages, bool):
        return "yes" if huge_pages else "no"
    if huge_pages == "auto":
        return "auto"
    wrong = ValueError if isinstance(huge_pages, str) else TypeError
    raise wrong(f'huge_pages is {safely(huge_pages)}; use True, False or "auto"')


def show_bytes(count: float) -> str:
    """Three digits and the unit that suits them."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1000 or unit == "TiB":
            break
        count /= 1024
    digits = 0 if unit == "bytes" or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {unit}"
