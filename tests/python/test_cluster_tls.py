"""Servers that are talked to in secret: TLS, with certificates on both sides."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import warnings

import pytest
import torch
from command import run
from servers import Server, programs
from stocache import CachedDataset, CacheLoader, RedisStore

DATA = [(torch.full((40_000,), i, dtype=torch.int32), i) for i in range(24)]
WORD = "a-password-of-the-test"


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """Who signs, a server signed by it, and a client; and somebody else who signs."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates; TLS is not covered")
    folder = tmp_path_factory.mktemp("papers")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for signer in ("ca", "other"):
        openssl("req", "-x509", *new, "-keyout", f"{signer}.key", "-out", f"{signer}.pem",
                "-days", "2", "-subj", f"/CN={signer}")  # fmt: skip
    for name, names in (("server", "DNS:localhost,IP:127.0.0.1"), ("client", "DNS:client")):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj",
                f"/CN={name}", "-addext", f"subjectAltName={names}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-copy_extensions", "copy", "-days", "2", "-out", f"{name}.pem")  # fmt: skip
    return folder


class Proxy:
    """TLS in front of a server that has none itself."""

    def __init__(self, to, papers, asks):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(papers / "server.pem", papers / "server.key")
        if asks:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(papers / "ca.pem")
        self.context, self.to = context, to
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                plain, _ = self.listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self.one, args=(plain,), daemon=True).start()

    def one(self, plain):
        try:
            outside = self.context.wrap_socket(plain, server_side=True)
        except OSError:
            return
        inside = socket.create_connection(("127.0.0.1", self.to.port))
        there = {outside: inside, inside: outside}
        try:
            while True:  # one thread for both ways: a session is not for two at once
                ready = [outside] if outside.pending() else select.select(list(there), [], [])[0]
                for here in ready:
                    here.setblocking(False)
                    with contextlib.suppress(ssl.SSLWantReadError):
                        if not (some := here.recv(1 << 16)):
                            return
                        there[here].setblocking(True)
                        there[here].sendall(some)
        except OSError:
            pass
        finally:
            outside.close()
            inside.close()

    def signal(self, number):
        self.to.signal(number)

    def stop(self):
        self.listener.close()
        self.to.stop()


def start(papers, asks):
    """A server with TLS: Redis itself, if it is here and can."""
    both = f"tls-auth-clients {'yes' if asks else 'no'}\nrequirepass {WORD}"
    files = "\n".join(
        f"tls-{what}-file {papers / name}"
        for what, name in (("cert", "server.pem"), ("key", "server.key"), ("ca-cert", "ca.pem"))
    )
    if "Redis" in programs():
        return Server(f"{files}\n{both}", program="Redis", tls=True)
    return Proxy(Server(f"requirepass {WORD}"), papers, asks)


@pytest.fixture(scope="module", params=[False, True], ids=["server alone", "client, too"])
def server(request, papers):
    found = start(papers, request.param)
    found.asks = request.param
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")


def files(server, papers):
    own = f"&cert={papers / 'client.pem'}&key={papers / 'client.key'}" if server.asks else ""
    return f"?ca={papers / 'ca.pem'}{own}"


def made(url, **options):
    options = {"probe": 0, "verbose": False, "fingerprint": "one", **options}
    return CachedDataset(DATA, options.pop("memory", "16MiB"), cluster=url, **options)


def check(dataset):
    for samples in (dataset.__getitems__(list(range(len(DATA)))), dataset):
        for (tensor, label), (expected, index) in zip(samples, DATA, strict=True):
            assert label == index and torch.equal(tensor, expected)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_samples_travel_in_secret(server, papers, host):
    url = f"rediss://:{WORD}@{host}:{server.port}{files(server, papers)}"
    with made(url, name=host) as first:
        check(first)
        assert first.flush() and first.cluster_servers()[0]["samples"] == len(DATA)
    with made(url, name=host) as second:
        check(second)
        assert second.stats().cluster.hits == len(DATA)
        (seen,) = second.cluster_servers()
        assert seen["errors"] == 0 and 0 < seen["latency"]["p50"] <= seen["latency"]["p99"]
        assert seen["bytes_read"] > sum(tensor.nbytes for tensor, _ in DATA)


def test_in_the_words_of_bagua_and_of_redis_py(server, papers):
    host = {
        "host": "127.0.0.1", "port": server.port, "password": WORD, "ssl": True,
        "ssl_ca_certs": str(papers / "ca.pem"),
    }  # fmt: skip
    if server.asks:
        host |= {"ssl_certfile": str(papers / "client.pem"),
                 "ssl_keyfile": str(papers / "client.key")}  # fmt: skip
    loader = CacheLoader(dataset_name="tls", hosts=[host])
    assert [loader.get(key, lambda key: key * key) for key in range(9)] == [k * k for k in range(9)]
    again = RedisStore([host])
    assert again.mget(["tls_3", "tls_4"]) == [9, 16] and again.status()
    again.clear()


