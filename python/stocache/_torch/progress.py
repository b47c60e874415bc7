"""Where an epoch stands: what its sampler gave, and which batches of that were handed out.

An epoch that was left in its middle goes on in another process by a state, which is plain data. Its
order is drawn again, from the random states with which it began, and nothing is loaded for that.
The program's own random numbers stay as they are: what is drawn again is drawn aside.

torch's own samplers draw nothing more once an epoch has its order, so the state of any rank will do
for them. A sampler with a state of its own is asked for it before every batch: it may be in its
next epoch when its last batch is still to be handed out. Any other may draw for every batch, while
the program draws too. What such a sampler gave ahead of what was handed out is part of the state:
it is not asked for it twice.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import operator
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stocache._torch.generators import is_generator, set_state, state_of
from stocache._torch.order import Drawn, drawn, listed

VERSION = 1
Numbers = tuple[int, int]
"""What random numbers of a fused transform follow from beside the index: seed and epoch."""


class Said(NamedTuple):
    """What was said of an epoch that begins."""

    epoch: int | None
    """None: nobody said a number."""
    times: int = 0
    """How often somebody said one, where that can be seen."""
    counts: tuple[Any, ...] = ()
    """Of what a process counts the epochs, also for loaders that are made anew."""


_TORCHS = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)


class Samplers:
    """What the order of a loader depends on."""

    def __init__(self, batches: Any, single: Any, generator: Any) -> None:
        self.batches = batches  # what gives the next batch, or the next index where there are none
        self.single = getattr(batches, "sampler", single)
        self._generator = generator

    def are_torchs(self) -> bool:
        """Whether nothing is drawn any more once an epoch has its order, but from generators that
        are theirs."""
        if type(self.batches) is BatchSampler:
            return type(self.single) in _TORCHS
        return type(self.batches) in _TORCHS

    def names(self) -> str:
        kinds = dict.fromkeys(type(part).__qualname__ for part in self._parts().values())
        return " of ".join(kinds)

    def generators(self) -> dict[str, Any]:
        """The random generators that are theirs, by their places."""
        places = {"generator": self._generator}
        for place, part in self._parts().items():
            for name, value in getattr(part, "__dict__", {}).items():
                places[f"{place}.{name}"] = value
        found: dict[str, Any] = {}
        for place, value in places.items():
            if is_generator(value) and all(value is not other for other in found.values()):
                found[place] = value
        return found

    def everything_random(self) -> dict[str, Any]:
        """The states of all generators that they may draw from."""
        states = {place: state_of(value) for place, value in self.generators().items()}
        states["torch"] = torch.get_rng_state()
        if not self.are_torchs():
            states["python"] = random.getstate()
            numpy_random = sys.modules.get("numpy.random")
            if numpy_random is not None:
                states["numpy"] = numpy_random.get_state(legacy=False)
        return states

    def stateful(self) -> Any:
        """The one that has a state of its own, and says so."""
        return next(filter(_is_stateful, self._parts().values()), None)

    def epoch(self) -> int | None:
        """The number that set_epoch() has set."""
        return self.said().epoch

    def said(self) -> Said:
        """The same; that it was set to what it is cannot be seen."""
        for part in self._parts().values():
            number = _attribute(part, "epoch")
            if callable(_attribute(part, "set_epoch")) and type(number) is int:
                return Said(number, counts=(part,))
        return Said(None)

    def set_epoch(self, number: int) -> None:
        for part in self._parts().values():
            if callable(_attribute(part, "set_epoch")):
                part.set_epoch(number)

    def share(self) -> list[Any]:
        """Which part of the dataset is theirs."""
        for part in self._parts().values():
            if type(replicas := _attribute(part, "num_replicas")) is int:
                return [_attribute(part, "rank"), replicas]
        return [None, None]

    def _parts(self) -> dict[str, Any]:
        if self.single is self.batches:
            return {"sampler": self.single}
        return {"batch_sampler": self.batches, "sampler": self.single}


class Epoch:
    """The batches of an epoch, as a sampler gives them. It is what torch's iterators ask."""

    def __init__(self, samplers: Samplers, iterator: Iterator[Any] | None = None) -> None:
        self._samplers = samplers
        self.set_by_program = samplers.epoch()
        self._at_iter = samplers.everything_random()
        self._at_first: dict[str, Any] | None = None  # as the first batch was asked for
        self._iterator: Any = iter(samplers.batches) if iterator is None else iterator
        self._asked = 0  # how often the sampler was asked, the time included when it had no more
        self._given = 0
        self._handed_out = 0
        self._again: deque[tuple[int, Any]] = deque()  # given before, to be given once more
        self._waiting: dict[int, Any] = {}  # given and not handed out yet, by number
        self._skipped: set[int] = set()  # handed out already, before this epoch went on
        self._stateful = samplers.stateful()
        if self._stateful is None and _is_stateful(self._iterator):
            self._stateful = self._iterator
        self._before: dict[int, Any] = {}  # its states before it gave these
        self._gathered = False
        self._has_ended = False
        self.is_over = False
        self.number = -1  # of the batch that was given last
        self.seed: int | None = None  # of the workers
        self.turn = 0  # how many epochs had the same seed before
        self.augmented: Numbers | None = None  # of a transform that was fused

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if self._again:
            self.number, indices = self._again.popleft()
        else:
            indices = self._ask()
            while self._given in self._skipped:
                self._given += 1
                indices = self._ask()
            self.number = self._given
            self._given += 1
            if self._before:
                for number in [n for n in self._before if n < self._first()]:
                    del self._before[number]
        if self._gathered:
            indices = kept(indices)
            self._waiting[self.number] = indices
        else:
            indices = listed(indices)
            self._waiting[self.number] = self._for_later(indices)
        return indices

    def _ask(self) -> Any:
        if self._at_first is None:
            self._at_first = self._samplers.everything_random()
        if not self._has_ended:
            self._asked += 1
            if self._stateful is not None:
                try:
                    # It may change the parts of its state as it gives the next batch.
                    self._before[self._given] = copy.deepcopy(self._stateful.state_dict())
                except Exception as error:  # of who asks the loader for its state, if somebody does
                    self._before[self._given] = error.with_traceback(None)
        try:
            return next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise

    def key(self) -> tuple[int, int, int]:
        """Which batch was given last, among all batches of all epochs."""
        assert self.seed is not None
        return self.seed, self.turn, self.number

    def gather(self) -> None:
        """From now on batches are gathered: their indices are asked for more than once, and need
        not be lists."""
        self._gathered = True
        if self._asked == 0:
            self._iterator = drawn(self._samplers.batches) or self._iterator

    def take_back(self) -> None:
        """What was not handed out is to be given once more, to workers that make batches."""
        self._again.extendleft(reversed(self._waiting.items()))
        self._waiting.clear()
        self._gathered = False

    def hand_out(self, number: int) -> None:
        """This batch is the program's now."""
        del self._waiting[number]
        self._handed_out += 1

    def _first(self) -> int:
        """From which batch on it is to go on. Of samplers with a state, that is before the last:
        they may have ended with it, and be asked what comes after."""
        waiting = [*self._waiting, *(number for number, _ in self._again), self._given]
        return min(waiting) if self._stateful is None else min(*waiting, max(0, self._given - 1))

    @property
    def handed_out(self) -> int:
        return self._handed_out

    def _for_later(self, indices: Any) -> Any:
        if type(self._samplers.batches) is BatchSampler:
            return indices  # a list that is nobody's
        if hasattr(indices, "__next__"):
            with contextlib.suppress(Exception):
                return copy.copy(indices)
            return indices  # it cannot be sent to a worker either
        return copied(indices)

    # Saved, and gone on with

    def state(self) -> dict[str, Any]:
        ahead = sorted([*self._waiting.items(), *self._again], key=operator.itemgetter(0))
        first = self._first()
        skipped = set(range(first, self._given)) - {number for number, _ in ahead}
        skipped |= {number for number in self._skipped if number >= self._given}
        state: dict[str, Any] = {
            "batches": self._handed_out,
            "asked": self._asked,
            "given": self._given,
            "first": first,
            "skipped": sorted(skipped),
            "seed": self.seed,
            "turn": self.turn,
            "set_by_program": self.set_by_program,
            "at_iter": _plain(self._at_iter),
            "at_first": None if self._at_first is None else _plain(self._at_first),
        }
        if self._stateful is not None:
            before = self._before.get(first)
            if isinstance(before, Exception):
                raise before
            now = self._stateful.state_dict() if before is None else before
            state["sampler"] = copy.deepcopy(now)
        elif not self._samplers.are_torchs():
            state["ahead"] = [[number, _plain_indices(indices)] for number, indices in ahead]
            state["ended"] = self._has_ended
        return state

    @classmethod
    def resumed(cls, samplers: Samplers, saved: dict[str, Any]) -> Epoch:
        """The rest of an epoch."""
        knows_itself = "sampler" in saved
        # Generators of torch's samplers go on from what is drawn again.
        goes_on = samplers.are_torchs() and saved["at_first"] is not None
        with _random_states_kept(samplers, but_their_own=knows_itself or goes_on):
            if not knows_itself:
                _set_states(samplers, saved["at_iter"])
            elif samplers.stateful() is not None:
                samplers.stateful().load_state_dict(saved["sampler"])
            epoch = cls(samplers, drawn(samplers.batches))
            epoch.set_by_program = saved["set_by_program"]
            epoch.seed, epoch.turn = saved["seed"], saved["turn"]
            epoch._at_iter = _from_plain(saved["at_iter"])
            if saved["at_first"] is not None:
                epoch._at_first = _from_plain(saved["at_first"])
            epoch._handed_out = saved["batches"]
            if "ahead" in saved:
                epoch._go_on(saved)
            else:
                epoch._given = saved["first"]
                epoch._skipped = set(saved["skipped"])
            if knows_itself and samplers.stateful() is None:
                epoch._stateful.load_state_dict(saved["sampler"])
            elif goes_on:
                epoch._draw_again(saved)
        return epoch

    def _draw_again(self, saved: dict[str, Any]) -> None:
        """What torch's samplers gave. Where they had more to give, the next is drawn as well, so
        that all is drawn that was."""
        _set_states(self._samplers, saved["at_first"])
        with contextlib.suppress(StopIteration):
            for _ in range(self._given):
                self._ask()
            if saved["asked"] > self._given:
                while self._given in self._skipped:
                    self._given += 1
                    self._ask()
                self._again.append((self._given, self._ask()))
                self._given += 1

    def _go_on(self, saved: dict[str, Any]) -> None:
        """After what other samplers gave."""
        self._given, self._asked = saved["given"], saved["asked"]
        self._again.extend((number, indices) for number, indices in saved["ahead"])
        if self._at_first is not None:
            _set_states(self._samplers, saved["at_first"])
            with contextlib.suppress(StopIteration):
                for _ in range(self._asked):
                    next(self._iterator)
        if saved["ended"]:
            self._has_ended = True
            self._iterator = iter(())


