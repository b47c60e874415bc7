"""Names of files, in one piece of memory: workers that read them do not copy them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
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
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        try:
            end = self._ends[index]
        except IndexError:
            raise IndexError(f"index {index} is out of bounds of {len(self)} files") from None
        start = self._ends[index - 1] if index % len(self._ends) else 0
        return os.fsdecode(self._bytes[start:end])

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
        shown = [*self[:3], "…", self[-1]] if len(self) > 4 else self[:]
        return f"<{len(self)} files: {', '.join(shown)}>"


def list_files(folder: str) -> Iterator[str]:
    """The names of all files below ``folder``, relative to it. Links are followed, but never round
    in a circle. A bar shows the number if it takes long."""
    with tqdm(unit=" files", desc=f"listing {folder}", delay=2, leave=False) as bar:
        todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
        while todo:
            below, above = todo.pop()
            stat = os.stat(os.path.join(folder, below))
            here = above | {(stat.st_dev, stat.st_ino)}
            if here == above:
                continue
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    name = os.path.join(below, entry.name)
                    if entry.is_dir():
                        todo.append((name, here))
                    elif entry.is_file():  # not a pipe, a device or a link to nowhere
                        bar.update()
                        yield name
