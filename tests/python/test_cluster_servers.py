"""Each kind of server in each kind of trouble: Redis itself, and Valkey."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernel import root_only
from servers import Server, ask, native_cluster, programs
from stocache import CachedDataset, RedisStore
from stocache._cluster import spawn
from stocache._cluster.cells import cell, in_cell

COUNT = 64
WORD = "a-password-of-the-test"


class Counted(torch.utils.data.Dataset):
    """Samples of 80 KB, and how often each was loaded."""

    def __init__(self):
        self.loads = Counter()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.loads[index] += 1
        return torch.full((20_000,), index, dtype=torch.int32), index


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")


@pytest.fixture(params=["Valkey", "Redis"])
def kind(request):
    return request.param


@pytest.fixture
def servers(kind):
    """Starts servers with a configuration, and ends them."""
    started = []

    def start(config="", **options):
        started.append(Server(config, program=kind, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def made(source, url, **options):
    options = {"probe": 0, "verbose": False, "fingerprint": "one", **options}
    return CachedDataset(source, options.pop("memory", 1), cluster=url, **options)


def check(dataset):
    """One epoch, the first half by the batch; no other bytes than they should be."""
    half = COUNT // 2
    samples = [*dataset.__getitems__(list(range(half))), *(dataset[i] for i in range(half, COUNT))]
    for index, (tensor, label) in enumerate(samples):
        assert label == index
        assert torch.equal(tensor, torch.full((20_000,), index, dtype=torch.int32))


def check_told(dataset, words):
    """Epochs with trouble: told once, and no sample lost."""
    with pytest.warns(RuntimeWarning, match=words) as told:
        for _ in range(3):
            check(dataset)
    assert sum("the server " in str(each.message) for each in told) == 1
    assert not any(WORD in str(each.message) for each in told)


def test_what_one_wrote_another_finds_clears_and_lists(servers, kind):
    server = servers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with made(Counted(), server.url) as first:
            check(first)
            assert first.flush()
        source = Counted()
        with made(source, server.url) as second:
            check(second)
            (seen,) = second.cluster_servers()
            assert not source.loads and seen["samples"] == seen["hits"] == COUNT
            assert seen["version"].startswith(kind)
            assert 0 < seen["latency"]["p50"] <= seen["latency"]["p90"] <= seen["latency"]["p99"]
            second.clear()
            assert second.cache_loader.num_keys() == 0
        with made(Counted(), server.url, ttl=1e8) as third:
            check(third)
            third.flush()
    assert 9e7 < int(ask(server.port, "TTL", next(_names(server)))[0][1:]) <= 1e8


def _names(server):
    return (line for line in ask(server.port, "KEYS", "*") if line.startswith(b"stocache:"))


def test_a_full_server_keeps_what_it_has(servers):
    server = servers("maxmemory 4mb\nmaxmemory-policy noeviction")
    with made(Counted(), server.url) as dataset:
        check_told(dataset, "takes no more samples")
        dataset.flush()
        kept = dataset.cache_loader.num_keys()
        assert 0 < kept < COUNT
    source = Counted()
    with made(source, server.url) as dataset, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        check(dataset)
        assert dataset.stats().cluster.hits == kept and len(source.loads) == COUNT - kept


def test_what_a_server_evicts_is_loaded_and_sent_again(servers):
    server = servers("maxmemory 4mb\nmaxmemory-policy allkeys-lru")
    source = Counted()
    with made(source, server.url) as dataset, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            check(dataset)
            dataset.flush()
        assert 0 < dataset.cache_loader.num_keys() < COUNT
        stats = dataset.stats()
        assert stats.cluster.dropped == stats.cluster.errors == 0
        assert stats.cluster.fills == stats.loads == source.loads.total() > COUNT
        assert stats.cluster.hits + stats.loads == 3 * COUNT


@pytest.mark.parametrize("config", [f"requirepass {WORD}", f"user us on >{WORD} ~* +@all"])
def test_who_is_not_let_in_is_told(servers, config):
    server = servers(f"user default off\n{config}" if "user" in config else config)
    login = f"us:{WORD}" if "user" in config else f":{WORD}"
    for wrong in ("us:other@", ":other@", ""):
        with made(Counted(), f"redis://{wrong}127.0.0.1:{server.port}") as dataset:
            check_told(dataset, "WRONGPASS|NOAUTH|AUTH")
    with made(Counted(), f"redis://{login}@127.0.0.1:{server.port}") as dataset:
        check(dataset)
        assert dataset.flush()


def test_a_user_needs_no_rights_of_an_administrator(servers):
    rights = "~stocache:* -@all +get +set +scan +unlink +strlen +info"
    server = servers(f"user default off\nuser us on >{WORD} {rights}")
    with (
        warnings.catch_warnings(),
        made(Counted(), f"redis://us:{WORD}@127.0.0.1:{server.port}") as dataset,
    ):
        warnings.simplefilter("error", RuntimeWarning)
        check(dataset)
        check(dataset)
        assert dataset.cache_loader.num_keys() == COUNT
        dataset.clear()
        assert dataset.cache_loader.num_keys() == 0


def test_a_server_that_comes_back_empty_is_filled_again(servers, kind):
    server = servers()
    with made(Counted(), server.url) as dataset:
        check(dataset)
        dataset.flush()
        server.stop()
        check_told(dataset, "cannot be reached")
    server.start()
    source = Counted()
    with made(source, server.url) as dataset:  # nobody rests in a new one
        check(dataset)
        dataset.flush()
        assert dataset.cache_loader.num_keys() == source.loads.total() == COUNT


def test_a_stopped_server_costs_a_process_one_wait(servers, monkeypatch):
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "0.25")
    server = servers()
    with made(Counted(), server.url) as dataset:
        check(dataset)
        dataset.flush()
        server.signal(signal.SIGSTOP)
        check_told(dataset, "does not answer in time")
        assert 1 <= dataset.stats().cluster.errors <= 2
        (seen,) = dataset._stocache.records.cluster_servers(False)
        assert seen["resting"]


def test_three_servers_of_a_native_cluster(tmp_path, kind):
    if kind not in programs():
        pytest.skip(f"there is no {kind} here; a native cluster of it is not covered")
    with native_cluster(tmp_path, kind) as members:
        store = RedisStore([members[1].host])
        store.mset({f"{i}": i for i in range(60)})
        assert store.num_keys() == 60
        assert RedisStore([members[2].host]).mget([f"{i}" for i in range(60)]) == list(range(60))
        store.clear()
        assert store.num_keys() == 0
        store.shutdown()


def test_redis_itself_can_be_spawned(tmp_path):
    if "Redis" not in programs():
        pytest.skip("there is no Redis here; spawning it is not covered")
    script = """
        import sys, tempfile
        tempfile.tempdir = sys.argv[1]
        from stocache import CachedDataset
        from stocache._cluster import spawn
        spawn.find_program = lambda: sys.argv[2]
        options = {"capacity_per_node": 64 << 20, "probe": 0, "verbose": False}
        with CachedDataset(list(range(20)), 1, cluster="spawn", name="one", **options) as dataset:
            assert list(dataset) == list(dataset) == list(range(20))
            (server,) = dataset.cluster_servers()
            assert server["samples"] == server["hits"] == 20, server
            print(server["version"])
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(script),
         str(tmp_path), programs()["Redis"]],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Redis")