def test_the_command_lists_them(server, papers):
    url = f"rediss://:{WORD}@127.0.0.1:{server.port}{files(server, papers)}"
    with made(url, name="listed") as dataset:
        check(dataset)
    (found,) = json.loads(run("ls", "--cluster", url, "--json").stdout)
    assert {"name": "listed", "samples": len(DATA)}.items() <= next(
        each for each in found["datasets"] if each["name"] == "listed"
    ).items()


def refused(url, words):
    """No sample is lost, and the reason is told once."""
    with pytest.warns(RuntimeWarning, match=words) as told, made(url, memory=1) as dataset:
        check(dataset)
        assert dataset.stats().cluster.hits == 0
    told = [str(each.message) for each in told if "the server " in str(each.message)]
    assert len(told) == 1 and WORD not in told[0], told


def test_a_server_that_somebody_else_signed_is_not_used(server, papers):
    own = files(server, papers).replace(f"?ca={papers / 'ca.pem'}", f"?ca={papers / 'other.pem'}")
    refused(f"rediss://:{WORD}@127.0.0.1:{server.port}{own}", "certificate")


def test_a_server_of_another_name_is_not_used(server, papers):
    # The same machine, by a number that its certificate does not have.
    if isinstance(server, Proxy):
        pytest.skip("the stand-in listens at one address; other names are not covered")
    refused(f"rediss://:{WORD}@127.0.0.2:{server.port}{files(server, papers)}", "certificate")


def test_without_a_ca_those_count_that_the_machine_trusts(server, papers, monkeypatch):
    own = (
        files(server, papers).replace(f"ca={papers / 'ca.pem'}", "").replace("?&", "?").rstrip("?")
    )
    url = f"rediss://:{WORD}@127.0.0.1:{server.port}{own}"
    monkeypatch.setenv("SSL_CERT_FILE", str(papers / "ca.pem"))
    with warnings.catch_warnings(), made(url, name="machine") as dataset:
        warnings.simplefilter("error", RuntimeWarning)
        check(dataset)
        assert dataset.flush()
    monkeypatch.setenv("SSL_CERT_FILE", str(papers / "other.pem"))
    refused(url, "certificate")


def test_a_client_without_a_certificate_is_told(server, papers):
    if not server.asks:
        pytest.skip("this server asks for none")
    refused(f"rediss://:{WORD}@127.0.0.1:{server.port}?ca={papers / 'ca.pem'}", "cannot be reached")


def test_no_openness_on_either_side_is_mistaken_for_trust(server, papers):
    refused(f"redis://:{WORD}@127.0.0.1:{server.port}", "server")
    plain = Server()
    try:
        refused(f"rediss://127.0.0.1:{plain.port}{files(server, papers)}", "server")
    finally:
        plain.stop()


def test_a_stopped_server_costs_one_warning_and_no_sample(server, papers, monkeypatch):
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "0.5")
    url = f"rediss://:{WORD}@127.0.0.1:{server.port}{files(server, papers)}"
    with made(url, memory=1) as dataset:
        check(dataset)
        server.signal(signal.SIGSTOP)
        try:
            with pytest.warns(RuntimeWarning, match="does not answer in time") as told:
                for _ in range(3):
                    check(dataset)
        finally:
            server.signal(signal.SIGCONT)
    assert sum("the server " in str(each.message) for each in told) == 1


def test_files_that_cannot_be_used_are_told_at_once(papers):
    for query, words in (
        ("ca=/no/such/file", "ca=/no/such/file of the cluster is not used"),
        (f"ca={papers / 'server.key'}", "there is no certificate in it"),
        (f"key={papers / 'server.key'}", "without cert="),
        (f"cert={papers / 'client.pem'}&key={papers / 'server.key'}", "is not used"),
        ("what=1", "nobody knows"),
    ):
        with pytest.raises(ValueError, match=words):
            made(f"rediss://:{WORD}@a:1?{query}")
    with pytest.raises(ValueError, match="TLS"):
        made(f"redis://:{WORD}@a:1?ca={papers / 'ca.pem'}")
    host = {"host": "a", "password": WORD}
    for hosts, words in (
        ([{**host, "ssl_ca_certs": "/a"}], '"ssl": True'),
        ([{**host, "ssl": True}, host], "differ in their ssl options"),
        ([{**host, "tls": True}], "no server"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            CacheLoader(hosts=hosts)
        assert WORD not in str(raised.value)
