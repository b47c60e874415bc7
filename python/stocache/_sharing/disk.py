"""Where the disk level of a dataset lies, and by what its samples are known there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stocache import _C
from stocache._cluster.address import safely
from stocache._sharing.change import differing_parts, in_words, use_a_fingerprint
from stocache._sharing.changing import changes_by_itself
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
        _make_folder(self.path)
        folder = _folder_of(self.path, label, fingerprint)
        if on_change is not None:
            for other in _others(folder):
                _answer_change(other, on_change, about, dataset)
        elif not os.path.exists(folder):
            _tell_of_lost(folder, about, dataset)
        _remove_left_over(self.path)
        budget = parse_size("disk", self.size, lambda: _free(self.path, folder))
        if isinstance(self.size, float):
            budget = _not_less_by_a_file(budget, folder)
        keys = b"" if self.key is None else self._keys(len(dataset))
        is_new = not os.path.exists(os.path.join(folder, "store"))
        records.open_disk(
            os.fsencode(folder), budget, fingerprint, keys, 0, self.compression or "none"
        )
        # By now the folder is known to be this user's, and in use: nobody takes it for left over.
        if self.temporary and is_new:
            with contextlib.suppress(FileExistsError):
                _write(os.path.join(folder, _TEMPORARY), "")
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
        raise TypeError(f"disk_path is {safely(disk_path)}; a folder is needed")
    path = os.path.abspath(os.fsdecode(disk_path))
    if key is not None and not callable(key) and not isinstance(key, Keys):
        raise TypeError(f"key is {safely(key)}; a function of the index of a sample is needed")
    return Disk(path, 0.5 if disk is None else disk, key, compression, bool(temporary))


def check_compression(way: Any) -> None:
    if way is not None and way not in WAYS:
        raise ValueError(f'compression {safely(way)} is not known; use "zstd", "lz4" or None')


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


def _make_folder(path: str) -> None:
    """The folder of all levels; one that is there may be for several users."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    if not os.access(path, os.R_OK | os.X_OK):  # of a disk that is read-only, what is there counts
        owner = os.stat(path).st_uid
        raise PermissionError(
            f"disk_path {path} is a folder of user {owner}, which user {os.geteuid()} may not look "
            "into; use another, or one that all may use (mode 1777)"
        )


def _folder_of(path: str, label: str, fingerprint: str) -> str:
    """Of the level itself. Where another user has one of that name, with the user in its name."""
    folder = os.path.join(path, f"{_file_name(label)}-{fingerprint[:_DIGITS]}")
    own = f"{folder}-u{os.geteuid()}"
    return own if not _may_be_ours(folder) or os.path.exists(own) else folder


def _may_be_ours(folder: str) -> bool:
    """Unless it is another user's."""
    with contextlib.suppress(OSError):
        return os.stat(folder, follow_symlinks=False).st_uid == os.geteuid()
    return True


def _others(folder: str) -> Iterator[str]:
    """Folders of the same name for other data, of this user."""
    name, digits = os.path.basename(folder), f"[0-9a-f]{{{_DIGITS}}}(-u[0-9]+)?"
    before = re.sub(f"{digits}$", "", name)
    with os.scandir(os.path.dirname(folder)) as entries:
        for entry in entries:
            alike = re.fullmatch(re.escape(before) + digits, entry.name)
            if alike and entry.name != name and _may_be_ours(entry.path):
                yield entry.path


def _answer_change(other: str, on_change: str, ours: str, dataset: Any) -> None:
    if on_change == "clear":
        remove(other)
        return
    differing = _differing(ours, other)
    raise ValueError(
        f"fingerprint: {other} was made for other data{in_words(differing)}; use another name or "
        f'disk_path, or on_change="clear" to remove it{use_a_fingerprint(dataset, differing)}'
    )


def _tell_of_lost(folder: str, ours: str, dataset: Any) -> None:
    """Warns if what an earlier run left is not found for nothing but what changes by itself."""
    for other in _others(folder):
        differing = _differing(ours, other)
        if differing and len(changes_by_itself(dataset, differing)) == len(differing):
            warnings.warn(
                f"{other} is of an earlier run, and this one does not know it again"
                f"{in_words(differing)}{use_a_fingerprint(dataset, differing)}",
                RuntimeWarning,
                stacklevel=6,
            )
            return


def _differing(ours: str, other: str) -> list[str]:
    return differing_parts("\n".join(ours.split("\n")[2:]), about(other))


def _note(folder: str, text: str) -> None:
    path = os.path.join(folder, _ABOUT)
    with contextlib.suppress(OSError):  # it helps people, and nothing else
        if not os.path.exists(path):
            made = f"{path}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):  # of a process that was killed
                os.unlink(made)
            _write(made, text)
            os.rename(made, path)


def _write(path: str, text: str) -> None:
    """Makes a file: what is there already, such as a link to somewhere else, is not written to."""
    with open(path, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(text)


def size_of_all(what: str, size: Any, path: str) -> int:
    """Bytes that levels in this folder can take together, as the user asks for them: a share is of
    what is free, and what they have."""
    with os.scandir(path) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    budget = parse_size(what, size, lambda: _free(path, *folders))
    return _not_less_by_a_file(budget, *folders) if isinstance(size, float) else budget


def _free(path: str, *folders: str) -> int:
    """Bytes that levels there can take: what is free, and what they have already."""
    left = os.statvfs(path)
    return max(1, left.f_bavail * left.f_frsize + sum(map(_taken, folders)))


def _taken(folder: str) -> int:
    return sum(file.st_blocks * 512 for file in _files(folder))


def _not_less_by_a_file(budget: int, *folders: str) -> int:
    """A share of what is free is a little less in every run, as others write to that disk. Files
    that are there already stay, unless one or more of them are too many."""
    sizes = [file.st_size for folder in folders for file in _files(folder, ".dat")]
    return max(budget, min(sum(sizes), budget + max(sizes, default=0)))


def _files(folder: str, ending: str = "") -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(OSError):  # it has just gone
                if file.name.endswith(ending):
                    yield file.stat()
