# mypy: disallow-untyped-calls=False
"""The private names of torch's DataLoader, and the two iterators that are built on them.

They are the same in every torch that stocache is tested with (docs/torch.md). Private names of
torch are used in this folder only: those of loaders here, of graphs in ops.py, of messages between
processes in ipc.py, of modes in modes.py, of tensors in subclasses.py.

An iterator of `stocache.DataLoader` is torch's own, which may make its batches in this process if
the loader says so at the beginning of an epoch. It asks its sampler for indices, and draws random
numbers, exactly when torch's does: workers' seeds once per iterator, `iter(sampler)` as the epoch
begins, and with workers so many batches ahead as torch hands out to them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stocache import _C
from stocache._torch.batch_transform import Key
from stocache._torch.order import listed
from stocache._torch.progress import Epoch, Numbers, Order, Progress, Said, Samplers
from stocache._torch.shares import Shares

__all__ = ["Asked", "Gatherer", "Loader", "RestOf", "as_plain_tensors", "pin_memory"]

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which a subclass's own idea of what a function does is not asked."""

# So many batches are gathered ahead. With one, nobody would gather while the training loop takes it
# and asks for the next.
_AHEAD = 2
# So many batches that cannot be gathered are asked for one by one. Then, if most of the epoch's
# were such, workers make the rest of it.
_FEW = 3


class Begun(Protocol):
    """A batch that is being made in this process."""

    rows: list[int] | None
    """Those that workers have to load; None if one of them has to make the batch."""

    def finish(self, answers: list[Any] | None = None) -> Any:
        """The batch, with what workers gave; or ``missing``: one of them must make all of it."""


class Gatherer(Protocol):
    """Makes batches in this process."""

    missing: Any
    """What comes instead of a batch if a sample is not in memory any more."""
    knows_order: bool
    """Whether indices may be asked for before torch would: nobody can tell the difference."""
    is_complete: bool
    """Whether all samples were in memory when somebody looked last."""

    def start(self, indices: Any, key: Key) -> Begun:
        """Begins with a batch."""


class Asked:
    """Asks a worker for a batch, in the place of its indices, and says which it is."""

    __slots__ = ("augmented", "indices", "key")

    def __init__(self, indices: Any, key: Key, augmented: Numbers | None) -> None:
        self.indices = indices
        self.key = key
        self.augmented = augmented  # what random numbers follow from, if they do


class RestOf(Asked):
    """Asks it for what is not in memory of these rows of a batch."""

    __slots__ = ("rows",)

    def __init__(self, indices: Any, key: Key, rows: Sequence[int]) -> None:
        super().__init__(indices, key, None)
        self.rows = rows


_NOT_YET = object()


class _Task:
    """A batch to come."""

    __slots__ = ("answers", "asked", "begun", "indices", "key")

    def __init__(self, indices: Any, key: Key) -> None:
        self.indices = indices
        self.key = key
        self.begun: Begun | None = None  # in this process
        self.asked = False  # of workers: the rest of it, or of one: the whole
        self.answers: list[Any] = []  # what they gave, or an ExceptionWrapper

    @property
    def number(self) -> int:
        return self.key[2]

    def is_answered(self) -> bool:
        return all(answer is not _NOT_YET for answer in self.answers)


