"""A dataset with random steps in its transform, cut in two: what can be cached, and the rest.

The dataset is copied, and its copy given the first steps in the place of its transform. All steps
are the same objects as before: MONAI knows them again when it inverts what they did. What the first
gave is then looked for in the sample, by identity: wherever it stands, and however often a dataset
called its transform for one sample, the rest goes on there. Cached are what the rest is called
with, and the sample with holes where its results belong. Where that cannot be found out, the sample
is loaded with the whole transform, and passes the cache by.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from stocache import _C
from stocache._compare import same
from stocache._dataset.copying import as_stored
from stocache._sharing.natives import slots_of
from stocache._sharing.sameness import NoPart, refusal
from stocache._torch.generators import generators_of, have_moved, set_states, states
from stocache._types.registry import register_type

# Steps of torchvision that give the same for the same image and draw nothing. Whatever is not known
# is taken for random: then less is cached, and nothing is wrong.
_SAME_EVERY_TIME = frozenset((
    "CenterCrop", "ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat",
    "ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation", "Normalize",
    "PILToTensor", "Pad", "RGB", "Resize", "SanitizeBoundingBoxes", "SanitizeKeyPoints",
    "SetClampingMode", "TenCrop", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor",
    "UniformTemporalSubsample",
))  # fmt: skip
# Steps of MONAI that call somebody else's function, of which nobody knows what it does.
_CALLS_OTHERS = frozenset((
    "Lambda", "Lambdad", "TorchIO", "TorchIOd", "TorchVision", "TorchVisiond",
))  # fmt: skip
_COMPOSED = frozenset((
    "monai.transforms.compose.Compose", "torchvision.transforms.transforms.Compose",
    "torchvision.transforms.v2._container.Compose",
))  # fmt: skip

# Equal values of these may be one object, whoever made them.
_ONE_OBJECT = (int, float, str, bytes, bool, type(None))

_ALWAYS = 1 << 62
# So many samples that cannot be cut are loaded twice, and more only if others can be.
_TRIES = 4

Path = tuple[Any, ...]
# Where a result of the rest belongs: the place in the sample, and what of the result it is.
Hole = tuple[Path, Path]


@dataclass
class Call:
    """A call of the first steps."""

    value: Any
    """What they gave."""
    arguments: tuple[Any, ...]
    """What the rest is called with."""
    named: dict[str, Any]
    before: Any
    """The value as it was given, if it can be stored."""


# The calls of the first steps for the sample that is being loaded, in their order; None if it is
# loaded with the whole transform.
_CALLS: ContextVar[list[Call | None] | None] = ContextVar("calls")
_NOBODY: list[Call | None] = []  # loads a sample here


@dataclass(frozen=True)
class Split:
    """A dataset up to its first random step, and what comes after."""

    dataset: Any
    rest: Rest | None
    """None: nothing is random."""
    told: str
    """Where it was cut, in a line."""


def split(dataset: Any, steps: int | None = None, checks: int = 1) -> Split:
    """Cuts before the first step that is random or not known; or after so many ``steps``. So many
    samples each process makes both ways, with and without the cut."""
    owner = dataset
    while type(owner) is Subset:
        owner = owner.dataset
    name = _name_of_transform(owner)
    transform = getattr(owner, name)
    before, after = _cut(transform) if steps is None else _cut_after(transform, steps)
    told = _told(f"{type(owner).__name__}.{name}", before, after)
    if after is None:
        return Split(dataset, None, told)
    rest = Rest(after)
    aside = Aside(dataset, transform, rest, checks)
    first = First(_without_random_state(before), aside)
    return Split(UpToRandom(_with_first_steps(dataset, name, first), aside), rest, told)


class Aside(NoPart):
    """What the two parts know of the dataset that was cut, and what came of its samples in this
    process."""

    __slots__ = (
        "checks", "cut", "dataset", "failed", "generators", "outside", "refuses", "rest",
        "to_check", "transform", "why",
    )  # fmt: skip

    def __init__(
        self, dataset: Any, transform: Callable[..., Any], rest: Callable[..., Any], checks: int
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.rest = rest
        self.checks = self.to_check = checks  # samples to be made both ways, in each process
        self.refuses = False  # it takes no transform but its own
        self.outside = 0  # calls of the transform that belonged to no sample that we load
        self.cut = self.failed = 0  # samples; the latter were loaded twice
        self.why = ""
        self.generators: list[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Aside, (self.dataset, self.transform, self.rest, self.checks)


class UpToRandom(Dataset[Any]):
    """The samples of a dataset whose transform has the first steps only, each with what the rest of
    them is called with, and where its results belong; or an ``Uncut`` one."""

    dataset: Any

    def __init__(self, dataset: Any, aside: Aside) -> None:
        self.dataset = dataset
        self.aside = aside

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        aside = self.aside
        if aside.failed > aside.cut + _TRIES:
            return Uncut(self._whole(index), aside.why)
        if aside.generators is None:
            aside.generators = generators_of([self.dataset, aside.transform])
        before, outside = states(aside.generators), aside.outside
        calls: list[Call | None] = []
        sample = None
        try:
            sample = self._load(index, calls)
            if aside.outside != outside:
                raise _CannotBeCut("calls its transform from another thread")
            prepared = _cut_open(sample, calls)
            if have_moved(before, states(aside.generators)):
                raise _CannotBeCut("draws random numbers itself, or seeds them")
            if aside.to_check > 0:
                aside.to_check -= 1
                prepared = self._checked(index, prepared, before)
        except _CannotBeCut as found:
            why = _why(self.dataset, str(found))
            if not calls:  # so that it is whole
                return Uncut(sample, why)
        except Exception as error:
            if aside.cut and not calls:
                raise  # it has nothing to do with us
            does = f"cannot go on with the first steps of its transform alone ({refusal(error)})"
            why = _why(self.dataset, does)
        else:
            aside.cut += 1
            return prepared
        set_states(aside.generators, before)
        aside.refuses = aside.refuses or not calls
        sample = self._whole(index)
        aside.failed, aside.why = aside.failed + 1, why
        return Uncut(sample, why)

    def _checked(self, index: Any, prepared: Any, before: list[Any]) -> Any:
        """The same, if the whole transform makes the same sample of the same random numbers. What a
        dataset computes from what its transform gave, nobody sees otherwise."""
        aside = self.aside
        kept = as_stored(prepared)  # who is asked again may answer in the same memory
        if kept is prepared:
            return prepared  # it is not stored
        generators = aside.generators or []

        def made(make: Callable[[], Any]) -> Any:
            set_states(generators, before)
            return as_stored(make())

        differs = False
        with contextlib.suppress(Exception):  # of the dataset itself
            whole = made(lambda: self._whole(index))
            try:
                differs = same(whole, made(lambda: aside.rest(as_stored(kept)))) is False
            except Exception:
                differs = True
            # Or it is random beyond these generators, and nothing can be said.
            differs = differs and same(whole, made(lambda: self._whole(index))) is True
        set_states(generators, before)
        if differs:
            aside.failed = _ALWAYS
            raise _CannotBeCut("gives other samples if a part of its transform runs later")
        return kept

    def _whole(self, index: Any) -> Any:
        return self.aside.dataset[index] if self.aside.refuses else self._load(index, None)

    def _load(self, index: Any, calls: list[Call | None] | None) -> Any:
        before = _CALLS.set(calls)
        try:
            return self.dataset[index]
        finally:
            _CALLS.reset(before)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


class First:
    """The first steps of a transform, in its place. While a sample is loaded to be cut, it notes
    what they gave; whoever else calls it gets the whole transform."""

    # No __dict__: loaders that seed all that they find in the attributes of a dataset, as MONAI's
    # does, count what they find, and the rest is to get the seed that the whole would have got.
    __slots__ = ("aside", "steps")

    def __init__(self, steps: Callable[..., Any] | None, aside: Aside) -> None:
        self.steps = steps
        self.aside = aside

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        calls = _CALLS.get(_NOBODY)
        if calls is _NOBODY:
            self.aside.outside += 1
        if calls is _NOBODY or calls is None:
            return self.aside.transform(*arguments, **named)
        if self.steps is None and arguments and named:
            calls.append(None)  # nobody knows what it would give
            return self.aside.transform(*arguments, **named)
        if self.steps is not None:
            value = self.steps(*arguments, **named)
            # What went in may stand in the sample, too, where the rest has nothing to do.
            if any(value is argument for argument in arguments):
                value = _another(value)
            # As Compose hands on what its steps give.
            arguments, named = (value if len(arguments) > 1 else (value,)), {}
        elif named:
            value = named = {name: _another(argument) for name, argument in named.items()}
        else:
            arguments = tuple(map(_another, arguments))
            value = arguments[0] if len(arguments) == 1 else arguments
        calls.append(Call(value, arguments, dict(named), _as_bytes(value)))
        return value


class Uncut:
    """A sample as the whole transform makes it, which is not to be stored."""

    __slots__ = ("sample", "why")

    def __init__(self, sample: Any, why: str) -> None:
        self.sample = sample
        self.why = why

    def __deepcopy__(self, _memo: Any) -> Uncut:
        return self  # handed out once, and no part of a dataset that is not its own


def _not_stored(sample: Uncut) -> Any:
    error = _C.UnsupportedSample(sample.why)
    error.place = "sample"
    raise error


register_type(Uncut, _not_stored, Uncut)


class Composed:
    """A Compose of MONAI whose steps are not random, as what it consists of. It has random numbers
    all the same, others in every process, which are no part of what is cached."""

    __slots__ = ("module", "name", "options")

    def __init__(self, composed: Any) -> None:
        self.module, self.name = type(composed).__module__, type(composed).__qualname__
        self.options = {name: value for name, value in vars(composed).items() if name != "R"}

    def __call__(self, *arguments: Any) -> Any:
        composed = object.__new__(getattr(sys.modules[self.module], self.name))
        vars(composed).update(self.options)
        return composed(*arguments)


class Rest:
    """The steps from the first random one on, wherever the first steps gave something."""

    def __init__(self, steps: Callable[..., Any]) -> None:
        self.steps = steps
        self.__name__ = getattr(steps, "__name__", type(steps).__name__)

    def __call__(self, prepared: Any) -> Any:
        if type(prepared) is Uncut:
            return prepared.sample
        calls, sample = prepared
        for arguments, named, holes in calls:
            result = self.steps(*arguments, **named)
            for place, inside in holes:
                sample = _with(sample, place, _at(result, inside))
        return sample

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.steps!r})"


# Cutting


def _name_of_transform(owner: Any) -> str:
    """``transforms`` of image and target, or ``transform``."""
    joint = getattr(owner, "transforms", None)
    if callable(joint) and not _is_standard(joint):
        return "transforms"
    if callable(getattr(owner, "transform", None)):
        return "transform"
    raise TypeError(
        f"dataset is a {type(owner).__name__} without a transform that could be cut; use "
        "CachedDataset(dataset, transform=...) with what is random as transform"
    )


def _cut(transform: Any) -> tuple[Any, Any]:
    """What is before the first random step, and the rest; None for nothing."""
    steps = _steps(transform)
    if steps is None:
        return (None, transform) if _may_be_random(transform) else (transform, None)
    for n, step in enumerate(steps):
        before, after = _cut(step)
        if after is not None:
            first = [*steps[:n], *([] if before is None else [before])]
            return _part(transform, first), _part(transform, [after, *steps[n + 1 :]])
    return transform, None


def _cut_after(transform: Any, count: int) -> tuple[Any, Any]:
    steps = _steps(transform)
    steps = [transform] if steps is None else steps
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= len(steps):
        raise ValueError(f"steps is {count!r}; the transform has {len(steps)}: use 0 to as many")
    return _part(transform, steps[:count]), _part(transform, steps[count:])


def _steps(transform: Any) -> list[Any] | None:
    """Of what consists of steps that are done one after the other."""
    if type(transform) is torch.nn.Sequential:
        return list(transform)
    if _kind(transform) in _COMPOSED and isinstance(transform.transforms, Sequence):
        return list(transform.transforms)
    return None


def _part(transform: Any, steps: list[Any]) -> Any:
    """The same with these steps only. Nothing of it is made anew: MONAI would seed it."""
    if not steps:
        return None
    if _steps(transform) is None:
        return transform
    if type(transform) is torch.nn.Sequential:
        return torch.nn.Sequential(*steps).train(transform.training)
    made = copy.copy(transform)
    made.transforms = steps
    return made


def _without_random_state(steps: Any) -> Any:
    if not _kind(steps).startswith("monai.") or _steps(steps) is None:
        return steps
    bare = copy.copy(steps)
    bare.transforms = [_without_random_state(step) for step in steps.transforms]
    return Composed(bare)


def _may_be_random(step: Any) -> bool:
    monai: Any = sys.modules.get("monai.transforms")
    if monai is not None and isinstance(step, monai.Transform):
        trait = getattr(monai, "RandomizableTrait", monai.Randomizable)
        library, _, name = _kind(step).rpartition(".")
        is_known = library.startswith("monai.") and name not in _CALLS_OTHERS
        return isinstance(step, trait) or not is_known
    library, _, name = _kind(step).rpartition(".")
    if not library.startswith("torchvision.transforms"):
        return True
    return name not in _SAME_EVERY_TIME


def _with_first_steps(dataset: Any, name: str, first: First) -> Any:
    """A copy that has these in the place of its transform. What it holds is not copied."""
    made = _shallow(dataset)
    if type(dataset) is Subset:
        made.dataset = _with_first_steps(dataset.dataset, name, first)
        return made
    _set(made, name, first)
    standard = getattr(made, "transforms", None)
    if _is_standard(standard):  # torchvision keeps it there, too
        standard = _shallow(standard)
        standard.transform = first
        _set(made, "transforms", standard)
    if getattr(made, name) is not first:
        raise TypeError(
            f"{name} of {type(dataset).__name__} is computed, so that no other can be put in its "
            "place; use CachedDataset(dataset, transform=...) with what is random as transform"
        )
    return made


def _set(owner: Any, name: str, value: Any) -> None:
    """Past ``__setattr__``, which may do more."""
    slot = slots_of(type(owner)).get(name)
    if slot is None:
        vars(owner)[name] = value
    else:
        slot.__set__(owner, value)


def _another(value: Any) -> Any:
    """Another object with the same contents; if there can be none, this one."""
    with contextlib.suppress(Exception):
        return copy.copy(value)
    return value


def _as_bytes(value: Any) -> Any:
    """What would be stored of it; None if it is not stored."""
    with contextlib.suppress(Exception):
        return _C.codec_encode(value)
    return None


def _shallow(value: Any) -> Any:
    try:
        made = object.__new__(type(value))
    except TypeError:  # of a native type
        return copy.copy(value)
    for slot in slots_of(type(value)).values():
        with contextlib.suppress(AttributeError):  # not set
            slot.__set__(made, slot.__get__(value))
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _is_standard(transforms: Any) -> bool:
    return _kind(transforms) == "torchvision.datasets.vision.StandardTransform"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Places


class _CannotBeCut(Exception):
    """What the dataset does that cannot be followed."""


def _cut_open(sample: Any, calls: Sequence[Call | None]) -> tuple[Any, Any]:
    """For each call what the rest is called with and where its results belong; and the sample with
    nothing there. A sample without a call has no random steps behind it: it is cached whole."""
    known = [call for call in calls if call is not None]
    if len(known) < len(calls):
        raise _CannotBeCut("calls its transform with positional and with keyword arguments")
    if any(call.before is not None and _as_bytes(call.value) != call.before for call in known):
        raise _CannotBeCut("edits what its transform gave")
    found: dict[Any, list[Path]] = {}
    for node, path in _walk(sample, ()):
        found.setdefault(id(node), []).append(path)
        if type(node) is tuple and node:
            # `image, target = transforms(image, target); return image, target`
            found.setdefault(_ids(node), []).append(path)
    holes = [_holes(call.value, found) for call in known]
    _share_out(known, holes)
    for call, own in zip(known, holes, strict=True):
        _check(call, own)
    places = [place for own in holes for place, _ in own]
    if any(place[:n] in places for place in places for n in range(len(place))):
        raise _CannotBeCut("calls its transform with what its transform gave")
    for place in places:
        sample = _with(sample, place, None)
    return tuple(
        (call.arguments, call.named, tuple(own)) for call, own in zip(known, holes, strict=True)
    ), sample


def _walk(node: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """All that is in a sample, and where."""
    yield node, path
    if isinstance(node, dict):
        inside: Any = node.items()
    elif isinstance(node, (list, tuple)):
        inside = enumerate(node)
    elif _has_fields(node):
        inside = ((field.name, getattr(node, field.name, None)) for field in fields(node))
    else:
        return
    for key, each in inside:
        yield from _walk(each, (*path, key))


def _ids(parts: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(id, parts))


def _holes(value: Any, found: dict[Any, list[Path]]) -> list[Hole]:
    """Where in the sample a value stands; or else what it consists of."""
    places = found.get(id(value)) or (type(value) is tuple and found.get(_ids(value))) or []
    if places:
        return [(place, ()) for place in places]
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    if not inside or any(id(each) not in found for _, each in inside):
        raise _CannotBeCut("changes what its transform gave, or leaves out a part of it")
    return [(place, (key,)) for key, each in inside for place in found[id(each)]]


def _share_out(calls: list[Call], holes: list[list[Hole]]) -> None:
    """Where there are no first steps, two calls may give one object: then each has its place."""
    for k, call in enumerate(calls):
        alike = [n for n in range(k, len(calls)) if calls[n].value is call.value]
        if len(alike) > 1 and len(holes[k]) == len(alike):
            for n, hole in zip(alike, list(holes[k]), strict=True):
                holes[n] = [hole]


def _check(call: Call, holes: list[Hole]) -> None:
    for inside in {inside for _, inside in holes}:
        value, count = _at(call.value, inside), sum(inside == each for _, each in holes)
        if type(value) in _ONE_OBJECT and count > 1:
            raise _CannotBeCut(
                f"has {value!r:.50}, which its transform gave, at {count} places of the sample, "
                "and nobody can tell which of them it gave"
            )


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = getattr(value, key) if _has_fields(value) else value[key]
    return value


def _with(sample: Any, path: Path, value: Any) -> Any:
    """A sample with another value there; the rest of it is the same."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    inside = _with(_at(sample, path[:1]), rest, value)
    if isinstance(sample, tuple):
        parts = [*sample[:key], inside, *sample[key + 1 :]]
        make = getattr(type(sample), "_make", type(sample))
        return make(parts)
    made = copy.copy(sample)
    if _has_fields(sample):
        object.__setattr__(made, key, inside)  # also of one that is frozen
    else:
        made[key] = inside
    return made


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, (dict, list, tuple, type))


# Telling


def _why(dataset: Any, does: str) -> str:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return (
        f"{type(dataset).__name__} {does}, so its random steps cannot go on after the cache; take "
        "them out of it and pass them as CachedDataset(transform=...)"
    )


def _told(name: str, before: Any, after: Any) -> str:
    first, rest = _names(before), _names(after)
    if not rest:
        return f"All steps of {name} are cached, for none is random: {', '.join(first)}."
    behind = f"after the cache: {', '.join(rest)}"
    if not first:
        return f"Samples are cached before all steps of {name}; {behind}."
    return f"Cached are {len(first)} of {len(first) + len(rest)} steps of {name} " + (
        f"({', '.join(first)}); {behind}."
    )


def _names(transform: Any) -> list[str]:
    steps = [] if transform is None else _steps(transform)
    if steps is None:
        return [getattr(transform, "__name__", type(transform).__name__)]
    return [name for step in steps for name in _names(step)]
