"""Samples on servers that several nodes share: real servers, on loopback."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from servers import Server, ask, native_cluster
from stocache import CachedDataset, CacheLoader, ClusterStore, DataLoader, RedisStore
from stocache._cluster import nodes, spawn
from stocache._cluster.options import Cluster
from stocache._types import stacking
from torch.utils.data import Dataset


class Counted(Dataset):
    """Says how often it was asked, also by its workers."""

    def __init__(self, length=64):
        self.length = length
        self.loads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loads[index] += 1
        return torch.full((300,), index, dtype=torch.int32), index


@pytest.fixture(autouse=True)
def secret(monkeypatch, tmp_path):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")  # whatever else this machine does
    monkeypatch.setattr(spawn.tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def node(dataset, url, **options):
    """A node has memory of its own; what is said of the data is the same on all."""
    options = {"fingerprint": "one", "name": None, "probe": 0, "verbose": False, **options}
    memory = options.pop("memory", "16MiB")
    return CachedDataset(dataset, memory, cluster=url, **options)


def check(samples):
    for index, (tensor, label) in enumerate(samples):
        assert label == index
        assert torch.equal(tensor, torch.full((300,), index, dtype=torch.int32))


def count(told, word):
    return sum(word in str(each.message) for each in told)


def test_what_one_node_loaded_another_finds(server):
    source = Counted()
    with node(source, server.url) as first:
        check(first[i] for i in range(64))
        check(first.__getitems__(list(range(64))))
        assert source.loads.tolist() == [1] * 64
        assert first.flush()
        stats = first.stats()
        assert (stats.cluster.fills, stats.cluster.hits, stats.cluster.errors) == (64, 0, 0)
    other = Counted()
    with node(other, server.url) as second:
        check(second.__getitems__(list(range(64))))
        check(second[i] for i in range(64))
        stats = second.stats()
    assert other.loads.sum() == 0
    assert (stats.cluster.hits, stats.filled, stats.misses) == (64, 64, 0), "from there to memory"


@pytest.mark.parametrize("memory", [1, "16MiB"])
def test_a_batch_is_asked_for_at_once(server, memory, tmp_path):
    """Not sample by sample: the server reads many questions at once, also behind a disk."""
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
    below = [{}, {"disk": "64MiB", "disk_path": tmp_path / "disk"}]
    for name, options in enumerate(below):
        source = Counted()
        with node(source, server.url, memory=memory, **options) as second:
            second.__getitems__([0])  # connected
            before = reads(server)
            check(second.__getitems__(list(range(64))))
            assert reads(server) - before < 20, name
            assert second.stats().cluster.hits >= 63
            twice = second.__getitems__([5, 7, 5])
            assert [label for _, label in twice] == [5, 7, 5] and twice[0] is not twice[2]
        assert source.loads.sum() == 0
    with node(Counted(), server.url, memory=memory) as second:
        before = reads(server)  # the control: one by one
        check(second[i] for i in range(64))
        assert reads(server) - before >= 64


class Together(Counted):
    """Gives many at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def is_batch(batch, indices):
    rows, labels = batch
    assert labels.tolist() == list(indices)
    assert torch.equal(
        rows, torch.tensor(list(indices), dtype=torch.int32)[:, None].expand(-1, 300)
    )


@pytest.mark.parametrize("kind", [Counted, Together])
@pytest.mark.parametrize("memory", [1, "16MiB"])
def test_a_batch_takes_its_rows_straight_from_the_servers(server, memory, kind):
    with node(kind(), server.url) as first:
        check(first[i] for i in range(64))
    source = kind()
    with node(source, server.url, memory=memory) as second:
        is_batch(second.batches[[0, 1]], [0, 1])
        second.__getitems__([2, 3] * 20)  # connected, and it knows how long values are
        before, seen = reads(server), second.stats().hits
        twice = [*range(63, 1, -1), 7, 7, 0]
        is_batch(second.batches[twice], twice)
        assert reads(server) - before < 20
        stats = second.stats()
        assert (stats.hits - seen, stats.misses) == (len(twice), 0)
        assert stats.filled == (0 if memory == 1 else 64)
        assert not source.loads.any()
    # What is not there is loaded, once, and sent.
    with node(kind(), server.url) as other:
        other.clear()
        [other[i] for i in range(0, 64, 2)]
    with node(source, server.url, memory=memory) as second:
        is_batch(second.batches[range(64)], range(64))
        # Once; of what gives many at once, some are compared with what it gives alone.
        loads = source.loads.tolist()
        assert not any(loads[::2]) and all(loads[1::2])
        assert kind is Together or sum(loads) == 32
        assert second.stats().misses == 32 and second.flush()
    with node(source, server.url, memory=memory) as second:
        is_batch(second.batches[range(64)], range(64))
    assert source.loads.tolist() == loads


