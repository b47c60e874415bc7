"""Servers that the nodes of one job run together, under torchrun. Nodes are pretended: each has a
folder of its own for its server; and, where that is permitted, a network of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
import torchrun
from kernel import root_only
from stocache._cluster import spawn

HERE = Path(__file__).parent
PROGRAM = HERE / "cluster_ranks.py"
LENGTH = 96
RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def program():
    try:
        spawn.find_program()
    except RuntimeError as error:
        pytest.skip(f"{error}; servers of several nodes are not covered")


def node_environment(folder: Path, node: int) -> dict[str, str]:
    own = folder / f"tmp{node}"
    own.mkdir(exist_ok=True)
    return {
        "TMPDIR": str(own),
        "STOCACHE_SECRET": f"words of node {node}",
        "STOCACHE_CLUSTER_TIMEOUT": "5",
    }


@pytest.fixture
def nodes(once):
    """What each rank saw in cluster_ranks.py: one launch for all tests."""

    def launch(folder):
        torchrun.launch(
            PROGRAM, folder, folder=folder, nodes=2, ranks=RANKS // 2,
            environment=lambda node: node_environment(folder, node),
        ).output()  # fmt: skip
        return torchrun.answers(folder, RANKS)

    folder, answers = once("cluster-nodes", launch)
    return folder, lambda scenario: [answer[scenario] for answer in answers]


def once_each(numbers):
    return Counter(numbers) == Counter(range(LENGTH))


@pytest.mark.parametrize("scenario", ["spawned", "workers"])
def test_two_nodes_read_each_sample_from_the_source_once(nodes, scenario):
    answers = nodes[1](scenario)
    for epoch in range(3):
        assert once_each(number for answer in answers for number in answer["seen"][epoch])
    assert once_each(answers[0]["loads"]), "each sample once, whichever node"
    for answer in answers:
        assert answer["servers"] == answers[0]["servers"], "the same list, spelled the same"
        assert len(answer["servers"]) == 2 and answer["forged"] == 0
        assert sum(answer["samples"]) == LENGTH and min(answer["samples"]) > 0
        assert answer["listens"] == ["127.0.0.1"] * 2, "one machine needs no other address"


@pytest.mark.parametrize("scenario", ["warmed", "warmed again"])
def test_each_sample_is_warmed_by_one_node(nodes, scenario):
    answers = nodes[1](scenario)
    assert once_each(answers[0]["loads"])
    for answer in answers:
        assert answer["loads"] == answers[0]["loads"], "nobody goes on before all are done"
        assert answer["seen"] == list(range(LENGTH))
        assert answer["in_memory"] == (LENGTH if scenario == "warmed" else answer["in_memory"])


def test_a_rank_that_warms_alone_waits_for_nobody(nodes):
    assert once_each(nodes[1]("warmed alone")[0]["loads"])


def test_nodes_have_cells_of_servers(nodes):
    answers = nodes[1]("cells")
    by_node = {answer["node"]: answer["servers"] for answer in answers}
    assert all(len(servers) == 1 for servers in by_node.values()) and by_node[0] != by_node[1]
    for answer in answers:
        assert answer["servers"] == by_node[answer["node"]]
        assert answer["seen"] == list(range(LENGTH))
        assert answer["keys"] == LENGTH, "each cell has a copy"
        assert answer["left"] == 0, "who clears clears all cells"


def test_control_nodes_that_keep_to_themselves_read_more(nodes):
    answers = nodes[1]("apart")
    loads = Counter(answers[0]["loads"])
    assert max(loads.values()) == 2, "the count of loads does not notice"
    by_node = {answer["node"]: answer["servers"] for answer in answers}
    assert all(len(servers) == 1 for servers in by_node.values()) and by_node[0] != by_node[1]


def test_the_secret_of_the_first_rank_is_that_of_all(nodes):
    agreed = nodes[1]("agreed")
    assert all(each == agreed[0] for each in agreed)
    assert agreed[0][1] == "words of node 0"


def test_the_trouble_of_one_rank_is_told_to_all(nodes):
    assert set(nodes[1]("trouble")) == {"rank 3: there is no server to spawn"}


def test_a_rank_that_asks_for_another_capacity_is_told_and_waits_for_nobody(nodes):
    (said,) = nodes[1]("capacity")[1]
    assert "capacity_per_node=64.0 MiB, which counts" in said


def test_the_loader_of_bagua_finds_what_another_node_computed(nodes):
    for answer in nodes[1]("loader"):
        assert answer == {"found": [key * key for key in range(20)], "keys": 20}


def test_no_server_is_left(nodes):
    for _ in range(600):
        if not list(nodes[0].glob("tmp*/stocache-server-*/address")):
            return
        time.sleep(0.1)
    raise AssertionError("a server outlives its job")


# Networks of their own


class Network:
    """Two network namespaces with a cable between them, and nothing else."""

    def __init__(self) -> None:
        self.holders = []
        try:
            for _ in range(2):
                holder = subprocess.Popen(
                    ["unshare", "-n", "sh", "-c", "echo; exec sleep 900"], stdout=subprocess.PIPE
                )
                self.holders.append(holder)
                if holder.stdout.readline() != b"\n":
                    raise OSError("unshare -n is not permitted")
            one, two = (["nsenter", "-t", str(each.pid), "-n"] for each in self.holders)
            self.fronts = [one, two]
            peer = ["peer", "name", "stocache1", "netns", str(self.holders[1].pid)]
            self.run(one, "link", "add", "stocache0", "type", "veth", *peer)
            for number, front in enumerate(self.fronts):
                device = f"stocache{number}"
                self.run(front, "addr", "add", f"10.98.0.{number + 1}/24", "dev", device)
                self.run(front, "link", "set", device, "up")
                self.run(front, "link", "set", "lo", "up")
        except OSError:
            self.close()
            raise

    def run(self, front, *words):
        done = subprocess.run([*front, "ip", *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def close(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()


@root_only
def test_servers_listen_where_other_nodes_reach_them_and_nowhere_else(tmp_path):
    try:
        network = Network()
    except OSError as error:
        pytest.skip(f"{error}; nodes with networks of their own are not covered")
    try:
        torchrun.launch_by_torchrun(
            PROGRAM, tmp_path, "spawned", folder=tmp_path, fronts=network.fronts,
            ranks=RANKS // 2, master="10.98.0.1",
            environment=lambda node: {
                **node_environment(tmp_path, node), "GLOO_SOCKET_IFNAME": f"stocache{node}",
            },
        ).output()  # fmt: skip
    finally:
        network.close()
    answers = [answer["spawned"] for answer in torchrun.answers(tmp_path, RANKS)]
    assert once_each(answers[0]["loads"]), "each sample once, whichever node"
    for answer in answers:
        assert answer["servers"] == answers[0]["servers"]
        hosts = [place.rpartition(":")[0] for place in answer["servers"]]
        assert hosts == ["10.98.0.1", "10.98.0.2"]
        assert answer["listens"] == [hosts[answer["node"]]], "there alone, and not everywhere"


CUT_OFF = """
    import sys, warnings
    import torch
    from stocache import CachedDataset
    data = [(torch.full((9,), index), index) for index in range(40)]
    dataset = CachedDataset(data, 1, cluster=sys.argv[1], probe=0, fingerprint="one",
                            verbose=False)
    def epoch():
        assert [label for _, label in dataset] == list(range(40))
        return dataset.stats().cluster
    epoch()
    assert dataset.flush() and epoch().hits == 40
    print("connected", flush=True)
    sys.stdin.readline()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        errors = [epoch().errors for _ in range(3)]
    assert 1 <= errors[0] <= errors[2] <= 2 and dataset.stats().cluster.hits == 40, errors
    told = [str(each.message) for each in told if "the server " in str(each.message)]
    assert len(told) == 1 and "does not answer in time" in told[0], told
    print("without", flush=True)
    sys.stdin.readline()
    warnings.simplefilter("ignore", RuntimeWarning)
    while epoch().hits < 80:  # it rests at first
        dataset.flush()
    print("again", flush=True)
