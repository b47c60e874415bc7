"""FileCache: copies of a far folder's files, next to the job."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import IO, Any

from stocache import _C, _html
from stocache._file_names import Bar, FileNames, list_files
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

    def _repr_html_(self) -> str:
        return _html.table(type(self).__name__, self._levels(), str(self))

    def _levels(self) -> list[_html.Level]:
        return [("disk", self.bytes, self.limit, f"{self.files} files")]

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
        disk: another word for limit, and the one that CachedDataset has.
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
        disk: int | str | None = None,
    ) -> None:
        if limit is not None and disk is not None:
            raise TypeError("limit and disk are both given, and mean the same; use one of them")
        limit = disk if limit is None else limit
        self.data_path = _folder("data_path", data_path)
        self.cache_path = _folder("cache_path", cache_path)
        self.limit = None if limit is None else _parse_limit(limit)
        self.background = bool(background)
        self.policy = _one_of("policy", policy, "lru", "freeze")
        self.check = _one_of("check", check, "once", "always", "never")
        self.checksum = bool(checksum)
        # Absolute: whoever unpickles this may be somewhere else.
        self._spelled = os.path.abspath(self.data_path)
        self._source = os.path.realpath(self.data_path)
        self._near = os.path.realpath(self.cache_path)
        if os.path.commonpath([self._source, self._near]) == self._source:
            raise ValueError(
                f"cache_path {self.cache_path!r} lies in data_path {self.data_path!r}: copies "
                "would be taken for sources; use a folder outside"
            )
        if files is None:
            self.files = FileNames(sorted(list_files(self._source)))
        else:
            self.files = FileNames(map(self._given, _iterate("files", files)))
        self._open()
        if trouble := self._native.trouble():
            warnings.warn(trouble, RuntimeWarning, stacklevel=2)

    def _open(self) -> None:
        self._native = _C.Files()
        self._native.open(
            os.fsencode(self._source),
            os.fsencode(self._near),
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
            plain = which[:1] != "/" and "//" not in which and "./" not in which
            return which if plain else self._relative(which)
        if type(which) is int:
            return self.files[which]
        try:
            index = operator.index(which)
        except TypeError:
            return self._relative(_text(which, "an index or a name"))
        return self.files[index]

    def _relative(self, name: str) -> str:
        """The name as ``files`` spells it; what is not below the source stays as it is."""
        name = os.path.normpath(name) if name else name
        for folder in (self._spelled, self._source):
            if name.startswith(above := os.path.join(folder, "")):
                return name[len(above) :]
        return name

    def _given(self, name: str | os.PathLike[str]) -> str:
        """A name of the list that the user gave."""
        found = self._relative(_text(name, "a name"))
        if found in ("", ".", "..") or found.startswith(("/", "../")) or "\0" in found:
            raise ValueError(
                f"{name!r} in files is not the name of a file below data_path {self.data_path!r}; "
                "names are relative to it"
            )
        return found

    def __len__(self) -> int:
        return len(self.files)

    # Ahead and after

    def prefetch(
        self,
        names: Iterable[NameOrIndex] | None = None,
        num_workers: int = 2,
        progress: bool = True,
    ) -> list[str]:
        """Copies these files, or all, with that many threads; returns those that have no copy now:
        there was no room for them, or they had to make room again for others.

        What is there already is not copied again, so an interrupted call goes on where it was.
        """
        left: set[str] = set()
        failures: list[OSError] = []
        copied, counting = 0, threading.Lock()

        def copy(name: str) -> str:
            nonlocal copied
            try:
                path, is_copy = self._native.fetch(name)
            except OSError as error:
                failures.append(error)
                is_copy = False
            if not is_copy:
                left.add(name)
                return f"{len(left)} left at the source"
            with contextlib.suppress(OSError), counting:  # an error: it was removed again
                copied += os.stat(path).st_size
            return show_bytes(copied)

        todo = self._names(names) if names is not None else self.files
        _each(todo, copy, num_workers, "copying", progress)
        _warn_of(failures, len(todo))
        there = self.in_cache
        left.update(name for name in todo if name not in there)
        return sorted(left)

    def warm(
        self,
        num_workers: int = 2,
        names: Iterable[NameOrIndex] | None = None,
        progress: bool = True,
    ) -> FileCacheStats:
        """Copies these files, or all, ahead of training: ``prefetch`` as CachedDataset says it."""
        self.prefetch(names, num_workers, progress)
        return self.stats()

    def verify(
        self,
        names: Iterable[NameOrIndex] | None = None,
        num_workers: int = 2,
        progress: bool = True,
    ) -> list[str]:
        """Compares these copies, or all, with their sources byte by byte; returns what differs.

        Such copies are removed, and copied again when they are asked for. A copy whose source
        cannot be read is compared with its checksum if it has one, and else stays.
        """
        differing: set[str] = set()
        failures: list[OSError] = []

        def compare(name: str) -> str:
            try:
                if self._native.verify(name) is False:
                    differing.add(name)
            except OSError as error:
                failures.append(error)
            return f"{len(differing)} differ"

        todo = self._names(names) if names is not None else FileNames(self._found())
        _each(todo, compare, num_workers, "comparing", progress)
        _warn_of(failures, len(todo))
        return sorted(differing)

    def _found(self) -> list[str]:
        """All that looks like a copy, also what was cut short and is not taken for one any more."""
        folder = self.folder
        there = (name for name in self.files if os.path.lexists(os.path.join(folder, name)))
        return sorted({*self.in_cache, *there})

    def _names(self, given: Iterable[NameOrIndex]) -> FileNames:
        return FileNames(map(self._name, _iterate("names", given)))

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

    def _repr_html_(self) -> str:
        if self.closed:
            return _html.table(repr(self), [])
        title = f"{type(self).__name__} {self.data_path} -> {self.cache_path}"
        return _html.table(title, self.stats()._levels(), str(self.stats()))

    # Coming and going

    def close(self) -> None:
        """Lets go of the cache. The copies stay for the next job."""
        self._native.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._native.is_open()

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
            self._open()
        else:
            self._native = _C.Files()


class DataCache(FileCache):
    """As ``DataCache`` of cache_dataloading, for any number of workers.

    Unlike there, ``files`` is sorted and has the files of sub-folders too, and ``cache_path`` is
    the folder in which the copies lie: one that belongs to this source alone, in the given one.
    """

    def __init__(
        self, data_path: str | os.PathLike[str], cache_path: str | os.PathLike[str], **options: Any
    ) -> None:
        super().__init__(data_path, cache_path, **options)
        self.cache_path = self.folder

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


# What users give


def _folder(what: str, path: Any) -> str:
    found = _text(path, f"{what}, the path of a folder,")
    if not found or "\0" in found:
        raise ValueError(f"{what} is {path!r}; it must be the path of a folder")
    return found


def _text(path: Any, needed: str) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{needed} is needed, not {path!r}") from None


def _iterate(what: str, names: Any) -> Iterator[Any]:
    if isinstance(names, (str, bytes, os.PathLike)) or not isinstance(names, Iterable):
        raise TypeError(f"{what} is {names!r}; it must be a list of names")
    return iter(names)


def _one_of(what: str, given: Any, *known: str) -> str:
    if given not in known or not isinstance(given, str):
        allowed = " or ".join(f'"{word}"' for word in known)
        kind = ValueError if isinstance(given, str) else TypeError
        raise kind(f"{what} is {given!r}; it must be {allowed}")
    return given


def _parse_limit(limit: Any) -> int:
    needed = 'use a number of bytes or a text such as "200GiB"'
    if isinstance(limit, (bool, float)):
        raise TypeError(f"limit is {limit!r}; {needed}")
    try:
        return parse_size("limit", limit if isinstance(limit, str) else operator.index(limit))
    except TypeError:
        raise TypeError(f"limit is {limit!r}; {needed}") from None
    except ValueError:
        raise ValueError(f"limit is {limit!r}; it must be at least 1 byte: {needed}") from None


# Many files at once


def _warn_of(failures: list[OSError], of: int) -> None:
    if failures:
        warnings.warn(
            f"{len(failures)} of {of} files could not be read from their source, the first: "
            f"{failures[0]}",
            RuntimeWarning,
            stacklevel=3,
        )


def _each(
    names: FileNames, act: Callable[[str], str], threads: int, doing: str, progress: bool
) -> None:
    """Calls ``act`` for every name, in threads, and shows what it returns behind the bar. Stops at
    the first error, which it raises, and at an interrupt."""
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"num_workers is {threads!r}; it must be a number of threads")
    if threads < 1:
        raise ValueError(f"num_workers is {threads}; it must be at least 1")
    todo, taking, stop = iter(names), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    with Bar(total=len(names), desc=doing, unit="file", disable=not progress) as bar:

        def work(ended: threading.Event) -> None:
            try:
                while not stop.is_set():
                    with taking:
                        name = next(todo, None)
                    if name is None:
                        return
                    words = act(name)
                    with taking:
                        bar.set_postfix_str(words, refresh=False)
                        bar.update()
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                ended.set()

        # Not by join, which an interrupt leaves in disorder: a second one returns too early.
        ends = [threading.Event() for _ in range(threads)]
        workers = [
            threading.Thread(target=work, args=(ended,), name=f"stocache-{doing}") for ended in ends
        ]
        try:
            for worker in workers:
                worker.start()
            for ended in ends:
                ended.wait()
        finally:
            stop.set()
            for worker, ended in zip(workers, ends, strict=True):
                if worker.ident is not None:  # else it has not begun, and will not
                    ended.wait()
    if errors:
        raise errors[0]
