"""fuse: torchvision's transforms as one native pipeline."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from stocache import _C
from stocache._augment import ruling, translating
from stocache._augment.following import Follower, follows, is_of_places
from stocache._torch.subclasses import parts_of_tree

_MASK = (1 << 64) - 1
# How the native half is told what kind of object an image was.
_TENSOR, _CHANNELS_LAST, _PIL, _ARRAY = range(4)


def fuse(
    transform: Any,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    seed: int | None = None,
) -> Pipeline:
    """Makes one native pipeline of transforms of torchvision.

    >>> from torchvision.transforms import v2
    >>> pipeline = fuse(v2.Compose([v2.RandomCrop(2), v2.ToDtype(torch.float32, scale=True)]))
    >>> pipeline(torch.zeros(3, 4, 4, dtype=torch.uint8)).shape
    torch.Size([3, 2, 2])

    As ``transform`` of a CachedDataset it runs while rows are copied into the batch. A step that
    cannot be fused is an error that names it; docs/augmentation.md lists those that can.

    Args:
        transform: A transform of torchvision, v2 or the first version, or a list of them.
        dtype: Of the numbers that come out, where the steps make float32 of them:
            ``torch.bfloat16`` or ``torch.float16`` take half of the memory.
        memory_format: ``torch.channels_last`` lays the channels of a pixel side by side.
        seed: Of its random numbers, which are a function of the seed, the epoch and the index of a
            sample. None: the one of ``torch.manual_seed``.
    """
    if isinstance(transform, Pipeline):
        raise TypeError("this is a pipeline already; fuse is given transforms of torchvision")
    if memory_format not in (torch.contiguous_format, torch.channels_last):
        raise ValueError(
            f"memory_format is {memory_format}; torch.contiguous_format and torch.channels_last "
            "are allowed"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is {seed!r}; an int or None is needed")
    steps, kinds = translating.steps_by_kind(transform)
    plan = ruling.plan_of(transform)
    description = {
        "steps": steps,
        "takes": [kind for kind in kinds if not (plan and ruling.refusal(plan, (kind,), [0]))],
        **ruling.in_short(plan),
        "dtype": None if dtype is None else translating.dtype_name(dtype, "dtype"),
        "channels_last": memory_format == torch.channels_last,
    }
    shown = translating.shown(transform)
    made_of = translating.results_in(transform)
    return Pipeline(
        json.dumps(description), made_of, shown, translating.beside(transform), seed, plan
    )


class Pipeline:
    """Steps that were fused; made by ``stocache.fuse``.

    As ``transform`` of a CachedDataset it gets the index of every sample, and its random numbers
    are a function of (seed, epoch, index). Called by itself, with a sample or with a batch of
    images, it augments with the numbers of ``index``; or, without one, of an index that is drawn
    from torch's generator, each time another.
    """

    def __init__(
        self, description: str, made_of: str, shown: list[str], beside: translating.Beside,
        seed: int | None, plan: ruling.Plan | None,
    ) -> None:  # fmt: skip
        self.native = _C.Pipeline(description)
        self._description = description
        self._takes = frozenset(json.loads(description)["takes"])
        self._made_of = made_of
        self._shown = shown
        self._beside = beside
        self._plan = plan
        self._refusals: dict[Any, str | None] = {}
        self.seed = seed
        # Of who sent this object, and to which process.
        self._sent_seed, self._sent_to = 0, 0
        # What was said last, -1 for nothing, and how often something was said.
        self._epoch = _shared(torch.tensor([-1, 0], dtype=torch.int64, device="cpu"))

    def __call__(self, sample: Any, index: int | Sequence[int] | None = None) -> Any:
        """The sample with its images augmented; each image of a batch [N, C, H, W] for itself."""
        return self.apply(sample, self.seed_here(), self.epoch or 0, index)

    def apply(self, sample: Any, seed: int, epoch: int, index: Any = None) -> Any:
        """The same with the numbers of that seed and epoch."""
        parts, made_of = parts_of_tree(sample)
        places = _places_of_images(parts)
        if not places:
            raise TypeError(
                f"{_of(index)}the sample, a {type(sample).__name__}, has no image, tensor or array "
                "in it that could be augmented"
            )
        why_not = self._refusal(parts, places)
        if why_not is not None:
            raise TypeError(f"{_of(index)}{why_not}")
        batches = [_is_batch(parts[place]) for place in places]
        if any(batches):
            return made_of(self._batch(parts, places, batches, seed, epoch, index))
        number = _drawn_index() if index is None else int(index)
        try:
            return made_of(
                self._sample(parts, places, (seed & _MASK, epoch & _MASK, number & _MASK))
            )
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:
            if index is None:
                raise
            raise type(error)(f"{_of(index)}{_message(error)}") from error

    def parameters(self, image: Any, index: int, epoch: int | None = None) -> list[dict[str, Any]]:
        """What is done to that image: each function of torchvision with its arguments."""
        data, form = self._taken(image)
        epoch = (self.epoch or 0) if epoch is None else epoch
        numbers = (self.seed_here() & _MASK, epoch & _MASK, int(index) & _MASK)
        return self._parameters(data, form, numbers)

    def output(self, image: Any) -> tuple[torch.dtype, tuple[int, int, int]]:
        """The dtype and the shape that an image of this kind becomes."""
        data, form = self._taken(image)
        dtype, shape, _ = self.native.output(tuple(data.shape), data.dtype, form)
        return dtype, shape

    @property
    def epoch(self) -> int | None:
        """What ``set_epoch`` said; None: nobody did."""
        epoch = int(self._epoch[0])
        return None if epoch < 0 else epoch

    @property
    def times(self) -> int:
        """How often ``set_epoch`` said one: the same number said again is that number again."""
        return int(self._epoch[1])

    def set_epoch(self, epoch: int) -> None:
        """Which epoch it is, also for workers that are there already: another one augments the same
        sample otherwise. ``stocache.DataLoader`` counts them itself, where this was not called."""
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch is {epoch!r}; an int is needed")
        if not 0 <= epoch < 1 << 63:
            raise ValueError(f"epoch is {epoch}; 0 or more is needed")
        self._epoch[0] = epoch
        self._epoch[1] += 1

    def sent_seed(self) -> int | None:
        """The seed of the process that sent this object to this one; None: nobody did."""
        return self._sent_seed if self._sent_to == os.getpid() else None

    def seed_here(self) -> int:
        """That of ``fuse``, or of ``torch.manual_seed`` in the process that started this worker."""
        if self.seed is not None:
            return self.seed
        if get_worker_info() is None:
            return torch.initial_seed()
        # A worker has a seed of its own.
        sent = self.sent_seed()
        return _inherited if sent is None else sent

    def _sample(
        self, parts: list[Any], places: list[int], numbers: tuple[int, int, int]
    ) -> list[Any]:
        parts = list(parts)
        taken = [self._taken(parts[place]) for place in places]
        sizes = {_size(data, form) for data, form in taken}
        beside = [place for place, part in enumerate(parts) if follows(part)]
        sizes |= {tuple(parts[place].canvas_size) for place in beside if _has_canvas(parts[place])}
        sizes |= {
            tuple(parts[place].shape[-2:]) for place in beside if not _has_canvas(parts[place])
        }
        if len(sizes) > 1:
            raise ValueError(
                "Found multiple HxW dimensions in the sample: "
                + ", ".join(f"({height}, {width})" for height, width in sorted(sizes))
            )
        for place, (data, form) in zip(places, taken, strict=True):
            index = torch.tensor([_signed(numbers[2])])
            made = self.native.apply(numbers[0], numbers[1], index, data[None], form, 1)[0]
            parts[place] = self._wrapped(made, parts[place])
        if beside:
            data, form = taken[0]
            follower = Follower(self._parameters(data, form, numbers), self._beside.dtypes)
            for place in beside:
                followed = follower(parts[place])
                parts[place] = _plain(followed) if self._beside.plain else followed
        return parts

    def _refusal(self, parts: list[Any], places: list[int]) -> str | None:
        """Why torchvision would do something else to these parts; None: it would not."""
        kinds = ruling.kinds_of(parts)
        if kinds not in self._refusals:
            why_not = ruling.refusal(self._plan, kinds, places) if self._plan else None
            if "follower" in kinds:
                why_not = self._beside.refused or why_not
            self._refusals[kinds] = why_not
        why_not = self._refusals[kinds]
        if why_not is None and self._beside.boxes_refused and any(map(is_of_places, parts)):
            return self._beside.boxes_refused
        return why_not

    def _taken(self, image: Any) -> tuple[torch.Tensor, int]:
        """Its values, and what it is, if these steps are for such images."""
        data, form = _taken(image)
        self._check_kind(image, form)
        return data, form

    def _check_kind(self, image: Any, form: int) -> None:
        kind = _kind(image, form)
        if kind not in self._takes:
            raise TypeError(
                f"a dict in the steps gives images of the kind {kind!r} other values than those of "
                f"{' and '.join(sorted(self._takes))}, and only these were fused: put v2.ToImage() "
                "first, or give the steps one value"
            )

    def _batch(
        self, parts: list[Any], places: list[int], batches: list[bool], seed: int, epoch: int,
        index: Any,
    ) -> list[Any]:  # fmt: skip
        if not all(batches) or any(follows(part) for part in parts):
            raise TypeError(
                "a batch is augmented where it is one of images alone, [N, C, H, W]; with masks or "
                "boxes give the pipeline samples, or to a CachedDataset as transform="
            )
        parts = list(parts)
        count = len(parts[places[0]])
        if any(len(parts[place]) != count for place in places):
            raise ValueError("the batches of images in the sample are of different lengths")
        if index is None:
            numbers = torch.empty(count, dtype=torch.int64).random_()
        else:
            numbers = torch.as_tensor(index, dtype=torch.int64).reshape(-1).contiguous()
        if len(numbers) != count:
            raise ValueError(
                f"index has {len(numbers)} numbers; one for each of the {count} images is needed"
            )
        for place in places:
            data, form = _laid_out(parts[place], dims=4)
            self._check_kind(parts[place], form)
            made = self.native.apply(
                seed & _MASK, epoch & _MASK, numbers, data, form, torch.get_num_threads()
            )
            parts[place] = self._wrapped(made, parts[place])
        return parts

    def _parameters(
        self, data: Any, form: int, numbers: tuple[int, int, int]
    ) -> list[dict[str, Any]]:
        text = self.native.drawn(*numbers, tuple(data.shape), data.dtype, form)
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def _wrapped(self, made: torch.Tensor, given: Any) -> Any:
        vision: Any = sys.modules.get("torchvision.tv_tensors")
        was_image = vision is not None and isinstance(given, vision.Image)
        if self._made_of == "image" or (self._made_of == "same" and was_image):
            return importlib.import_module("torchvision.tv_tensors").Image(made)
        return made

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity()[:3])

    def _identity(self) -> tuple[Any, ...]:
        return self._description, self.seed, self._made_of, self._beside, self._plan

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["native"]
        state["_sent_seed"] = self.seed_here()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.native = _C.Pipeline(self._description)
        self._epoch = _shared(self._epoch)
        self._sent_to = os.getpid()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        made = object.__new__(Pipeline)
        vars(made).update(vars(self), _epoch=_shared(self._epoch.clone()))
        return made

    def __copy__(self) -> Pipeline:
        return self.__deepcopy__({})

    def __repr__(self) -> str:
        description = json.loads(self._description)
        ends = [description["dtype"], "channels_last" if description["channels_last"] else None]
        end = ", ".join(filter(None, ends))
        steps = "\n".join(self._shown)
        head = f"fused, in one native pipeline{f' that ends in {end}' if end else ''}:"
        return f"{head}\n{steps}" if steps else head


# The seed of the process that forked this one, as it was then.
_inherited = 0


def _before_fork() -> None:
    global _inherited
    _inherited = torch.initial_seed()


os.register_at_fork(before=_before_fork)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that workers share, so that those which persist see it change; as it is where there
    is no such memory."""
    with contextlib.suppress(RuntimeError):
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _message(error: Exception) -> str:
    return str(error.args[0]) if error.args else str(error)


