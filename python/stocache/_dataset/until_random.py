"""The samples of a dataset up to the first random step of its transform, and the rest of them.

For the time that a sample is loaded, the first steps stand in the place of the dataset's transform.
The dataset gets something ``Sealed`` for what they give, and what it makes of that is the sample,
with holes where results belong. Cached are the holes, the sample around them, and what the rest is
called with. All steps are the same objects as before: MONAI knows them again when it inverts what
they did.

Where a dataset does more with a result than to hand it on, its samples pass the cache by: then the
whole transform makes them, when it is their turn to be handed out.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from stocache import _C
from stocache._compare import same
from stocache._dataset import places, telling
from stocache._dataset.copying import as_stored
from stocache._dataset.places import Path
from stocache._dataset.sealed import LOAD, CannotBeCut, Load, Sealed, Through, origin
from stocache._dataset.snapshot import Snapshot, States
from stocache._sharing.natives import slots_of
from stocache._sharing.sameness import NoPart, refusal
from stocache._types.registry import register_type

# So many samples that cannot be cut are loaded in vain, and more only if others can be.
_TRIES = 4

# Of one value that is compared by what it is, there is nothing to be shared.
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None)))
_MISSING = object()

Hole = tuple[Path, Any]
"""A place, and what belongs there: of shared things a number, of calls (number, entry)."""


class Aside(NoPart):
    """What the parts of a dataset that was cut know of each other, and what came of its samples in
    this process."""

    __slots__ = (
        "allow_pickle", "checks", "cut", "dataset", "failed", "first", "inside", "keeps",
        "loaded", "misfits", "name", "never", "noted", "outside", "own", "rest", "steps",
        "to_check", "told_of_change", "transform", "why",
    )  # fmt: skip

    def __init__(
        self, dataset: Any, name: str, steps: Callable[..., Any] | None,
        rest: Callable[..., Any], checks: int, allow_pickle: bool,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.name = name
        owner = owner_of(dataset)
        self.transform = getattr(owner, name)
        self.own = _own(owner, name) is not _MISSING  # or it is its class's
        self.noted = _all_steps(self.transform)
        self.steps = steps
        self.rest = rest
        self.checks = checks
        self.allow_pickle = allow_pickle
        self._begin()

    def _begin(self) -> None:
        self.first = First(self)
        self.inside: list[None] = []  # an entry for each sample that is being loaded to be cut
        self.to_check = self.checks  # samples to be made both ways, in each process
        self.loaded = self.cut = self.failed = 0  # samples; the last were loaded in vain
        self.outside = 0  # calls of the first steps that belonged to no sample that we load
        self.misfits = False  # its transform gave None
        self.never = self.keeps = self.told_of_change = False
        self.why = ""

    def __reduce__(self) -> tuple[Any, ...]:
        names = (
            "dataset", "name", "transform", "own", "noted", "steps", "rest", "checks",
            "allow_pickle",
        )  # fmt: skip
        # By a state, which may hold what holds this.
        return object.__new__, (Aside,), {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._begin()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The first steps are in the place of the transform meanwhile. Several threads may be at
        it: whoever is last takes them away."""
        owner = owner_of(self.dataset)
        if self.is_changed():
            raise CannotBeCut(f"has another {self.name} by now")
        standard = _standard_of(owner) if self.name == "transform" else None
        self.inside.append(None)
        try:
            _set(owner, self.name, self.first)
            if standard is not None:  # torchvision keeps it there, too
                standard.transform = self.first
            if getattr(owner, self.name) is not self.first:
                raise TypeError(
                    f"{self.name} of {type(owner).__name__} is computed, so that no other can be "
                    "put in its place; use CachedDataset(dataset, transform=...) with what is "
                    "random as transform"
                )
            yield
        finally:
            self.inside.pop()
            if not self.inside:
                _set(owner, self.name, self.transform if self.own else _MISSING)
                if standard is not None:
                    standard.transform = self.transform

    def states(self) -> States:
        """Of random numbers; and of more, until a sample was cut: what a program makes at its first
        sample, it has made then."""
        if self.cut:
            return States([self.dataset, self.transform])
        return Snapshot(self.dataset, self.transform, owner_of(self.dataset))

    def is_changed(self) -> bool:
        """Whether the dataset has another transform than was cut, or that other steps."""
        there = _own(owner_of(self.dataset), self.name)
        if there is not (self.transform if self.own else _MISSING) and there is not self.first:
            return True
        now = _all_steps(self.transform)
        return len(now) != len(self.noted) or any(map(operator.is_not, now, self.noted))

    def gives_up(self) -> bool:
        return self.never or self.failed > self.cut + _TRIES

    def whole(self, index: Any) -> Any:
        """A sample as it is without us."""
        before = LOAD.set(None)
        try:
            sample = self.dataset[index]
        finally:
            LOAD.reset(before)
        if self.keeps and any(type(node) is Sealed for node, _ in places.walk(sample)):
            raise RuntimeError(
                f"{self.says('keeps what its transform gave, and gives it again')}; its sample "
                f"{index} is lost in this process"
            )
        return sample

    def says(self, does: str) -> str:
        return (
            f"{type(owner_of(self.dataset)).__name__} {does}, so its random steps cannot go on "
            "after the cache; take them out of it and pass them as CachedDataset(transform=...)"
        )


