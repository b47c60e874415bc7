"""Where a dataset's transform is cut: before its first random step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stocache._dataset.until_random import Aside, Rest, UpToRandom, is_standard, owner_of
from stocache._torch.altered import is_altered

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


@dataclass(frozen=True)
class Split:
    """A dataset up to its first random step, and what comes after."""

    dataset: Any
    rest: Rest | None
    """None: nothing is random."""
    told: str
    """Where it was cut, in a line."""

    @contextmanager
    def as_cached(self) -> Iterator[None]:
        """The dataset has the first steps alone meanwhile, for who wants to know what samples
        depend on."""
        with nullcontext() if self.rest is None else self.rest.aside.in_place():
            yield


def split(
    dataset: Any, steps: int | None = None, checks: int = 1, allow_pickle: bool = False
) -> Split:
    """Cuts before the first step that is random or not known; or after so many ``steps``. So many
    samples each process makes both ways, with and without the cut."""
    owner = owner_of(dataset)
    name = _name_of_transform(owner)
    transform = getattr(owner, name)
    before, after = _cut(transform) if steps is None else _cut_after(transform, steps)
    told = _told(f"{type(owner).__name__}.{name}", before, after)
    if after is None:
        return Split(dataset, None, told)
    if hasattr(owner, "__getitems__"):
        raise TypeError(
            f"{type(owner).__name__} has a __getitems__ of its own, and what that makes of "
            "samples cannot be cut; use CachedDataset(dataset, transform=...) with what is random "
            "as transform"
        )
    aside = Aside(dataset, name, _without_random_state(before), after, checks, allow_pickle)
    found = Split(UpToRandom(aside), Rest(aside), told)
    with found.as_cached():  # if that can be
        return found


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


# Cutting


def _name_of_transform(owner: Any) -> str:
    """``transforms`` of image and target, or ``transform``."""
    joint = getattr(owner, "transforms", None)
    if callable(joint) and not is_standard(joint):
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
    """Of what consists of steps that are done one after the other, and does no more."""
    if is_altered(transform):
        return None
    if getattr(transform, "lazy", False) is not False:  # MONAI resamples at its end, once for all
        return None
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
        made = torch.nn.Sequential(*steps)
        made.training = transform.training  # by train() it would be that of the user's steps, too
        return made
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
    if getattr(step, "lazy", False):  # what it does is done by a later one
        return True
    if is_altered(step):
        return True
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


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
