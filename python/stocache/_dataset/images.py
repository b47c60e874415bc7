"""Transforms of torchvision, which are made for images, given to whole samples.

Those of its second version (v2) look for what is theirs in a sample: all images of it, or its first
tensor if there is none. Those of the first take an image and nothing else, so they are given the
first one that the others would find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stocache._torch.subclasses import parts_of_tree

_TORCHVISION = "torchvision.transforms"
_SECOND = f"{_TORCHVISION}.v2"


class OnImage:
    """Applies a transform of one image to the image of a sample, and leaves the rest as it is."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        parts, made_of = parts_of_tree(sample)
        place = _place_of_image(parts)
        if place is None:
            raise TypeError(
                f"transform is torchvision's {type(self.transform).__name__}, and the sample, a "
                f"{type(sample).__name__}, has no image, tensor or array in it; a function that "
                "gets the whole sample is given as transform_sample="
            )
        parts[place] = self.transform(parts[place])
        return made_of(parts)


def for_samples(transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The same as a function of whole samples."""
    return OnImage(transform) if transform is not None and takes_image(transform) else transform


def as_given(transform: Any) -> Any:
    """What ``for_samples`` was given."""
    return transform.transform if type(transform) is OnImage else transform


def takes_image(transform: Any) -> bool:
    """Whether it is a transform of torchvision that takes one image, or has such among its steps:
    what holds functions alone may take anything."""
    members = _members(transform)
    if members is not None:
        return any(map(takes_image, members))
    return _version(transform) == 1


def is_of_torchvision(transform: Any) -> bool:
    """Whether it is one of torchvision, or has such among its steps."""
    members = _members(transform)
    if members is not None:
        return any(map(is_of_torchvision, members))
    return _version(transform) is not None


def _members(transform: Any) -> Iterable[Any] | None:
    """The steps of what consists of others."""
    if isinstance(transform, torch.nn.Sequential):
        return list(transform)
    if _version(transform) is None:
        return None
    members = getattr(transform, "transforms", None)
    return members if isinstance(members, (list, tuple, torch.nn.ModuleList)) else None


def _version(transform: Any) -> int | None:
    """Of torchvision's transforms, if it is one."""
    for kind in type(transform).__mro__:
        if kind.__module__.startswith(_TORCHVISION):
            return 2 if kind.__module__.startswith(_SECOND) else 1
    return None


def _place_of_image(parts: list[Any]) -> int | None:
    """Where the first image is; else the first tensor, or the first array."""
    for kinds in (_images(), (torch.Tensor,), _arrays()):
        for place, part in enumerate(parts):
            if isinstance(part, kinds):
                return place
    return None


def _images() -> tuple[type, ...]:
    pil: Any = sys.modules.get("PIL.Image")
    vision: Any = sys.modules.get("torchvision.tv_tensors")
    return (*((pil.Image,) if pil else ()), *((vision.Image, vision.Video) if vision else ()))


def _arrays() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray,) if numpy else ()
