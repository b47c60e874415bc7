"""The programs of Bagua's documentation with the import changed; and the attack that works on
Bagua: an open port and pickled values."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from servers import Server, ask
from stocache import CachedDataset, CacheLoader
from stocache._cluster import spawn

# In front of each program: what the documentation leaves out.
FRONT = """
    import json, sys, tempfile
    tempfile.tempdir = sys.argv[1]
    import torch
    from collections import Counter
    loads = Counter()

    class Source(torch.utils.data.Dataset):
        def __init__(self, name, example):
            self.name, self.example = name, example
        def __len__(self):
            return 30
        def __getitem__(self, idx):
            loads[self.name] += 1
            return torch.full((4, 5), idx), len(self.name)

    def begin(example):
        global dataset, dataset1, dataset2
        loads.clear()
        dataset, dataset1, dataset2 = (Source(each, example) for each in ("ds", "ds1", "second"))

    def epochs(cache_dataset):
        for _ in range(2):
            for i, (input, target) in enumerate(torch.utils.data.DataLoader(cache_dataset)):
                assert torch.equal(input, torch.full((1, 4, 5), i)), i
                assert target == len(cache_dataset.dataset.name)

    def once(name):
        return 30 <= loads[name] <= 34  # some are loaded again to compare them (probe=)

    from stocache import CachedDataset, CacheLoader
