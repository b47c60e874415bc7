"""FileCache: copies of a far folder's files, next to the job."""

from __future__ import annotations

import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import IO, Any

from tqdm import tqdm

from stocache import _C
from stocache._file_names import FileNames, list_files
from stocache.sizes import parse_size, show_bytes

NameOrIndex = Any
"""An index into ``files``, or a name: text or a path, relative to the source or below it."""


@dataclass(frozen=True)
class FileCacheStats:
    """Sums over all processes of the node, since the first of them opened the cache."""

    hits: int
    """Requests answered with a copy that was there."""
    copies: int
    """Files copied."""
    copied_bytes: int
    copy_seconds: float
    """Time spent copying, summed over processes."""
    waits: int
    """Requests that waited for a copy that somebody else was making."""
    from_source: int
    """Requests answered with the path of the source."""
    failed: int
    """Copies that could not be made."""
    stale: int
    """Copies replaced because their source had changed."""
    evicted: int
    """Copies removed to make room."""
    too_large: int
    """Requests for files larger than the limit."""
    files: int
    """Copies that are there now."""
    bytes: int
    """Their size."""
    limit: int | None
    """The most they may take."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {show_bytes(self.limit)}"
        parts = [f"{self.files} files, {show_bytes(self.bytes)}{limit}", f"{self.hits} hits"]
        speed = show_bytes(self.copied_bytes / self.copy_seconds) if self.copy_seconds else "0"
        parts.append(f"{self.copies} copied ({show_bytes(self.copied_bytes)}, {speed}/s)")
        for word in ("from_source", "waits", "stale", "evicted", "failed", "too_large"):
            if count := getattr(self, word):
                parts.append(f"{count} {word.replace('_', ' ')}")
        return "; ".join(parts)


class FileCache:
    """Serves local copies of the files below ``data_path``, each copied at most once per node.

    >>> files = FileCache("/nas/images", "/scratch/images", limit="200GiB")
    >>> path = files.get_path(0)

    Safe with any number of workers, ranks and jobs: a copy gets its name when it is whole. What is
    on the disk is known again in the next job. If the cache folder cannot be used, or is full, the
    path of the source is served: training goes on.

    Args:
        data_path: the folder with the files; sub-folders too.
        cache_path: where to keep copies. Every source has a folder of its own in there, so several
            caches can use the same one.
        limit: bytes that copies may take, as a number or a text such as "200GiB".
        background: serve the source at once, and copy behind.
        files: the names to use, in this order; without it, all files, sorted.
        policy: "lru" removes the copies that were not used for longest to make room for others;
            "freeze" keeps what is there, which suits shuffled epochs over more than fits.
        check: when a copy is compared with its source by size and time of change: "once" per job,
            "always", or "never" if there is a copy from an earlier job.
        checksum: keep a hash of every copy, and compare it whenever the copy is checked.
    """

    def __init__(
        self,
        data_path: str | os.PathLike[str],
        cache_path: str | os.PathLike[str],
        limit: int | str | None = None,
        background: bool = False,
        *,
        files: Iterable[str | os.PathLike[str]] | None = None,
        policy: str = "lru",
        check: str = "once",
        checksum: bool = False,
    ) -> None:
        self.data_path = os.fspath(data_path)
        self.cache_path = os.fspath(cache_path)
        self.limit = None if limit is None else _parse_limit(limit)
        self.background = bool(background)
        self.policy = policy
        self.check = check
        self.checksum = bool(checksum)
        self._source = os.path.realpath(self.data_path)
        near = os.path.realpath(self.cache_path)
        if os.path.commonpath([self._source, near]) == self._source:
            raise ValueError(
                f"cache_path {self.cache_path!r} lies in data_path {self.data_path!r}: copies "
                "would be taken for sources; use a folder outside"
            )
        if files is None:
            self.files = FileNames(sorted(list_files(self._source)))
        else:
            self.files = FileNames(self._relative(os.fspath(name)) for name in files)
        self._open(near)
        if trouble := self._native.trouble():
            warnings.warn(trouble, RuntimeWarning, stacklevel=2)

    def _open(self, near: str) -> None:
        self._native = _C.Files()
        self._native.open(
            os.fsencode(self._source),
            os.fsencode(near),
            self.limit or 0,
            self.policy,
            self.check,
            self.checksum,
            len(self.files),
        )

    # Serving

    def get_path(self, which: NameOrIndex) -> str:
        """The path to open: of the copy, which is made first if need be, or of the source.

        With a limit, the last two files that a thread was given stay; for more, or for longer, use
        ``open``. An error about the source is the one that opening it would raise.
        """
        return self._native.path(self._name(which), self.background)

    def open(self, which: NameOrIndex, mode: str = "rb", **options: Any) -> IO[Any]:
        """The file, open for reading. It stays readable whatever happens to the copy."""
        if set(mode) - set("rbt"):
            raise ValueError(f"mode is {mode!r}; a cached file can only be read")
        name = self._name(which)
        path = self._native.path(name, self.background)
        try:
            return open(path, mode, **options)
        except FileNotFoundError:  # something else removed the copy just now
            return open(self._native.path(name, self.background), mode, **options)

    def _name(self, which: NameOrIndex) -> str:
        if isinstance(which, str):
            return which if which[:1] != "/" else self._relative(which)
        try:
            index = operator.index(which)
        except TypeError:
            return self._relative(os.fspath(which))
        return self.files[index]

    def _relative(self, name: str) -> str:
        """The name as ``files`` spells it."""
        if os.path.isabs(name):
            for folder in (os.path.abspath(self.data_path), self._source):
                if name.startswith(os.path.join(folder, "")):
                    name = os.path.relpath(name, folder)
                    break
        return os.path.normpath(name) if name else name

    def __len__(self) -> int:
        return len(self.files)

    # Ahead and after

    def prefetch(
        self,
        names: Iterable[NameOrIndex] | None = None,
        num_workers: int = 2,
        progress: bool = True,
    ) -> list[str]:
        """Copies these files, or all, with that many threads; returns those that have no copy now.

        What is there already is not copied again, so an interrupted call goes on where it was.
        """
        left: list[str] = []
        failures: list[OSError] = []
        copied = 0

        def copy(name: str) -> str:
            nonlocal copied
            try:
                path, is_copy = self._native.fetch(name)
            except OSError as error:
                failures.append(error)
                is_copy = False
            if not is_copy:
                left.append(name)
                return f"{len(left)} left at the source"
            copied += os.stat(path).st_size
            return show_bytes(copied)

        todo = self.files if names is None else FileNames(map(self._name, names))
        _each(todo, copy, num_workers, "copying", progress)
        if failures:
            warnings.warn(
                f"{len(failures)} of {len(todo)} files could not be read from their source, the "
                f"first: {failures[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
        return sorted(left)

    def verify(
        self,
        names: Iterable[NameOrIndex] | None = None,
        num_workers: int = 2,
        progress: bool = True,
    ) -> list[str]:
        """Compares these copies, or all, with their sources byte by byte; returns what differs.

        Such copies are removed, and copied again when they are asked for.
        """
        differing: list[str] = []

        def compare(name: str) -> str:
            if self._native.verify(name) is False:
                differing.append(name)
            return f"{len(differing)} differ"

        todo = FileNames(self.in_cache if names is None else map(self._name, names))
        _each(todo, compare, num_workers, "comparing", progress)
        return sorted(differing)

    def clear(self) -> int:
        """Removes the copies that stocache made and that nobody is about to open; says how many."""
        return self._native.clear()

    # Looking

    @property
    def folder(self) -> str:
        """Where the copies are."""
        return os.path.join(self._native.folder(), "files")

    @property
    def in_cache(self) -> AbstractSet[str]:
        """The names of the files that have a copy."""
        return _Copies(self._native)

    def stats(self) -> FileCacheStats:
        """What happened on this node."""
        counts = self._native.stats()
        counts["from_source"] = counts.pop("passed")
        return FileCacheStats(limit=self.limit, **counts)

    def __repr__(self) -> str:
        state = str(self.stats()) if self._native.is_open() else "closed"
        return f"<{type(self).__name__} {self.data_path} -> {self.cache_path}: {state}>"

    # Coming and going

    def close(self) -> None:
        """Lets go of the cache. The copies stay for the next job."""
        self._native.close()

    def __enter__(self) -> FileCache:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_native"] = self._native.is_open()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_open = state.pop("_native")
        self.__dict__.update(state)
        if is_open:
            self._open(os.path.realpath(self._given_cache_path))
        else:
            self._native = _C.Files()

    @property
    def _given_cache_path(self) -> str:
        return self.cache_path


class DataCache(FileCache):
    """As ``DataCache`` of cache_dataloading, for any number of workers.

    Unlike there, ``files`` is sorted and has the files of sub-folders too, and ``cache_path`` is
    the folder in which the copies lie: one that belongs to this source alone, in the given one.
    """

    def __init__(
        self, data_path: str | os.PathLike[str], cache_path: str | os.PathLike[str], **options: Any
    ) -> None:
        super().__init__(data_path, cache_path, **options)
        self._given = self.cache_path
        self.cache_path = self.folder

    @property
    def _given_cache_path(self) -> str:
        return self._given

    def validate_cache(self, fname: str) -> str:
        """The path of the copy, which is made if need be."""
        return self.get_path(fname)

    def copy_to_cache(self, fname: str) -> None:
        """Sees to it that there is a copy."""
        self._native.fetch(self._name(fname))


class _Copies(AbstractSet[str]):
    """A look at the disk: no name is kept here."""

    def __init__(self, native: _C.Files) -> None:
        self._native = native

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._native.contains(name)

    def __iter__(self) -> Iterator[str]:
        return map(os.fsdecode, self._native.names().split(b"\0")[:-1])

    def __len__(self) -> int:
        return self._native.names().count(b"\0")

    @classmethod
    def _from_iterable(cls, names: Iterable[Any]) -> Any:
        return set(names)

    def __repr__(self) -> str:
        return f"<{len(self)} copies>"


def _parse_limit(limit: Any) -> int:
    if isinstance(limit, float):
        raise TypeError(f'limit is {limit!r}; use a number of bytes or a text such as "200GiB"')
    return parse_size("limit", limit)


def _each(
    names: FileNames, act: Callable[[str], str], threads: int, doing: str, progress: bool
) -> None:
    """Calls ``act`` for every name, in threads, and shows what it returns behind the bar. Stops at
    the first error, which it raises, and at an interrupt."""
    if threads < 1:
        raise ValueError(f"num_workers is {threads}; it must be at least 1")
    todo, taking, stop = iter(names), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    with tqdm(total=len(names), desc=doing, unit="file", disable=not progress) as bar:

        def work() -> None:
            while not stop.is_set():
                with taking:
                    name = next(todo, None)
                if name is None:
                    return
                try:
                    words = act(name)
                except BaseException as error:
                    errors.append(error)
                    stop.set()
                    return
                with taking:
                    bar.set_postfix_str(words, refresh=False)
                    bar.update()

        workers = [threading.Thread(target=work, name=f"stocache-{doing}") for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    if errors:
        raise errors[0]
