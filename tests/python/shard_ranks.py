"""A program for torchrun: what each rank has of a dataset, in every mode; one launch for all.

Each rank writes what it saw to <folder>/rank<n>.json; test_sharding.py looks at the answers."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from sources import Counted
from stocache import DataLoader, LazyShardDataset

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
NODE = int(os.environ["GROUP_RANK"])
LENGTH = 101
MEMORY = "16MiB"


def source(what: str) -> Counted:
    return Counted(FOLDER / f"loads-{what}-{NODE}", LENGTH, words=64)


def made(what: str, **options) -> LazyShardDataset:
    options.setdefault("memory_size", MEMORY)
    options.setdefault("disk_size", None)
    options.setdefault("disk_cache_path", FOLDER / f"disk-{what}-{NODE}")
    return LazyShardDataset(source(what), verbose=False, **options)


def epochs(dataset: LazyShardDataset, workers: int) -> list[list[int]]:
    """The samples of three epochs, each after the other ranks are done with the one before."""
    seen = []
    loader = DataLoader(
        dataset, 8, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen.append([number for numbers, _ in loader for number in numbers.tolist()])
        assert seen[-1] == dataset.indices().tolist()
        dist.barrier()
    return seen


def visits(mode: str, workers: int, **options) -> dict:
    what = f"{mode}-{workers}-{'-'.join(options)}"
    with made(what, mode=mode, seed=3, **options) as dataset:
        dist.barrier()
        before = dataset.dataset.loads()  # to measure them
        dist.barrier()
        seen = epochs(dataset, workers)
        loads = dataset.dataset.loads()
        loads.subtract(before)
        memory, disk = dataset.memory_cache, dataset.disk_cache
        counts = [memory.hits.value, memory.misses.value, disk.hits.value, disk.misses.value]
        dist.barrier()
        return {
            "seen": seen, "counts": counts, "node": NODE,
            "loads": sorted(index for index in loads.elements()),
        }  # fmt: skip


def disagreement() -> str:
    try:
        made("other", seed=5 if RANK == 1 else 4)
    except ValueError as error:
        return str(error)
    return "no error"


def trouble_of_one() -> list[str]:
    """One rank cannot say what it has; the others do not wait for it for ever."""
    said = []
    for options in ({"memory_size": "much"}, {"overflow": -1.0}, {"mode": "ranks"}):
        try:
            made("trouble", **(options if RANK == 1 else {}))
        except ValueError as error:
            said.append(str(error))
    return said


def capacities() -> list[int]:
    """Nodes with other capacities: those with room take what others have not."""
    with made("uneven", memory_size="200KiB" if NODE == 0 else MEMORY, mode="rank") as dataset:
        found = dataset.indices().tolist()
        dist.barrier()
        return found


def warmed() -> dict:
    """The first rank of each node loads nothing; the others make it good."""
    with made("warmed", mode="rank") as dataset:
        if dataset.rank.local != 0 or dataset.rank.ranks_on[dataset.rank.node] == 1:
            dataset.warm(progress=False)
        dist.barrier()
        before = dataset.stats().loads
        for _ in DataLoader(dataset, 8):
            pass
        dist.barrier()
        return {"loads": dataset.stats().loads - before}


def the_example_of_bilevelcache() -> dict:
    """As its README has it, with the import changed, smaller data and a folder per node."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = source("example")
    cached_dataset = LazyShardDataset(
        data,
        shuffle=True,
        disk_size=0.01,
        memory_size=0.01,
        overflow=0.0,
        min_elements=len(data) // world_size,
        rank=rank,
        num_replicas=world_size,
        seed=13,
        mode="rank",
        disk_cache_path=FOLDER / f"bicache-{NODE}",
    )
    loader = torch.utils.data.DataLoader(
        cached_dataset, batch_size=4, num_workers=2, shuffle=True, multiprocessing_context="fork"
    )
    memory_hits: list[int] = []
    memory_miss: list[int] = []
    for _ in range(2):
        for _ in loader:
            memory_miss.append(cached_dataset.memory_cache.misses.value - max([*memory_miss, 0]))
            memory_hits.append(cached_dataset.memory_cache.hits.value - max([*memory_hits, 0]))
    values = [cached_dataset.memory_cache._values_cache.get(i) for i in range(8)]
    dist.barrier()
    found = {
        "cached": len([value for value in values if value is not None]),
        "hits": cached_dataset.memory_cache.hits.value,
        "misses": cached_dataset.memory_cache.misses.value,
        "length": len(cached_dataset),
    }
    cached_dataset.close()
    return found


SCENARIOS = {
    "rank": lambda: visits("rank", 0),
    "node": lambda: visits("node", 2),
    "disk": lambda: visits("disk", 0, disk_size="64MiB", memory_size="200KiB"),
    "equal": lambda: visits("rank", 0, equal=True),
    "equal node": lambda: visits("node", 0, equal=True),
    "chunks": lambda: visits("rank", 0, chunk=7),
    "disagreement": disagreement,
    "trouble": trouble_of_one,
    "capacities": capacities,
    "warmed": warmed,
    "example": the_example_of_bilevelcache,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = {}
    for name, act in SCENARIOS.items():
        try:
            answers[name] = act()
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
            break  # the others may be elsewhere
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