_COUNTED: WeakKeyDictionary[Any, tuple[int | None, int]] = WeakKeyDictionary()
"""What this process counted last: a number that was said, and how many epochs since."""


class Augmented:
    """Which numbers the epochs of a loader have, where random numbers follow from such: a seed, and
    what set_epoch() said last. Epochs that begin after it without a word have numbers that nobody
    says; where none was ever said, they are counted from 0."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._kept_seed: int | None = None  # of the state with which it goes on
        self._said: int | None = None
        self._times: int | None = None  # None: not known of the state with which it goes on
        self._since = -1

    def next(self, seed: int, said: Said) -> Numbers:
        if said.epoch is None:  # what the state says with which it goes on
            said = said._replace(epoch=self._said)
        if self._since >= 0 and said.epoch == self._said and self._times in (None, said.times):
            since = self._since
        else:
            counted = map(self._counted, said.counts)
            since = max((since for at, since in counted if at == said.epoch), default=-1)
        self._seed = seed if self._kept_seed is None else self._kept_seed
        self._said, self._since = said.epoch, since + 1
        return self.now(said)

    def now(self, said: Said) -> Numbers:
        """The numbers of the epoch that began last."""
        assert self._seed is not None
        self._times = said.times
        for each in said.counts:
            at, since = self._counted(each)
            with contextlib.suppress(TypeError):  # what has no hash is counted by its loader alone
                since = max(since, self._since) if at == self._said else self._since
                _COUNTED[each] = self._said, since
        if self._said is None:
            return self._seed, self._since
        return self._seed, self._said + (self._since << 32)

    def _counted(self, each: Any) -> tuple[int | None, int]:
        try:
            return _COUNTED.get(each, (None, -1))
        except TypeError:
            return None, -1

    def state(self) -> list[int | None] | None:
        return None if self._seed is None else [self._seed, self._said, self._since]

    def load(self, state: list[Any] | None) -> None:
        if state is not None:
            self._seed, self._said, self._since = state
            self._kept_seed, self._times = self._seed, None


class Order:
    """A loader's sampler as its iterators have it: they begin an epoch by iter() of it."""

    def __init__(self, progress: Progress, samplers: Samplers) -> None:
        self._progress = progress
        self._samplers = samplers
        # An iterator with workers asks for an order twice as it is made, and uses the second. The
        # first is none where that can be told: where it stands for one that lived on, which asks
        # once.
        self.is_idle = False

    def __len__(self) -> int:
        return len(self._samplers.batches)

    def __iter__(self) -> Any:
        if self.is_idle:
            self.is_idle = False
            return iter(())
        epoch = self._progress.resumed
        if epoch is None:
            epoch = Epoch(self._samplers)
        epoch.augmented = self._progress.augmented
        self._progress.epoch = epoch
        return epoch