class Loader(DataLoader[Any]):
    """torch's DataLoader, with these iterators."""

    batch_transform: Callable[..., Any] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stocache_progress = Progress()

    def _stocache_said(self) -> tuple[int, Said] | None:
        """The seed of an epoch that begins now and what was said of it; None where no transform
        was fused."""
        raise NotImplementedError

    def _stocache_tells(self) -> bool:
        """Whether who makes a batch needs to know which it is."""
        if self._stocache_progress.augmented is not None and self.batch_sampler is not None:
            return True
        return self.batch_transform is not None

    def _stocache_source(self) -> Any:
        """What batches can be gathered from, as it is now; None if they cannot be."""
        raise NotImplementedError

    def _stocache_gatherer(self, source: Any) -> Gatherer | None:
        """Makes the batches of an epoch that begins now, from what ``source`` gave, if that can be
        done here."""
        raise NotImplementedError

    def _stocache_view(self, source: Any) -> Any:
        """What to fetch from in the place of the dataset: it gives whole batches. None if it is the
        dataset, and torch collates."""
        raise NotImplementedError

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return HereIterator(self)
        self.check_worker_number_rationality()
        return WorkersIterator(self)

    def __iter__(self) -> _BaseDataLoaderIter:
        progress, begun = self._stocache_progress, False
        samplers, said = self._stocache_samplers(), self._stocache_said()
        progress.resume(samplers)
        if said is not None:
            progress.augment(samplers, *said)
        try:
            iterator = super().__iter__()
            begun = True
        finally:
            progress.resumption_is_over(begun)
        return iterator

    @property
    def _index_sampler(self) -> Any:
        """For iterators, an order that is noted as they ask for it."""
        order = vars(self).get("_stocache_order")
        return super()._index_sampler if order is None else order

    def _stocache_samplers(self) -> Samplers:
        return Samplers(super()._index_sampler, self.sampler, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands that began last: ``load_state_dict`` goes on there.

        What was handed out counts, not what was prepared. Before an epoch, and after its end, it is
        the state in which the next one begins.
        """
        lives_on = self.persistent_workers and self._iterator is not None
        about = self._stocache_about()
        return self._stocache_progress.state(self._stocache_samplers(), about, lives_on)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next epoch is the rest of that of which this is the state. The samples before it are
        not loaded, and no random number of the program's is drawn for them."""
        about = self._stocache_about()
        self._stocache_progress.load(self._stocache_samplers(), about, state_dict)

    def _stocache_about(self) -> dict[str, Any]:
        if isinstance(self.dataset, IterableDataset):
            raise TypeError(
                f"{type(self.dataset).__name__} is an IterableDataset, which has no order that "
                "could be drawn again; a map-style dataset is needed, or a loader that asks the "
                "dataset for its state"
            )
        batches = super()._index_sampler
        return {
            "samples": len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            # The number of a program's own batches may be another one in every epoch.
            "batches_per_epoch": len(batches) if type(batches) is BatchSampler else None,
        }


def _over_view(loader: Loader, source: Any) -> Any:
    """A loader as this one is, for an iterator. It fetches from the view if there is one."""
    other: Any = copy.copy(loader)
    # Iterators have it, so it must not have them: nothing would end in time.
    other._iterator = None
    progress = loader._stocache_progress
    other._stocache_order = Order(progress, loader._stocache_samplers())
    if progress.seed is not None:
        other.generator = torch.Generator()  # the seed of the workers has been drawn
    view = loader._stocache_view(source)
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


class _Unprofiled(_BaseDataLoaderIter):
    """A batch that is gathered here is noted for torch's profiler only while somebody profiles: the
    note alone takes 6 µs, a small batch 70."""

    _gatherer: Gatherer | None
    _sampler_iter: Epoch
    _tells: bool

    def __next__(self) -> Any:
        try:
            if self._gatherer is None or torch._C._autograd._profiler_enabled():
                return super().__next__()
            batch: Any = self._next_data()
        except StopIteration:
            self._sampler_iter.is_over = True
            raise
        self._num_yielded += 1
        return batch

    def _question(self, indices: Any, key: Key) -> Any:
        """What asks for a batch."""
        return Asked(indices, key, self._sampler_iter.augmented) if self._tells else indices


class HereIterator(_Unprofiled, _SingleProcessDataLoaderIter):
    """Without workers."""

    def __init__(self, loader: Any) -> None:
        source = loader._stocache_source()
        super().__init__(_over_view(loader, source))
        self._gatherer = loader._stocache_gatherer(source)
        epoch = self._sampler_iter
        if epoch.seed is None:
            seed = loader._stocache_progress.seed
            epoch.seed = int(self._base_seed) if seed is None else seed
        if self._gatherer is not None:
            epoch.gather()
        self._tells = loader._stocache_tells()
        self._begun: deque[tuple[Any, Key, Begun]] = deque()
        self._unasked = 0
        if self._gatherer and self._gatherer.knows_order:
            self._unasked = len(self) - epoch.handed_out

    def _next_data(self) -> Any:
        if self._gatherer is None:
            return super()._next_data()
        if not self._begun:
            self._begin(self._gatherer)
        # The last batch may end the sampler, which may draw: it is asked for when it is wanted.
        with contextlib.suppress(StopIteration):  # the dataset became shorter
            while len(self._begun) <= _AHEAD and self._unasked > 1:
                self._begin(self._gatherer)
        indices, key, begun = self._begun.popleft()
        self._sampler_iter.hand_out(key[2])
        batch = begun.finish()
        if batch is not self._gatherer.missing:
            return batch
        batch = self._dataset_fetcher.fetch(self._question(listed(indices), key))
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _begin(self, gatherer: Gatherer) -> None:
        indices = next(self._sampler_iter)
        key = self._sampler_iter.key()
        self._unasked -= 1
        self._begun.append((indices, key, gatherer.start(indices, key)))

    def _next_index(self) -> Any:
        """Where batches are not gathered. Whatever comes of it, the next one is the one after."""
        indices = super()._next_index()
        self._sampler_iter.hand_out(self._sampler_iter.number)
        return self._question(indices, self._sampler_iter.key())


class WorkersIterator(_Unprofiled, _MultiProcessingDataLoaderIter):
    """With workers, which are started when they are needed: for a batch that is in memory there is
    nothing for them to do.

    While batches are gathered in this process, a worker gets what is missing of a batch as torch
    would give it the whole one, and torch's own machine brings the answers, in the order in which
    they were asked for.
    """

    _shutdown = True  # until workers were started

    def __init__(self, loader: Any) -> None:
        self._given: deque[_Task] = deque()  # in the order of the sampler
        self._begun = 0  # how many of these were looked at
        # Which question it is, by the number of torch's task.
        self._asked: dict[int, tuple[_Task, int]] = {}
        self._shares = Shares(loader.num_workers)
        self._sent: dict[int, int] = {}  # numbers of batches that workers make, likewise
        self._turn = loader._stocache_progress.turn
        self._tells = loader._stocache_tells()
        self._message: Any = None  # to the next worker
        self._started = 0  # batches of this epoch that were begun in this process
        self._made_by_workers = 0  # those of them that could not be gathered
        # Workers have what is there when they are started, and see nothing that is set later.
        self._source = loader._stocache_source()
        self._gatherer = loader._stocache_gatherer(self._source)
        self._loader = _over_view(loader, self._source)
        progress = loader._stocache_progress
        order = self._loader._stocache_order
        if progress.seed is not None:
            self._workers_seed = int(progress.seed)
            order.is_idle = progress.resumed is None
        if self._gatherer is None:
            super().__init__(self._loader)
            return
        self._prefetch_factor = loader.prefetch_factor
        order.is_idle = order.is_idle or loader._stocache_samplers().are_torchs()
        _BaseDataLoaderIter.__init__(self, self._loader)
        self._reset(loader, first_iter=True)

    @property
    def _base_seed(self) -> int:
        """The seed of the workers: drawn once, when torch draws it, whenever they are started."""
        return self._workers_seed

    @_base_seed.setter
    def _base_seed(self, seed: int) -> None:
        self._workers_seed = getattr(self, "_workers_seed", seed)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._sent.clear()
        if not first_iter:
            self._gatherer = loader._stocache_gatherer(self._source)
            self._turn += 1
        if self._gatherer is None and not self._shutdown:
            super()._reset(loader, first_iter)
            return
        self._given.clear()
        self._begun = 0
        self._forget_questions()
        self._message = None
        self._started = self._made_by_workers = 0
        # Of an epoch that was left early, or in which a worker died with what it was asked for.
        if not self._shutdown and (self._task_info or self._tasks_outstanding):
            super()._reset(loader, first_iter)
        else:
            _BaseDataLoaderIter._reset(self, loader, first_iter)
        if self._gatherer is not None:
            self._sampler_iter.gather()
        for _ in range(self._prefetch_factor * self._num_workers):
            self._take()
        if self._gatherer is None:
            self._hand_to_workers()

    # From here on: in an epoch that is gathered in this process, as far as it can be

    def _next_data(self) -> Any:
        if self._gatherer is None:
            return super()._next_data()
        if not self._given:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        # Those further ahead are begun with, unless all is in memory: then soon enough here.
        while self._begun < min(len(self._given), _AHEAD + 1):
            task = self._given[self._begun]
            self._begun += 1
            if task.begun is None and not task.asked:
                self._begin(self._gatherer, task)
        task = self._given[0]
        try:
            batch = self._made(self._gatherer, task)
        except Exception:
            if not task.asked or task.is_answered():  # it is about this batch
                self._next_task()
            raise
        if batch is self._gatherer.missing:
            self._hand_to_workers()
            return super()._next_data()
        self._next_task()
        return batch

    def _made(self, gatherer: Gatherer, task: _Task) -> Any:
        """The batch; ``missing`` if it is for workers that give batches as they come. After a
        timeout it goes on where it was; after Ctrl-C too, unless torch's queue lost a message."""
        if task.begun is not None:
            batch = task.begun.finish(self._answers(task) if task.asked else None)
            if batch is not gatherer.missing:
                return batch
            if not self._loader.in_order:
                return gatherer.missing
            self._made_by_workers += 1
            self._ask_for_all(task)
        return self._answers(task)[0]

    def _take(self) -> None:
        """The next batch of the sampler. What is missing of it is asked for at once."""
        try:
            indices = self._next_batch()
        except StopIteration:
            return
        task = _Task(indices, self._sampler_iter.key())
        self._given.append(task)
        if self._gatherer is not None and not self._gatherer.is_complete:
            self._begin(self._gatherer, task)

    def _begin(self, gatherer: Gatherer, task: _Task) -> None:
        """Begins with a batch: what is in memory is copied, the rest is asked of workers."""
        if self._made_by_workers >= max(_FEW, self._started / 2):
            self._ask_for_all(task)
            return
        self._started += 1
        begun = task.begun = gatherer.start(task.indices, task.key)
        if begun.rows == [] or not self._loader.in_order:
            return
        if begun.rows is None:
            self._made_by_workers += 1
            self._ask_for_all(task)
        else:
            self._ask_for_rest(task, begun.rows)
        if gatherer.is_complete:
            # What was in memory as the epoch began is not any more.
            gatherer.is_complete = False
            for other in self._given:
                if other.begun is None and not other.asked:
                    self._begin(gatherer, other)

    def _next_batch(self) -> Any:
        """The indices of the next batch."""
        epoch = self._sampler_iter
        if not isinstance(epoch, Epoch):  # workers that are started with nothing to do yet
            raise StopIteration
        if epoch.seed is None:
            epoch.seed, epoch.turn = self._base_seed, self._turn
        self._turn = epoch.turn  # an epoch that goes on has its own
        return next(epoch)

    def _next_task(self) -> None:
        task = self._given.popleft()
        self._begun -= 1
        self._sampler_iter.hand_out(task.number)
        self._take()

    def _ask_for_all(self, task: _Task) -> None:
        task.begun = None
        indices = listed(task.indices)
        message = self._question(indices, task.key)
        self._ask(task, [(self._shares.next(len(indices), self._lives()), message)])

    def _ask_for_rest(self, task: _Task, rows: list[int]) -> None:
        """Workers share the rows, so that none is idle while another loads."""
        indices = listed(task.indices)
        parts = self._shares.divide(rows, self._lives())
        messages = [(worker, RestOf(indices, task.key, part)) for worker, part in parts]
        self._ask(task, messages)

    def _lives(self) -> list[bool]:
        return [True] * self._num_workers if self._shutdown else self._workers_status

    def _ask(self, task: _Task, messages: list[tuple[int, Any]]) -> None:
        if self._shutdown:
            self._start_workers(())
        task.asked, task.answers = True, [_NOT_YET] * len(messages)
        # torch counts messages, and allows so many for each worker as there are batches ahead.
        factor = self._prefetch_factor
        self._prefetch_factor = factor * self._num_workers
        first = self._send_idx
        try:
            for number, (worker, self._message) in enumerate(messages):
                self._asked[self._send_idx] = (task, number)
                # torch takes the first of these that lives.
                everybody = itertools.cycle(range(self._num_workers))
                chosen: Any = itertools.chain((worker,), everybody)
                self._worker_queue_idx_cycle = chosen
                self._try_put_index()
        except BaseException:
            if self._send_idx == first:  # nothing was asked
                task.asked, task.answers = False, []
            raise
        finally:
            self._prefetch_factor = factor

    def _forget_questions(self) -> None:
        self._asked.clear()
        self._shares = Shares(self._num_workers)

    def _answers(self, task: _Task) -> list[Any]:
        """What workers gave. Answers come in the order of the questions: those for other batches
        are kept for them. Where several raised, it is the error of the first rows."""
        while not task.is_answered():
            try:
                answer = super()._next_data()
            except StopIteration:
                task.answers = [None]  # they will not come
                raise RuntimeError("a DataLoader worker is gone, and its batch with it") from None
            of, number = self._asked.pop(self._rcvd_idx - 1)
            of.answers[number] = answer
        for answer in task.answers:
            if isinstance(answer, ExceptionWrapper):
                answer.reraise()
        return task.answers

    def _process_data(self, data: Any, worker: int) -> Any:
        if self._gatherer is None:
            for sent in [sent for sent in self._sent if sent not in self._task_info]:
                self._sampler_iter.hand_out(self._sent.pop(sent))
            return super()._process_data(data, worker)
        self._workers_num_tasks[worker] -= 1
        return data  # an error is raised when its batch is wanted

    def _next_index(self) -> Any:
        """What torch's machine gives to the next worker."""
        if self._gatherer is None:
            indices = self._next_batch()
            self._sent[self._send_idx] = self._sampler_iter.number
            return self._question(indices, self._sampler_iter.key())
        if self._message is None:
            raise StopIteration
        message, self._message = self._message, None
        return message

    def _hand_to_workers(self) -> None:
        """The rest of this epoch, as if they had had it from its beginning."""
        self._sampler_iter.take_back()
        self._given.clear()
        self._begun = 0
        self._forget_questions()
        self._sent.clear()
        self._gatherer = None
        if self._shutdown:
            self._start_workers(self._sampler_iter)
        else:
            order, self._index_sampler = self._index_sampler, _Rest(self._sampler_iter)
            try:
                super()._reset(self._loader)
            finally:
                self._index_sampler = order

    def _start_workers(self, rest: Iterable[Any]) -> None:
        """To make the rest of this epoch. Nobody sees that they begin in its middle."""
        loader = copy.copy(self._loader)
        loader.generator = torch.Generator()  # their seed has been drawn
        loader._stocache_order = _Rest(iter(rest))
        order, indices, yielded = self._index_sampler, self._sampler_iter, self._num_yielded
        gatherer, self._gatherer = self._gatherer, None
        try:
            super().__init__(loader)
        except BaseException:
            self._shutdown = True
            for worker in vars(self).get("_workers", ()):  # those before one that did not start
                worker.terminate()
                worker.join()
            raise
        finally:
            self._gatherer, self._index_sampler, self._num_yielded = gatherer, order, yielded
            if gatherer is not None:
                self._sampler_iter = indices

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