def _all_steps(transform: Any) -> list[Any]:
    """It and all that it consists of, as it is now."""
    inside = getattr(transform, "transforms", ())
    if type(transform) is torch.nn.Sequential:
        inside = transform.children()
    elif not isinstance(inside, (list, tuple)):
        inside = ()
    return [transform, *(each for step in inside for each in _all_steps(step))]


class UpToRandom(Dataset[Any]):
    """The samples of a dataset as they are cached, see ``_opened``; or an ``Uncut`` one."""

    # No __dict__ of its own: loaders that seed all that they find in the attributes of a dataset,
    # as MONAI's does, find it once, at the Rest.
    __slots__ = ("aside", "dataset")

    def __init__(self, aside: Aside) -> None:
        object.__setattr__(self, "dataset", aside.dataset)
        object.__setattr__(self, "aside", aside)

    def __reduce__(self) -> tuple[Any, ...]:
        return UpToRandom, (self.aside,)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        aside = self.aside
        if aside.gives_up():
            return Uncut(index, aside.why, aside.never)
        before = aside.states()
        load = Load(aside.allow_pickle)
        try:
            prepared = self._prepared(index, load, before)
        except CannotBeCut as found:
            aside.never = aside.never or found.never
            does = load.found or str(found)
        except _OfTheDataset as found:
            raise found.error from None
        except Exception as error:
            before.put_back()
            aside.whole(index)  # which raises what is the dataset's own
            reason = refusal(error)
            does = load.found or f"cannot go on with the first steps of its transform ({reason})"
        else:
            aside.cut += 1
            return prepared
        before.put_back()
        aside.failed, aside.why = aside.failed + 1, aside.says(does)
        return Uncut(index, aside.why, aside.never)

    def _prepared(self, index: Any, load: Load, before: States) -> Any:
        aside = self.aside
        is_first, aside.loaded = not aside.loaded, aside.loaded + 1
        whole = None
        if is_first and aside.to_check:
            # First of all, so that a dataset that remembers it has a whole one.
            whole = self._outcome(aside.whole, index, before)
            if whole.error is not None:
                raise _OfTheDataset(whole.error)
            before.put_back()
        before.watch()
        prepared = self._cut(index, load)
        if prepared is None:
            raise CannotBeCut("does not call its transform for every sample", never=is_first)
        if before.were_used():
            raise CannotBeCut("draws random numbers itself, or seeds them")
        before.numbers_back()
        return self._looked(index, prepared, before, whole) if aside.to_check else prepared

    def _cut(self, index: Any, load: Load) -> Any:
        """A sample with holes; None if the transform was not called for it."""
        aside = self.aside
        outside = aside.outside
        token = LOAD.set(load)
        try:
            with aside.in_place():
                sample = self.dataset[index]
        finally:
            LOAD.reset(token)
        if load.found:
            raise CannotBeCut(load.found)
        if aside.outside != outside:
            raise CannotBeCut("calls its transform from another thread")
        if not load.calls:
            return None
        prepared = _opened(sample, load)
        del sample
        if load.is_kept():
            gc.collect()  # it may be in a circle
        if load.is_kept():
            aside.keeps = True
            raise CannotBeCut("keeps what its transform gave", never=True)
        return prepared

    def _looked(self, index: Any, prepared: Any, before: States, whole: Outcome | None) -> Any:
        """The same, if the whole transform makes the same sample of the same random numbers. A
        result was not looked at; but the transform itself may have been, or where it is from."""
        aside = self.aside
        kept = as_stored(prepared, aside.allow_pickle)  # who is asked again may edit it
        if kept is prepared:
            return prepared  # it is not stored
        aside.to_check -= 1

        def outcome(make: Callable[[Any], Any], value: Any) -> Outcome:
            return self._outcome(make, value, before)

        whole = whole or outcome(aside.whole, index)
        rest = outcome(lambda it: Rest(aside)(it, index), as_stored(kept, aside.allow_pickle))
        if rest.differs(whole):
            again = outcome(lambda i: self._cut(i, Load(aside.allow_pickle)), index)
            if again.differs(Outcome(kept)):
                raise CannotBeCut("gives another sample every time by itself", never=True)
            # Or its random numbers are from elsewhere, and nothing can be said.
            is_told = not whole.differs(outcome(aside.whole, index))
            if is_told and rest.differs(outcome(self._through, index)):
                does = "gives other samples if a part of its transform runs later"
                raise CannotBeCut(does, never=True)
        before.put_back()
        return kept

    def _through(self, index: Any) -> Any:
        """A sample of which nothing runs later, if its numbers lie otherwise in the cache."""
        aside = self.aside
        load = Through(aside.rest, aside.allow_pickle)
        token = LOAD.set(load)
        try:
            with aside.in_place():
                sample = self.dataset[index]
        finally:
            LOAD.reset(token)
        if not load.lies_otherwise:
            raise CannotBeCut("")
        return sample

    def _outcome(self, make: Callable[[Any], Any], value: Any, before: States) -> Outcome:
        before.put_back()
        try:
            made = make(value)
        except Exception as error:
            return Outcome(None, error)
        return Outcome(as_stored(made, self.aside.allow_pickle))

    # It is the dataset, to whoever sets or asks for more.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


