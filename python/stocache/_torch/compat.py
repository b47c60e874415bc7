# mypy: disallow-untyped-calls=False
"""The private names of torch's DataLoader, and the two iterators that are built on them.

stocache is built for exactly one torch, so these names are known to be there. They are used in this
file only (and in ops.py and ipc.py, for graphs and for messages between processes).

An iterator of `stocache.DataLoader` is torch's own, which may make its batches in this process if
the loader says so at the beginning of an epoch. It asks its sampler for indices, and draws random
numbers, exactly when torch's does: workers' seeds once per iterator, `iter(sampler)` as the epoch
begins, and with workers so many batches ahead as torch hands out to them.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stocache import _C
from stocache._torch.order import drawn, listed

__all__ = ["Gatherer", "Loader", "as_plain_tensors", "pin_memory"]

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which a subclass's own idea of what a function does is not asked."""

# So many batches are gathered ahead. With one, nobody would gather while the training loop takes it
# and asks for the next.
_AHEAD = 2


class Gatherer(Protocol):
    """Makes batches in this process."""

    missing: Any
    """What comes instead of a batch if a sample is not in memory any more."""
    knows_order: bool
    """Whether indices may be asked for before torch would: nobody can tell the difference."""

    def start(self, indices: Any) -> Callable[[], Any]:
        """Begins with a batch; the function waits for it."""


class Loader(DataLoader[Any]):
    """torch's DataLoader, with these iterators."""

    def gatherer(self) -> Gatherer | None:
        """Makes the batches of an epoch that begins now, if that can be done here."""
        raise NotImplementedError

    def view(self) -> Any:
        """What to fetch from in the place of the dataset: it gives whole batches. Or None."""
        raise NotImplementedError

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return HereIterator(self)
        self.check_worker_number_rationality()
        return WorkersIterator(self)


def _over_view(loader: Loader) -> Any:
    """A loader as this one is, for an iterator, which fetches from the view if there is one."""
    other: Any = copy.copy(loader)
    # Iterators have it, so it must not have them: nothing would end in time.
    other._iterator = None
    view = loader.view()
    if view is not None:
        other.__dict__["dataset"] = view  # torch refuses to set it
        other.collate_fn = _as_it_is
        other.worker_init_fn = _Introduction(loader.dataset, loader.worker_init_fn)
    return other


def _as_it_is(batch: Any) -> Any:
    return batch


class _Introduction:
    """The first that a worker does: get_worker_info() tells of the dataset, not of the view."""

    def __init__(self, dataset: Any, worker_init_fn: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._then = worker_init_fn

    def __call__(self, worker: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # it is frozen
        if self._then is not None:
            self._then(worker)


def _kept(indices: Any) -> Any:
    """The indices of a batch, which may be asked for twice: an iterator gives them once."""
    return list(indices) if hasattr(indices, "__next__") else indices


def _order_of(iterator: Any) -> Iterator[Any]:
    """What it asks for indices, before it has asked for any."""
    return drawn(iterator._index_sampler) or iterator._sampler_iter


class _Unprofiled(_BaseDataLoaderIter):
    """A batch that is gathered here is noted for torch's profiler only while somebody profiles: the
    note alone takes 6 µs, a small batch 70."""

    _gatherer: Gatherer | None

    def __next__(self) -> Any:
        if (
            self._gatherer is None
            or self._sampler_iter is None
            or torch._C._autograd._profiler_enabled()
        ):
            return super().__next__()
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch


class HereIterator(_Unprofiled, _SingleProcessDataLoaderIter):
    """Without workers."""

    def __init__(self, loader: Any) -> None:
        super().__init__(_over_view(loader))
        self._gatherer = loader.gatherer()
        if self._gatherer is not None:
            self._sampler_iter = _order_of(self)
        self._begun: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._unasked = len(self) if self._gatherer and self._gatherer.knows_order else 0

    def _next_data(self) -> Any:
        if self._gatherer is None:
            return super()._next_data()
        if not self._begun:
            self._begin(self._gatherer)
        # The last batch may end the sampler, which may draw: it is asked for when it is wanted.
        while len(self._begun) <= _AHEAD and self._unasked > 1:
            self._begin(self._gatherer)
        indices, wait = self._begun.popleft()
        batch = wait()
        if batch is not self._gatherer.missing:
            return batch
        batch = self._dataset_fetcher.fetch(listed(indices))
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _begin(self, gatherer: Gatherer) -> None:
        indices = _kept(self._next_index())
        self._unasked -= 1
        self._begun.append((indices, gatherer.start(indices)))


class WorkersIterator(_Unprofiled, _MultiProcessingDataLoaderIter):
    """With workers, which are started when they are needed: in an epoch that is gathered in this
    process there is nothing for them to do."""

    _shutdown = True  # until workers were started

    def __init__(self, loader: Any) -> None:
        self._given: deque[list[Any]] = deque()  # indices, and what waits for their batch
        self._gatherer = loader.gatherer()
        self._loader = _over_view(loader)
        if self._gatherer is None:
            super().__init__(self._loader)
            return
        self._prefetch_factor = loader.prefetch_factor
        _BaseDataLoaderIter.__init__(self, self._loader)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._gatherer = loader.gatherer()
        if self._gatherer is None and not self._shutdown:
            super()._reset(loader, first_iter)
            return
        _BaseDataLoaderIter._reset(self, loader, first_iter)
        self._given.clear()
        if self._gatherer is not None:
            self._sampler_iter = _order_of(self)
        for _ in range(self._prefetch_factor * self._num_workers):
            self._ask()
        if self._gatherer is None:
            self._hand_to_workers()

    def _next_data(self) -> Any:
        if self._gatherer is None:
            return super()._next_data()
        if not self._given:
            raise StopIteration
        for task in itertools.islice(self._given, _AHEAD + 1):
            if len(task) == 1:
                task.append(self._gatherer.start(task[0]))
        try:
            batch = self._given[0][1]()
        except Exception:
            self._given.popleft()
            self._ask()
            raise
        if batch is self._gatherer.missing:
            self._hand_to_workers()
            return super()._next_data()
        self._given.popleft()
        self._ask()
        return batch

    def _ask(self) -> None:
        try:
            self._given.append([_kept(self._next_index())])
        except StopIteration:
            return

    def _hand_to_workers(self) -> None:
        """The rest of this epoch, as if they had had it from its beginning."""
        given = [task[0] for task in self._given]
        rest = _Rest(map(listed, itertools.chain(given, self._sampler_iter)))
        order = self._index_sampler
        self._given.clear()
        self._gatherer = None
        if not self._shutdown:
            self._index_sampler = rest
            super()._reset(self._loader)
        else:
            loader = copy.copy(self._loader)
            # Their seed was drawn as this iterator was made. (They will draw nothing with it: a
            # transform would have been a reason not to gather here.)
            loader.generator = torch.Generator().manual_seed(int(self._base_seed))
            loader.__dict__["batch_sampler"] = rest  # torch refuses to set it
            super().__init__(loader)
        self._index_sampler = order

    def _shutdown_workers(self) -> None:
        had_workers = not self._shutdown
        super()._shutdown_workers()
        if had_workers and not sys.is_finalizing():
            # Later there may be nobody who receives or drops a batch, which does the same.
            _C.batch_sweep()


class _Rest:
    """A batch sampler that goes on where another was left."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self._rest
