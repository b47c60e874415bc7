"""CacheLoader without a server: values by text keys in memory and on disk of one machine."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest
import torch
from sources import Bomb
from stocache import CacheLoader, LocalStore, local_store
from torch.utils.data import DataLoader, Dataset


@pytest.fixture
def store():
    made = []

    def make(**options):
        made.append(LocalStore(**{"memory": "8MiB", **options}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_the_loader_of_bagua_without_a_server():
    loads = []

    def load(key):
        loads.append(key)
        return None if key == 3 else {"key": torch.tensor([key]), "name": f"{key}"}

    loader = CacheLoader(backend="local", dataset_name="pano", memory="8MiB")
    for _ in range(2):
        for key in range(10):
            value = loader.get(key, load)
            assert value is None if key == 3 else value["key"].item() == key
    assert loader.get("4", load)["name"] == "4", "1 and '1' are one"
    assert loads == list(range(10)) and loader.num_keys() == 10
    loader.store.shutdown()


def test_its_words_are_those_of_the_other_stores(store):
    mine = store()
    assert mine.status() and mine.get("a") is None and mine.get("a", 7) == 7
    mine.mset({"a": b"1", "b": [1, 2.5, "x"]})
    assert mine.mget(["b", "a", "c"]) == [[1, 2.5, "x"], b"1", None]
    assert mine.num_keys() == 2
    mine.set("a", b"1")
    with pytest.raises(ValueError, match="another value already"):
        mine.set("a", b"2")
    assert mine.get("a") == b"1"
    mine.clear()
    assert (mine.num_keys(), mine.get("a")) == (0, None)
    mine.set("a", b"2")
    assert mine.get("a") == b"2"
    mine.shutdown()
    assert not mine.status()


def crowded(store):
    """How many keys of a crowded store have a wrong value, and how many have one."""
    mine = store(slots=64, policy="freeze")
    with pytest.warns(RuntimeWarning, match="pass slots="):
        for key in range(2000):
            mine.set(f"key {key}", key)
    found = [mine.get(f"key {key}") for key in range(2000)]
    there = [(key, value) for key, value in enumerate(found) if value is not None]
    assert len(there) == mine.num_keys() > 32
    return sum(key != value for key, value in there)


def test_keys_are_never_confused(store):
    assert crowded(store) == 0


def test_control_slots_that_do_not_know_their_keys_are_noticed(store, monkeypatch):
    def at(self, place, mine):
        return self._records.get_many([place], False)[0][1]

    monkeypatch.setattr(local_store.LocalStore, "_at", at)
    monkeypatch.setattr(local_store.Records, "differs", lambda *_: False)
    mine = store(slots=64, policy="freeze")
    for key in range(2000):
        mine.set(f"key {key}", key)
    assert any(mine.get(f"key {key}") != key for key in range(2000))


def test_what_was_not_used_for_longest_makes_room(store):
    mine = store(memory="4MiB")
    for key in range(400):
        mine.set(key, torch.full((10_000,), key, dtype=torch.int32))  # 16 MB in all
        assert mine.get(key) is not None
    there = [key for key in range(400) if mine.get(key) is not None]
    assert 399 in there and 0 not in there and 40 < len(there) < 110
    for key in there:
        assert int(mine.get(key)[0]) == key


def of_other_process(mine, conversation):
    conversation.send([mine.get(key) for key in range(20)])
    mine.set("from there", "hello")
    conversation.send(None)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_other_processes_have_the_same_values(store, context):
    mine = store()
    mine.mset({key: key * key for key in range(20)})
    context = multiprocessing.get_context(context)
    here, there = context.Pipe()
    process = context.Process(target=of_other_process, args=(mine, there))
    process.start()
    assert here.recv() == [key * key for key in range(20)]
    here.recv()
    process.join()
    assert mine.get("from there") == "hello"


class Computed(Dataset):
    def __init__(self, loader, log):
        self.loader, self.log = loader, log

    def __len__(self):
        return 40

    def load(self, index):
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        return torch.full((50,), index)

    def __getitem__(self, index):
        return self.loader.get(index, self.load)


def test_workers_share_what_they_compute(tmp_path):
    loader = CacheLoader(backend="local", memory="8MiB")
    data = Computed(loader, str(tmp_path / "log"))
    for _ in range(3):
        batches = DataLoader(data, 4, num_workers=2, shuffle=True)
        assert sorted(int(row[0]) for batch in batches for row in batch) == list(range(40))
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(40))
    loader.store.shutdown()


def test_two_stores_share_by_name_and_not_without(store, unique_name):
    name = unique_name()
    one, two, other = store(name=name), store(name=name), store()
    one.set("a", 1)
    assert (two.get("a"), other.get("a")) == (1, None)
    again = pickle.loads(pickle.dumps(one))
    assert again.get("a") == 1
    again.shutdown()


def test_what_is_on_disk_the_next_run_finds(store, tmp_path):
    options = {"memory": 1, "disk": "64MiB", "disk_path": tmp_path / "below"}
    first = store(**options)
    for key in range(200):
        first.set(key, torch.full((1000,), key))
    assert first.flush() and first.num_keys() == 200
    first.shutdown()
    second = store(**options)
    assert second.num_keys() == 200
    assert all(int(second.get(key)[0]) == key for key in range(200))


def test_what_cannot_be_kept_is_loaded_and_told_once(tmp_path):
    loader = CacheLoader(backend="local", memory="8MiB")
    with pytest.warns(RuntimeWarning, match="not kept") as told:
        for key in range(3):
            assert isinstance(loader.get(key, lambda key: Bomb(tmp_path / "executed")), Bomb)
    assert len(told) == 1 and not (tmp_path / "executed").exists()
    loader.store.shutdown()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"memory": 0.5}, TypeError, "the same for all processes"),
        ({"memory": "much"}, ValueError, "memory is 'much'"),
        ({"disk": "1GiB"}, ValueError, "needs disk_path="),
        ({"disk_path": "x"}, ValueError, "needs disk="),
        ({"slots": 3}, ValueError, "slots is 3"),
        ({"policy": "best"}, ValueError, "best"),
    ],
)
def test_bad_input_is_told(options, error, said):
    with pytest.raises(error, match=said):
        LocalStore(**{"memory": "8MiB", **options})