class Outcome:
    """What came of making a sample."""

    def __init__(self, sample: Any, error: Exception | None = None) -> None:
        self.sample = sample
        self.error = error

    def differs(self, other: Outcome) -> bool:
        if self.error is not None or other.error is not None:
            return type(self.error) is not type(other.error)
        return same(self.sample, other.sample) is False


class _OfTheDataset(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error


class First:
    """The first steps of a transform, in its place. Where no sample is loaded to be cut, it is the
    whole transform."""

    __slots__ = ("aside", "steps")

    def __init__(self, aside: Aside) -> None:
        self.aside = aside
        self.steps = aside.steps

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        load = LOAD.get(None)
        if load is None:
            self.aside.outside += 1
            return self.aside.transform(*arguments, **named)
        load.catches = load.catches or _is_caught(sys._getframe(1))
        return load.note(self.steps, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        load = LOAD.get(None)
        if load is not None:
            raise load.cannot("looks at its transform")
        return getattr(self.aside.transform, name)


def _is_caught(frame: FrameType | None) -> bool:
    """Whether the dataset may handle an error that its transform raises here, and go on."""
    while frame is not None and frame.f_code is not UpToRandom._cut.__code__:
        if _handles_errors(frame.f_code):
            return True
        frame = frame.f_back
    return frame is None


def _handles_errors(code: CodeType) -> bool:
    if sys.version_info >= (3, 11):
        return bool(code.co_exceptiontable)
    return any(dis.opmap[name] in code.co_code[::2] for name in ("SETUP_FINALLY", "SETUP_WITH"))


class Uncut:
    """In the place of a sample that the whole transform is to make, and that is not stored."""

    __slots__ = ("index", "never", "why")

    def __init__(self, index: Any, why: str, never: bool) -> None:
        self.index = index
        self.why = why
        self.never = never

    def __deepcopy__(self, _memo: Any) -> Uncut:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a sample that is still to be made is no part of a dataset")


def _not_stored(sample: Uncut) -> Any:
    raise _unsupported(sample.why)


def _unsupported(why: str) -> Exception:
    error = _C.UnsupportedSample(why)
    error.place = "sample"
    return error


register_type(Uncut, _not_stored, Uncut)


def is_cut(source: Any) -> bool:
    """Whether samples of this dataset may be such."""
    return type(source) is UpToRandom


def is_never_cut(sample: Any) -> bool:
    """Whether it says that no sample of its dataset can be cut."""
    return type(sample) is Uncut and sample.never


def why_not(source: UpToRandom) -> Exception:
    """Why its samples cannot be cut."""
    return _unsupported(source.aside.why)


class Rest:
    """The steps from the first random one on, wherever the first steps gave something."""

    # What has a name here is found by loaders that seed all that they find, as without us.
    __slots__ = ("__dict__", "aside", "steps")

    def __init__(self, aside: Aside) -> None:
        self.aside = aside
        self.steps = aside.rest
        self.dataset = aside.dataset

    def __call__(self, prepared: Any, index: Any = _MISSING) -> Any:
        """The sample, which has this index."""
        aside = self.aside
        if type(prepared) is Uncut:
            return aside.whole(prepared.index)
        if aside.is_changed() and index is not _MISSING:
            if not aside.told_of_change:
                aside.told_of_change = True
                telling.warn(
                    f"{type(owner_of(aside.dataset)).__name__} has another {aside.name} than when "
                    "it was cached, so its samples are loaded every time from now on; make a "
                    "CachedDataset.until_random of it anew"
                )
            return aside.whole(index)
        may_go_on = prepared[0] or aside.misfits
        before = States(aside.transform) if may_go_on else None
        try:
            return filled(prepared, self.steps)
        except Misfit:
            if index is _MISSING:
                raise
            if before is None:
                telling.warn(aside.says("takes the None of its transform for another sample"))
            aside.misfits = True
        except Exception:
            if index is _MISSING or before is None:
                raise
        # What the dataset makes of an error, or of None, it is to make here, too.
        if before is not None:
            before.put_back()
        return aside.whole(index)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.steps!r})"


