"""Ranks of one job share a cache, or divide the memory, whoever launched them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import zygote
from stocache._sharing.launcher import Job, find_job

# As the launchers set them, less what says nothing of ranks. {0} is the rank.
LAUNCHERS = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40001",
        "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "{0}", "WORLD_SIZE": "2",
    },
    "srun": {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "{0}", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)", "SLURM_PROCID": "{0}", "SLURM_NTASKS": "8",
    },
    "srun --ntasks-per-node": {
        "SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "3", "SLURM_LOCALID": "{0}",
        "SLURM_NTASKS_PER_NODE": "2",
    },
    "mpirun of Open MPI": {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{0}",
        "PMIX_NAMESPACE": "prterun-node-4711@1",
    },
    "mpiexec of MPICH": {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "{0}", "PMI_RANK": "{0}"},
    "mvapich": {"MV2_COMM_WORLD_LOCAL_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "{0}"},
    "Lightning": {
        "LOCAL_RANK": "{0}", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "40002",
    },
    "deepspeed": {
        "LOCAL_RANK": "{0}", "LOCAL_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1",
        "MASTER_PORT": "29500", "CROSS_RANK": "0",
    },
}  # fmt: skip
SEEN = ("TORCHELASTIC", "MASTER_", "LOCAL_", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """This run may itself be the step of a job."""
    for name in list(os.environ):
        if name.startswith(SEEN):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_of_a_launcher_are_one_job_of_two(launcher):
    jobs = [find_job(rank_of(launcher, rank)) for rank in range(2)]
    assert jobs[0] == jobs[1] and jobs[0].ranks == 2


def rank_of(launcher: str, rank: int) -> dict[str, str]:
    return {name: value.format(rank) for name, value in LAUNCHERS[launcher].items()}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "4", "SLURM_LOCALID": "0"},  # no srun
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0",
         "SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0",
         "SLURM_STEP_TASKS_PER_NODE": "?"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"MPI_LOCALNRANKS": "many"},
        {"LOCAL_RANK": "0"},
        {"MASTER_PORT": "1", "WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"},
        {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1"},
    ],
)  # fmt: skip
def test_a_single_rank_is_no_job(environment):
    assert find_job(environment) is None


def test_torchrun_under_srun_is_torchruns_job():
    outer = {**rank_of("srun", 0), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    job = find_job({**outer, **rank_of("torchrun", 1)})
    assert job is not None and job.name.startswith("torchrun:") and job.ranks == 2


def test_two_jobs_of_a_launcher_are_told_apart():
    for launcher, changed in (
        ("torchrun", "MASTER_PORT"),
        ("srun", "SLURM_STEP_ID"),
        ("mpirun of Open MPI", "PMIX_NAMESPACE"),
        ("Lightning", "MASTER_PORT"),
    ):
        one = rank_of(launcher, 0)
        assert find_job(one) != find_job({**one, changed: "4713"}), launcher


RANK = """
    import json, os, random, sys, warnings
    import torch, stocache
    from torch.utils.data import Dataset

    class Augment:
        # As albumentations' Compose: it has random numbers of its own.
        def __init__(self):
            self.numbers = random.Random()

    class Data(Dataset):
        def __init__(self, options, first=0):
            self.first = first
            if "home" in options:
                os.chdir(options["home"])
            if "rank" in options:
                self.rank = options["rank"]
            if options.get("augments"):
                self.augment = {"steps": [Augment()]}
        def __len__(self): return 8
        def __getitem__(self, i):
            return torch.tensor(self.first + i + int(os.getenv("unseen_offset".upper(), "0")))

    def main():
        options = json.loads(sys.argv[1])
        if options.get("blind"):
            stocache._sharing.dataset.stack = lambda caller: ()
        def make(data):
            return stocache.CachedDataset(
                data, options.get("memory", "8MiB"), shared=options.get("shared", True),
                fingerprint=options.get("fingerprint", "auto"), probe=options.get("probe", 0),
                backing="shm", verbose=False,
            )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if options.get("validation"):
                validation = make(Data(options, 1000))
                validation[0]
            os.environ["UNSEEN_OFFSET"] = str(options.get("offset", 0))
            dataset = make(Data(options))
            seen = [int(dataset[i]) for i in range(8)]
        answer = {
            "name": dataset.name, "bytes": dataset.stats().data_bytes,
            "first": seen[0], "seen": seen,
            "told": [str(each.message) for each in told],
            "where": [each.filename == __file__ for each in told],
        }
        print(json.dumps(answer), flush=True)
        sys.stdin.readline()

    main()