"""

EXAMPLES = {
    "spawned": """
        cache_dataset = CachedDataset(
         dataset,
         backend="redis",
         dataset_name="ds",
         capacity_per_node=400 * 1024 * 1024 * 1024,
        )
        epochs(cache_dataset)
        assert cache_dataset.cache_loader.num_keys() == 30
        assert once("ds"), loads
        (server,) = cache_dataset.cluster_servers()
        assert 0 < server["max_bytes"] <= 400 * 1024 * 1024 * 1024
    """,
    "local only": """
        cache_dataset = CachedDataset(
         dataset,
         backend="redis",
         dataset_name="ds",
         cluster_mode=False,
         capacity_per_node=400 * 1024 * 1024 * 1024,
        )
        epochs(cache_dataset)
        (server,) = cache_dataset.cluster_servers()
        assert server["samples"] == 30 and cache_dataset.cache_loader.num_keys() == 60, "of both"
        assert once("ds"), loads
    """,
    "hosts": """
        hosts = [
            {"host": "127.0.0.1", "port": sys.argv[2]},
            {"host": "127.0.0.1", "port": sys.argv[3]},
        ]
        cache_dataset = CachedDataset(
            dataset,
            backend="redis",
            dataset_name="ds",
            hosts=hosts,
        )
        epochs(cache_dataset)
        assert once("ds"), loads
        held = [each["samples"] for each in cache_dataset.cluster_servers()]
        assert sum(held) == 30 and min(held) > 0, held
    """,
    "two datasets": """
        cache_dataset1 = CachedDataset(
         dataset1,
         backend="redis",
         dataset_name="ds1",
         capacity_per_node=400 * 1024 * 1024 * 1024,
        )
        import warnings
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache_dataset2 = CachedDataset(
             dataset2,
             backend="redis",
             dataset_name="ds2",
             capacity_per_node=200 * 1024 * 1024 * 1024,
            )
        assert len(told) == 1 and "400 GiB, which counts" in str(told[0].message), told[0]
        epochs(cache_dataset1)
        epochs(cache_dataset2)
        assert once("ds1") and once("second"), loads
        servers = [each.cluster_servers()[0] for each in (cache_dataset1, cache_dataset2)]
        assert servers[0]["address"] == servers[1]["address"]
        assert servers[0]["max_bytes"] == servers[1]["max_bytes"]
    """,
    "augmentation": """
        import torch.utils.data as data


        class PanoHand(data.Dataset):
            def __init__(self):
                super(PanoHand, self).__init__()

                self.img_list = list(range(30))
                self.cache_loader = CacheLoader(
                    backend="redis",
                    capacity_per_node=400 * 1024 * 1024 * 1024,
                    hosts=None,
                    cluster_mode=True,
                )

            def __getitem__(self, idx):
                return self.get_training_sample(idx)

            def _process_fn(self, idx):
                loads["processed"] += 1
                return {"image": torch.full((4, 5), float(idx)), "name": f"image {idx}"}

            def get_training_sample(self, idx):
                ret = self.cache_loader.get(idx, self._process_fn)
                assert ret["name"] == f"image {idx}"
                return ret["image"] + torch.rand(4, 5)

            def __len__(self):
                return len(self.img_list)


        pano = PanoHand()
        first, second = [[sample for sample in data.DataLoader(pano)] for _ in range(2)]
        for idx, (one, other) in enumerate(zip(first, second)):
            assert not torch.equal(one, other), "augmented anew"
            assert ((one >= idx) & (one <= idx + 1) & (other >= idx) & (other <= idx + 1)).all()
        assert loads == {"processed": 30}
        assert pano.cache_loader.num_keys() == 30
        workers = list(data.DataLoader(pano, num_workers=2))
        assert len(workers) == 30 and loads == {"processed": 30}
    """,
}


@pytest.fixture(scope="module")
def servers():
    found = [Server(), Server()]
    yield found
    for server in found:
        server.stop()


def test_the_programs_of_bagua_run_with_the_import_changed(servers, tmp_path):
    try:
        spawn.find_program()
    except RuntimeError as error:
        pytest.skip(f"{error}; spawned servers are not covered")
    # One process for all of them, each with data of its own.
    program = textwrap.dedent(FRONT)
    for name, example in EXAMPLES.items():
        front = f"\n\ndef example():\n    print({name!r})\n    begin({name!r})\n"
        program += front + textwrap.indent(textwrap.dedent(example), "    ") + "\n\nexample()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *(str(server.port) for server in servers)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert [line for line in done.stdout.splitlines() if line in EXAMPLES] == list(EXAMPLES)


# The attack


class Bomb:
    """Whoever unpickles it runs a command: here, one that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def get_like_bagua(port, name):
    """What Bagua does with a value: it believes it."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        file = connection.makefile("rb")
        return pickle.loads(file.read(int(file.readline()[1:])))


@pytest.fixture
def open_server(monkeypatch):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")
    server = Server()
    yield server
    server.stop()


def planted(port, path):
    """Bombs under all names that there are, as anybody can who reaches the port."""
    names = [each for each in ask(port, "KEYS", "*") if each.startswith(b"stocache:")]
    for name in names:
        assert ask(port, "SET", name, pickle.dumps(Bomb(path))) == [b"+OK"]
    return names


def test_an_open_port_does_not_let_others_run_their_code(open_server, tmp_path):
    path, port = tmp_path / "executed", open_server.port
    data = [(torch.full((9,), index), index) for index in range(20)]
    host = [{"host": "127.0.0.1", "port": port}]

    def dataset():
        return CachedDataset(
            data, 1, backend="redis", dataset_name="ds", hosts=host, probe=0, verbose=False,
            shared=False, allow_pickle=True,
        )  # fmt: skip

    with dataset() as first:
        assert [label for _, label in first] == list(range(20))
    loader = CacheLoader(dataset_name="pano", hosts=host)
    assert [loader.get(key, lambda key: key) for key in range(20)] == list(range(20))
    loader.store.flush()
    names = planted(port, path)
    assert len(names) == 40
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dataset() as second:
            assert [label for _, label in second] == list(range(20))
            assert second.stats().cluster.hits == 0
        again = CacheLoader(dataset_name="pano", hosts=host)
        assert [again.get(key, lambda key: key) for key in range(20)] == list(range(20))
    assert len(told) == 2 and all("secret" in str(each.message) for each in told)
    assert not path.exists()
    # The control: the same bombs where values are believed.
    names = planted(port, path)
    get_like_bagua(port, names[0])
    assert path.exists()
