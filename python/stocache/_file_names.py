"""Names of files, in one piece of memory: workers that read them do not copy them."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from tqdm import tqdm


class FileNames(Sequence[str]):
    """A list of names that cannot be changed. Millions of them cost no Python object each."""

    def __init__(self, names: Iterable[str]) -> None:
        ends, parts, end = array("Q"), [], 0
        for name in names:
            part = os.fsencode(name)
            parts.append(part)
            end += len(part)
            ends.append(end)
        self._bytes = b"".join(parts)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < len(self._ends):  # the usual case, quickly
            return self._at(index)
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"index {i} is out of bounds of {len(self)} files")
        return self._at(i % len(self))

    def _at(self, i: int) -> str:
        return os.fsdecode(self._bytes[self._ends[i - 1] if i else 0 : self._ends[i]])

    def __iter__(self) -> Iterator[str]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FileNames):
            return self._bytes == other._bytes and self._ends == other._ends
        if isinstance(other, (list, tuple)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # equal to a list, which has no hash

    def __repr__(self) -> str:
        names = list(map(repr, self if len(self) <= 4 else [*self[:3], self[-1]]))
        if len(self) > 4:
            names.insert(3, "…")
        return f"<{len(self)} files: {', '.join(names)}>"


class Bar(tqdm):  # type: ignore[misc] # it has no types
    """A progress bar without tqdm's thread, which would be in the way of forks."""

    monitor_interval = 0


def list_files(folder: str) -> Iterator[str]:
    """The names of all files below ``folder``, relative to it. Links are followed, but never round
    in a circle. A bar shows the number if it takes long."""
    bar, count, late = None, 0, time.monotonic() + 2
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    with contextlib.ExitStack() as stack:
        while todo:
            below, above = todo.pop()
            path = os.path.join(folder, below) if below else folder
            stat = os.stat(path)
            here = above | {(stat.st_dev, stat.st_ino)}
            if here == above:
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    name = os.path.join(below, entry.name)
                    if _leads_to(entry.is_dir):
                        todo.append((name, here))
                    elif _leads_to(entry.is_file):  # not a pipe, a device or a link to nowhere
                        count += 1
                        if bar:
                            bar.update()
                        elif time.monotonic() > late:
                            words = {"desc": f"listing {folder}", "unit": " files"}
                            bar = stack.enter_context(Bar(initial=count, leave=False, **words))
                        yield name


def _leads_to(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself leads nowhere
            return False
        raise
