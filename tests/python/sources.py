"""Datasets that say how often they were asked, and what their samples must look like. Spawned
workers import this module by name, so it holds no fixtures."""

from __future__ import annotations

import multiprocessing
import os
from array import array
from collections import Counter, namedtuple
from pathlib import Path

import torch
from samples import complaint, whole
from stocache import _C
from stocache._loading import gatherer
from torch.utils.data import Dataset

FORK = multiprocessing.get_context("fork")


def index_bytes() -> int:
    """What a store takes for itself, with the index of a small dataset."""
    records = _C.Records()
    records.open(1 << 20, 100, "freeze", "", "memfd", False, "", "no", "", 0, -1)
    room = records.stats()["data_bytes"]
    records.close()
    return (1 << 20) - room


INDEX = index_bytes()

Point = namedtuple("Point", "x y")


def words_of(idx: int, most: int) -> int:
    """How many words sample `idx` has: 1 to `most`, without a pattern that neighbours share."""
    return 1 + (idx * 7919) % most


def wrong(idx: int, sample, most: int) -> str | None:
    """None when `sample` is what Counted gives for `idx`, from its first word to its last."""
    number, row = sample
    if number != idx:
        return f"sample {idx} says that it is {number}"
    if row.numel() != words_of(idx, most):
        return f"sample {idx} has {row.numel()} words instead of {words_of(idx, most)}"
    return complaint(idx, row)


class Counted(Dataset):
    """Samples of 1 to `most` words, or all of exactly `words`; every load is noted in a file."""

    def __init__(self, log: str, length: int, most: int = 64, words: int | None = None) -> None:
        self.log = str(log)
        self.length = length
        self.most = most
        self.words = words

    def __len__(self) -> int:
        return self.length

    def note(self, idx: int) -> None:
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, array("q", [idx]).tobytes())
        os.close(file)

    def make(self, idx: int):
        return idx, whole(idx, self.words or words_of(idx, self.most))

    def __getitem__(self, idx: int):
        if idx < 0:  # as a list
            idx += self.length
        self.note(idx)
        return self.make(idx)

    def loads(self) -> Counter:
        """How often each sample was loaded, by all processes together."""
        path = Path(self.log)
        return Counter(array("q", path.read_bytes()) if path.exists() else ())

    def once_each(self) -> bool:
        return self.loads() == Counter(range(self.length))


class Together(Counted):
    """Can load many at once, and notes how many."""

    def __getitems__(self, indices):
        with open(self.log + ".groups", "a") as groups:
            groups.write(f"{len(indices)}\n")
        for idx in indices:
            self.note(idx)
        return [self.make(idx) for idx in indices]

    def groups(self) -> list[int]:
        path = Path(self.log + ".groups")
        return [int(line) for line in path.read_text().split()] if path.exists() else []


class Fails(Exception):
    """What a broken source raises."""


class Broken(Counted):
    """Raises for sample 3 as long as the file `<log>.broken` exists."""

    def __getitem__(self, idx: int):
        self.note(idx)
        if idx == 3 and os.path.exists(self.log + ".broken"):
            raise Fails("the disk of sample 3 is on fire")
        return self.make(idx)


class Fixed(Dataset):
    """The samples of a list."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int):
        return self.samples[idx]


class Plain:
    """An object that only pickle can store."""

    def __init__(self, value) -> None:
        self.value = value

    def __eq__(self, other) -> bool:
        return type(other) is Plain and other.value == self.value

    def __repr__(self) -> str:
        return f"Plain({self.value!r})"

    __hash__ = None


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def doubled(sample):
    """A transform that edits what it is given."""
    number, row = sample
    row.mul_(2)
    return number, row


def into_one_buffer(monkeypatch):
    """A twin of what makes batches in the training process, for controls: each is written over the
    one before, whoever holds that."""
    finished, kept = gatherer.finished, {}

    def twin(*arguments):
        indices, rows = finished(*arguments)
        return [indices, kept.setdefault(rows.shape, torch.empty_like(rows)).copy_(rows)]

    monkeypatch.setattr(gatherer, "finished", twin)


def verified(samples):
    """A collate_fn: the indices of samples of Counted, which it looks at."""
    assert type(samples) is list
    for idx, row in samples:
        assert complaint(idx, row) is None
    return [idx for idx, _ in samples]


def same(one, other) -> bool:
    """Equal in values, types, shapes and dtypes, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return alike and same(vars(one), vars(other))
    if type(one).__module__ == "numpy":
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
