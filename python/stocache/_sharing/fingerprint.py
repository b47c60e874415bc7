"""What a cache of a dataset depends on: its code, its configuration and its contents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from stocache._sharing import code
from stocache._sharing.modules import users_own
from stocache._sharing.natives import ITEMS, attributes_of, base_of, plain, slots_of
from stocache._sharing.sameness import contents, digest, refusal

# Packages whose datasets are no code of the user's, though a dataset's class may be theirs: they
# count by source and version, and not by what they have in memory, such as random states.
_COMMON = frozenset((
    "abc", "builtins", "collections", "datasets", "monai", "stocache", "timm", "torch",
    "torch_geometric", "torchaudio", "torchdata", "torchvision", "transformers", "typing",
))  # fmt: skip
_PART_DIGITS = 8
_NESTED = 16  # datasets in datasets whose attributes are told apart


@dataclass(frozen=True)
class Fingerprint:
    """A text that changes when the dataset would give other samples, and what it is made of."""

    text: str
    parts: dict[str, str] = field(default_factory=dict)
    """Digests of attributes, code and globals by their names: two that differ say where."""
    unseen: tuple[str, ...] = ()
    """What could not be looked into: equal texts then do not mean equal data."""

    def notes(self) -> str:
        """The parts as text, which a cache keeps so that others can say what differs."""
        return "\n".join(f"{part} {name}" for name, part in self.parts.items())


def fingerprint(dataset: Any, of_each: bool = True) -> Fingerprint:
    """Looks at the attributes of the dataset and of everything in it (transforms, lists of files,
    arrays), and at the code of its class and of what that uses. Without ``of_each``, at nothing
    that has a value for each sample.

    Not covered are the files that it reads: for those, recomputing a few samples is what helps
    (``CachedDataset(probe=...)``).
    """
    try:
        found = [
            (name, contents(value, where=name)) for name, value in _parts(dataset, "", {}, of_each)
        ]
    except Exception as error:  # somebody's class that does not want to be looked at
        return Fingerprint("", unseen=(f"{type(dataset).__name__} ({refusal(error)})",))
    unseen = dict.fromkeys(each for _, part in found for each in part.unseen)
    return Fingerprint(
        digest([(name, part.digest) for name, part in found]),
        {name: part.digest[:_PART_DIGITS] for name, part in found},
        tuple(unseen),
    )


def differences(ours: str, theirs: str, cut: bool = False) -> list[str]:
    """The names of what differs between two ``notes``; ``cut``: the end of theirs was lost."""
    one, other = (dict(map(_name_and_part, text.splitlines())) for text in (ours, theirs))
    if cut:
        other.popitem()  # half a line
    names = [name for name in one if name in other] if cut else {**one, **other}
    return [name for name in names if one.get(name) != other.get(name)]


def _name_and_part(line: str) -> tuple[str, str]:
    part, _, name = line.partition(" ")
    return name, part


def _parts(
    dataset: Any, before: str, told: dict[int, str], of_each: bool
) -> Iterator[tuple[str, Any]]:
    """What a dataset is made of, by the names that its author gave; ``told`` are those that were
    told before, by address."""
    kind = type(dataset)
    told[id(dataset)] = before
    top = str(kind.__module__).partition(".")[0]
    with contextlib.nullcontext() if top in _COMMON else users_own(top):
        if (
            of_each and not before
        ):  # what those inside it say of their lengths may be wrong, or take long
            yield f"len({kind.__name__})", len(dataset)
        members = code.class_parts(kind, made=True)
        yield f"class {kind.__qualname__}", members.pop("")
        for name, member in members.items():
            function = code.function_in(member)
            if function is None:
                yield name, member
                continue
            yield name, code.own_parts(function)
            yield from code.used_by(function).items()
        base = base_of(kind)
        if base is None:
            yield f"{before}contents", dataset
            return
        own = attributes_of(dataset, slots_of(kind))
        if base is not object:
            own[ITEMS] = plain(dataset, base)
        if not of_each:
            length = len(dataset)
            own = {name: value for name, value in own.items() if _length(value) != length}
        yield f"{before}attributes", list(own)
        for name, value in own.items():
            nested = issubclass(type(value), Dataset)
            if nested and id(value) in told:
                yield f"{before}{name}", f"the dataset {told[id(value)]}"
            elif nested and len(told) < _NESTED:
                yield from _parts(value, f"{before}{name}.", told, of_each)
            else:
                yield f"{before}{name}", value


def _length(value: Any) -> int | None:
    """Of a list, an array or a table; a text is one value, and a dataset is looked into."""
    if isinstance(value, (str, bytes, Dataset)):
        return None
    try:
        return len(value)
    except Exception:  # it has none
        return None