@pytest.mark.parametrize("memory", [1, "16MiB"])
def test_a_worker_makes_whole_batches_of_what_servers_have(server, memory):
    with node(Counted(256), server.url) as first:
        is_batch(first.batches[range(256)], range(256))
    source = Counted(256)
    with node(source, server.url, memory=memory) as second:
        loader = DataLoader(second, 32, shuffle=True, num_workers=2, persistent_workers=True)
        for _ in range(3):
            seen = []
            for rows, labels in loader:
                is_batch((rows, labels), labels.tolist())
                seen += labels.tolist()
            assert sorted(seen) == list(range(256))
        assert not source.loads.any()
        stats = second.stats()
        assert stats.misses == 0 and stats.hits == 3 * 256
        assert stats.cluster.hits == (3 if memory == 1 else 1) * 256
        del loader


class Odd(Counted):
    """One sample has another shape."""

    def __getitem__(self, index):
        tensor, label = super().__getitem__(index)
        return tensor[: 299 if index == 40 else 300].clone(), label


def test_samples_that_are_no_batch_are_given_one_by_one(server):
    with node(Odd(), server.url, memory=1) as first:
        assert len(first.__getitems__(list(range(64)))) == 64
    source = Odd()
    with node(source, server.url, memory=1) as second:
        samples = second.__getitems__(list(range(64)))
        assert [len(tensor) for tensor, _ in samples] == [
            299 if i == 40 else 300 for i in range(64)
        ]
        with pytest.raises(RuntimeError, match="stack"):  # as default_collate says it
            second.batches[range(64)]
        is_batch(second.batches[range(40)], range(40))
    assert not source.loads.any()


class Uneven(Counted):
    """Every other sample has another shape, also among the first."""

    def __getitem__(self, index):
        tensor, label = super().__getitem__(index)
        return tensor[: 299 if index % 2 else 300].clone(), label


def test_what_comes_first_and_is_no_batch_is_not_asked_for_again(server):
    with node(Uneven(), server.url, memory=1) as first:
        first.__getitems__(list(range(64)))
    source = Uneven()
    with node(source, server.url, memory=1) as second:
        with pytest.raises(RuntimeError, match="stack"):
            second.batches[range(64)]
        assert second.stats().cluster.hits == 64, "once each"
        is_batch(second.batches[range(0, 64, 2)], range(0, 64, 2))
    assert not source.loads.any()


class TwoShapes(Counted):
    def __getitem__(self, index):
        tensor, label = super().__getitem__(index)
        return tensor[: 300 if index < 128 else 299].clone(), label


@pytest.mark.parametrize("memory", [1, "16MiB"])
def test_a_batch_of_other_shapes_than_those_before_is_what_it_is(server, memory):
    """Batches are laid out as those before them, before anything of them is there."""
    first, others = list(range(64)), list(range(128, 192))
    with node(TwoShapes(256), server.url) as filler:
        filler.__getitems__(list(range(256)))
    source = TwoShapes(256)

    def is_of_others(batch, indices):
        assert batch[0].shape == (len(indices), 299) and batch[1].tolist() == indices
        assert torch.equal(batch[0][:, 5], torch.tensor(indices, dtype=torch.int32))

    with node(source, server.url, memory=memory) as dataset:
        asked = 0
        for turn in range(4):
            for start in (0, 8, 16, 24):  # of what is in memory nobody is asked
                indices = [*range(start + turn * 32, start + turn * 32 + 8)]
                is_batch(dataset.batches[indices], indices)
                asked += 8
        for _ in range(5):
            is_of_others(dataset.batches[others], others)
            is_batch(dataset.batches[first], first)
            with pytest.raises(RuntimeError, match="stack"):
                dataset.batches[[*range(224, 228), 0, 1]]
            asked += 64 + 64 + 6
        stats = dataset.stats()
        assert stats.cluster.hits == (asked if memory == 1 else 128 + 64 + 4), "once for each"
        assert stats.misses == 0
    assert not source.loads.any()


class Kin(torch.Tensor):
    """Whether batches of it are stacked is asked in Python."""


