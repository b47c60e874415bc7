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
_DIGITS = 16  # of a fingerprint are in the name of its folder
_ATOMS = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True)
class Disk:
    """A level below memory, as the user asks for it."""

    path: str
    """The folder of all such levels."""
    size: Any
    key: Callable[[int], Any] | None
    """What the sample of an index is made from."""

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
        budget = parse_size("disk", self.size, lambda: _free(self.path, folder))
        if isinstance(self.size, float):
            budget = _not_less_by_a_file(budget, folder)
        keys = b"" if self.key is None else _keys(self.key, len(dataset))
        records.open_disk(os.fsencode(folder), budget, fingerprint, keys, 0)
        _note(folder, about)


def checked(disk: Any, disk_path: Any, key: Any) -> Disk | None:
    """What was asked for, if anything."""
    if disk_path is None:
        if disk is not None or key is not None:
            what = "disk" if disk is not None else "key"
            raise ValueError(
                f"{what}= needs disk_path=, a folder on a disk of this node, such as "
                'disk_path="/local/cache"'
            )
        return None
    if not isinstance(disk_path, (str, bytes, os.PathLike)):
        raise TypeError(f"disk_path is {disk_path!r}; a folder is needed")
    path = os.path.abspath(os.fsdecode(disk_path))
    if key is not None and not callable(key):
        raise TypeError(f"key is {key!r}; a function of the index of a sample is needed")
    return Disk(path, 0.5 if disk is None else disk, key)


def folder_of(records: _C.Records) -> str | None:
    """Of the disk level that is open, if one is."""
    options = records.disk()
    return None if options is None else os.fsdecode(options[0])


def remove(folder: str) -> None:
    """Who still uses it goes on with the files that it has open, and without those that it has
    not."""
    shutil.rmtree(folder, ignore_errors=True)


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


def _answer_change(other: str, on_change: str, about: str) -> None:
    if on_change == "clear":
        remove(other)
        return
    theirs = ""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(os.path.join(other, _ABOUT)) as it:
        theirs = it.read()
    differing = what_differs("\n".join(about.split("\n")[2:]), theirs)
    raise ValueError(
        f"fingerprint: {other} was made for other data{differing}; use another name or disk_path, "
        'or on_change="clear" to remove it'
    )


def _note(folder: str, about: str) -> None:
    path = os.path.join(folder, _ABOUT)
    with contextlib.suppress(OSError):  # it helps people, and nothing else
        if not os.path.exists(path):
            made = f"{path}.{os.getpid()}"
            with open(made, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(about)
            os.rename(made, path)


def _free(path: str, folder: str) -> int:
    """Bytes that a level there can take: what is free, and what it has already."""
    left = os.statvfs(path)
    taken = sum(file.st_blocks * 512 for file in _files(folder))
    return max(1, left.f_bavail * left.f_frsize + taken)


def _not_less_by_a_file(budget: int, folder: str) -> int:
    """A share of what is free is a little less in every run, as others write to that disk. Files
    that are there already stay, unless one or more of them are too many."""
    sizes = [file.st_size for file in _files(folder, ".dat")]
    return max(budget, min(sum(sizes), budget + max(sizes, default=0)))


def _files(folder: str, ending: str = "") -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(OSError):  # it has just gone
                if file.name.endswith(ending):
                    yield file.stat()