"""


@root_only
def test_a_server_that_is_cut_off_costs_one_wait_and_is_used_again(tmp_path):
    """Nobody says that the connection is gone: it is half open."""
    try:
        network = Network()
    except OSError as error:
        pytest.skip(f"{error}; nodes with networks of their own are not covered")
    port, started = spawn.free_port(), []
    try:
        server = subprocess.Popen(
            [*network.fronts[1], spawn.find_program(), "-"], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(server)
        lines = f'port {port}\nbind 10.98.0.2\nprotected-mode no\nsave ""\n'
        server.stdin.write(lines.encode())
        server.stdin.close()
        env = {**os.environ, "STOCACHE_SECRET": "words", "STOCACHE_CLUSTER_TIMEOUT": "1"}
        program = subprocess.Popen(
            [*network.fronts[0], sys.executable, "-c", textwrap.dedent(CUT_OFF),
             f"redis://10.98.0.2:{port}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env,
        )  # fmt: skip
        started.append(program)

        def says(word):
            said = program.stdout.readline()
            assert said == f"{word}\n", program.stderr.read()

        def go_on():
            program.stdin.write("\n")
            program.stdin.flush()

        says("connected")
        network.run(network.fronts[1], "link", "set", "stocache1", "down")
        go_on()
        says("without")
        network.run(network.fronts[1], "link", "set", "stocache1", "up")
        go_on()
        says("again")
        assert program.wait(60) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        network.close()