# Names and numbers


def test_a_server_has_an_address_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"{error}; addresses of IPv6 are not covered")
    server = Server(at="::1", port=spawn.free_port("::1"))
    try:
        for host in (
            {"host": "::1", "port": server.port},
            {"host": "::1", "port": f"{server.port}"},
        ):
            assert RedisStore([host]).get("key", 7) == 7
        with made(Counted(), f"redis://[::1]:{server.port}") as dataset:
            check(dataset)
            assert dataset.flush() and dataset.cache_loader.num_keys() == COUNT
            (seen,) = dataset.cluster_servers()
            assert seen["address"] == f"[::1]:{server.port}"
    finally:
        server.stop()


@root_only
def test_a_name_is_looked_up_again_for_each_connection(tmp_path):
    """A server that moves to another address is found there, under the same name."""
    hosts = tmp_path / "hosts"
    port = spawn.free_port()
    old, new = (Server(port=port, at=f"127.0.0.{n}") for n in (2, 3))
    script = """
        import ctypes, sys, time, warnings
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        from kernel import CLONE_NEWNS, MS_PRIVATE, MS_REC, system
        hosts, port = Path(sys.argv[1]), sys.argv[2]
        hosts.write_text("127.0.0.2 server.test")
        system("unshare", CLONE_NEWNS)
        system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        system("mount", bytes(hosts), b"/etc/hosts", None, 0x1000, None)
        from stocache import CachedDataset
        data = CachedDataset(list(range(20)), 1, cluster=f"redis://server.test:{port}", probe=0,
                             fingerprint="one", verbose=False)
        assert list(data) == list(range(20)) and data.flush()
        print("written", flush=True)
        sys.stdin.readline()
        hosts.write_text("127.0.0.3 server.test")
        warnings.simplefilter("ignore", RuntimeWarning)
        while data.stats().cluster.fills < 40:  # it rests at first
            assert list(data) == list(range(20))
            data.flush()
            time.sleep(0.1)
        print("again", flush=True)
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(hosts), str(port),
         str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = program.stdout.readline()
        if said != "written\n":
            error = program.stderr.read()
            if "Operation not permitted" in error or "mount:" in error:
                pytest.skip("mounts are not permitted; names that change are not covered")
            raise AssertionError(error)
        old.stop()
        out, error = program.communicate("\n", timeout=120)
        assert (out, program.returncode) == ("again\n", 0), error
        assert len(list(_names_at(new))) == 20
    finally:
        program.kill()
        program.communicate()
        for server in (old, new):
            server.stop()


def _names_at(server):
    with socket.create_connection((server.at, server.port), 10) as connection:
        connection.sendall(b"KEYS *\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return [line for line in answer.split(b"\r\n") if line.startswith(b"stocache:")]


# Cells


def test_a_node_is_connected_to_its_cell_alone():
    servers, processes, needed = 1024, 72, 4
    cells = [cell(servers, 4 << 40, 1 << 40, node, servers) for node in range(servers)]
    connections = Counter(at for first, last in cells for at in range(first, last + 1))
    assert {each * processes for each in connections.values()} == {processes * needed}
    assert set(connections) == set(range(servers)), "all are used"


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 7, 16, 100])
@pytest.mark.parametrize("copies", [0.5, 1, 1.01, 2.5, 3, 7, 1000])
def test_cells_hold_a_copy_each_and_lie_side_by_side(servers, copies):
    capacity = 1 << 30
    for nodes in (1, servers, 3 * servers):
        found = [cell(servers, int(copies * capacity), capacity, n, nodes) for n in range(nodes)]
        sizes = [last - first + 1 for first, last in found]
        assert min(sizes) >= min(servers, copies) and max(sizes) - min(sizes) <= 1
        assert found == sorted(found)
        different = sorted(set(found))
        for (_, last), (first, _) in pairwise(different):
            assert first == last + 1 or nodes < servers
        if nodes >= servers:
            assert different[0][0] == 0 and different[-1][1] == servers - 1


def test_a_cell_of_servers_that_run_has_a_copy_of_its_own(monkeypatch):
    four = [Server() for _ in range(4)]
    try:
        url = "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in four)
        assert in_cell(f"{url}?ca=/a", 0, 1) == f"{url}?ca=/a&cell=0-1"
        for rank in range(4):
            for name, value in (
                ("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1),
            ):  # fmt: skip
                monkeypatch.setenv(name, str(value))
            source = Counted()
            options = {"capacity_per_node": "1MiB", "dataset_size": "2MiB", "shared": False}
            with made(source, url, **options) as dataset:
                check(dataset)
                dataset.flush()
                held = dataset.cluster_servers()
                mine = [f"127.0.0.1:{server.port}" for server in four[rank // 2 * 2 :][:2]]
                assert [each["address"] for each in held] == mine
                assert sum(each["samples"] for each in held) == COUNT
                assert bool(source.loads) == (rank % 2 == 0), "the first of a cell loads"
                if rank == 3:
                    dataset.clear()
        assert [list(_names(server)) for server in four] == [[]] * 4, "of all cells"
    finally:
        for server in four:
            server.stop()


def connections(servers):
    """Of others than who asks here; one that was closed goes when the server has noticed."""
    found = []
    for server in servers:
        lines = b"\n".join(ask(server.port, "CLIENT", "LIST")).decode().splitlines()
        found.append(sum("addr=" in line and "cmd=client" not in line for line in lines))
    return found


def test_connections_are_made_when_something_is_asked_for_and_to_its_cell_alone():
    four = [Server() for _ in range(4)]
    try:
        url = "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in four)
        with (
            made(Counted(), f"{url}?cell=1-2", shared=False) as dataset,
            made(Counted(), f"{url}?cell=1-2", shared=False, fingerprint="two") as other,
        ):
            assert connections(four) == [0, 0, 0, 0]
            check(dataset)
            check(dataset)
            assert connections(four) == [0, 1, 1, 0]
            check(other)
            assert connections(four) == [0, 2, 2, 0], "one of each dataset"
            context = torch.multiprocessing.get_context("fork")
            meet = context.Barrier(2)

            def read():
                meet.wait(60)
                dataset[0]
                meet.wait(60)
                meet.wait(60)

            reader = context.Process(target=read)
            reader.start()
            meet.wait(60)
            meet.wait(60)
            held = connections(four)
            meet.wait(60)
            reader.join()
            assert sorted(held) == [0, 0, 2, 3], "a child has one of its own"
        until = time.monotonic() + 60
        while connections(four) != [0, 0, 0, 0]:
            assert time.monotonic() < until, connections(four)
            time.sleep(0.05)
    finally:
        for server in four:
            server.stop()
