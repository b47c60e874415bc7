"""A dataset with random steps in its transform, cut in two: what can be cached, and the rest.

The dataset is copied, and its copy given the first steps in the place of its transform. All steps
are the same objects as before: MONAI knows them again when it inverts what they did. What the first
gave is then looked for in the sample, by identity: wherever it stands, and however often a dataset
called its transform for one sample, the rest goes on there. The places are cached with the sample.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

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

Path = tuple[Any, ...]
# What the first steps gave for the sample that is being loaded, in the order of the calls.
_GIVEN: ContextVar[list[Any] | None] = ContextVar("given", default=None)


@dataclass(frozen=True)
class Split:
    """A dataset up to its first random step, and what comes after."""

    dataset: Any
    rest: Rest | None
    """None: nothing is random."""
    told: str
    """Where it was cut, in a line."""


def split(dataset: Any, steps: int | None = None) -> Split:
    """Cuts before the first step that is random or not known; or after so many ``steps``."""
    owner = dataset
    while type(owner) is Subset:
        owner = owner.dataset
    name = _name_of_transform(owner)
    transform = getattr(owner, name)
    before, after = _cut(transform) if steps is None else _cut_after(transform, steps)
    told = _told(f"{type(owner).__name__}.{name}", before, after)
    if after is None:
        return Split(dataset, None, told)
    prepared = UpToRandom(_with_first_steps(dataset, name, First(_without_random_state(before))))
    return Split(prepared, Rest(after, several=name == "transforms"), told)


class UpToRandom(Dataset[Any]):
    """The samples of a dataset whose transform has the first steps only, each with the places at
    which the rest of them goes on."""

    dataset: Any

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> tuple[tuple[tuple[Path, ...], ...], Any]:
        given: list[Any] = []
        before = _GIVEN.set(given)
        try:
            sample = self.dataset[index]
        finally:
            _GIVEN.reset(before)
        return _places(sample, given, self.dataset), sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


class First:
    """The first steps of a transform, in its place. It notes what they gave."""

    # No __dict__: loaders that seed all that they find in the attributes of a dataset, as MONAI's
    # does, count what they find, and the rest is to get the seed that the whole would have got.
    __slots__ = ("steps",)

    def __init__(self, steps: Callable[..., Any] | None) -> None:
        self.steps = steps

    def __call__(self, *arguments: Any) -> Any:
        if self.steps is not None:
            value = self.steps(*arguments)
        else:
            value = arguments[0] if len(arguments) == 1 else arguments
        given = _GIVEN.get()
        if given is not None:
            # What went in may stand in the sample, too, where the rest has nothing to do.
            if any(value is argument for argument in arguments):
                value = _another(value)
            given.append(value)
        return value


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

    def __init__(self, steps: Callable[..., Any], several: bool) -> None:
        self.steps = steps
        self.several = several  # they get image and target, not one value

    def __call__(self, prepared: tuple[tuple[tuple[Path, ...], ...], Any]) -> Any:
        places, sample = prepared
        for paths in places:
            value = sample
            for key in paths[0]:
                value = value[key]
            value = self.steps(*value) if self.several else self.steps(value)
            for path in paths:
                sample = _with(sample, path, value)
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
    vars(made)[name] = first
    standard = vars(made).get("transforms")
    if _is_standard(standard):  # torchvision keeps it there, too
        made.transforms = _shallow(standard)
        made.transforms.transform = first
    return made


def _another(value: Any) -> Any:
    """Another object with the same contents; if there can be none, this one."""
    with contextlib.suppress(Exception):
        return copy.copy(value)
    return value


def _shallow(value: Any) -> Any:
    try:
        made = object.__new__(type(value))
        vars(made).update(vars(value))
    except TypeError:  # of a native type
        made = copy.copy(value)
    return made


def _is_standard(transforms: Any) -> bool:
    return _kind(transforms) == "torchvision.datasets.vision.StandardTransform"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Places


def _places(sample: Any, given: list[Any], dataset: Any) -> tuple[tuple[Path, ...], ...]:
    """Where in the sample each of what was given stands."""
    found: list[list[Path]] = [[] for _ in given]
    _look(sample, given, (), found)
    _share_out(given, found)
    for value, paths in zip(given, found, strict=True):
        if type(value) in _ONE_OBJECT and len(paths) > 1:
            raise ValueError(
                f"what the transform of {type(dataset).__name__} gives, {value!r}, stands at "
                f"{len(paths)} places of its sample, and nobody can tell which of them it gave; "
                "take the random steps out of it and pass them as "
                "CachedDataset(transform_sample=...)"
            )
    if not given or not all(found):
        kind = type(dataset).__name__
        raise ValueError(
            f"what the transform of {kind} gives is not part of its sample, so its random steps "
            "cannot go on after the cache: the dataset changes it afterwards, or calls it "
            "elsewhere; take the random steps out of it and pass them as "
            "CachedDataset(transform=...)"
        )
    return tuple(map(tuple, found))


def _look(node: Any, given: list[Any], path: Path, found: list[list[Path]]) -> None:
    for value, paths in zip(given, found, strict=True):
        if _is_same(node, value):
            paths.append(path)
            return
    if isinstance(node, dict):
        for key, each in node.items():
            _look(each, given, (*path, key), found)
    elif isinstance(node, (list, tuple)):
        for key, each in enumerate(node):
            _look(each, given, (*path, key), found)


def _share_out(given: list[Any], found: list[list[Path]]) -> None:
    """Where there are no first steps, two calls may give one object: then each has its place."""
    for k, value in enumerate(given):
        calls = [n for n in range(k, len(given)) if given[n] is value]
        if len(calls) > 1 and len(found[k]) == len(calls):
            for n, path in zip(calls, list(found[k]), strict=True):
                found[n] = [path]


def _is_same(node: Any, value: Any) -> bool:
    if node is value:
        return True
    # `image, target = transforms(image, target); return image, target`
    alike = type(node) is tuple is type(value) and len(node) == len(value) > 0
    return alike and all(one is other for one, other in zip(node, value, strict=True))


def _with(sample: Any, path: Path, value: Any) -> Any:
    """A sample with another value there; the rest of it is the same."""
    if not path:
        return value
    key, *rest = path
    inside = _with(sample[key], tuple(rest), value)
    if isinstance(sample, tuple):
        parts = [*sample[:key], inside, *sample[key + 1 :]]
        make = getattr(type(sample), "_make", type(sample))
        return make(parts)
    made = copy.copy(sample)
    made[key] = inside
    return made


# Telling


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
