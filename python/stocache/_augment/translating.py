"""Transforms of torchvision, in the words of the native pipeline."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stocache._torch.altered import is_altered

_TORCHVISION = "torchvision.transforms"

# The steps that are fused, as errors and the documentation list them.
FUSED = (
    "CenterCrop", "ColorJitter", "Compose", "ConvertImageDtype", "Grayscale", "Identity",
    "Normalize", "PILToTensor", "Pad", "RGB", "RandomApply", "RandomChoice", "RandomCrop",
    "RandomErasing", "RandomGrayscale", "RandomHorizontalFlip", "RandomResizedCrop",
    "RandomVerticalFlip", "Resize", "ToDtype", "ToImage", "ToPureTensor", "ToTensor",
)  # fmt: skip

_GEOMETRIC = frozenset(
    ("CenterCrop", "Pad", "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop",
     "RandomVerticalFlip", "Resize")
)  # fmt: skip

_DTYPES = {
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
}

Step = dict[str, Any]

# What an image may be; torchvision's arguments may be dicts by type.
KINDS = ("image", "tensor", "pil", "array")


def steps_by_kind(transform: Any) -> tuple[list[Step], list[str]]:
    """What it does, step by step, and to which kinds of images; an error that names the first step
    that cannot be fused. Where arguments are dicts, others may get something else."""
    found: dict[str, list[Step]] = {}
    refused: list[Exception] = []
    for kind in KINDS:
        try:
            found[kind] = steps_of(transform, Kind(kind))
        except (ValueError, TypeError) as error:
            refused.append(error)
    if not found:
        raise refused[0]
    first = next(iter(found.values()))
    return first, [kind for kind, steps in found.items() if steps == first]


class Kind:
    """What an image is, while steps make it something else."""

    def __init__(self, name: str) -> None:
        self.name = name

    def value_in(self, values: dict[Any, Any], default: Any = None) -> Any:
        """What a dict says by its type."""
        vision: Any = sys.modules["torchvision.tv_tensors"]
        pil: Any = sys.modules.get("PIL.Image")
        types = {"image": vision.Image, "tensor": torch.Tensor, "pil": pil and pil.Image}
        kind = types.get(self.name)
        return values[kind] if kind in values else values.get("others", default)

    def after(self, step: str) -> None:
        becomes = {
            "ToImage": {"tensor": "image", "pil": "image", "array": "image"},
            "ToPureTensor": {"image": "tensor"},
            "PILToTensor": {"pil": "tensor"},
            "ToTensor": {"pil": "tensor", "array": "tensor"},
        }
        self.name = becomes.get(step, {}).get(self.name, self.name)


def steps_of(transform: Any, kind: Kind) -> list[Step]:
    """What it does to images of that kind, which becomes what they are then."""
    name = type(transform).__name__
    if isinstance(transform, (list, tuple)):
        return [step for each in transform for step in steps_of(each, kind)]
    if is_altered(transform):
        raise TypeError(
            f"{name} has hooks, or functions in the place of its methods, which would not be "
            "called where it is fused; give it as batch_transform= of the DataLoader"
        )
    if type(transform) in (torch.nn.Identity, torch.nn.Sequential, torch.nn.ModuleList):
        return [step for each in transform.children() for step in steps_of(each, kind)]
    known = _KNOWN.get(name) if _is_of_torchvision(transform) else None
    if known is None:
        raise TypeError(_refusal(transform, name))
    steps = known(transform, kind)
    kind.after(name)
    return steps


def dtype_name(dtype: torch.dtype, of: str) -> str:
    if dtype not in _DTYPES:
        raise TypeError(f"{of} is {dtype}, which cannot be fused; {_listed(map(str, _DTYPES))} can")
    return _DTYPES[dtype]


def results_in(transform: Any) -> str:
    """What comes out: "image" (a tv_tensors.Image), "tensor", or "same" as what goes in."""
    found = "same"
    for step in _each(transform):
        name = type(step).__name__
        found = {"ToImage": "image", "ToPureTensor": "tensor"}.get(name, found)
    return found


class Beside(NamedTuple):
    """What becomes of masks, boxes and points."""

    plain: bool
    """They become plain tensors."""
    dtypes: dict[Any, Any]
    """What ToDtype gives them, by their types."""
    refused: str | None
    """Why they cannot be beside an image; None if they can."""
    boxes_refused: str | None
    """The same of those that are numbers of places."""


def beside(transform: Any) -> Beside:
    """torchvision does its steps to them in turn; here the dtype comes last."""
    plain, dtypes, found = False, 0, Beside(False, {}, None, None)
    for step, always in _each_and_whether(transform):
        name = type(step).__name__
        if plain and name in _GEOMETRIC:
            found = found._replace(
                refused=f"ToPureTensor comes before {name}, which masks and boxes do not follow as "
                "plain tensors: put it last"
            )
        elif dtypes and name in _GEOMETRIC:
            found = found._replace(
                boxes_refused=f"ToDtype comes before {name}, which is done to boxes of that dtype "
                "then: put it after what moves things"
            )
        plain |= name == "ToPureTensor"
        if name == "ToDtype" and isinstance(step.dtype, dict) and not plain:
            dtypes += 1
            found = found._replace(dtypes=step.dtype)
            if dtypes > 1 or not always:
                found = found._replace(
                    refused="ToDtype gives masks and boxes a dtype "
                    f"{'twice' if always else 'now and then'}: say it once, for all samples"
                )
    return found._replace(plain=plain)


def shown(transform: Any, indent: str = "  ") -> list[str]:
    """The steps as people read them."""
    lines = []
    members = members_of(transform)
    for step in [transform] if members is None else members:
        name = type(step).__name__
        inner = members_of(step)
        if inner is None:
            lines.append(f"{indent}{step!r}")
        elif name in ("Compose", "Sequential", "list", "tuple"):
            lines.extend(shown(step, indent))
        else:
            p = f"p={step.p}"
            lines.append(f"{indent}{name}({p})")
            lines.extend(shown(list(inner), indent + "  "))
    return lines


def _each(transform: Any) -> list[Any]:
    return [step for step, _ in _each_and_whether(transform)]


def _each_and_whether(transform: Any, always: bool = True) -> list[tuple[Any, bool]]:
    """Its steps, and whether they are done to all samples."""
    members = members_of(transform)
    if members is None:
        return [(transform, always)]
    always &= type(transform).__name__ not in ("RandomApply", "RandomChoice")
    return [step for member in members for step in _each_and_whether(member, always)]


def members_of(transform: Any) -> list[Any] | None:
    """The steps of what consists of others."""
    if isinstance(transform, (list, tuple)):
        return list(transform)
    if isinstance(transform, (torch.nn.Sequential, torch.nn.ModuleList)):
        return list(transform)
    inner = getattr(transform, "transforms", None)
    return list(inner) if isinstance(inner, (list, tuple, torch.nn.ModuleList)) else None


def _is_of_torchvision(transform: Any) -> bool:
    """One of its own classes; what a subclass does instead, nobody knows."""
    return type(transform).__module__.startswith(_TORCHVISION)


def is_first_version(transform: Any) -> bool:
    """Whether it is none of v2."""
    return not type(transform).__module__.startswith(f"{_TORCHVISION}.v2")


def _refusal(transform: Any, name: str) -> str:
    kinds = [
        kind.__name__ for kind in type(transform).__mro__[1:] if _is_of_torchvision_class(kind)
    ]
    if kinds and kinds[0] not in ("Transform", "_RandomApplyTransform"):
        name = f"{name}, a subclass of {kinds[0]},"
    return (
        f"{name} cannot be fused; give it as batch_transform= of the DataLoader, where it gets "
        "whole batches, or do what it does in the dataset, if it is not random. "
        f"These can be: {', '.join(FUSED)}"
    )


def _is_of_torchvision_class(kind: type) -> bool:
    return kind.__module__.startswith(_TORCHVISION)


def _listed(words: Any) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"


def _pair(size: Any) -> list[int]:
    """Height and width."""
    if isinstance(size, (int, float)):
        return [int(size)] * 2
    sides = [int(side) for side in size]
    return sides * 2 if len(sides) == 1 else sides


def _padding(padding: Any) -> list[int]:
    """Left, top, right and bottom."""
    sides = [padding] if isinstance(padding, int) else [int(side) for side in padding]
    sides = sides * 4 if len(sides) == 1 else sides * 2 if len(sides) == 2 else sides
    if any(side < 0 for side in sides):
        raise ValueError(
            f"Pad(padding={padding}) crops, which is not fused: use CenterCrop or RandomCrop"
        )
    return sides


def _fill(transform: Any, kind: Kind) -> tuple[list[float], float | None]:
    """That of images, and that of masks, if it is one number."""
    fill = transform.fill
    image: Any = fill
    mask: Any = fill
    if isinstance(fill, dict):
        vision: Any = sys.modules["torchvision.tv_tensors"]
        image, mask = kind.value_in(fill), fill.get(vision.Mask, fill.get("others"))
    image = 0 if image is None else image
    mask = 0 if mask is None else mask
    values = _numbers(transform, "fill", image)
    return values, float(mask) if isinstance(mask, (int, float)) else None


def _numbers(transform: Any, name: str, values: Any) -> list[float]:
    """One or several."""
    try:
        found = [float(value) for value in values]
    except TypeError:  # it is one, and maybe a tensor
        found = [float(values)]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{type(transform).__name__}({name}={values}): finite numbers are needed")
    return found


def _filter(transform: Any) -> str:
    given = transform.interpolation
    value = {2: "bilinear", 3: "bicubic"}.get(given, given) if isinstance(given, int) else given
    value = str(getattr(value, "value", value))
    if value not in ("bilinear", "bicubic"):
        raise ValueError(
            f"{type(transform).__name__}(interpolation={value!r}) cannot be fused: bilinear and "
            "bicubic can be"
        )
    return value


def _range(name: str, values: Sequence[float]) -> list[float]:
    found = [float(value) for value in values]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{name} is {values}; two numbers are needed")
    return found


def _random_crop(t: Any, kind: Kind) -> Step:
    fill, mask_fill = _fill(t, kind)
    padding = t.padding
    if padding is not None and is_first_version(t):
        padding = _padding(padding)
    elif padding is not None:  # v2 has it as torch's pad takes it
        left, right, top, bottom = padding
        padding = _padding([left, top, right, bottom])
    return {
        "size": _pair(t.size), "padding": padding, "pad_if_needed": bool(t.pad_if_needed),
        "fill": fill, "mask_fill": mask_fill, "padding_mode": t.padding_mode,
    }  # fmt: skip


def _pad(t: Any, kind: Kind) -> Step:
    fill, mask_fill = _fill(t, kind)
    return {
        "padding": _padding(t.padding), "fill": fill, "mask_fill": mask_fill,
        "padding_mode": t.padding_mode,
    }  # fmt: skip


def _resize(t: Any, _: Kind) -> Step:
    size = [] if t.size is None else [t.size] if isinstance(t.size, int) else list(t.size)
    return {
        "size": [int(side) for side in size], "max_size": t.max_size,
        "filter": _filter(t), "antialias": bool(t.antialias),
    }  # fmt: skip


def _resized_crop(t: Any, _: Kind) -> Step:
    return {
        "size": _pair(t.size), "scale": _range("scale", t.scale), "ratio": _range("ratio", t.ratio),
        "filter": _filter(t), "antialias": bool(t.antialias),
    }  # fmt: skip


def _to_dtype(t: Any, kind: Kind) -> list[Step]:
    dtype, scale = t.dtype, bool(getattr(t, "scale", True))  # ConvertImageDtype always scales
    if isinstance(dtype, dict):
        if kind.name in ("pil", "array"):  # stay what they are
            return []
        missing = object()
        dtype = kind.value_in(dtype, missing)
        if dtype is missing:
            raise ValueError(
                f"ToDtype: No dtype was specified for images of the kind {kind.name!r}; you can "
                'use "others" as a catch-all key'
            )
    if dtype is None:
        return []
    name = dtype_name(dtype, "the dtype of ToDtype")
    return [{"step": "ToDtype", "dtype": name, "scale": scale}]


def _erasing(t: Any, _: Kind) -> Step:
    random = t.value is None or (isinstance(t.value, str) and t.value == "random")
    return {
        "p": float(t.p), "scale": _range("scale", t.scale), "ratio": _range("ratio", t.ratio),
        "value": None if random else _numbers(t, "value", t.value),
    }  # fmt: skip


def _jitter(t: Any, _: Kind) -> Step:
    def span(name: str) -> list[float] | None:
        value = getattr(t, name)
        return None if value is None else _range(name, value)

    return {name: span(name) for name in ("brightness", "contrast", "saturation", "hue")}


def _apply(t: Any, kind: Kind) -> Step:
    return {"steps": steps_of(list(t.transforms), kind), "p": float(t.p)}


def _choice(t: Any, kind: Kind) -> Step:
    # The first version of torchvision takes them as weights, too.
    p = t.p if t.p is not None else [1.0] * len(t.transforms)
    steps = []
    before = kind.name
    for each in t.transforms:
        kind.name = before
        steps.append({"step": "Compose", "steps": steps_of(each, kind)})
    return {"steps": steps, "p": [float(each) for each in p]}


def _one(arguments: Callable[[Any, Kind], Step]) -> Callable[[Any, Kind], list[Step]]:
    return lambda t, kind: [{"step": type(t).__name__, **arguments(t, kind)}]


def _plain(_t: Any, _: Kind) -> Step:
    return {}


def _chance(t: Any, _: Kind) -> Step:
    return {"p": float(t.p)}


def _first_version(t: Any, _: Kind) -> Step:
    return {"v1": is_first_version(t)}


def _means(t: Any, _: Kind) -> Step:
    return {"mean": _numbers(t, "mean", t.mean), "std": _numbers(t, "std", t.std)}


_KNOWN: dict[str, Callable[[Any, Kind], list[Step]]] = {
    "CenterCrop": _one(lambda t, _: {"size": _pair(t.size)}),
    "ColorJitter": _one(_jitter),
    "Compose": lambda t, kind: steps_of(list(t.transforms), kind),
    "ConvertImageDtype": _to_dtype,
    "Grayscale": _one(lambda t, _: {"num_output_channels": int(t.num_output_channels)}),
    "Identity": lambda _t, _: [],
    "Normalize": _one(_means),
    "PILToTensor": _one(_first_version),
    "Pad": _one(_pad),
    "RGB": _one(_plain),
    "RandomApply": _one(_apply),
    "RandomChoice": _one(_choice),
    "RandomCrop": _one(_random_crop),
    "RandomErasing": _one(_erasing),
    "RandomGrayscale": _one(_chance),
    "RandomHorizontalFlip": _one(_chance),
    "RandomResizedCrop": _one(_resized_crop),
    "RandomVerticalFlip": _one(_chance),
    "Resize": _one(_resize),
    "ToDtype": _to_dtype,
    "ToImage": _one(_plain),
    "ToPureTensor": lambda _t, _: [],
    "ToTensor": _one(_first_version),
}