# Samples with holes


def _opened(sample: Any, load: Load) -> Any:
    """A sample with holes: whether the dataset may go on where its transform fails; what is at
    several places, each thing once; the calls, each with its arguments, where shared things belong
    in them, and how many parts its result has if somebody counts on that; the sample, where shared
    things belong in it, and where results."""
    given = [(call.arguments, call.named) for call in load.calls]
    if any(
        load.encoded(value) != call.stored for value, call in zip(given, load.calls, strict=True)
    ):
        raise CannotBeCut("edits what it gave its transform")
    shares = _Shares(given, sample)
    numbers = {id(call): number for number, call in enumerate(load.calls)}
    results: list[Hole] = []
    for node, path in list(places.walk(sample)):
        if type(node) is Sealed:
            call, entry = origin(node)
            if id(call) not in numbers:
                raise CannotBeCut("keeps what its transform gave", never=True)
            results.append((path, (numbers[id(call)], entry)))
            sample = places.put(sample, path, None)
    if {number for _, (number, _) in results} != set(numbers.values()):
        raise CannotBeCut("does not put what its transform gave into its sample")
    calls = [
        (*shares.taken_out(value), call.unpacked)
        for value, call in zip(given, load.calls, strict=True)
    ]
    rest, holes = shares.taken_out(sample)
    return load.catches, tuple(shares.things), tuple(calls), rest, holes, tuple(results)


