"""A training program for torchrun: every scenario a rank can be in, one launch for all of them.

Each rank writes what it saw to <folder>/rank<n>.json; test_ranks.py looks at the answers. The
scenarios go in the same order on every rank, with a barrier of files between them."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path

import stocache
import torch
from samples import CachedSamples, complaint, limit_gib, whole
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
LENGTH, WORDS = 64, 256


def barrier(name: str) -> None:
    """Files are enough for ranks of one node, and need no network."""
    (FOLDER / f"{name}-{RANK}").touch()
    deadline = time.monotonic() + 60
    while not all((FOLDER / f"{name}-{rank}").exists() for rank in range(WORLD)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other ranks did not reach {name}")
        time.sleep(0.01)


def identity(cache) -> list[int]:
    """What tells one segment from another, whatever backs it."""
    cache.aux_array.sum()
    if cache.path is not None:
        stat = os.stat(cache.path)
        return [stat.st_dev, stat.st_ino]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({int(line.split()[4]) for line in maps if "memfd:stocache" in line})


def epochs(dataset, context: str) -> dict:
    """Two epochs with other halves of the data each, every sample verified."""
    sampler = DistributedSampler(dataset, WORLD, RANK, shuffle=True)
    hits = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(
            dataset, 8, sampler=sampler, num_workers=2, multiprocessing_context=context
        )
        count = 0
        for indices, hit, rows in loader:
            count += int(hit.sum())
            for idx, row in zip(indices.tolist(), rows, strict=True):
                if wrong := complaint(idx, row):
                    raise AssertionError(wrong)
        hits.append(count)
        barrier(f"{context}-{dataset.label}-{epoch}")
    stats = dataset.cache.stats()
    return {"hits": hits, "fills": stats.fills, "filled": stats.filled}


class Labelled(CachedSamples):
    def __init__(self, label: str, **options) -> None:
        self.label = label
        super().__init__(LENGTH, WORDS, **options)


class FileList(Dataset):
    """Samples that depend on a list of files known before the cache is made."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.cache = stocache.SharedCache(0.001, 16, (8,), torch.int64, verbose=False)

    def fill(self) -> None:
        for idx, file in enumerate(self.files):
            if self.cache.get_slot(idx) is None:
                self.cache.set_slot(idx, torch.full((8,), int(file)))

    def wrong(self) -> int:
        """How many samples are not those of this rank's files."""
        rows = [self.cache.get_slot(idx) for idx in range(16)]
        return sum(
            row is not None and int(row[0]) != int(file)
            for row, file in zip(rows, self.files, strict=True)
        )


class LateList(FileList):
    """As FileList, but the list becomes an attribute only after the cache was made."""

    def __init__(self, files: list[str]) -> None:
        self.cache = stocache.SharedCache(0.001, 16, (8,), torch.int64, verbose=False)
        self.files = files


