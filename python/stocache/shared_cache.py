"""SharedCache: a tensor slot per sample, shared by every process of a job."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from stocache import _C, _html
from stocache._sharing import job as _job
from stocache._sharing.change import NOT_OPEN_ELSEWHERE, check_on_change, open_or_clear
from stocache._sharing.launcher import find_job
from stocache._torch import ops as _ops
from stocache.sizes import huge_pages_word, parse_size

_GIB = 1 << 30
Indices = Sequence[int] | torch.Tensor | Any  # also numpy arrays, which are not imported for this


@dataclass(frozen=True)
class SharedCacheStats:
    """What a cache did so far, summed over all processes that used it."""

    hits: int
    """Look-ups that found the sample."""
    misses: int
    """Look-ups inside the dataset that did not."""
    fills: int
    """Samples written."""
    bytes: int
    """Bytes of samples written."""
    waits: int
    """Overwrites that waited for another writer of the same slot."""
    lost: int
    """Writes not done because another process had just done them."""
    dropped: int
    """Writes not done for lack of space or of a free writer's lease."""
    damaged: int
    """Slots whose checksum did not match (verify="always")."""
    filled: int
    """Slots that hold a sample now."""
    capacity: int
    """Slots."""
    dataset_len: int
    """Samples in the dataset."""
    slot_bytes: int
    """Bytes of one sample."""
    frozen: bool
    """No more samples are taken until clear(): the space ran out."""

    @property
    def hit_rate(self) -> float:
        """Share of look-ups that found the sample; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def _levels(self) -> list[_html.Level]:
        used, of = self.filled * self.slot_bytes, self.capacity * self.slot_bytes
        return [("memory", used, of, f"{self.filled} of {self.capacity} slots")]

    def _repr_html_(self) -> str:
        return _html.table(type(self).__name__, self._levels(), str(self))

    def __str__(self) -> str:
        return (
            f"{self.filled} of {self.capacity} slots filled "
            f"({self.filled * self.slot_bytes / _GIB:.2f} GiB), "
            f"{self.hits} hits, {self.misses} misses ({self.hit_rate:.1%} hit rate)"
            + (", frozen" if self.frozen else "")
        )


class SharedCache(_C.Cache):
    """A cache of equal-shaped samples in shared memory; drop-in for ``stocaching.SharedCache``.

    One slot per sample, for as many samples as the limit holds: the first ``len(cache)`` of the
    dataset. Every process that inherits or unpickles the cache, and under torchrun every rank of
    the node, reads and fills the same slots.

    >>> cache = SharedCache(size_limit_gib=0.001, dataset_len=10, data_dims=(3, 4), verbose=False)
    >>> x = cache.get_slot(7)
    >>> if x is None:
    ...     x = torch.full((3, 4), 7, dtype=torch.uint8)
    ...     cache.set_slot(7, x)
    >>> cache.get_slot(7).sum().item()
    84

    Args:
        size_limit_gib: The most the cache may take, in GiB; may be fractional.
        memory: The same as CachedDataset takes it, in its place: bytes, a text such as "32GiB", or
            a fraction of the memory that is free.
        dataset_len: Number of samples in the dataset.
        data_dims: Shape of one sample, without the batch dimension.
        dtype: Any torch dtype.
        name: Share on purpose, with any process of this user on this node that gives the same name.
        shared: False keeps a rank's cache to itself and its workers. Needed only if ranks hold
            different data under equal attributes.
        backing: "shm" is a file in /dev/shm, "memfd" memory outside of it; "auto" takes /dev/shm
            where it has room.
        keep: Leave the cache in /dev/shm when the last process exits, for the next run under the
            same name.
        fingerprint: Any text that says what the data are. A cache made with another is refused.
        on_change: "clear" removes a cache of this name that was made with another fingerprint or
            other arguments, if nobody uses it, instead of refusing it.
        verify: "always" keeps a checksum per slot and checks it at every hit; a slot that somebody
            wrote to through a view is then a miss instead of wrong data.
        checksum: True is another word for verify="always", and the one that FileCache has.
        huge_pages: True fills the cache with pages of 2 MiB, which cost a process hardly any page
            tables, and is an error where shared memory gets none; "auto" uses them where it does.
        verbose: Print one line at creation.

    A hit is a view, not a copy: editing it in place edits the cache. Clone it first, or use
    ``get_many``, which copies.
    """

    _rendezvous: _job.Rendezvous | None = None

    def __init__(
        self,
        size_limit_gib: float | None = None,
        dataset_len: int | None = None,
        data_dims: Sequence[int] | None = None,
        dtype: torch.dtype = torch.uint8,
        *,
        memory: int | float | str | None = None,
        name: str | None = None,
        shared: bool = True,
        backing: str = "auto",
        keep: bool = False,
        fingerprint: str = "",
        on_change: str = "error",
        verify: str = "never",
        checksum: bool = False,
        huge_pages: bool | str = False,
        verbose: bool = True,
    ) -> None:
        size_limit_gib = _one_limit(size_limit_gib, memory)
        limit = _number("size_limit_gib", size_limit_gib)
        length = _whole("dataset_len", dataset_len)
        dims = _dims(data_dims)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"Unsupported dtype: {dtype!r}; use a torch.dtype such as torch.uint8")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is a {type(name).__name__}; a str or None is needed")
        # The rest is checked where it is opened.
        if name is not None and not (name and name.isprintable()):
            raise ValueError(
                f"name {name!r} is not allowed: "
                "use 1 to 100 letters, digits, dots, dashes and underscores"
            )
        flags = {"shared": shared, "keep": keep, "checksum": checksum, "verbose": verbose}
        for what, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{what} is {flag!r}; True or False is needed")
        if checksum and verify == "never":
            verify = "always"
        for what, word, allowed in (
            ("backing", backing, '"auto", "shm" or "memfd"'),
            ("verify", verify, '"never" or "always"'),
        ):
            if not isinstance(word, str):
                raise TypeError(f"{what} is {word!r}; use {allowed}")
        check_on_change(on_change)
        pages = huge_pages_word(huge_pages)
        job = find_job() if shared and name is None else None
        rendezvous = None
        if job is not None:
            geometry = (limit, length, dims, str(dtype), backing, fingerprint, verify)
            rendezvous = _job.Rendezvous(job.name, geometry, _job.caller_of(self))
        chosen = name or (rendezvous.name if rendezvous else "")
        mark = _C.fingerprint_of(str(fingerprint))
        open_or_clear(
            lambda: self._open(
                limit, length, dims, dtype, chosen, backing, keep, verify, mark, pages,
                *NOT_OPEN_ELSEWHERE,
            ),
            chosen, on_change,
        )  # fmt: skip
        if rendezvous is not None and rendezvous.owner is not None:
            self._rendezvous = rendezvous
            self._set_provisional()
            _job.agree_before_fork(self)
        if verbose:
            self._announce(size_limit_gib, backing)

    @classmethod
    def join(cls, name: str) -> SharedCache:
        """The cache of that name, whatever it holds; a RuntimeError if no process has it open."""
        if not isinstance(name, str):
            raise TypeError(f"name is a {type(name).__name__}; a str is needed")
        cache = cls.__new__(cls)
        cache._join(name)
        return cache

    def _announce(self, size_limit_gib: float, backing: str) -> None:
        location, stats = self._location(), self.stats()
        if location["opened"] == "joined":
            return  # whoever created it has said so
        capacity, length = stats.capacity, stats.dataset_len
        size = (stats.slot_bytes + 1) * length / _GIB
        fits = capacity == length
        line = (
            f"Dataset size ({size:.1f} GiB) {'fits in' if fits else 'exceeds'} cache limit "
            f"({size_limit_gib} GiB). Allocating space to cache "
            + (f"all {capacity} samples." if fits else f"{capacity} / {length} samples.")
        )
        if location["opened"] == "resumed":
            line += f" {location['name']!r} was kept: {stats.filled} of them are filled."
        elif location["backing"] == "memfd" and backing == "auto":
            line += " /dev/shm has too little room for it, so it lies in memory outside /dev/shm."
        print(line, flush=True)

    # Sharing

    def _agree_on_name(self) -> None:
        """Called once before the first use: the dataset is complete now (see _sharing/job.py)."""
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is None:
            return
        name = rendezvous.final_name()
        if self._is_open() and name != self.name:
            arguments = list(self._arguments())
            arguments[4] = name
            arguments[-3:] = NOT_OPEN_ELSEWHERE
            self._open(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rejoin, (type(self), self._arguments()), _extra_attributes(self))

    @property
    def name(self) -> str:
        """The name under which other processes can join."""
        return str(self._location()["name"])

    @property
    def path(self) -> str | None:
        """The file in /dev/shm, or None for a memfd."""
        return self._location()["path"] or None

    @property
    def backing(self) -> str:
        """Where the memory is: "shm" or "memfd"."""
        return str(self._location()["backing"])

    @property
    def handle(self) -> str:
        """How ``torch.ops.stocache`` and graphs refer to this cache: its name, and what its samples
        look like."""
        _, _, dims, dtype, name, *_ = self._arguments()
        return _ops.handle(name, dims, dtype)

    def scripted(self, if_gone: str = "error") -> torch.ScriptObject:
        """This cache as a ``torch.classes.stocache.SharedCache``, for scripted modules.

        A module that holds it can be saved with torch.jit.save. Loading it, in Python or C++, joins
        the live cache of this name.

        Args:
            if_gone: What loading does when no process has the cache open any more: "error" raises,
                "empty" makes an empty one.
        """
        scripted: torch.ScriptObject = torch.classes.stocache.SharedCache.join(self.name, if_gone)
        return scripted

    # The whole cache

    @property
    def array(self) -> torch.Tensor:
        """All slots as one tensor of shape (len(cache), *data_dims).

        Reserves the memory of every slot first, filled or not: direct access must not fail later.
        """
        return self._array()

    @property
    def underlying_array(self) -> torch.Tensor:
        """The same as ``array``."""
        return self._array()

    @property
    def aux_array(self) -> torch.Tensor:
        """The state of every sample, live: 0 empty, 1 set, 2 beyond the cache, else written now."""
        return self._states()

    @property
    def fill_fraction(self) -> float:
        """Share of the slots that are filled."""
        stats = self._stats()
        return float(stats["filled"]) / max(1, len(self))

    def stats(self) -> SharedCacheStats:
        """Counts of all processes so far."""
        return SharedCacheStats(**self._stats())

    def __len__(self) -> int:
        return self._length()

    def __repr__(self) -> str:
        if self.closed:
            return f"{type(self).__name__}(closed)"
        _, length, dims, dtype, name, *_ = self._arguments()
        return (
            f"{type(self).__name__}({len(self)} of {length} samples, {dims}, {dtype}, "
            f"{self.fill_fraction:.0%} filled, name={name!r})"
        )

    def _repr_html_(self) -> str:
        if self.closed:
            return _html.table(repr(self), [])
        return _html.table(type(self).__name__, self.stats()._levels(), str(self.stats()))

    # Samples by index

    def __getitem__(self, idx: Any) -> torch.Tensor:
        place = self._place(idx)
        return self.array[idx] if place is None else self._slot_in_place(place)

    def __setitem__(self, idx: Any, value: Any) -> None:
        place = self._place(idx)
        if place is not None:
            self.set_slot(place, self._filled_with(value, ()), False, True)
        elif isinstance(idx, tuple):
            self.array[idx] = value  # part of a slot: its state stays as it is
        else:
            # Slices, masks and lists of indices select whole slots.
            rows = torch.arange(len(self))[idx]
            self.set_many(rows, self._filled_with(value, (len(rows),)), allow_overwrite=True)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def _place(self, idx: Any) -> int | None:
        """An integer index with negative ones counted from the end; None for other keys."""
        if isinstance(idx, (bool, slice, tuple, list)) or idx is None or idx is Ellipsis:
            return None
        if isinstance(idx, torch.Tensor) and (idx.dim() > 0 or idx.dtype == torch.bool):
            return None
        try:
            place = operator.index(idx)
        except TypeError:
            return None
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is out of bounds of SharedCache of length {len(self)}")
        return place % len(self)

    def _filled_with(self, value: Any, batch: tuple[int, ...]) -> torch.Tensor:
        """A number stands for a slot full of it; tensors must have the slot's shape and dtype."""
        dims, dtype = self._arguments()[2:4]
        if isinstance(value, (bool, int, float, complex)):
            return torch.full((*batch, *dims), value, dtype=dtype)
        if batch and isinstance(value, torch.Tensor) and value.shape == dims:
            return value.expand(*batch, *dims)
        return value  # type: ignore[no-any-return]

    # Many samples

    def get_many(
        self, indices: Indices, out: torch.Tensor | None = None, threads: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies many samples in one call without the GIL.

        Returns ``(batch, found)``: a tensor of shape (len(indices), *data_dims) and a bool tensor
        that says which rows were cached; the other rows are zero. Without ``out``, the memory of an
        earlier batch is used again once nothing refers to it.
        """
        return self._get_many(_as_indices(indices), out, threads)

    def set_many(
        self, indices: Indices, batch: torch.Tensor, allow_overwrite: bool = False
    ) -> torch.Tensor:
        """Stores many samples in one call without the GIL; returns which were stored.

        Not stored, and no error, is what lies beyond the cache or is already there.
        """
        return self._set_many(_as_indices(indices), batch, allow_overwrite)

    # The end

    def close(self) -> None:
        """Detaches this process; views stay valid. The last process to detach removes the cache."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._is_open()

    def __enter__(self) -> SharedCache:
        self._location()  # says so if it is closed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _rejoin(kind: type[SharedCache], arguments: tuple[Any, ...]) -> SharedCache:
    """The same cache in another process; an empty one of the same kind if it is gone."""
    cache = kind.__new__(kind)
    cache._open(*arguments)
    return cache


def _extra_attributes(cache: SharedCache) -> dict[str, Any] | None:
    """What a subclass or a user put on the object."""
    return {key: value for key, value in vars(cache).items() if key != "_rendezvous"} or None


def _as_indices(indices: Indices) -> Any:
    if isinstance(indices, (torch.Tensor, list, tuple)):
        return indices
    return (
        torch.as_tensor(indices, dtype=torch.int64)
        if not hasattr(indices, "dtype")
        else (torch.as_tensor(indices))
    )


def _whole(what: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}; an integer of at least 1 is needed") from None
    if not -(1 << 62) < number < 1 << 62:
        raise ValueError(f"{what} is {number}; it must be below 2**62")
    return number


def _one_limit(size_limit_gib: Any, memory: Any) -> Any:
    """The limit in GiB, in whichever words it was given."""
    if (size_limit_gib is None) == (memory is None):
        raise TypeError(
            "size_limit_gib and memory are both given; use one of them"
            if memory is not None
            else 'size_limit_gib is None; use a number of GiB, or memory= such as "32GiB"'
        )
    return size_limit_gib if memory is None else parse_size("memory", memory) / _GIB


def _dims(data_dims: Any) -> tuple[int, ...]:
    if isinstance(data_dims, (str, bytes)) or not hasattr(data_dims, "__iter__"):
        raise TypeError(f"data_dims is {data_dims!r}; a tuple such as (3, 224, 224) is needed")
    return tuple(_whole(f"dimension {i} of data_dims", dim) for i, dim in enumerate(data_dims))


def _number(what: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r}; a number of GiB is needed") from None
