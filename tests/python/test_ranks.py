"""Under torchrun: the ranks of a node share one copy of the same data, and never other data."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest
import torchrun

PROGRAM = Path(__file__).parent / "ranks.py"
STORE = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture
def launch(once):
    """What both ranks of one launch saw in every scenario of ranks.py, and what they left."""

    def by_torchrun(folder):
        before = set(glob.glob("/dev/shm/stocache-*"))
        torchrun.launch_by_torchrun(PROGRAM, folder, folder=folder).output()
        left = set(glob.glob("/dev/shm/stocache-*")) - before
        return torchrun.answers(folder, 2), sorted(left)

    return once("ranks", by_torchrun)[1]


@pytest.fixture
def ranks(launch):
    def ask(scenario):
        return [answers[scenario] for answers in launch[0]]

    return ask


@pytest.mark.parametrize("scenario", ["shared", "spawned", "memfd"])
def test_the_ranks_of_a_node_share_one_cache_without_an_argument(ranks, scenario):
    one, two = ranks(scenario)
    assert one["id"] and one["id"] == two["id"], "each rank has a copy of its own"
    # epoch 0: each rank loads its half once; epoch 1: the other half is a hit
    assert one["fills"] == two["fills"] == 64 and one["filled"] == 64
    assert one["hits"] == [0, 32] and two["hits"] == [0, 32]


def test_ranks_that_ask_to_be_apart_are_apart(ranks):
    one, two = ranks("apart")
    assert one["id"] != two["id"]
    for rank in (one, two):
        assert rank["hits"][0] == 0
        assert 32 <= rank["fills"] <= 64 and rank["fills"] == rank["filled"]


def test_ranks_with_the_same_files_share(ranks):
    one, two = ranks("same files")
    assert one["id"] == two["id"] and one["wrong"] == two["wrong"] == 0


@pytest.mark.parametrize(
    "scenario",
    [
        "other files",
        "other files, late",
        "other files, in slots",
        "other files, in a partial",
        "other files, in a closure",
        "other files, deep down",
        "other files, one of many",
    ],
)
def test_ranks_with_other_files_do_not_get_each_others_samples(ranks, scenario):
    one, two = ranks(scenario)
    assert (one["wrong"], two["wrong"]) == (0, 0), "samples of the other rank's files"
    assert one["id"] != two["id"]


def test_the_training_set_and_the_test_set_of_a_job_are_two_caches(ranks):
    one, two = ranks("train and test")
    assert one["wrong"] == two["wrong"] == 0
    assert one["ids"] == two["ids"], "both ranks share both"
    assert one["ids"][0] != one["ids"][1]


def test_a_cache_asked_for_twice_is_two_caches_on_every_rank(ranks):
    one, two = ranks("twins")
    assert one["ids"] == two["ids"] and one["ids"][0] != one["ids"][1]
    assert not one["second"] and not two["second"]


def test_a_rank_that_ends_early_takes_nothing_from_the_others(ranks):
    _, two = ranks("first")
    assert two == {"none": 0, "wrong": 0, "path": True}


def test_nothing_is_left_after_a_launch(launch):
    assert not launch[1]


def test_two_jobs_on_one_node_do_not_meet(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    launches = [torchrun.launch(PROGRAM, folder, "same files", folder=folder) for folder in folders]
    for each in launches:
        each.output()
    answers = [torchrun.answers(folder, 2) for folder in folders]
    ids = [[tuple(rank["same files"]["id"]) for rank in job] for job in answers]
    assert ids[0][0] == ids[0][1] and ids[1][0] == ids[1][1]
    assert ids[0][0] != ids[1][0]


def test_ranks_without_torchrun_are_told_what_it_tells(ranks):
    """Other tests launch their ranks in this way, which takes less time."""
    for rank, told in enumerate(ranks("environment")):
        pretended = torchrun.rank_environment(rank, 1, 2, int(told["MASTER_PORT"]))
        # There the first node keeps the store, here rank 0 does.
        assert (told.pop(STORE), pretended.pop(STORE)) == ("True", "False")
        assert {name: told.get(name) for name in pretended} == pretended