class Slotted:
    """A table of somebody's library: no __dict__ to look into."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows


def nth(files: list[str], n: int) -> str:
    return files[n]


class Reader(FileList):
    """Knows its files only through something else that `hide` made."""

    hide = staticmethod(Slotted)

    def __init__(self, files: list[str]) -> None:
        self.reader = self.hide(files)
        self.cache = stocache.SharedCache(0.001, 16, (8,), torch.int64, verbose=False)
        del self.reader
        self.files = files


class PartialReader(Reader):
    hide = staticmethod(lambda files: functools.partial(nth, files))


class ClosureReader(Reader):
    hide = staticmethod(lambda files: lambda n: files[n])


class DeepReader(Reader):
    hide = staticmethod(lambda files: {"a": {"b": {"c": {"d": {"e": {"f": files}}}}}})


class OneOfMany(Reader):
    """A long list of which a single entry differs between the ranks."""

    hide = staticmethod(lambda files: [*map(str, range(1234)), files[0], *map(str, range(3000))])


def lists(kind, of_rank) -> dict:
    dataset = kind([str(of_rank(RANK) * 1000 + n) for n in range(16)])
    mark = f"{kind.__name__}-{of_rank(1)}"
    barrier(f"{mark}-made")
    dataset.fill()
    barrier(f"{mark}-filled")
    seen = {"id": identity(dataset.cache), "wrong": dataset.wrong()}
    barrier(f"{mark}-seen")
    dataset.cache.close()
    return seen


def shared_without_an_argument() -> dict:
    dataset = Labelled("shared")
    barrier("shared-made")
    seen = {"id": identity(dataset.cache), **epochs(dataset, "fork")}
    dataset.cache.close()
    return seen


def shared_with_spawned_workers() -> dict:
    dataset = Labelled("spawned")
    barrier("spawned-made")
    seen = {"id": identity(dataset.cache), **epochs(dataset, "spawn")}
    dataset.cache.close()
    return seen


def apart_on_request() -> dict:
    dataset = Labelled("apart", shared=False)
    barrier("apart-made")
    seen = {"id": identity(dataset.cache), **epochs(dataset, "fork")}
    dataset.cache.close()
    return seen


def in_memfd() -> dict:
    dataset = Labelled("memfd", backing="memfd")
    barrier("memfd-made")
    seen = {"id": identity(dataset.cache), **epochs(dataset, "fork")}
    dataset.cache.close()
    return seen


def train_and_test() -> dict:
    """One class, one line of code, two caches: training set and test set."""
    made = [FileList([str(part * 1000 + n) for n in range(16)]) for part in (1, 2)]
    barrier("two-made")
    for dataset in made:
        dataset.fill()
    barrier("two-filled")
    seen = {"ids": [identity(d.cache) for d in made], "wrong": sum(d.wrong() for d in made)}
    barrier("two-seen")
    for dataset in made:
        dataset.cache.close()
    return seen


def twins() -> dict:
    """Two caches that nothing tells apart but that the program asked twice."""
    limit = limit_gib(16, 8)
    made = [stocache.SharedCache(limit, 16, (8,), torch.int64, verbose=False) for _ in range(2)]
    barrier("twins-made")
    if RANK == 0:
        made[0].set_slot(0, whole(0, 8))
    barrier("twins-filled")
    seen = {"ids": [identity(c) for c in made], "second": made[1].get_slot(0) is not None}
    barrier("twins-seen")
    for cache in made:
        cache.close()
    return seen


def one_rank_goes_first() -> dict:
    """A rank that ends early takes nothing from the others."""
    dataset = Labelled("first")
    barrier("first-made")
    for idx in range(RANK, LENGTH, WORLD):
        dataset[idx]
    barrier("first-filled")
    if RANK == 0:
        dataset.cache.close()
    barrier("first-closed")
    seen = {}
    if RANK != 0:
        rows = [dataset.cache.get_slot(idx) for idx in range(LENGTH)]
        seen = {"none": sum(row is None for row in rows)}
        seen["wrong"] = sum(
            row is not None and bool(complaint(i, row)) for i, row in enumerate(rows)
        )
        seen["path"] = dataset.cache.path is None or os.path.exists(dataset.cache.path)
    barrier("first-seen")
    dataset.cache.close()
    return seen


def what_torchrun_told() -> dict:
    words = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ROLE_NAME")
    return {name: value for name, value in os.environ.items() if any(w in name for w in words)}


SCENARIOS = {
    "shared": shared_without_an_argument,
    "spawned": shared_with_spawned_workers,
    "apart": apart_on_request,
    "memfd": in_memfd,
    "same files": lambda: lists(FileList, lambda rank: 7),
    "other files": lambda: lists(FileList, lambda rank: rank),
    "other files, late": lambda: lists(LateList, lambda rank: rank),
    "other files, in slots": lambda: lists(Reader, lambda rank: rank),
    "other files, in a partial": lambda: lists(PartialReader, lambda rank: rank),
    "other files, in a closure": lambda: lists(ClosureReader, lambda rank: rank),
    "other files, deep down": lambda: lists(DeepReader, lambda rank: rank),
    "other files, one of many": lambda: lists(OneOfMany, lambda rank: rank),
    "train and test": train_and_test,
    "twins": twins,
    "first": one_rank_goes_first,
    "environment": what_torchrun_told,
}


def main() -> None:
    torch.set_num_threads(1)
    answers = {}
    for name in sys.argv[2:] or SCENARIOS:
        try:
            answers[name] = SCENARIOS[name]()
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
            barrier(f"{name}-failed")
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
