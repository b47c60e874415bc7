"""Runs a program on every rank of some nodes, all of them this machine.

The zygote forks the ranks, with what torchrun tells each in its environment. torchrun itself starts
an interpreter that imports torch for each rank, and one for each node. test_ranks.py launches by
torchrun, and compares what the ranks are told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zygote

HERE = Path(__file__).parent


class Launch:
    """The processes of a job."""

    def __init__(self, processes: Iterable[subprocess.Popen | zygote.Forked]) -> None:
        self.processes = list(processes)

    def output(self) -> str:
        """What all of them printed, when all have ended. Fails if one does; then the others end."""
        with concurrent.futures.ThreadPoolExecutor(len(self.processes)) as pool:
            try:
                talks = [pool.submit(each.communicate, timeout=400) for each in self.processes]
                for _ in concurrent.futures.as_completed(talks):
                    if any(each.returncode not in (None, 0) for each in self.processes):
                        break
                else:
                    return "".join(out for out, _ in (talk.result() for talk in talks))
            finally:
                self.end()
        said = "".join("".join(talk.result()) for talk in talks if talk.exception() is None)
        raise AssertionError(f"{[each.returncode for each in self.processes]}\n{said}")

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answers(folder: Path, ranks: int) -> list[dict]:
    """What each rank wrote to its file in ``folder``: an answer for each scenario."""
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for rank, answer in enumerate(found):
        for scenario, each in answer.items():
            if isinstance(each, dict) and "error" in each:
                raise AssertionError(f"rank {rank}, {scenario}: {each['error']}")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_tests(environment: dict[str, str]) -> dict[str, str]:
    """So that a program can import what the tests import."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **environment}


def rank_environment(rank: int, nodes: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank, with so many nodes and ranks on each."""
    node, local = divmod(rank, ranks)
    numbers = {
        "LOCAL_RANK": local, "RANK": rank, "GROUP_RANK": node, "ROLE_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": nodes * ranks, "GROUP_WORLD_SIZE": nodes,
        "ROLE_WORLD_SIZE": nodes * ranks, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }  # fmt: skip
    return {
        **{name: str(value) for name, value in numbers.items()},
        "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip


def launch(
    program: Path,
    *args: object,
    folder: Path,
    nodes: int = 1,
    ranks: int = 2,
    environment: Callable[[int], dict[str, str]] = lambda node: {},
) -> Launch:
    """``environment`` of a node is added to that of its ranks."""
    port = free_port()
    command = [sys.executable, str(program), *map(str, args)]
    return Launch(
        zygote.fork(
            command,
            folder,
            with_tests(
                {**rank_environment(rank, nodes, ranks, port), **environment(rank // ranks)}
            ),
        )
        for rank in range(nodes * ranks)
    )


def launch_by_torchrun(
    program: Path,
    *args: object,
    folder: Path,
    fronts: Sequence[Sequence[str]] = ((),),
    ranks: int = 2,
    master: str = "127.0.0.1",
    environment: Callable[[int], dict[str, str]] = lambda node: {},
) -> Launch:
    """By torchrun itself. ``fronts`` is how a command is run on each node."""
    port = free_port()
    return Launch(
        subprocess.Popen(
            [
                *front, sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(fronts)}",
                f"--nproc-per-node={ranks}", f"--node-rank={node}", f"--master-addr={master}",
                f"--master-port={port}", str(program), *map(str, args),
            ],
            cwd=folder, env=with_tests({"OMP_NUM_THREADS": "1", **environment(node)}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for node, front in enumerate(fronts)
    )  # fmt: skip