"""


@pytest.fixture
def ranks(tmp_path):
    """What two real ranks see: one after the other, while both live. They run the same file, for
    the line at which a cache is made is part of the question who shares it."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    children: list[zygote.Forked] = []

    def launch(launcher: str, options=lambda rank: {}) -> list[dict]:
        answers = []
        for rank in range(2):
            command = [sys.executable, str(script), json.dumps(options(rank))]
            child = zygote.fork(command, tmp_path, {**os.environ, **rank_of(launcher, rank)})
            children.append(child)
            line = child.stdout.readline()
            assert line, child.stderr.read()
            answers.append(json.loads(line))
        for child in children[-2:]:
            child.communicate("\n")
            assert child.returncode == 0
        return answers

    yield launch
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_of_any_launcher_share(ranks, launcher):
    one, two = ranks(launcher)
    assert one["name"] == two["name"] and one["name"].startswith("job-")
    assert one["told"] == two["told"] == []


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "Lightning"])
def test_ranks_that_do_not_share_divide_the_memory(ranks, launcher):
    whole, _ = ranks(launcher, lambda rank: {"memory": 0.01})
    for part in ranks(launcher, lambda rank: {"memory": 0.01, "shared": False}):
        assert part["name"].startswith("private-")
        # What is free changes while others run, by much less than a half.
        assert 0.3 * whole["bytes"] < part["bytes"] < 0.7 * whole["bytes"]


def test_ranks_with_different_attributes_are_told_which(ranks):
    one, two = ranks("srun", lambda rank: {"rank": rank, "memory": 0.01})
    assert one["name"] != two["name"]
    assert one["told"] == []  # nobody else was there yet
    (told,) = two["told"]
    assert "different datasets (what differs: rank), so each keeps a cache of its own" in told
    assert "name= and fingerprint=" in told and "shared=False" in told and "\n" not in told
    assert two["bytes"] < 0.7 * one["bytes"], "the second takes its part only"


def test_ranks_with_what_changes_by_itself_are_told_what_it_is(ranks):
    one, two = ranks("torchrun", lambda rank: {"augments": True})
    assert one["name"] != two["name"]
    (told,) = two["told"]
    assert "(what differs: augment)" in told and "\n" not in told
    assert "augment['steps'][0].numbers is a random generator (Random)" in told
    assert "pass fingerprint= with a text" in told and "shared=False" in told
    # the remedy
    one, two = ranks("torchrun", lambda rank: {"augments": True, "fingerprint": "v1"})
    assert one["name"] == two["name"] and one["told"] == two["told"] == []


def test_ranks_with_equal_attributes_are_told_nothing(ranks):  # control of the above
    one, two = ranks("srun", lambda rank: {"rank": 7})
    assert one["name"] == two["name"] and one["told"] == two["told"] == []


def validates_on_rank_0(rank: int) -> dict:
    return {"fingerprint": "v1", "validation": rank == 0}


def test_ranks_that_make_other_numbers_of_caches_get_their_own_samples(ranks):
    """The user's fingerprint does not say which dataset it is: the line does, and the class."""
    one, two = ranks("torchrun", validates_on_rank_0)
    assert (one["first"], two["first"]) == (0, 0), "samples of the other rank's validation set"
    assert one["name"] == two["name"] and one["name"].startswith("job-")


def test_control_without_the_line_they_get_each_others_samples(ranks):
    one, two = ranks("torchrun", lambda rank: {**validates_on_rank_0(rank), "blind": True})
    assert (one["first"], two["first"]) == (0, 1000)


@pytest.mark.parametrize("probe", [4, 0])
def test_a_rank_whose_samples_are_others_is_told_and_goes_on_without_the_cache(ranks, probe):
    """They depend on what no look can see. Without the probe (the control) they are mixed."""
    one, two = ranks("torchrun", lambda rank: {"offset": 100 * rank, "probe": probe})
    assert one["name"] == two["name"]
    assert one["seen"] == list(range(8)) and one["told"] == []
    if probe:
        assert two["seen"] == list(range(100, 108))
        (told,) = two["told"]
        assert "not the one that another rank of this node has cached" in told
        assert "shared=False" in told and two["where"] == [True]
    else:
        assert two["seen"] == list(range(8)) and two["told"] == []


def test_ranks_in_other_folders_do_not_share(ranks, tmp_path):
    """The same relative name is another file there."""
    homes = [tmp_path / "0", tmp_path / "1"]
    for home in homes:
        home.mkdir()
    one, two = ranks("torchrun", lambda rank: {"home": str(homes[rank])})
    assert one["name"] != two["name"]


def test_spawned_ranks_share_once_they_have_met(tmp_path):
    torch.multiprocessing.spawn(spawned, (str(tmp_path),), nprocs=2)
    names = [(tmp_path / f"name-{rank}").read_text() for rank in range(2)]
    assert names[0] == names[1] and names[0].startswith("job-")


def spawned(rank: int, folder: str) -> None:
    import stocache
    from sources import Fixed

    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dataset = stocache.CachedDataset(Fixed([1, 2, 3]), "8MiB", verbose=False)
    Path(folder, f"name-{rank}").write_text(dataset.name)
    torch.distributed.barrier()
    dataset.close()
    torch.distributed.destroy_process_group()


def test_a_real_mpirun_is_seen(tmp_path):
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is absent (apt-get install openmpi-bin): only its environment is tried")
    script = tmp_path / "rank.py"
    script.write_text("from stocache._sharing.launcher import find_job; print(find_job())")
    done = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one == two and "ranks=2" in one


def test_what_a_job_is_can_be_compared():
    assert Job("a", 2) == Job("a", 2) != Job("b", 2)
