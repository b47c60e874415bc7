"""What of a sample torchvision does its steps to, one after the other.

Each step looks anew what there is: all images that say so of themselves, or else the first plain
tensor. So a step that makes other objects of images may change what the next ones are done to. A
fused pipeline does all steps to the same images. Where that is something else it refuses the
sample.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from stocache._augment.following import follows
from stocache._augment.translating import is_first_version, members_of

# A plan: the name of a step, steps one after the other, steps that are done or not, or one of them.
Plan = tuple[str, Any]
Kinds = tuple[str, ...]

# Of which kinds parts are that a step is done to; of others all tensors and images are.
_DONE_TO = {
    "ToImage": ("tensor", "pil", "array"),
    "ToPureTensor": ("image", "video", "follower"),
    "PILToTensor": ("pil",),
    "ToTensor": ("pil", "array"),
    "Identity": (),
}
_OTHERS = ("tensor", "pil", "image", "video", "follower")
_BECOMES = {
    "ToImage": "image", "ToPureTensor": "tensor", "PILToTensor": "tensor", "ToTensor": "tensor",
}  # fmt: skip
_IMAGES = ("pil", "image", "video")
_WORDS = {
    "pil": "PIL image", "image": "tv_tensors.Image", "tensor": "plain tensor", "array": "array",
    "follower": "mask or box", "video": "video",
}  # fmt: skip


def plan_of(transform: Any) -> Plan | None:
    """Its steps by name; None for those of torchvision's first version, which get an image alone
    and not a sample."""
    if all(map(is_first_version, _leaves(transform))):
        return None
    plan = _plan(transform)
    return plan if plan[0] == "all" else ("all", (plan,))


def _plan(transform: Any) -> Plan:
    members = members_of(transform)
    name = type(transform).__name__
    if members is None:
        return "step", name
    kind = {"RandomApply": "maybe", "RandomChoice": "one of"}.get(name, "all")
    plans = tuple(map(_plan, members))
    if kind != "one of":  # in which order steps are done is all there is to it
        plans = tuple(plan for how, of in plans for plan in (of if how == "all" else [(how, of)]))
    return kind, plans


def _leaves(transform: Any) -> list[Any]:
    members = members_of(transform)
    return [transform] if members is None else [leaf for each in members for leaf in _leaves(each)]


def kinds_of(parts: list[Any]) -> Kinds:
    """What the parts of a sample are, as torchvision tells them apart."""
    pil: Any = sys.modules.get("PIL.Image")
    vision: Any = sys.modules.get("torchvision.tv_tensors")
    numpy: Any = sys.modules.get("numpy")
    found = []
    for part in parts:
        if vision is not None and isinstance(part, vision.Image):
            found.append("image")
        elif vision is not None and isinstance(part, vision.Video):
            found.append("video")
        elif follows(part):
            found.append("follower")
        elif isinstance(part, torch.Tensor):
            found.append("tensor")
        elif pil is not None and isinstance(part, pil.Image):
            found.append("pil")
        elif numpy is not None and isinstance(part, numpy.ndarray):
            found.append("array")
        else:
            found.append("")
    return tuple(found)


def refusal(plan: Plan, kinds: Kinds, places: list[int]) -> str | None:
    """Why samples of such parts cannot be given to these steps with the images at ``places``; None
    if they can."""
    try:
        _after(plan, kinds, frozenset(places))
    except _Otherwise as found:
        return str(found)
    return None


def in_short(plan: Plan | None) -> dict[str, bool]:
    """What the native half has to know of it, which leaves samples in doubt to Python."""
    names = [] if plan is None else [name for name in _names(plan) if name != "Identity"]
    plain = [at for at, name in enumerate(names) if _BECOMES.get(name) == "tensor"]
    return {
        "arrays": "ToImage" in names or "ToTensor" in names,  # become images beside an image, too
        "first": bool(plain) and plain[0] < len(names) - 1,  # of plain tensors goes on alone
    }


def _names(plan: Plan) -> list[str]:
    how, what = plan
    return [what] if how == "step" else [name for each in what for name in _names(each)]


class _Otherwise(Exception):
    pass


def _after(plan: Plan, before: Kinds, places: frozenset[int]) -> Kinds:
    """What the parts are after it."""
    how, what = plan
    if how == "step":
        return _step(what, before, places)
    if how == "one of":
        found = [_after(each, before, places) for each in what]
        return _the_one(before, found or [before])
    after = before
    for each in what:
        after = _after(each, after, places)
    return _the_one(before, [before, after]) if how == "maybe" else after


def _the_one(before: Kinds, found: list[Kinds]) -> Kinds:
    for kind, after in zip(before, zip(*found, strict=True), strict=True):
        if len(set(after)) > 1:
            raise _Otherwise(
                f"the {_WORDS[kind]} becomes an object of one type or of another, as numbers are "
                "drawn: convert it outside of RandomApply and RandomChoice"
            )
    return found[0]


def _step(name: str, kinds: Kinds, places: frozenset[int]) -> Kinds:
    takes = _DONE_TO.get(name, _OTHERS)
    plain = not any(kind in _IMAGES for kind in kinds)
    after = list(kinds)
    for place, kind in enumerate(kinds):
        done = kind in takes
        if done and kind == "tensor":
            done, plain = plain, False  # to the first alone
        if kind != "follower" and done != (kind in takes and place in places):
            raise _Otherwise(
                f"torchvision looks anew at each step what is an image, and does {name} "
                f"{'also' if done else 'not'} to part {place} of the sample, which is a "
                f"{_WORDS[kind]} then: use v2.ToImage() alone to convert images, and give other "
                "data as plain tensors"
            )
        if done and name in _BECOMES:
            after[place] = _BECOMES[name]
    return tuple(after)
