"""Which parts of a sample fused steps are done to: those of torchvision's v2, or the sample is
refused."""

from __future__ import annotations

import random

import numpy as np
import PIL.Image
import pytest
import torch
from stocache import DataLoader, fuse
from stocache._augment import ruling
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

vision = pytest.importorskip("torchvision.tv_tensors")
v2 = pytest.importorskip("torchvision.transforms.v2")

SIDE = 6


def octets(seed, *shape):
    return torch.from_numpy(np.random.RandomState(seed).randint(256, size=shape, dtype="u1"))


PARTS = {
    "pil": lambda n: PIL.Image.fromarray(octets(n, SIDE, SIDE, 3).numpy()),
    "image": lambda n: vision.Image(octets(n, 3, SIDE, SIDE)),
    "tensor": lambda n: octets(n, 3, SIDE, SIDE),
    "array": lambda n: octets(n, SIDE, SIDE, 3).numpy(),
    "mask": lambda n: vision.Mask(octets(n, SIDE, SIDE)),
    "boxes": lambda n: vision.BoundingBoxes(
        torch.tensor([[1, 2, 4, 5]]), format="XYXY", canvas_size=(SIDE, SIDE)
    ),
    "label": lambda n: n,
}
STEPS = {
    "ToImage": lambda: v2.ToImage(),
    "PILToTensor": lambda: v2.PILToTensor(),
    "ToPureTensor": lambda: v2.ToPureTensor(),
    "Identity": lambda: v2.Identity(),
    "flip": lambda: v2.RandomHorizontalFlip(1.0),
    "crop": lambda: v2.CenterCrop(4),
    "pad": lambda: v2.Pad(1),
    "float": lambda: v2.ToDtype(torch.float32, scale=True),
    "by type": lambda: v2.ToDtype(
        {vision.Mask: torch.int64, vision.Image: torch.float32, "others": None}, scale=True
    ),
    "erase": lambda: v2.RandomErasing(p=0.0),
    "may be": lambda: v2.RandomApply([v2.ToImage()], p=1.0),
    "may not be": lambda: v2.RandomApply([v2.ToPureTensor()], p=0.0),
    "either": lambda: v2.RandomChoice([v2.RandomHorizontalFlip(1.0)]),
}


def shown(sample):
    def of(part):
        if isinstance(part, torch.Tensor):
            canvas = getattr(part, "canvas_size", None)
            return type(part).__name__, str(part.dtype), canvas, part.tolist()
        if isinstance(part, (np.ndarray, PIL.Image.Image)):
            return type(part).__name__, np.asarray(part).tolist()
        return part

    return [of(part) for part in pytree.tree_flatten(sample)[0]]


def outcome(function, *arguments):
    try:
        return shown(function(*arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__


def differing(seed, count):
    """Samples and steps of which fused ones make something else; and how many are equal."""
    draw, found, equal = random.Random(seed), [], 0
    for _ in range(count):
        kinds = [draw.choice(list(PARTS)) for _ in range(draw.randint(1, 4))]
        names = [draw.choice(list(STEPS)) for _ in range(draw.randint(1, 5))]
        sample = tuple(PARTS[kind](n) for n, kind in enumerate(kinds))
        transform = v2.Compose([STEPS[name]() for name in names])
        expected = outcome(transform, sample)
        try:
            got = outcome(fuse(transform), sample)
        except (TypeError, ValueError):
            continue
        if isinstance(got, str):
            continue
        equal += got == expected
        if got != expected:
            found.append((kinds, names, expected, got))
    return found, equal


def test_fused_steps_are_torchvisions_or_refused(seed, scale):
    count = scale(3000, 60_000)
    found, equal = differing(seed, count)
    assert not found, f"{len(found)} differ, as {min(found, key=lambda each: len(str(each)))}"
    assert equal > count // 20


def test_the_control_without_the_rule_others_are_seen(seed, monkeypatch):
    monkeypatch.setattr(ruling, "refusal", lambda plan, kinds, places: None)
    found, _ = differing(seed, 3000)
    assert len(found) > 20


REFUSED = {
    "an array beside an image": (("pil", "array"), ("ToImage", "flip"), "does ToImage also to"),
    "two images that become plain": (
        ("pil", "pil"), ("PILToTensor", "flip", "float"), "does RandomHorizontalFlip not to part 1",
    ),
    "a mask before the image": (
        ("mask", "image"), ("ToPureTensor", "float"), "does ToDtype also to part 0",
    ),
    "a tensor before the image": (
        ("tensor", "pil"), ("PILToTensor", "flip"), "does RandomHorizontalFlip also to part 0",
    ),
    "an image of one type or another": (("tensor",), ("may be",), "one type or of another"),
    "a dtype twice": (("image", "mask"), ("by type", "by type"), "a dtype twice"),
    "boxes of another dtype": (("image", "boxes"), ("by type", "crop"), "ToDtype comes before"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_samples_that_are_refused_are_told_why(what, cached):
    kinds, names, words = REFUSED[what]
    steps = [STEPS[name]() for name in names]
    if what == "boxes of another dtype":
        steps[0] = v2.ToDtype({vision.BoundingBoxes: torch.float32, "others": None})
    pipeline = fuse(steps)
    samples = [tuple(PARTS[kind](10 * i + n) for n, kind in enumerate(kinds)) for i in range(4)]
    with pytest.raises(TypeError, match=words) as caught:
        pipeline(samples[0])
    assert "\n" not in str(caught.value)
    dataset = cached(samples, transform=pipeline)
    for _ in range(2):  # natively it would be another sample, too
        with pytest.raises(TypeError, match=words):
            list(DataLoader(dataset, 4))


NATIVE = {
    "a picture": (("pil", "label"), ("ToImage", "flip", "float", "ToPureTensor")),
    "two pictures": (("image", "image", "label"), ("flip", "float")),
    "a tensor behind it": (("pil", "tensor"), ("PILToTensor", "flip", "float")),
    "a tensor before it": (("tensor", "pil"), ("ToImage", "flip", "float")),
    "an array beside tensors": (("image", "array"), ("flip", "float")),
}


@pytest.mark.parametrize("what", NATIVE)
def test_what_torchvision_does_as_well_is_done_natively(what, cached):
    kinds, names = NATIVE[what]
    steps = [STEPS[name]() for name in names]
    samples = [tuple(PARTS[kind](10 * i + n) for n, kind in enumerate(kinds)) for i in range(4)]
    expected = default_collate([v2.Compose(steps)(sample) for sample in samples])
    dataset = cached(samples, transform=fuse(steps))
    for gathered in (0, 1):
        (batch,) = DataLoader(dataset, 4)
        for one, other in zip(batch, expected, strict=True):
            assert torch.allclose(one.float(), other.float(), atol=1e-6)
        assert (dataset.stats().hits > 0) == gathered
    native = dataset._stocache_fusing([0]).native([0, 1, 2, 3])
    assert dataset._stocache.records.gather([0, 1, 2, 3], 1, False, None, native).missing() == []
