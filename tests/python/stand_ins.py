"""Types as the libraries that people train with have them, registered as ours are. Spawned workers
import this module by name, so it holds no fixtures.

`Picture` and `Boxes` are as torchvision's tv_tensors: torch computes plain tensors of them. `Scan`
is as MONAI's MetaTensor: results keep what it carries, and a function of its own collates it.
"""

from __future__ import annotations

import enum
from typing import Any

import stocache
import torch
from torch.utils._pytree import register_pytree_node
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map


class Form(enum.Enum):
    CORNERS = "corners"
    CENTRE = "centre"


class _Copied(torch.Tensor):
    def __deepcopy__(self, memo: Any) -> Any:
        return carrying(self.as_subclass(torch.Tensor).clone(), type(self), vars(self))


def carrying(data: torch.Tensor, cls: type, attributes: dict[str, Any]) -> Any:
    made = data.as_subclass(cls)
    vars(made).update(attributes)
    return made


class Picture(_Copied):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        return made.as_subclass(torch.Tensor) if isinstance(made, Picture) else made


class Boxes(Picture):
    """With attributes."""


def boxes(data: torch.Tensor, canvas: tuple[int, int], form: Form = Form.CORNERS) -> Boxes:
    return carrying(data, Boxes, {"form": form, "canvas": canvas})


class Scan(_Copied):
    meta: dict[Any, Any]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        first = args[0][0] if args and isinstance(args[0], (list, tuple)) else args and args[0]
        if isinstance(made, Scan) and not vars(made) and isinstance(first, Scan):
            vars(made).update(vars(first))
        return made


def scan(data: torch.Tensor, **meta: Any) -> Scan:
    return carrying(data, Scan, {"meta": {**meta, Form.CENTRE: meta.get("origin")}})


def collate_scans(batch: Any, *, collate_fn_map: Any = None) -> Any:
    made = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    made.meta = [each.meta for each in batch]
    made.is_batch = True
    return made


default_collate_fn_map[Scan] = collate_scans


def _parts(value: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        data = value.as_subclass(torch.Tensor)
    return (data, vars(value)) if vars(value) else (data,)


def _maker(cls: type) -> Any:
    return lambda data, attributes={}: carrying(data, cls, attributes)


for _cls in (Picture, Boxes, Scan):
    stocache.register_type(_cls, _parts, _maker(_cls), stacks=True)


class Marked(_Copied):
    """Of which nobody has said anything."""


def marked(data: torch.Tensor, **attributes: Any) -> Marked:
    return carrying(data, Marked, attributes)


class Money:
    """An object of any kind, registered."""

    def __init__(self, amount: Any, currency: str) -> None:
        self.amount, self.currency = amount, currency

    def __eq__(self, other: object) -> bool:
        return type(other) is Money and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.amount, self.currency))

    def __repr__(self) -> str:
        return f"Money({self.amount!r}, {self.currency!r})"


stocache.register_type(Money, lambda money: (money.amount, money.currency), Money)


class Tree:
    """A type that torch's pytree knows."""

    def __init__(self, leaves: list[Any], name: str) -> None:
        self.leaves, self.name = leaves, name


register_pytree_node(
    Tree,
    lambda tree: (tree.leaves, tree.name),
    lambda leaves, name: Tree(list(leaves), name),
    serialized_type_name="stand_ins.Tree",
)


class Table(dict):
    """Its methods lie, and its objects have attributes."""

    def __init__(self) -> None:
        raise AssertionError("it is made without")

    def items(self) -> Any:
        return [("wrong", 0)]

    def __iter__(self) -> Any:
        return iter(["wrong"])


class Row(list):
    pass


class Pair(tuple):
    def __new__(cls, one: Any, two: Any) -> Any:
        return super().__new__(cls, (one, two))


class Name(str):
    pass


class Bits(bytes):
    pass


class Count(int):
    pass


class Metres(float):
    pass


class Opaque:
    """A type that nobody knows."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Opaque({self.value!r})"
