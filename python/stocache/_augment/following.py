"""Masks, boxes and points of torchvision, which follow the geometry of the image beside them.

They are small beside the image, and torchvision's own functions know all of their kinds; so these
are called, with the parameters that were drawn for the image.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# A step that torchvision does to an image alone.
_OF_IMAGES = frozenset(
    ("to_dtype", "normalize", "erase", "grayscale", "brightness", "contrast", "saturation", "hue")
)


def follows(part: Any) -> bool:
    """Whether it is of torchvision, and no image."""
    vision: Any = sys.modules.get("torchvision.tv_tensors")
    return vision is not None and isinstance(part, _kinds(vision))


def is_of_places(part: Any) -> bool:
    """Whether it is numbers of places, as boxes are and masks are not."""
    return follows(part) and type(part).__name__ != "Mask"


def _kinds(vision: Any) -> tuple[type, ...]:
    names = ("Mask", "BoundingBoxes", "KeyPoints")
    return tuple(getattr(vision, name) for name in names if hasattr(vision, name))


class Follower:
    """Does to what is no image what was done to the image."""

    def __init__(self, parameters: list[dict[str, Any]], dtypes: dict[Any, Any]) -> None:
        self._parameters = parameters
        self._dtypes = dtypes

    def __call__(self, part: Any) -> Any:
        F: Any = importlib.import_module("torchvision.transforms.v2.functional")

        is_mask = type(part).__name__ == "Mask"
        for given in self._parameters:
            arguments = dict(given)
            op = arguments.pop("op")
            if op in _OF_IMAGES:
                continue
            if op == "pad":
                mask_fill = arguments.pop("mask_fill")
                if is_mask and mask_fill is None:
                    raise ValueError("Non-scalar fill value is not supported for masks")
                part = F.pad(
                    part, arguments["padding"], mask_fill if is_mask else 0,
                    arguments["padding_mode"],
                )  # fmt: skip
            elif op == "resize":
                part = F.resize(part, [arguments["height"], arguments["width"]])
            else:
                part = getattr(F, op)(part, **arguments)
        dtype = self._dtypes.get(type(part), self._dtypes.get("others"))
        return part if dtype is None else F.to_dtype(part, dtype)