class OfKin(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((5 if index < 32 else 6,), float(index)).as_subclass(Kin)


def test_a_layout_that_another_thread_finds_wrong_is_kept_by_who_began_with_it(server, monkeypatch):
    """It asks whether samples are stacked, and meanwhile a batch of other shapes is made."""
    asked, go, mine = threading.Event(), threading.Event(), threading.local()
    is_stacked = stacking.is_stacked

    def slowly(kind):
        if getattr(mine, "waits", False):
            mine.waits = False
            asked.set()
            assert go.wait(60)
        return is_stacked(kind)

    monkeypatch.setattr(stacking, "is_stacked", slowly)
    first, others, made = list(range(8)), list(range(32, 40)), []

    def make():
        mine.waits = True
        made.append(dataset.batches[first])

    with node(OfKin(), server.url, memory=1, probe=0) as dataset:
        dataset.__getitems__(list(range(64)))
        assert dataset.flush()
        for _ in range(6):  # known from then on
            dataset.batches[first]
        thread = threading.Thread(target=make)
        thread.start()
        # Alone it is asked; after other tests the answer may be known, and the batch made at once.
        while thread.is_alive() and not asked.wait(0.01):
            pass
        assert dataset.batches[others][:, 0].tolist() == others
        go.set()
        thread.join()
    assert type(made[0]) is Kin and made[0].shape == (8, 5) and made[0][:, 4].tolist() == first


def reads(server):
    """How often the server has read from sockets."""
    lines = b"\n".join(ask(server.port, "INFO", "stats")).decode().splitlines()
    fields = dict(line.strip().split(":", 1) for line in lines if ":" in line)
    return int(fields["total_reads_processed"])


def test_a_node_fetches_each_sample_once_however_many_ask(server):
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
    source = Counted()
    context = torch.multiprocessing.get_context("fork")
    with node(source, server.url) as second:
        begin = context.Barrier(4)

        def read():
            begin.wait(60)
            check(second.__getitems__(list(range(64))))

        readers = [context.Process(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
            assert reader.exitcode == 0
        stats = second.stats()
    assert source.loads.sum() == 0
    assert (stats.cluster.hits, stats.filled) == (64, 64)
    # The control: four that share no memory.
    hits = []
    for _ in range(4):
        with node(source, server.url, shared=False) as alone:
            check(alone.__getitems__(list(range(64))))
            hits.append(alone.stats().cluster.hits)
    assert hits == [64] * 4 and source.loads.sum() == 0


def test_servers_of_a_native_cluster_are_one_store(tmp_path):
    with native_cluster(tmp_path) as servers:
        source = Counted()
        with node(source, servers[0].url) as first, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            check(first[i] for i in range(64))
            assert first.flush()
            assert first.cache_loader.num_keys() == 64
            held = [each["samples"] for each in first.cluster_servers()]
            assert len(held) == 3 and sum(held) == 64 and min(held) > 0, held
        other = Counted()
        with node(other, servers[1].url) as second:
            check(second.__getitems__(list(range(64))))
            assert second.stats().cluster.hits == 64
        assert other.loads.sum() == 0
        store = RedisStore(hosts=[servers[2].host])
        store.mset({f"{i}": i for i in range(30)})
        assert store.num_keys() == 30 and store.status()
        assert store.mget([f"{i}" for i in range(30)]) == list(range(30))
        store.clear()
        assert store.num_keys() == 0
        store.shutdown()


def test_other_data_is_not_found(server):
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
    for other in ({"fingerprint": "two"}, {"name": "other-name"}):
        source = Counted()
        with node(source, server.url, **other) as second:
            check(second[i] for i in range(64))
        assert source.loads.tolist() == [1] * 64


@pytest.mark.parametrize(
    "names", [("训练", "验证"), ("train/a", "train_a"), ("x" * 100 + "train", "x" * 100 + "val")]
)
def test_names_that_look_alike_on_servers_are_several(server, names):
    one, other = names
    with node(Counted(), server.url, dataset_name=one) as first:
        check(first[i] for i in range(64))
    source = Counted()
    with node(source, server.url, dataset_name=other) as second:
        check(second[i] for i in range(64))
    assert source.loads.tolist() == [1] * 64
    with node(source, server.url, dataset_name=one) as again:  # the control: its own are found
        check(again[i] for i in range(64))
        assert again.stats().cluster.hits == 64
    assert source.loads.tolist() == [1] * 64


class Half(Counted):
    """One of two of the same class and length."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def __getitem__(self, index):
        tensor, label = super().__getitem__(index)
        return self.sign * tensor, label


@pytest.mark.parametrize("probe", [4, 0])
@pytest.mark.parametrize("memory", [1, "16MiB"])
@pytest.mark.parametrize("way", ["each", "many", "batch"])
def test_samples_of_another_dataset_are_seen_before_they_are_handed_out(server, way, memory, probe):
    with node(Half(1), server.url) as first:
        check(first[i] for i in range(64))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with node(Half(-1), server.url, memory=memory, probe=probe) as second:
            if way == "each":
                given = [second[i][0][0].item() for i in range(64)]
            elif way == "many":
                given = [tensor[0].item() for tensor, _ in second.__getitems__(list(range(64)))]
            else:
                given = second.batches[list(range(64))][0][:, 0].tolist()
    if probe == 0:  # the control
        assert given == list(range(64)) and not told
        return
    assert given == [-i for i in range(64)]
    assert len(told) == 1 and f"127.0.0.1:{server.port}" in str(told[0].message)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, DataLoader])
def test_what_workers_load_is_there_when_they_have_ended(server, context, loader):
    workers = 2 if context == "fork" else 1  # each of those imports torch
    with node(Counted(), server.url, memory="4MiB") as first:
        batches = loader(first, batch_size=8, num_workers=workers, multiprocessing_context=context)
        assert sorted(torch.cat([label for _, label in batches]).tolist()) == list(range(64))
        assert first.cache_loader.num_keys() == 64
    other = Counted()
    with node(other, server.url) as second:
        batches = loader(second, batch_size=8, num_workers=workers, multiprocessing_context=context)
        assert torch.cat([label for _, label in batches]).tolist() == list(range(64))
        assert second.stats().cluster.hits == 64
    assert other.loads.sum() == 0


def test_a_disk_in_front_gets_what_comes_from_the_servers(server, tmp_path):
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
    # Memory for a few samples alone.
    options = {"memory": 1, "disk": "64MiB", "disk_path": tmp_path / "disk"}
    source = Counted()
    with node(source, server.url, **options) as second:
        check(second[i] for i in range(64))
        assert second.flush()
        filled = second.stats().disk.filled + second.stats().filled
        assert filled == 64
        check(second[i] for i in range(64))
        assert second.stats().cluster.hits == 64, "asked once for each"
    assert source.loads.sum() == 0


def test_values_of_others_are_misses_and_told_once(server, monkeypatch):
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
    monkeypatch.setenv("STOCACHE_SECRET", "others")
    source = Counted()
    with node(source, server.url) as second, pytest.warns(RuntimeWarning, match="secret") as told:
        check(second[i] for i in range(64))
    assert len(told) == 1
    assert source.loads.tolist() == [1] * 64


class Bomb:
    def __reduce__(self):
        return (os.system, ("echo executed > executed",))


def test_planted_pickles_are_never_executed(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with node(Counted(), server.url) as first:
        check(first[i] for i in range(64))
        first.flush()
    names = [line for line in ask(server.port, "KEYS", "*") if line.startswith(b"stocache:")]
    assert len(names) == 64
    for name in names:
        ask(server.port, "SET", name, pickle.dumps(Bomb()))
    source = Counted()
    with node(source, server.url) as second, pytest.warns(RuntimeWarning, match="secret"):
        check(second[i] for i in range(64))
    assert source.loads.tolist() == [1] * 64
    assert not Path("executed").exists()
    pickle.loads(pickle.dumps(Bomb()))  # the control: it would
    assert Path("executed").exists()


def test_a_stopped_server_costs_one_warning_and_no_sample(server):
    with node(Counted(), server.url, memory=1) as dataset:
        check(dataset[i] for i in range(64))
        dataset.flush()
        server.signal(signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="does not answer in time") as told:
            for _ in range(3):
                check(dataset[i] for i in range(64))
        assert count(told, "the server ") == 1
        errors = dataset.stats().cluster.errors
        assert 1 <= errors <= 2, "left alone after that"


def test_a_killed_server_costs_one_warning_and_no_sample(server):
    with node(Counted(), server.url, memory=1) as dataset:
        check(dataset[i] for i in range(64))
        server.stop()
        with pytest.warns(RuntimeWarning, match="cannot be reached") as told:
            check(dataset[i] for i in range(64))
        assert count(told, "the server ") == 1


def test_a_connection_that_the_server_closed_is_made_anew_without_a_word(server):
    """As servers, and what stands in front of them, do with those that are idle."""
    store = RedisStore([server.host])
    store.set("one", 1)
    assert store.flush() and store.get("one") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(3):
            for act in (lambda: store.get("one") == 1, lambda: store.set("two", 2) is None):
                ask(server.port, "CLIENT", "KILL", "TYPE", "normal")
                time.sleep(0.1)
                assert act(), turn
            assert store.flush() and store.get("two") == 2
    (seen,) = store.servers()
    assert (seen["errors"], seen["dropped"]) == (0, 0)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("-inf")])
def test_a_time_that_makes_no_sense_is_none(server, seconds):
    store = RedisStore([server.host])
    store.set("one", 1)
    assert store.flush(float("inf"))
    server.signal(signal.SIGSTOP)
    store.set("two", 2)
    assert not store.flush(seconds)


def test_no_server_at_all_is_no_error():
    port = spawn.free_port()
    warned = pytest.warns(RuntimeWarning, match="cannot be reached")
    with warned as told, node(Counted(), f"redis://127.0.0.1:{port}") as dataset:
        check(dataset[i] for i in range(64))
        check(dataset[i] for i in range(64))
    assert len(told) == 1


def test_what_was_asked_for_wrongly_is_told():
    for cluster, words in (
        ("10.0.0.1:7000", 'use "redis://host:port,host:port"'),
        ("redis://", "there is no host"),
        ("rediss://", "there is no host"),
        ("redisx://a:1", 'use "redis://host:port,host:port"'),
        (7, 'use "redis://host:port,host:port"'),
    ):
        with pytest.raises((ValueError, TypeError), match=words) as raised:
            node(Counted(), cluster)
        assert "\n" not in str(raised.value).split("\nException raised from")[0]
    with pytest.raises(ValueError, match="needs cluster="):
        CachedDataset(Counted(), "16MiB", ttl=3)
    with pytest.raises(ValueError, match="already"):
        node(Counted(), "redis://a:1", capacity_per_node="1GiB")
    with pytest.raises(ValueError, match="needs capacity_per_node="):
        node(Counted(), "redis://a:1", dataset_size="1GiB")
    with pytest.raises(ValueError, match="needs cluster="):
        CachedDataset(Counted(), "16MiB", dataset_size="1GiB")
    with pytest.raises(ValueError, match='use "redis"'):
        CachedDataset(Counted(), backend="memcached")
    with pytest.raises(ValueError, match="hosts"):
        CacheLoader(hosts=[])


def test_a_secret_that_others_may_read_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("STOCACHE_SECRET")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    node(Counted(), "redis://127.0.0.1:1").close()
    file = tmp_path / "stocache" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    first = file.read_bytes()
    assert len(first) == 64
    node(Counted(), "redis://127.0.0.1:1").close()
    assert file.read_bytes() == first
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        node(Counted(), "redis://127.0.0.1:1")


# In the words of Bagua


def test_the_dataset_of_bagua(server):
    source = Counted()
    options = {"hosts": [server.host], "fingerprint": "one", "verbose": False, "probe": 0}
    first = CachedDataset(source, backend="redis", dataset_name="ds", **options)
    check(first[i] for i in range(64))
    assert first.cache_loader.num_keys() == 64
    assert first.dataset is source
    other = CachedDataset(Counted(), backend="redis", dataset_name="ds2", **options)
    check(other[i] for i in range(64))
    assert (first.cache_loader.num_keys(), other.cache_loader.num_keys()) == (128, 128), "of all"
    assert [each["samples"] for each in first.cluster_servers()] == [64]
    store = other.cache_loader.store
    assert store.status() and store.num_keys() == 128
    store.clear()
    assert first.cache_loader.num_keys() == 64, "those of others stay"
    source = Counted()
    again = CachedDataset(source, "redis", "ds", **options)
    check(again[i] for i in range(64))
    assert source.loads.sum() == 0
    asked = []
    with CachedDataset(Counted(), backend="redis", dataset_name="ds3", **options) as third:
        for _ in range(2):
            sample = third.cache_loader.get(
                3, lambda key: asked.append(key) or (torch.ones(2), key)
            )
            assert sample[0].tolist() == [1, 1] and sample[1] == 3
        assert asked == [3] and third[3][1] == 3
        with pytest.raises(IndexError):
            third.cache_loader.get(64, asked.append)


def test_the_loader_of_bagua(server):
    loads = []

    def load(key):
        loads.append(key)
        return None if key == 3 else {"key": torch.tensor([key]), "name": f"{key}"}

    for _ in range(2):
        loader = CacheLoader(backend="redis", dataset_name="pano", hosts=[server.host])
        for key in range(10):
            value = loader.get(key, load)
            assert value is None if key == 3 else value["key"].item() == key
        assert loader.get("4", load)["name"] == "4", "1 and '1' are one"
        assert loader.num_keys() == 10
    assert loads == list(range(10))
    other = CacheLoader(dataset_name="other", hosts=[server.host])
    assert other.get(1, lambda key: b"bytes") == b"bytes"
    assert other.num_keys() == 11, "all of the store"
    with pytest.raises(ValueError, match="memcached"):
        CacheLoader(backend="memcached")


def test_the_store_of_bagua(server):
    store = RedisStore(hosts=[server.host])
    assert store.status()
    assert store.get("a") is None
    store.mset({"a": b"1", "b": [1, 2.5, "x"]})
    assert store.mget(["b", "a", "c"]) == [[1, 2.5, "x"], b"1", None]
    again = pickle.loads(pickle.dumps(store))
    assert again.num_keys() == 2 and again.get("a") == b"1"
    ask(server.port, "SET", "not-ours", "x")
    store.clear()
    assert (store.num_keys(), again.get("a")) == (0, None)
    assert ask(server.port, "GET", "not-ours")[1] == b"x", "what is not ours stays"
    store.shutdown()
    server.stop()
    with pytest.warns(RuntimeWarning, match="cannot be reached"):
        assert again.get("a", 7) == 7
    assert not again.status()


def test_what_cannot_be_kept_is_loaded_and_told_once(server):
    loader = CacheLoader(hosts=[server.host])
    with pytest.warns(RuntimeWarning, match="not kept") as told:
        for key in range(3):
            assert isinstance(loader.get(key, lambda key: Bomb()), Bomb)
    assert len(told) == 1


def test_a_store_of_several_servers_asks_all_at_once_and_says_which_has_what(server):
    other = Server()
    try:
        store = RedisStore(hosts=[server.host, {"host": "127.0.0.1", "port": other.port}])
        keys = [f"key {k}" for k in range(200)]
        store.mset({key: at for at, key in enumerate(keys)})
        assert store.mget([*keys, "none"]) == [*range(200), None]
        counts = [each["samples"] for each in store.servers()]
        assert sum(counts) == 200 and min(counts) > 50
        assert [store.route(key).get(key) for key in keys] == list(range(200))
        homes = {id(store.route(key)): store.route(key) for key in keys}
        assert sorted(home.num_keys() for home in homes.values()) == sorted(counts)
        one = homes.popitem()[1]
        assert one.route("key 0") is one
        store.shutdown()
    finally:
        other.stop()


def test_several_stores_as_one(server):
    other = Server()
    try:
        first, second = RedisStore([server.host]), RedisStore([other.host])
        store = ClusterStore([first, second])
        keys = [f"key {k}" for k in range(200)]
        store.mset({key: None if at == 7 else at for at, key in enumerate(keys)})
        store.set("one more", "x")
        expected = [None if at == 7 else at for at in range(200)]
        assert store.mget([*keys, "none", "key 3"]) == [*expected, None, 3]
        assert (store.get("one more"), store.get("none", 9), store.get("key 7", 9)) == (
            "x",
            9,
            None,
        )
        assert store.num_keys() == 201 and min(first.num_keys(), second.num_keys()) > 50
        assert all(store.route(key).get(key, -1) != -1 for key in keys)
        again = pickle.loads(pickle.dumps(store))
        assert all(again._route(key) == store._route(key) for key in keys)
        # One more store takes from the others, and nothing moves between them.
        wider = ClusterStore([first, second, first])
        moved = [key for key in keys if wider._route(key) != store._route(key)]
        assert 30 < len(moved) < 110 and all(wider._route(key) == 2 for key in moved)
        assert store.status()
        other.stop()
        with pytest.warns(RuntimeWarning, match="cannot be reached"):
            for key in keys:
                store.get(key)
        assert not store.status()
        again.stores[0].clear()
        assert first.num_keys() == 0
        store.shutdown()
    finally:
        other.stop()
    for wrong in ([], [3]):
        with pytest.raises(ValueError, match="list of stores"):
            ClusterStore(wrong)


# A server of this node

USER = """
    import sys, tempfile
    tempfile.tempdir = sys.argv[1]
    from stocache._cluster import spawn
    print(spawn.url_of([spawn.join(1 << 26)]), flush=True)
    sys.stdin.read()
"""


def start_user(folder):
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(USER), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return program, program.stdout.readline().strip()


def wait_until(what):
    for _ in range(600):
        if what():
            return
        time.sleep(0.1)
    raise AssertionError("it does not come to pass")


def processes(word, where=("cmdline", "environ")):
    """Those that have it in their arguments or in their environment."""
    found = set()
    for path in (path for each in where for path in Path("/proc").glob(f"[0-9]*/{each}")):
        with contextlib.suppress(OSError):
            if word in path.read_bytes():
                found.add(int(path.parent.name))
    return sorted(found)


def listens(port):
    """The addresses at which somebody listens on that port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A" and int(place.split(":")[1], 16) == port:
                found.append(place.split(":")[0])
    return found


@pytest.fixture
def program():
    try:
        return spawn.find_program()
    except RuntimeError as error:
        pytest.skip(f"{error}; spawned servers are not covered")


def test_a_spawned_server_is_not_exposed_and_goes_with_its_last_user(program, tmp_path):
    first, url = start_user(tmp_path)
    second, same = start_user(tmp_path)
    try:
        assert url == same, "one server for a node"
        password, port = url.split(":")[2].split("@")[0], int(url.split(":")[-1])
        assert listens(port) == ["0100007F"], "loopback alone"
        assert processes(password.encode()) == [], "in nobody's arguments or environment"
        assert first.pid in processes(str(tmp_path).encode()), "the control: it is looked at"
        assert ask(port, "GET", "stocache:x")[0].startswith(b"-NOAUTH")
        for nobody in (None, ("default", ""), ("stocache", ""), ("stocache", "word")):
            for command in (("SET", "stocache:x", "y"), ("FLUSHALL",), ("REPLICAOF", "::1", "1")):
                answers = ask(port, *command, login=nobody)
                assert all(answer.startswith(b"-") for answer in answers), (nobody, command)
        # Nor by way of a web page that a browser of this machine shows.
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n\r\nSET stocache:x y\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"+" not in connection.recv(1 << 16)
        login = ("stocache", password)
        assert ask(port, "SET", "stocache:x", "y", login=login) == [b"+OK", b"+OK"]
        for command in (
            ("CONFIG", "GET", "*"), ("EVAL", "return 1", "0"), ("FLUSHALL",), ("MODULE", "LIST"),
            ("ACL", "LIST"), ("DEBUG", "SLEEP", "0"), ("SHUTDOWN",), ("KEYS", "*"),
            ("GET", "other"), ("SET", "other", "x"),
        ):  # fmt: skip
            assert ask(port, *command, login=login)[1].startswith(b"-"), command
        first.kill()
        second.send_signal(signal.SIGSTOP)
        time.sleep(2)
        assert listens(port), "a user that is stopped is one"
        second.kill()
        wait_until(lambda: not listens(port))
        folder = tmp_path / f"stocache-server-{os.geteuid()}"
        wait_until(lambda: not processes(str(folder).encode(), ["cmdline"]))
        assert not (folder / "address").exists()
    finally:
        for user in (first, second):
            user.kill()
            user.wait()
            user.stdin.close()
            user.stdout.close()


def test_a_spawned_server_ends_with_its_supervisor_and_the_next_user_starts_another(
    program, tmp_path
):
    user, url = start_user(tmp_path)
    port = int(url.split(":")[-1])
    try:
        (supervisor,) = [
            int(Path(path).parent.name)
            for path in Path("/proc").glob("[0-9]*/stat")
            if "supervisor" in _arguments(path) and _has_open(path, tmp_path)
        ]
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: not listens(port))
        other, again = start_user(tmp_path)
        assert again != url
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
        wait_until(lambda: listens(int(again.split(":")[-1])))
    finally:
        user.kill()
        user.wait()
        user.stdin.close()
        user.stdout.close()
    wait_until(lambda: not listens(int(again.split(":")[-1])))


def _arguments(path):
    try:
        return (Path(path).parent / "cmdline").read_text()
    except OSError:
        return ""


def _has_open(path, folder):
    try:
        links = [os.readlink(link) for link in (Path(path).parent / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(str(folder)) for link in links)


def test_a_dataset_with_a_server_of_its_own(program, tmp_path):
    script = """
        import sys, tempfile
        tempfile.tempdir = sys.argv[1]
        import torch
        from stocache import CachedDataset, CacheLoader
        data = [(torch.full((9,), i), i) for i in range(20)]
        given = {"capacity_per_node": 64 << 20, "probe": 0, "verbose": False}
        one = CachedDataset(data, "16MiB", cluster="spawn", name="one", **given)
        two = CachedDataset(data, backend="redis", dataset_name="ds", cluster_mode=False, **given)
        for dataset in (one, two):
            assert [label for _, label in dataset] == list(range(20))
        assert two.cache_loader.num_keys() == 40, "of both"
        (server,) = one.cluster_servers()
        assert server["samples"] == 20 and server["max_bytes"] == 64 << 20, server
        loader = CacheLoader(dataset_name="pano", hosts=None, capacity_per_node=64 << 20)
        assert loader.get(3, lambda key: key * 2) == 6 and loader.get("3", None) == 6
        print(server["address"])
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(script),
         str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    port = int(done.stdout.split(":")[-1])
    wait_until(lambda: not listens(port))


STORE_OF_A_JOB = """
    import sys, tempfile, torch
    tempfile.tempdir = sys.argv[1]
    from stocache import CacheLoader

    def load(key):
        return f"{sys.argv[2]} {key}"

    def opened(_=None):
        return CacheLoader(hosts=None, capacity_per_node=64 << 20)

    def of_child(_):
        return opened().get(1, lambda key: "it found nothing")

    if __name__ == "__main__":
        loader = opened()
        print(loader.get(1, load), loader.get(2, load), loader.num_keys(), flush=True)
        for context in ("fork", "spawn") * (sys.argv[2] == "first"):
            with torch.multiprocessing.get_context(context).Pool(1) as pool:
                print(pool.map(of_child, [0])[0], flush=True)
        if sys.argv[2] == "second":
            loader.store.clear()
        sys.stdin.readline()
        print(loader.get(1, load), loader.num_keys(), flush=True)
"""


def test_jobs_that_share_a_server_do_not_share_a_store(program, tmp_path):
    """Nor does one of them empty it for the others."""
    file = tmp_path / "job.py"
    file.write_text(textwrap.dedent(STORE_OF_A_JOB))
    said = {}
    with contextlib.ExitStack() as ends:
        started = []
        for name in ("first", "second"):
            job = subprocess.Popen(
                [sys.executable, str(file), str(tmp_path), name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            ends.enter_context(job)
            started.append(job)
            lines = 3 if name == "first" else 1
            said[name] = [job.stdout.readline().strip() for _ in range(lines)]
        for name, job in zip(said, started, strict=True):
            said[name].append(job.communicate("\n", timeout=60)[0].strip())
    assert said["second"][0] == "second 1 second 2 2"
    assert said["first"] == ["first 1 first 2 2", "first 1", "first 1", "first 1 2"], "its children"


def test_a_program_that_took_the_port_is_not_taken_for_the_server(program, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [other.getsockname()[1], spawn.free_port()]
        monkeypatch.setattr(spawn, "free_port", lambda host: ports.pop(0))
        address = spawn.join(1 << 26)
        try:
            assert not ports and address["port"] != other.getsockname()[1]
            login = ("stocache", address["password"])
            assert ask(address["port"], "PING", login=login) == [b"+OK", b"+PONG"]
        finally:
            for fd in spawn._held.values():
                os.close(fd)
            spawn._held.clear()
    wait_until(lambda: not listens(address["port"]))


def test_several_nodes_that_cannot_agree_are_told_what_to_do(monkeypatch):
    for what, value in (
        ("RANK", 1), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2),
        ("MASTER_PORT", 1),
    ):  # fmt: skip
        monkeypatch.setenv(what, str(value))
    remedy = "4 ranks, 2 of them on this node, .*init_process_group"
    with pytest.raises(ValueError, match=remedy):
        node(Counted(), "spawn")
    with pytest.raises(ValueError, match=remedy):
        CacheLoader(hosts=None, cluster_mode=True)


def test_the_address_of_a_node_is_one_that_others_reach(monkeypatch):
    here, there = ("a", "127.0.0.1"), ("b", "127.0.1.1")
    with pytest.raises(ValueError, match="set STOCACHE_CLUSTER_ADDRESS"):
        nodes._address(here, [here, there])
    assert nodes._address(("a", "10.0.0.7"), [here, there]) == "10.0.0.7"
    for given, words in (
        ("0.0.0.0", "expose"), ("::", "expose"), ("no.such.host.invalid", "as a number"),
        ("192.0.2.1", "one interface of this node"),
    ):  # fmt: skip
        monkeypatch.setenv("STOCACHE_CLUSTER_ADDRESS", given)
        with pytest.raises(ValueError, match=words):
            nodes._address(here, [here, there])
    monkeypatch.setenv("STOCACHE_CLUSTER_ADDRESS", "localhost")
    assert nodes._address(here, [here, there]) in ("127.0.0.1", "::1")


def test_passwords_and_secrets_are_not_shown():
    agreed = nodes.Agreed("redis://u:password@a:1", b"secret", (1, "noeviction"), 1)
    cluster = Cluster("redis://u:password@a:1", None, b"secret")
    for shown in (repr(agreed), repr(cluster)):
        assert "password" not in shown and "secret" not in shown


HUSH = "hush-hush"


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": [f"redis://u:{HUSH}@h:1"]}, {"cluster": f"http://u:{HUSH}@h:1"},
        {"cluster": f"u:{HUSH}@h:1"}, {"cluster": f"redis://u:{HUSH}"},
        {"cluster": f"redis://u:12,{HUSH}@h:0"}, {"cluster": f"redis://u:{HUSH},12@h:0"},
        {"cluster": f"redis://u:1?{HUSH}"}, {"cluster": f"redis://u:{HUSH}%4@h"},
        {"cluster": f"redis://u:{HUSH}", "dataset_size": 1, "capacity_per_node": 1},
        {"cluster": f"redis://u:1,h:{HUSH}@h:x", "dataset_size": 1, "capacity_per_node": 1},
        {"cluster": f"redis://u:1?{HUSH}=x", "dataset_size": 1, "capacity_per_node": 1},
        {"memory": f"redis://u:{HUSH}@h"}, {"backend": f"redis://u:{HUSH}@h"},
        {"name": f"redis://u:{HUSH}@h"}, {"name": [f"redis://u:{HUSH}@h"]},
        {"cluster": "redis://h", "ttl": f"redis://u:{HUSH}@h"},
        {"cluster": "spawn", "capacity_per_node": f"redis://u:{HUSH}@h"},
        {"cluster": "redis://h", "capacity_per_node": f"redis://u:{HUSH}@h"},
        {"cluster": "redis://h", "capacity_per_node": 1, "dataset_size": f"redis://u:{HUSH}@h"},
        {"fingerprint": [f"redis://u:{HUSH}@h"]}, {"disk": 1, "disk_path": [f"u:{HUSH}@h"]},
        {"probe": f"redis://u:{HUSH}@h"}, {"huge_pages": f"redis://u:{HUSH}@h"},
        {"on_change": f"redis://u:{HUSH}@h"}, {"transform": f"redis://u:{HUSH}@h"},
        {"cluster": f"redis://u:{HUSH}@h:1?cell=x", "dataset_size": 1, "capacity_per_node": 1},
        {"backend": "redis", "hosts": {"host": "h", "password": HUSH}},
        {"backend": "redis", "hosts": f"redis://u:{HUSH}@h"},
        {"backend": "redis", "hosts": [f"redis://u:{HUSH}@h"]},
        {"backend": "redis", "hosts": [{"host": "h", "word": HUSH}]},
        {"backend": "redis", "hosts": [{"host": "h", "port": "x", "password": HUSH}]},
    ],
)  # fmt: skip
def test_no_error_shows_a_password(options):
    is_hushed(lambda: CachedDataset(Counted(), verbose=False, **{"memory": "16MiB", **options}))


def is_hushed(act):
    with pytest.raises((ValueError, TypeError)) as raised:
        act()
    said = str(raised.value)
    assert HUSH not in said and len(said) > 20, said


WITH_HUSH = f"redis://u:{HUSH}@h"


@pytest.mark.parametrize(
    "act",
    [
        lambda: CachedDataset(Counted(), WITH_HUSH),
        lambda: CachedDataset(Counted(), "redis", [{"host": "h", "password": HUSH}]),
        lambda: CachedDataset(Counted(), "redis", "ds", [{"host": "h", "password": HUSH}]),
        lambda: CacheLoader(WITH_HUSH),
        lambda: CacheLoader("redis", "", [{"host": "h", "password": HUSH}]),
        lambda: RedisStore(WITH_HUSH),
        lambda: RedisStore(None, True, WITH_HUSH),
        lambda: ClusterStore([{"host": "h", "password": HUSH}]),
        lambda: ClusterStore([WITH_HUSH]),
        lambda: ClusterStore(WITH_HUSH),
    ],
)
def test_no_error_shows_a_password_that_is_in_the_wrong_place(act):
    is_hushed(act)


def test_control_what_is_no_password_is_shown():
    with pytest.raises(ValueError, match="backend is 'memcached'"):
        CachedDataset(Counted(), "16MiB", backend="memcached")
    with pytest.raises(ValueError, match="memory is 'much'"):
        CachedDataset(Counted(), "much")
    with pytest.raises(ValueError, match=r"backend is 'redis://…@h:1'"):
        CacheLoader(f"redis://u:{HUSH}@h:1")


def test_another_capacity_than_that_of_the_server_is_told(program, tmp_path):
    user, _ = start_user(tmp_path)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            url = nodes.servers(1 << 27, True).url
        assert len(told) == 1 and "64.0 MiB" in str(told[0].message)
    finally:
        user.kill()
        user.wait()
        user.stdin.close()
        user.stdout.close()
        for fd in spawn._held.values():
            os.close(fd)
        spawn._held.clear()
    wait_until(lambda: not listens(int(url.split(":")[-1])))
