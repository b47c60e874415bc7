"""Which job of this node the process is a rank of, whoever launched it.

Launchers tell a process in its environment what it is. Each is asked what tells its jobs apart on
one node, and how many ranks it has there.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """Several ranks on one node."""

    name: str
    """The same for all ranks of the job on this node, and for no others."""
    ranks: int
    """How many there are on this node, or at most may be."""


def find_job(env: Environment = os.environ) -> Job | None:
    """The job this process is a rank of; None if it has a single rank here, or no launcher."""
    return _launched(env) or _spawned(env)


def job_or_program() -> str:
    """What tells the job of this process from all others of its node; without a launcher the job
    is a program, with all that it has started by multiprocessing."""
    if (job := _launched(os.environ)) is not None:
        return job.name
    return hashlib.sha256(multiprocessing.current_process().authkey).hexdigest()


def local_ranks() -> int:
    """How many ranks divide this node's memory; 1 without a launcher."""
    job = find_job()
    return 1 if job is None else job.ranks


def _launched(env: Environment) -> Job | None:
    found = (ask(env) for ask in (_torchrun, _slurm, _open_mpi, _hydra, _mvapich, _by_port))
    return next((job for job in found if job is not None and job.ranks > 1), None)


def _torchrun(env: Environment) -> Job | None:
    """Also accelerate's and those of others that use it."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    # The run id alone is not enough: without a rendezvous it is always "none".
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return _job("torchrun", [env.get(part, "") for part in parts], env.get("LOCAL_WORLD_SIZE"))


def _slurm(env: Environment) -> Job | None:
    """srun. A batch script without it has a job, but no step."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or "SLURM_LOCALID" not in env or "SLURM_JOB_ID" not in env:
        return None
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    ranks = env.get("SLURM_NTASKS_PER_NODE")
    if tasks:
        each = _per_node(tasks)
        node = _whole(env.get("SLURM_NODEID")) or 0
        ranks = str(each[node]) if node < len(each) else ranks
    return _job("srun", [env["SLURM_JOB_ID"], step], ranks)


def _per_node(tasks: str) -> list[int]:
    """SLURM's way to write "2 on three nodes, then 1": ``2(x3),1``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _open_mpi(env: Environment) -> Job | None:
    """mpirun of Open MPI."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in env:
        return None
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    known = [env[name] for name in names if name in env]
    return _job("mpirun", known or [_parent()], env["OMPI_COMM_WORLD_LOCAL_SIZE"])


def _hydra(env: Environment) -> Job | None:
    """mpiexec of MPICH and Intel MPI: one proxy per node starts the ranks."""
    return _job("mpiexec", [_parent()], env.get("MPI_LOCALNRANKS"))


def _mvapich(env: Environment) -> Job | None:
    return _job("mvapich", [_parent()], env.get("MV2_COMM_WORLD_LOCAL_SIZE"))


def _by_port(env: Environment) -> Job | None:
    """Lightning's own launcher, deepspeed's and what people write themselves: ranks meet at an
    address. Where nobody says how many of them are here, it may be all."""
    if not {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} <= env.keys():
        return None
    ranks = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or env["WORLD_SIZE"]
    return _job("port", [env.get("MASTER_ADDR", ""), env["MASTER_PORT"]], ranks)


def _spawned(env: Environment) -> Job | None:
    """torch.multiprocessing.spawn, once the ranks have met: they have one parent."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if multiprocessing.parent_process() is None or distributed.get_world_size() < 2:
        return None
    return Job(f"spawn:{_parent()}", distributed.get_world_size())


def _job(launcher: str, names: list[str], ranks: str | None) -> Job | None:
    count = _whole(ranks)
    return None if count is None else Job(":".join([launcher, *names]), count)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _parent() -> str:
    """The parent process, told from a later one of the same number by when it began."""
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{parent}-{began}"