class Progress:
    """The epoch of a loader that began last, and the state with which the next one is to begin."""

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.resumed: Epoch | None = None  # while an iterator is made for it
        self.seed: int | None = None  # of the workers of that iterator
        self.turn = 0
        self.loaded: dict[str, Any] | None = None
        self.augmented: Numbers | None = None  # of the epoch that began last
        self._augmented = Augmented()

    def __reduce__(self) -> tuple[Any, ...]:
        return Progress, ()  # a pickled or copied loader begins anew

    def state(self, samplers: Samplers, about: dict[str, Any], lives_on: bool) -> dict[str, Any]:
        """A state; ``lives_on``: whether the next epoch has the workers of the last one."""
        if self.loaded is not None:
            return copy.deepcopy(self.loaded)
        epoch, workers, between = self.epoch, None, None
        if epoch is not None and epoch.is_over:
            workers = [epoch.seed, epoch.turn + 1] if lives_on else None
            epoch = None
        if epoch is None and samplers.stateful() is not None:
            between = samplers.stateful().state_dict()
        return {
            "version": VERSION,
            **about,
            "sampler": samplers.names(),
            "share": samplers.share(),
            "sampler_epoch": samplers.epoch() if epoch is None else epoch.set_by_program,
            "sampler_state": between,
            "generators": _plain({n: state_of(g) for n, g in samplers.generators().items()}),
            "epoch": None if epoch is None else epoch.state(),
            "workers": workers,
            "augmented": self._augmented.state(),
        }

    def load(self, samplers: Samplers, about: dict[str, Any], state: Any) -> None:
        _check(samplers, about, state)
        for place, value in samplers.generators().items():
            set_state(value, _state_from_plain(state["generators"][place]))
        if state["sampler_epoch"] is not None:
            samplers.set_epoch(state["sampler_epoch"])
        if state["sampler_state"] is not None:
            samplers.stateful().load_state_dict(copy.deepcopy(state["sampler_state"]))
        self.loaded = copy.deepcopy(state)
        self._augmented.load(state.get("augmented"))

    def augment(self, samplers: Samplers, seed: int, said: Said) -> None:
        """An epoch begins whose random numbers follow from its number: what was ``said`` where
        somebody said it to the transform, and not to the sampler. One that goes on has its own."""
        if said.epoch is None and samplers.epoch() is not None:
            said = samplers.said()
        if self.resumed is not None and self._augmented.state() is not None:
            self.augmented = self._augmented.now(said)
        else:
            self.augmented = self._augmented.next(seed, said)

    def resume(self, samplers: Samplers) -> None:
        """Makes the next iterator one that goes on, if a state was loaded."""
        if self.loaded is None:
            return
        saved = self.loaded["epoch"]
        if saved is None:
            if self.loaded["workers"] is not None:
                self.seed, self.turn = self.loaded["workers"]
            return
        number = self.loaded["sampler_epoch"]
        if samplers.stateful() is None and samplers.epoch() != number:
            raise ValueError(
                f"set_epoch({samplers.epoch()}) was called after load_state_dict(), whose state is "
                f"in the middle of epoch {number}; go on with set_epoch({number}), or load no state"
            )
        self.resumed = Epoch.resumed(samplers, copy.deepcopy(saved))
        self.seed, self.turn = saved["seed"], saved["turn"]

    def resumption_is_over(self, begun: bool) -> None:
        self.resumed, self.seed, self.turn = None, None, 0
        if begun:
            self.loaded = None