def _of(index: Any) -> str:
    return (
        ""
        if index is None or isinstance(index, (list, tuple, torch.Tensor))
        else f"sample {index}: "
    )


def _drawn_index() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _places_of_images(parts: list[Any]) -> list[int]:
    """torchvision's rule: all images; or else the first tensor, or else the first array."""
    pil: Any = sys.modules.get("PIL.Image")
    vision: Any = sys.modules.get("torchvision.tv_tensors")
    numpy: Any = sys.modules.get("numpy")
    if vision is not None and any(isinstance(part, vision.Video) for part in parts):
        raise TypeError("videos cannot be fused: give the transform itself as transform=")
    images = (*((pil.Image,) if pil else ()), *((vision.Image,) if vision else ()))
    found = [place for place, part in enumerate(parts) if isinstance(part, images)]
    if found:
        return found
    for kind in (torch.Tensor, *((numpy.ndarray,) if numpy else ())):
        for place, part in enumerate(parts):
            if isinstance(part, kind) and not follows(part):
                return [place]
    return []


def _plain(image: Any) -> torch.Tensor:
    made: torch.Tensor = image.detach().as_subclass(torch.Tensor)
    return made


def _is_batch(image: Any) -> bool:
    return isinstance(image, torch.Tensor) and image.ndim == 4


