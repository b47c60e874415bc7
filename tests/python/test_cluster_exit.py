"""What was sent to servers when a process ends: there, or told to be lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import stocache
import torch
from servers import Server, ask
from stocache import CachedDataset, RedisStore

# A value that no socket takes at once: the server is stopped while it is sent.
PROGRAM = """
    import os, signal, sys, torch
    from stocache import CachedDataset, RedisStore

    port, pid, how, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    sample = torch.zeros(32 << 20, dtype=torch.uint8)

    class Source(torch.utils.data.Dataset):
        def __len__(self):
            return 2
        def __getitem__(self, index):
            if index == 1:
                os.kill(pid, signal.SIGSTOP)
            return sample

    if how == "dataset":
        url = f"redis://127.0.0.1:{port}"
        dataset = CachedDataset(Source(), 1, cluster=url, fingerprint="f", probe=0, verbose=False)
        dataset[0]
        assert dataset.flush()
        dataset[1]
    else:
        store = RedisStore([{"host": "127.0.0.1", "port": port}])
        store.set("a", sample)
        assert store.flush()
        os.kill(pid, signal.SIGSTOP)
        store.set("b", sample)
    print("set", flush=True)
    if end == "at once":
        os._exit(0)
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def values_after(server, how, end):
    """How many values there are after such a program has ended."""
    command = [
        sys.executable, "-c", textwrap.dedent(PROGRAM), str(server.port), str(server.process.pid),
        how, end,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "set\n"
        time.sleep(0.5)
        server.signal(signal.SIGCONT)
        assert program.wait(60) == 0
    (_, count) = ask(server.port, "DBSIZE")[0].split(b":")
    return int(count)


@pytest.mark.parametrize("how", ["dataset", "store"])
def test_a_program_that_just_ends_has_sent_all(server, how):
    assert values_after(server, how, "in order") == 2


@pytest.mark.parametrize("how", ["dataset", "store"])
def test_control_a_process_that_ends_at_once_has_not(server, how):
    assert values_after(server, how, "at once") == 1
    stocache.sweep()  # what it left


class Deaf:
    """A server that has nothing, and never says what became of what it is given."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection:
            while asked := connection.recv(1 << 16):
                if b"SLOTS" in asked:
                    connection.sendall(b"-ERR This instance has cluster support disabled\r\n")
                connection.sendall(b"$-1\r\n" * asked.count(b"$3\r\nGET\r\n"))

    def close(self):
        self.listener.close()
        for connection in self.connections:
            connection.close()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), index)


def test_what_may_be_lost_at_the_end_is_told_with_its_number():
    deaf = Deaf()
    url = f"redis://127.0.0.1:{deaf.port}"
    dataset = CachedDataset(Numbers(), 1, cluster=url, name=None, probe=0, verbose=False)
    assert [int(sample[0]) for sample in dataset.__getitems__(list(range(8)))] == list(range(8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dataset.close()
    (said,) = (str(each.message) for each in told)
    assert said.startswith("8 samples that were sent"), said
    store = RedisStore([{"host": "127.0.0.1", "port": deaf.port}])
    for key in "abc":
        store.set(key, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.shutdown()
    (said,) = (str(each.message) for each in told)
    assert said.startswith("3 samples that were sent"), said
    deaf.close()


def test_who_flushes_waits_for_a_server_that_was_stopped_for_a_while(server, monkeypatch):
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "0.2")
    store = RedisStore([server.host])
    store.set("a", 1)
    assert store.flush()
    server.signal(signal.SIGSTOP)
    store.set("b", 2)
    assert not store.flush(0.5)
    timer = threading.Timer(1, os.kill, (server.process.pid, signal.SIGCONT))
    timer.start()
    assert store.flush(60)
    timer.join()
    assert store.num_keys() == 2