def _check(samplers: Samplers, about: dict[str, Any], state: Any) -> None:
    """One sentence about a state that is not of a loader like this one."""
    if not isinstance(state, dict) or "version" not in state:
        raise TypeError(
            f"state is a {type(state).__name__} without a version; give what state_dict() of a "
            "stocache.DataLoader returned"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"state has version {state['version']!r}, and this stocache reads version {VERSION}; "
            "go on with the stocache that saved it, or begin the epoch anew"
        )
    for name, what in _ABOUT.items():
        if state.get(name) != about[name]:
            raise ValueError(
                f"state is of a loader with {what} {state.get(name)!r}, and this one has "
                f"{about[name]!r}; make the loader as it was, or begin the epoch anew"
            )
    names, places = samplers.names(), sorted(samplers.generators())
    if state["sampler"] != names or sorted(state["generators"]) != places:
        theirs = sorted(state["generators"])
        raise ValueError(
            f"state is of a {state['sampler']} with the generators {theirs}, and this loader has a "
            f"{names} with {places}; make the loader as it was, or begin the epoch anew"
        )
    rank, replicas = state["share"]
    own_rank, own_replicas = samplers.share()
    if replicas != own_replicas or (rank != own_rank and not samplers.are_torchs()):
        raise ValueError(
            f"state is of rank {rank} of {replicas}, and this loader's sampler is of rank "
            f"{own_rank} of {own_replicas}; load each rank's own state, with as many ranks"
        )