def _taken(image: Any) -> tuple[torch.Tensor, int]:
    """Its values as they lie, without gaps, and what it is."""
    if isinstance(image, torch.Tensor):
        if image.ndim != 3:
            raise ValueError(
                f"Expected tensor to be a tensor image of size (..., C, H, W). Got "
                f"{tuple(image.shape)}; [C, H, W] or a batch [N, C, H, W] is needed"
            )
        return _laid_out(image, dims=3)
    numpy: Any = sys.modules["numpy"]
    if isinstance(image, numpy.ndarray):
        if image.ndim not in (2, 3):
            raise ValueError(f"pic should be 2/3 dimensional. Got {image.ndim} dimensions.")
        array = image if image.ndim == 3 else image[:, :, None]
        return torch.from_numpy(numpy.array(array, order="C")), _ARRAY
    if image.mode not in ("L", "RGB"):
        raise TypeError(
            f"the PIL image is of mode {image.mode!r}; RGB and L are known: use "
            'image.convert("RGB") in the dataset'
        )
    array = numpy.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]), _PIL


def _laid_out(image: torch.Tensor, dims: int) -> tuple[torch.Tensor, int]:
    if image.device.type != "cpu" or image.layout != torch.strided or image.is_quantized:
        raise TypeError(
            f"the image is {image.layout} on {image.device}; an ordinary tensor of the CPU is "
            "needed"
        )
    image = _plain(image).resolve_neg()
    order = (0, 2, 3, 1) if dims == 4 else (1, 2, 0)
    if not image.is_contiguous() and image.permute(order).is_contiguous():
        return image.permute(order), _CHANNELS_LAST
    return image.contiguous(), _TENSOR


def _kind(image: Any, form: int) -> str:
    if form == _PIL:
        return "pil"
    if form == _ARRAY:
        return "array"
    vision: Any = sys.modules.get("torchvision.tv_tensors")
    return "image" if vision is not None and isinstance(image, vision.Image) else "tensor"


def _size(data: torch.Tensor, form: int) -> tuple[int, int]:
    height, width = data.shape[1:] if form == _TENSOR else data.shape[:2]
    return int(height), int(width)


def _has_canvas(part: Any) -> bool:
    return hasattr(part, "canvas_size")
