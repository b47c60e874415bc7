"""Which rank this process is, which ranks have a node in common, and what they tell each other."""

from __future__ import annotations

import operator
import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stocache._sharing.launcher import find_job

# In whose words a launcher says which rank of how many a process is. torchrun's first: others may
# have started it.
_WORDS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(frozen=True)
class Rank:
    """A process of the job, as the others see it."""

    number: int
    node: int
    local: int
    """Its number among the ranks of its node."""
    ranks_on: tuple[int, ...]
    """How many ranks each node has."""

    @property
    def ranks(self) -> int:
        return sum(self.ranks_on)


def rank_and_ranks(
    rank: Any, num_replicas: Any, env: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """As given, or as torch.distributed or the launcher says."""
    found = _found(env)
    number = found[0] if rank is None else whole("rank", rank)
    ranks = found[1] if num_replicas is None else whole("num_replicas", num_replicas)
    if ranks < 1:
        raise ValueError(f"num_replicas is {ranks}; there is 1 rank at least")
    if not 0 <= number < ranks:
        raise ValueError(f"rank is {number}; with {ranks} ranks it is from 0 to {ranks - 1}")
    return number, ranks


def whole(what: str, number: Any) -> int:
    """An int, also for one of numpy's or torch's."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise TypeError(f"{what} is {number!r}; a whole number is needed")


def _found(env: Mapping[str, str]) -> tuple[int, int]:
    if has_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, ranks in _WORDS:
        # A batch script of SLURM's is no rank, though it is told how many there will be.
        step = rank != "SLURM_PROCID" or "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
        number, count = env.get(rank, ""), env.get(ranks, "")
        if step and number.isdecimal() and count.isdecimal() and int(number) < int(count):
            return int(number), int(count)
    return 0, 1


def has_group() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def can_ask(ranks: int) -> bool:
    """Whether these are the ranks of torch.distributed: those of a model that is spread over
    several processes, say, are fewer."""
    return has_group() and torch.distributed.get_world_size() == ranks


def exchanged(message: Any, ranks: int) -> list[Any] | None:
    """What each rank says; None where they cannot be asked."""
    if ranks == 1:
        return [message]
    if not can_ask(ranks):
        return None
    answers: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(answers, message)
    return answers


def node_name(number: int) -> str:
    """The same for the ranks that share this node's memory, and for no others."""
    job = find_job()
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return f"{machine} {f'rank {number}' if job is None else job.name}"


def placed(number: int, nodes: list[str]) -> Rank:
    """By the names of the nodes of all ranks."""
    ranks_on = Counter(nodes)  # in the order of their first ranks
    mine = [k for k, node in enumerate(nodes) if node == nodes[number]]
    return Rank(
        number, list(ranks_on).index(nodes[number]), mine.index(number), tuple(ranks_on.values())
    )


def presumed(number: int, ranks: int) -> Rank:
    """Where nobody can be asked: as many ranks on each node as on this one, in their order."""
    job = find_job()
    here = min(ranks, 1 if job is None else job.ranks)
    return placed(number, [str(k // here) for k in range(ranks)])
