"""Where the disk level of a dataset lies, and by what its samples are known there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stocache import _C
from stocache._sharing.change import what_differs
from stocache.sizes import parse_size

_ABOUT = "about"  # what a folder is for, in the words of `change.note`
_TEMPORARY = "temporary"  # who has this goes with its last process
WAYS = ("zstd", "lz4")
_MOST_ABOUT = 64 << 10  # of it is read
_DIGITS = 16  # of a fingerprint are in the name of its folder
_ATOMS = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True)
class Disk:
    """A level below memory, as the user asks for it."""

    path: str
    """The folder of all such levels."""
    size: Any
    key: Callable[[int], Any] | Keys | None
    """What the sample of an index is made from, or that of each already."""
    compression: str | None
    temporary: bool

    def open_below(
        self, records: _C.Records, dataset: Any, label: str, fingerprint: str, about: str,
        on_change: str | None,
    ) -> None:  # fmt: skip
        """``label`` is its name for people, ``about`` says what it was made for. ``on_change`` is
        what to do if there is one of that name for other data; None: they are nobody's concern."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        folder = os.path.join(self.path, f"{_file_name(label)}-{fingerprint[:_DIGITS]}")
        if on_change is not None:
            for other in _others(folder):
                _answer_change(other, on_change, about)
        _remove_left_over(self.path)
        budget = parse_size("disk", self.size, lambda: _free(self.path, folder))
        keys = b"" if self.key is None else self._keys(len(dataset))
        if self.temporary and not os.path.exists(os.path.join(folder, "store")):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            _write(os.path.join(folder, _TEMPORARY), "")
        records.open_disk(
            os.fsencode(folder), budget, fingerprint, keys, 0, self.compression or "none"
        )
        _note(folder, about)

    def _keys(self, length: int) -> bytes:
        assert self.key is not None
        return self.key.keys if isinstance(self.key, Keys) else _keys(self.key, length)


@dataclass(frozen=True)
class Keys:
    """Of each sample, 16 bytes."""

    keys: bytes


def checked(
    disk: Any, disk_path: Any, key: Any, compression: Any, temporary: Any
) -> Disk | None:  # fmt: skip
    """What was asked for, if anything."""
    check_compression(compression)
    if disk_path is None:
        asked = {"disk": disk, "key": key, "compression": compression, "temporary": temporary}
        for what, value in asked.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"{what}= needs disk_path=, a folder on a disk of this node, such as "
                    'disk_path="/local/cache"'
                )
        return None
    if not isinstance(disk_path, (str, bytes, os.PathLike)):
        raise TypeError(f"disk_path is {disk_path!r}; a folder is needed")
    path = os.path.abspath(os.fsdecode(disk_path))
    if key is not None and not callable(key) and not isinstance(key, Keys):
        raise TypeError(f"key is {key!r}; a function of the index of a sample is needed")
    return Disk(path, 0.5 if disk is None else disk, key, compression, bool(temporary))


def check_compression(way: Any) -> None:
    if way is not None and way not in WAYS:
        raise ValueError(f'compression {way!r} is not known; use "zstd", "lz4" or None')


def folder_of(records: _C.Records) -> str | None:
    """Of the disk level that is open, if one is."""
    options = records.disk()
    return None if options is None else os.fsdecode(options[0])


def remove(folder: str) -> None:
    """Who still uses it goes on with the files that it has open, and without those that it has
    not."""
    shutil.rmtree(folder, ignore_errors=True)


def is_temporary(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, _TEMPORARY))


def remove_if_unused(folder: str) -> None:
    """Of a level that is temporary: what is left of it. Who uses it still will do so."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        _C.remove_disk(os.fsencode(folder), False)


def about(folder: str) -> str:
    """What a level was made for, as far as anybody left word."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(os.path.join(folder, _ABOUT), flags)
        with open(fd, "rb") as file:
            return file.read(_MOST_ABOUT).decode("utf-8", "replace")
    return ""


def _remove_left_over(path: str) -> None:
    """Temporary levels whose processes were all killed."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for folder in [entry.path for entry in entries if is_temporary(entry.path)]:
            remove_if_unused(folder)


def _keys(key: Callable[[int], Any], length: int) -> bytes:
    """One of 16 bytes for each sample, equal in two runs if what ``key`` gives is."""
    texts = (_as_text(key(index), index) for index in range(length))
    encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
    return b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in encoded)


def _as_text(value: Any, index: int) -> str:
    """Other values have other texts."""
    if type(value) in _ATOMS:
        return repr(value)
    if isinstance(value, os.PathLike):
        return f"path {os.fspath(value)!r}"
    if type(value) in (tuple, list):
        return f"({','.join(_as_text(each, index) for each in value)})"
    raise TypeError(
        f"key({index}) is a {type(value).__name__}; use a str, bytes, a number, a path, or a tuple "
        "of such: (path, os.stat(path).st_mtime_ns), say"
    )


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]", "_", label)[:100] or "dataset"


def _others(folder: str) -> Iterator[str]:
    """Folders of the same name for other data."""
    before = folder[:-_DIGITS]
    with os.scandir(os.path.dirname(folder)) as entries:
        for entry in entries:
            ours = entry.path[: len(before)] == before and entry.path != folder
            if ours and re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", entry.path[len(before) :]):
                yield entry.path


def _answer_change(other: str, on_change: str, ours: str) -> None:
    if on_change == "clear":
        remove(other)
        return
    differing = what_differs("\n".join(ours.split("\n")[2:]), about(other))
    raise ValueError(
        f"fingerprint: {other} was made for other data{differing}; use another name or disk_path, "
        'or on_change="clear" to remove it'
    )


def _note(folder: str, text: str) -> None:
    path = os.path.join(folder, _ABOUT)
    with contextlib.suppress(OSError):  # it helps people, and nothing else
        if not os.path.exists(path):
            made = f"{path}.{os.getpid()}"
            _write(made, text)
            os.rename(made, path)


def _write(path: str, text: str) -> None:
    with open(path, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(text)


def free_on_disk(path: str) -> int:
    """Bytes that levels in this folder can take together: what is free, and what they have."""
    with os.scandir(path) as folders:
        taken = sum(_taken(folder.path) for folder in folders if folder.is_dir())
    left = os.statvfs(path)
    return max(1, left.f_bavail * left.f_frsize + taken)


def _free(path: str, folder: str) -> int:
    """Bytes that a level there can take: what is free, and what it has already."""
    left = os.statvfs(path)
    return max(1, left.f_bavail * left.f_frsize + _taken(folder))


def _taken(folder: str) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        return sum(file.stat().st_blocks * 512 for file in files)
    return 0
