"""Arrays, tensors and buffers by their bytes, at the speed of memory.

All of them are hashed whole. Only what is mapped from a file that nobody can have changed in this
process alone counts by which file it is, and when it was changed last: a file may be larger than
memory, and reading it would take as long as loading the dataset.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

import torch

from stocache import _C

# From this size on it is worth asking whether the bytes are those of a file.
_LARGE = 64 << 20
_BLOCKS, _BLOCK = 256, 4096  # of a file's bytes are looked at all the same
_PIECE = 64 << 20  # of an array with gaps are copied at a time


class Feeds(Protocol):
    """Where the bytes go."""

    def say(self, *words: object) -> None: ...
    def column(self, values: list[Any], where: str, depth: float) -> None: ...


def feed_memory(to: Feeds, value: Any, where: str, depth: float) -> None:
    """Hashes a tensor, a numpy array, or what else gives its bytes."""
    if isinstance(value, torch.Tensor):
        _feed_tensor(to, value, where, depth)
    elif hasattr(value, "__array_interface__"):
        _feed_array(to, value, where, depth)
    else:
        with memoryview(value) as view:
            to.say(view.format, view.shape)
            numpy = sys.modules.get("numpy")
            if numpy is None or view.nbytes < _LARGE:
                to.say(_C.hash_bytes(view))
            else:
                _feed_bytes(to, numpy.frombuffer(view, "u1"))


def _feed_tensor(to: Feeds, value: torch.Tensor, where: str, depth: float) -> None:
    to.say(tuple(value.shape), str(value.dtype), value.device.type, str(value.layout))
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.layout == torch.sparse_coo:
        plain = plain.coalesce()
        to.column([plain.indices(), plain.values()], where, depth + 1)
        return
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    flat = plain.cpu().contiguous().reshape(-1)
    _feed_bytes(to, flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _feed_array(to: Feeds, value: Any, where: str, depth: float) -> None:
    to.say(value.shape, repr(value.dtype))
    if hasattr(value, "mask"):
        to.column([value.data, value.mask], where, depth + 1)
    elif value.dtype.hasobject:
        flat = value.reshape(-1)
        to.column(list(flat) if value.dtype.names is None else flat.tolist(), where, depth + 1)
    elif value.size == 0:
        pass
    elif value.flags.c_contiguous or value.flags.f_contiguous:
        to.say(value.flags.c_contiguous)
        rows = value if value.flags.c_contiguous else value.T
        _feed_bytes(to, rows.reshape(-1).view("u1"))
    else:
        step = max(1, _PIECE // max(1, value.nbytes // len(value)))
        for at in range(0, len(value), step):
            _feed_bytes(to, value[at : at + step].copy().reshape(-1).view("u1"))


def _feed_bytes(to: Feeds, flat: Any) -> None:
    """Contiguous bytes, as a numpy array or bytes."""
    if len(flat) >= _LARGE and (source := file_of(flat.__array_interface__["data"][0], len(flat))):
        to.say("file", *source)
        step = max(_BLOCK, len(flat) // _BLOCKS)
        for at in range(0, len(flat), step):
            to.say(_C.hash_bytes(flat[at : at + _BLOCK]))
        return
    to.say(_C.hash_bytes(flat))


def file_of(address: int, length: int) -> tuple[int, ...] | None:
    """Of which file the bytes at ``address`` are, in which state and from where on; None for memory
    of other kinds, and where this process may hold pages that the file does not have."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                begin, end = (int(number, 16) for number in fields[0].split("-"))
                if not begin <= address < end:
                    continue
                private = fields[1][3] == "p" and "w" in fields[1]
                path = fields[5].rstrip("\n") if len(fields) > 5 else ""
                if private or address + length > end or not path.startswith("/"):
                    return None
                if path.startswith(("/dev/", "/memfd:")):
                    return None  # shared memory: each process may have a file of its own
                stat = os.stat(path)
                if stat.st_ino != int(fields[4]):
                    return None
                offset = int(fields[2], 16) + address - begin
                return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, offset)
    except (OSError, ValueError):
        pass
    return None
