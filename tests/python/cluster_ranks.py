"""A program for torchrun: servers that the nodes of a job run together; one launch for all.

Each rank writes what it saw to <folder>/rank<n>.json, which test_cluster_nodes.py looks at."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from sources import Counted
from stocache import CachedDataset, CacheLoader, DataLoader
from stocache._cluster import nodes, spawn
from torch.utils.data import DistributedSampler

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
NODE = int(os.environ["GROUP_RANK"])
LENGTH = 96
CAPACITY = 64 << 20


def made(what: str, **options) -> CachedDataset:
    source = Counted(FOLDER / f"loads-{what}", LENGTH, words=64)
    options = {"capacity_per_node": CAPACITY, "verbose": False, "probe": 0, **options}
    return CachedDataset(source, options.pop("memory", "16MiB"), **options)


def listening() -> dict[int, str]:
    """Where somebody listens, by port, as seen from this node."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        place, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = place.split(":")
            found[int(port, 16)] = ".".join(str(each) for each in bytes.fromhex(address)[::-1])
    return found


def visits(what: str, workers: int, **options) -> dict:
    """Three epochs, in each of which the ranks have other samples."""
    with made(what, **options) as dataset:
        sampler = DistributedSampler(dataset, shuffle=True)
        loader = DataLoader(
            dataset, 8, sampler=sampler, num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        seen = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            seen.append([number for numbers, _ in loader for number in numbers.tolist()])
            dataset.flush()
            dist.barrier()
        servers = dataset.cluster_servers()
        listens = listening()
        places = [each["address"] for each in servers]
        dist.barrier()
        return {
            "seen": seen, "node": NODE, "loads": sorted(dataset.dataset.loads().elements()),
            "servers": places, "samples": [each["samples"] for each in servers],
            "forged": sum(each["forged"] for each in servers),
            "listens": [listens[port] for place in places
                        if (port := int(place.rpartition(":")[2])) in listens],
        }  # fmt: skip


def warmed(what: str, **options) -> dict:
    """Filled ahead by all ranks together, with workers; then an epoch of all samples in each."""
    with made(what, cluster="spawn", **options) as dataset:
        dataset.warm(num_workers=1, progress=False)
        loads = sorted(dataset.dataset.loads().elements())
        in_memory = dataset.stats().filled
        dist.barrier()
        seen = [int(number) for number, _ in dataset]
        dist.barrier()
        return {"loads": loads, "in_memory": in_memory, "seen": seen, "node": NODE}


def warmed_by_one() -> dict:
    """The others do not call it: nobody waits for them."""
    with made("alone", cluster="spawn") as dataset:
        if RANK == 1:
            dataset.warm(progress=False)
        dist.barrier()
        return {"loads": sorted(dataset.dataset.loads().elements())}


def in_cells() -> dict:
    """Of two servers each node needs one: it has no connection to the other."""
    with made("cells", cluster="spawn", dataset_size=CAPACITY // 2) as dataset:
        seen = [int(number) for number, _ in dataset]
        dataset.flush()
        dist.barrier()
        servers = [each["address"] for each in dataset.cluster_servers()]
        keys = sum(each["samples"] for each in dataset.cluster_servers())
        dist.barrier()
        if RANK == 0:
            dataset.clear()
        dist.barrier()
        left = sum(each["samples"] for each in dataset.cluster_servers())
        dist.barrier()
        return {"servers": servers, "seen": seen, "keys": keys, "left": left, "node": NODE}


def trouble_of_one() -> str:
    """One rank cannot start its server; the others do not wait for it for ever."""
    join = spawn.join

    def refuse(*_: object) -> dict:
        raise RuntimeError("there is no server to spawn")

    spawn.join = refuse if RANK == 3 else join
    try:
        made("trouble", cluster="spawn")
    except RuntimeError as error:
        return str(error)
    finally:
        spawn.join = join
    return "no error"


def another_capacity() -> list[str]:
    """By one rank alone: the job has agreed already, and nobody waits."""
    if RANK != 1:
        return []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made("other", cluster="spawn", capacity_per_node=2 * CAPACITY).close()
    return [str(each.message) for each in told]


def loader_of_bagua() -> dict:
    loader = CacheLoader(
        backend="redis", dataset_name="pano", hosts=None, cluster_mode=True,
        capacity_per_node=CAPACITY,
    )  # fmt: skip
    if RANK == 0:
        for key in range(20):
            loader.get(key, lambda key: key * key)
        loader.store.flush()
    dist.barrier()
    found = [loader.get(key, lambda key: None) for key in range(20)]
    count = loader.num_keys()
    dist.barrier()
    return {"found": found, "keys": count}


SCENARIOS = {
    "trouble": trouble_of_one,
    "spawned": lambda: visits("spawned", 0, cluster="spawn"),
    "workers": lambda: visits("workers", 2, backend="redis", dataset_name="ds"),
    "apart": lambda: visits("apart", 0, cluster="spawn", cluster_mode=False),
    "warmed": lambda: warmed("warmed"),
    "warmed again": lambda: warmed("small", memory=1),
    "warmed alone": warmed_by_one,
    "cells": in_cells,
    "capacity": another_capacity,
    "loader": loader_of_bagua,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = {}
    for name in sys.argv[2:] or SCENARIOS:
        try:
            answers[name] = SCENARIOS[name]()
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
            break  # the others may be elsewhere
    agreed = nodes._agreed
    answers["agreed"] = None if agreed is None else [agreed.url, agreed.secret.decode()]
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()