_ABOUT = {
    "samples": "a dataset of length",
    "batch_size": "batch_size",
    "drop_last": "drop_last",
    "batches_per_epoch": "a number of batches of",
}


# Indices


def kept(indices: Any) -> Any:
    """The indices of a batch, which are asked for more than once: an iterator gives them once, and
    a list or an array may be filled anew for the next batch."""
    if type(indices) is Drawn or isinstance(indices, tuple):
        return indices
    return list(indices) if hasattr(indices, "__next__") else copied(indices)


def copied(indices: Any) -> Any:
    """The same, of the same type where that can be."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    try:
        return copy.copy(indices)
    except Exception:  # the keys of a dict, say
        return list(indices)


def _plain_indices(indices: Any) -> Any:
    """As numbers of Python's where they are numbers, for a file."""
    indices = listed(indices)
    if isinstance(indices, (str, bytes)):
        return indices
    if isinstance(indices, torch.Tensor):
        return indices.tolist()
    with contextlib.suppress(TypeError):
        return operator.index(indices)
    if isinstance(indices, tuple):
        return tuple(map(_plain_indices, indices))
    with contextlib.suppress(TypeError):
        return [_plain_indices(index) for index in copied(indices)]
    return indices


# Random states


def _attribute(thing: Any, name: str) -> Any:
    """None if it has none, or one that raises something: nobody asked for it."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _is_stateful(thing: Any) -> bool:
    return all(callable(_attribute(thing, name)) for name in ("state_dict", "load_state_dict"))


def _set_states(samplers: Samplers, plain: dict[str, Any]) -> None:
    states = _from_plain(plain)
    for place, generator in samplers.generators().items():
        if place in states:
            set_state(generator, states[place])
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


@contextlib.contextmanager
def _random_states_kept(samplers: Samplers, but_their_own: bool) -> Iterator[None]:
    """What is drawn here is drawn from nobody: all generators are as before afterwards."""
    before = samplers.everything_random()
    own = {} if but_their_own else samplers.generators()
    try:
        yield
    finally:
        for place, generator in own.items():
            set_state(generator, before[place])
        torch.set_rng_state(before["torch"])
        if "python" in before:
            random.setstate(before["python"])
        if "numpy" in before:
            sys.modules["numpy.random"].set_state(before["numpy"])


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain_state(state) for name, state in states.items()}


def _plain_state(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return base64.b64encode(bytes(state.tolist())).decode()
    if isinstance(state, dict):
        return {name: _plain_state(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return [_plain_state(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def _from_plain(states: dict[str, Any]) -> dict[str, Any]:
    return {name: _state_from_plain(state) for name, state in states.items()}


def _state_from_plain(state: Any) -> Any:
    if isinstance(state, str):  # of torch
        return torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8, device="cpu")
    if isinstance(state, list):  # of random
        version, numbers, rest = state
        return version, tuple(numbers), rest
    return state  # of numpy