class _Shares:
    """What a transform is called with, where it is that in several calls, or stands in the sample
    as well: two calls with one picture are two with one picture again."""

    def __init__(self, given: list[Any], sample: Any) -> None:
        met: dict[int, int] = {}
        for node, _ in places.walk(given):
            met[id(node)] = met.get(id(node), 0) + 1
        for node, _ in places.walk(sample):
            if id(node) in met:
                met[id(node)] += 1
        self._met = met
        self._numbers: dict[int, int] = {}
        self.things: list[Any] = []

    def taken_out(self, value: Any) -> tuple[Any, tuple[Hole, ...]]:
        holes: list[Hole] = []
        for node, path in list(places.walk(value)):
            if type(node) in _ATOMS or places.is_container(node) or self._met.get(id(node), 0) < 2:
                continue
            if id(node) not in self._numbers:
                self._numbers[id(node)] = len(self.things)
                self.things.append(node)
            holes.append((path, self._numbers[id(node)]))
            value = places.put(value, path, None)
        return value, tuple(holes)


def filled(prepared: Any, steps: Callable[..., Any]) -> Any:
    """The sample that these steps make of one with holes."""
    _, things, calls, sample, holes, places_of_results = prepared
    results = []
    for given, own, unpacked in calls:
        arguments, named = _with(given, own, things)
        result = steps(*arguments, **named)
        if unpacked is not None and _length(result) != unpacked:
            raise Misfit
        results.append(result)
    sample = _with(sample, holes, things)
    for path, (number, entry) in places_of_results:
        sample = places.put(sample, path, _entry(results[number], entry))
    return sample


def _length(result: Any) -> int | None:
    return len(result) if hasattr(result, "__len__") else None


def _entry(value: Any, keys: Path) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (LookupError, TypeError):
            raise Misfit from None
    if value is None:  # of which alone a dataset can ask without our seeing it
        raise Misfit
    return value


def _with(value: Any, holes: tuple[Hole, ...], things: tuple[Any, ...]) -> Any:
    for path, number in holes:
        value = places.put(value, path, things[number])
    return value


class Misfit(Exception):
    """What the steps gave is not what it was for the sample that was cut."""

    def __init__(self) -> None:
        super().__init__("the transform gave None, or no such entry as the dataset takes")


# Where a dataset keeps its transform


def owner_of(dataset: Any) -> Any:
    """The dataset whose transform it is."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def is_standard(transforms: Any) -> bool:
    """Whether it is torchvision's own way of calling a transform of images."""
    kind = type(transforms)
    return f"{kind.__module__}.{kind.__qualname__}" == (
        "torchvision.datasets.vision.StandardTransform"
    )


def _standard_of(owner: Any) -> Any:
    standard = getattr(owner, "transforms", None)
    return standard if is_standard(standard) else None


def _own(owner: Any, name: str) -> Any:
    """Past ``__getattr__`` and what its class has."""
    slot = slots_of(type(owner)).get(name)
    if slot is None:
        return getattr(owner, "__dict__", {}).get(name, _MISSING)
    return getattr(owner, name, _MISSING)


def _set(owner: Any, name: str, value: Any) -> None:
    """Past ``__setattr__``, which may do more."""
    slot = slots_of(type(owner)).get(name)
    if slot is not None:
        slot.__set__(owner, value)
    elif value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
