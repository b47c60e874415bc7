"""`stocache ls --cluster`: what is on servers."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from command import run
from servers import Server, ask
from stocache import CachedDataset
from stocache._cluster import spawn
from stocache._cluster.address import parse

WORD = "a-password-of-the-test"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("STOCACHE_SECRET", "words-of-the-test")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")
    server = Server(f"requirepass {WORD}\nmaxmemory 64mb")
    yield server
    server.stop()


def test_ls_shows_each_dataset_of_each_server_and_no_password(server):
    url = f"redis://:{WORD}@127.0.0.1:{server.port}"
    data = [torch.full((100,), i, dtype=torch.int64) for i in range(1, 31)]
    for name, count in (("one", 30), ("two", 12)):
        with CachedDataset(
            data[:count], "16MiB", cluster=url, name=name, probe=0, verbose=False
        ) as dataset:
            list(dataset)
            dataset.flush()
    ask(server.port, "SET", "not-ours", "x", login=("default", WORD))
    done = run("ls", "--cluster", url, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["address"] == f"127.0.0.1:{server.port}" and found["max_bytes"] == 64 << 20
    assert found["version"].startswith(("Valkey ", "Redis ")) and not found["trouble"]
    assert 0 < found["latency"]["p50"] <= found["latency"]["p90"] <= found["latency"]["p99"]
    assert [(each["name"], each["samples"]) for each in found["datasets"]] == [
        ("one", 30), ("two", 12),
    ]  # fmt: skip
    one, two = (each["bytes"] for each in found["datasets"])
    assert 30 * 800 < one < 30 * 1200 and one * 12 == two * 30
    text = run("ls", "--cluster", url)
    header, first, second = text.stdout.splitlines()
    assert header.split() == [
        "SERVER",
        "VERSION",
        "USED",
        "LIMIT",
        "P50",
        "P90",
        "P99",
        "DATASET",
        "SAMPLES",
        "BYTES",
    ]
    assert first.split()[-4:-2] == ["one", "30"] and second.split()[:2] == ["two", "12"]
    for said in (done.stdout, text.stdout, text.stderr):
        assert WORD not in said and "words-of-the-test" not in said


def test_servers_can_be_named_where_no_list_of_processes_shows_them(server, monkeypatch):
    url = f"redis://:{WORD}@127.0.0.1:{server.port}"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{url}\n"))
    done = run("ls", "--cluster", "-")
    assert done.returncode == 0 and f"127.0.0.1:{server.port}" in done.stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = run("ls", "--cluster", "-")
    assert done.returncode == 2 and "redis://host:port" in done.stderr


def test_a_server_that_talks_for_ever_is_not_listened_to(monkeypatch):
    """It answers each question in time, and its list of names never ends."""
    from stocache._cluster import listing

    monkeypatch.setattr(listing, "_LONGEST_TALK", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while asked := connection.recv(1 << 16):
                    answer = b"*2\r\n$1\r\n7\r\n*0\r\n" if b"SCAN" in asked else b":1\r\n"
                    connection.sendall(b"$0\r\n\r\n" if b"INFO" in asked else answer)

        thread = threading.Thread(target=say)
        thread.start()
        (found,) = listing.servers(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert "takes longer than 2 s" in found.trouble


def test_ls_says_which_server_is_in_trouble(server):
    good, bad = f":{WORD}@127.0.0.1:{server.port}", ":wrong-word@127.0.0.1:1"
    done = run("ls", "--cluster", f"redis://{good},{bad}")
    assert done.returncode == 1
    assert "127.0.0.1:1: " in done.stderr and "no answer" in done.stdout
    done = run("ls", "--cluster", f"redis://:wrong-word@127.0.0.1:{server.port}")
    assert done.returncode == 1 and "WRONGPASS" in done.stderr
    assert "wrong-word" not in done.stdout + done.stderr
    for url in ("redis://u:wrong-word", "redis://u:wrong-word,1@h:x", "u:wrong-word@h:1"):
        done = run("ls", "--cluster", url)
        assert done.returncode == 2 and "wrong-word" not in done.stdout + done.stderr
    done = run("ls", "--cluster", "127.0.0.1:1")
    assert done.returncode == 2 and "redis://host:port" in done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n", b":7\r\n" * 400, b"*1\r\n" * 5000, b"$x\r\n",
        b"-wrong-word\r\n", b"-ERR unknown command 'AUTH', with args: wrong-word\r\n",
        b"$99999999999\r\n", b"+PONG\r\n" * 100 + b"+OK\r\n" * 9, b"", b"$-1\r\n" * 400,
        b"+PONG\r\n" * 100 + b"$9\r\nx:1\r\ny:2\n\r\n" + b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n",
    ],
)  # fmt: skip
def test_ls_believes_no_answer(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def say():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=say)
        thread.start()
        done = run("ls", "--cluster", f"redis://:wrong-word@127.0.0.1:{port}")
        thread.join()
    assert "wrong-word" not in done.stdout + done.stderr
    assert done.returncode == 1 and f"127.0.0.1:{port}: " in done.stderr


def test_names_that_others_gave_do_nothing_to_a_terminal(server):
    ask(server.port, "SET", "stocache:\x1b[2Jname:x:1", "y", login=("default", WORD))
    done = run("ls", "--cluster", f"redis://:{WORD}@127.0.0.1:{server.port}")
    assert "?[2Jname" in done.stdout and "\x1b" not in done.stdout


def test_ls_shows_the_servers_that_jobs_run_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(spawn.tempfile, "tempdir", str(tmp_path))  # of this process, too
    assert "no job of yours" in run("ls", "--cluster", "spawn").stdout
    script = """
        import sys
        import torch
        from stocache import CachedDataset
        data = [torch.full((9,), i) for i in range(20)]
        options = {"capacity_per_node": 64 << 20, "probe": 0, "verbose": False}
        dataset = CachedDataset(data, "16MiB", cluster="spawn", name="mine", **options)
        list(dataset)
        dataset.flush()
        print("ready", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        try:
            if job.stdout.readline() != "ready\n":
                error = job.stderr.read()
                if "there is no server to spawn" in error:
                    pytest.skip("there is no server to spawn; its listing is not covered")
                raise AssertionError(error)
            (found,) = json.loads(run("ls", "--cluster", "spawn", "--json").stdout)
            (dataset,) = found["datasets"]
            assert (dataset["name"], dataset["samples"]) == ("mine", 20) and dataset["bytes"] > 0
        finally:
            job.communicate()  # it ends with its input, and leaves nothing


def test_servers_are_read_as_the_core_reads_them():
    def shown(url):
        return [(str(each), each.user, each.password, each.url) for each in parse(url)]

    assert shown("redis://10.0.0.1:7000,node-2") == [
        ("10.0.0.1:7000", "", "", "redis://10.0.0.1:7000"),
        ("node-2:6379", "", "", "redis://node-2:6379"),
    ]
    assert shown("redis://u:p%40x@a:1,b:2/") == [
        ("a:1", "u", "p@x", "redis://u:p%40x@a:1"), ("b:2", "u", "p@x", "redis://u:p%40x@b:2"),
    ]  # fmt: skip
    assert [each[:3] for each in shown("redis://:word@[::1]:7,[fe80::2]")] == [
        ("[::1]:7", "", "word"), ("[fe80::2]:6379", "", "word"),
    ]  # fmt: skip
    assert [each[:3] for each in shown("redis://a:x@h:1,b:y@h:2")] == [
        ("h:1", "a", "x"), ("h:2", "b", "y"),
    ]  # fmt: skip
    for wrong in ("", "a:1", "redis://", "redis://u:secret@a:x", "http://u:secret@a"):
        with pytest.raises(ValueError, match="use redis://host:port") as raised:
            parse(wrong)
        assert "secret" not in str(raised.value)
