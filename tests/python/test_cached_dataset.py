"""CachedDataset: any dataset in one line, loaded once per node, whatever happens to the loaders."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import os
import pickle
import random
import re
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import stocache
import torch
import torchrun
from kernel import hog_the_mount, mount_shm, process_state
from samples import complaint, whole
from sources import (
    FORK,
    INDEX,
    Bomb,
    Broken,
    Counted,
    Fails,
    Fixed,
    Plain,
    Point,
    Together,
    doubled,
    same,
    verified,
    words_of,
    wrong,
)
from stocache._dataset import samples as implementation
from stocache._sharing.fingerprint import fingerprint
from stocache.sizes import parse_size
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

HERE = Path(__file__).parent


@pytest.fixture
def patience(monkeypatch):
    """patience(seconds): how long this process and those it forks wait for a loader."""
    return lambda seconds: monkeypatch.setattr(implementation, "_PATIENCE_SECONDS", seconds)


@pytest.fixture
def start():
    """start(f, *args): f(*args) in a forked process that does not outlive the test."""
    started = []

    def run(function, *args):
        started.append(FORK.Process(target=function, args=args))
        started[-1].start()
        return started[-1]

    yield run
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


# One line is enough


@dataclasses.dataclass
class Label:
    name: str
    box: torch.Tensor

    def __eq__(self, other):
        return type(other) is Label and same((self.name, self.box), (other.name, other.box))


KINDS = {
    "a tensor": torch.arange(12).reshape(3, 4),
    "a byte": torch.ones(1, dtype=torch.uint8),
    "nothing in it": torch.empty(0, 5),
    "a scalar tensor": torch.tensor(2.5, dtype=torch.float64),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "bool and complex": (torch.tensor([True, False]), torch.tensor([1 + 2j])),
    "a transposed tensor": torch.arange(12).reshape(3, 4).t(),
    "some MB": torch.arange(700_000),
    "a tuple": (torch.ones(3), 7, "cat"),
    "a list": [1, 2.5, None, True, b"bytes", "ü", 1 - 2j],
    "a dict": {"image": torch.zeros(2, 2), "label": 3, 5: {"deep": (1, [2, {"er": "x"}])}},
    "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
    "numpy of other kinds": (np.array(3, dtype=np.int16), np.float64(2.5), np.array([], "u1")),
    "a named tuple": Point(torch.ones(2), 4),
    "a dataclass": Label("dog", torch.tensor([1, 2, 3, 4])),
    "an int": 5,
    "a large int": 2**100,
    "nan and the like": (float("inf"), -0.0),
    "None": None,
    "an empty text": ("", b"", (), [], {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_equals_what_went_in(cached, kind):
    dataset = cached([KINDS[kind]] * 2, "16MiB")
    for _ in range(3):
        assert same(dataset[0], KINDS[kind])
    stats = dataset.stats()
    assert (stats.hits, stats.misses, stats.filled) == (2, 1, 1)
    assert stats.loads == stats.fills == 1, "and it was kept"


def test_samples_of_every_size_and_kind_live_in_one_cache(cached):
    samples = [torch.full((n,), n % 251, dtype=torch.uint8) for n in range(300)]
    samples += [torch.full((n,), n % 251, dtype=torch.uint8) for n in (4095, 4097, 3 << 20)]
    samples += list(KINDS.values())
    dataset = cached(Fixed(samples), "32MiB")
    for _ in range(2):
        for idx in random.sample(range(len(samples)), len(samples)):
            assert same(dataset[idx], samples[idx]), idx
    assert dataset.is_complete() and dataset.stats().hits == len(samples)


def test_more_kinds_of_samples_than_the_cache_has_names_for(cached):
    # every sample has keys of its own; at some point each record brings its schema along
    samples = [{f"key {idx} {'x' * 200}": idx, "row": whole(idx, 4)} for idx in range(1000)]
    dataset = cached(Fixed(samples))
    for _ in range(2):
        assert all(same(dataset[idx], samples[idx]) for idx in range(1000))
    assert dataset.stats().hits == 1000
    assert dataset.verify(50) == 50


def test_pil_images_come_back_as_they_were(cached):
    image = pytest.importorskip("PIL.Image")
    samples = []
    for mode in ("RGB", "L", "P", "RGBA", "1", "I;16", "F"):
        made = image.new(mode, (5, 3))
        made.putpixel((2, 1), 1 if mode == "1" else 7 if len(mode) != 3 and mode != "RGBA" else 9)
        samples.append(made)
    dataset = cached(Fixed(samples))
    for _ in range(2):
        for idx, sample in enumerate(samples):
            got = dataset[idx]
            assert (got.mode, got.size) == (sample.mode, sample.size)
            assert got.tobytes() == sample.tobytes() and got.getpalette() == sample.getpalette()
    got.putpixel((0, 0), 1)
    assert dataset[len(samples) - 1].tobytes() == samples[-1].tobytes()


def test_it_is_used_as_the_dataset_itself(cached):
    source = Fixed([torch.full((2,), idx) for idx in range(10)])
    source.classes = ["a", "b"]
    dataset = cached(source)
    assert len(dataset) == 10 and isinstance(dataset, Dataset)
    assert dataset.classes is source.classes and dataset.samples is source.samples
    assert not hasattr(dataset, "no_such_thing")
    with pytest.raises(AttributeError):
        dataset.no_such_thing  # noqa: B018
    assert int(dataset[-1][0]) == 9 and int(dataset[-10][0]) == 0
    assert int(dataset[np.int64(3)][0]) == 3 and int(dataset[torch.tensor(4)][0]) == 4
    for idx in (10, -11, 2**70):
        with pytest.raises(IndexError):
            dataset[idx]
    assert [int(row[0]) for row in dataset] == list(range(10)), "IndexError ends the loop"
    for idx in (1.0, "1", None, (1, 2), [True]):
        with pytest.raises(TypeError):
            dataset[idx]
    with pytest.raises(IndexError):
        dataset.__getitems__([1, 10])


def test_other_datasets_go_on_top(cached, log):
    source = Counted(log, 20, words=4)
    dataset = cached(source)
    part, rest = random_split(dataset, [5, 15], torch.Generator().manual_seed(1))
    twice = ConcatDataset([dataset, Subset(dataset, [3, 1])])
    for _ in range(2):
        assert sorted(s[0] for s in part) + sorted(s[0] for s in rest) != list(range(20))
        assert sorted(s[0] for half in (part, rest) for s in half) == list(range(20))
        assert [s[0] for s in twice] == [*range(20), 3, 1]
        assert [s[0] for s in Subset(Subset(dataset, [4, 5, 6]), [2, 0])] == [6, 4]
        assert [s[0] for s in part.__getitems__([0, 1])] == [part.indices[0], part.indices[1]]
    assert source.once_each()


# The transform comes after the cache


def test_a_transform_runs_on_every_access_and_after_the_cache(cached, log):
    calls = []

    def noisy(sample):
        calls.append(sample[0])
        return sample[0], torch.rand(4)

    source = Counted(log, 4, words=4)
    dataset = cached(source, transform=noisy)
    rows = [dataset[2][1] for _ in range(5)]
    assert calls == [2] * 5 and source.loads() == {2: 1}
    assert len({tuple(row.tolist()) for row in rows}) == 5, "random stays random"
    assert [s[0] for s in dataset.__getitems__([1, 2])] == [1, 2]
    assert calls == [2] * 5 + [1, 2]


@pytest.mark.parametrize("kind", [Counted, Together])
def test_a_transform_that_edits_its_input_does_not_edit_the_cache(cached, log, kind):
    dataset = cached(kind(log, 8, words=16), transform=doubled)
    for _ in range(3):
        assert torch.equal(dataset[5][1], 2 * whole(5, 16))
        for batch in ([1, 2, 3, 5], [4, 4, 6, 6]):  # a sampler may repeat itself
            for idx, row in dataset.__getitems__(batch):
                assert torch.equal(row, 2 * whole(idx, 16)), f"sample {idx}"
    for batch in DataLoader(dataset, 4, num_workers=2, collate_fn=stocache.collate):
        for idx, row in zip(batch[0].tolist(), batch[1], strict=True):
            assert torch.equal(row, 2 * whole(idx, 16))


def test_what_is_handed_out_is_a_copy(cached, log, in_child):
    dataset = cached(Counted(log, 4, words=64))
    array = cached([np.arange(5), {"a": [torch.ones(3), np.ones(3)]}])
    for _ in range(4):
        row = dataset[1][1]
        assert complaint(1, row) is None
        row.zero_()
        one, two = array[0], array[1]
        if array.stats().hits:
            assert one.tolist() == list(range(5)) and two["a"][0].tolist() == [1, 1, 1]
            one[:] = 9
            two["a"][0].fill_(9)
            two["a"].append(5)
        del row

    def edit():
        dataset[1][1].fill_(-1)
        return complaint(1, dataset[1][1])

    assert in_child(edit) is None
    # two tensors of one sample do not share memory that one of them could grow into
    pair = cached([(torch.zeros(8), torch.zeros(8))] * 2)
    pair[0]
    left, right = pair[0]
    with contextlib.suppress(RuntimeError):
        left.resize_(64).fill_(5)
    assert not right.any() and not pair[0][1].any()


# Each sample is loaded once per node


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize("workers, context", [(0, None), (2, "fork"), (4, "fork")])
def test_each_sample_is_loaded_once_whatever_the_workers(cached, log, backing, workers, context):
    source = Counted(log, 90, most=3000)
    dataset = cached(source, backing=backing)
    load_all(dataset, workers, context)
    assert source.once_each()
    stats = dataset.stats()
    assert stats.loads == stats.fills == stats.filled == 90 and dataset.is_complete()
    assert stats.hits >= 90 and stats.misses >= 90


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_each_sample_is_loaded_once_by_workers_that_start_afresh(cached, log, context):
    source = Counted(log, 60, most=3000)
    dataset = cached(source)
    load_all(dataset, 2, context, persistent=True)  # starting one takes seconds
    assert source.once_each()
    assert dataset.stats().filled == 60


def load_all(dataset, workers, context, persistent=False):
    """Two epochs, with new workers for each unless they are persistent."""
    loader = DataLoader(
        dataset,
        7,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
        collate_fn=verified,
    )
    for _ in range(2):
        assert sorted(idx for batch in loader for idx in batch) == list(range(len(dataset)))


def test_without_the_cache_it_would_be_twice(log):
    # the control of the counts above
    source = Counted(log, 20)
    load_all(source, 2, "fork")
    assert source.loads() == Counter([*range(20), *range(20)])


RANK = """
    import json, os, sys, time, torch, stocache
    from pathlib import Path
    from sources import Counted, wrong
    from torch.utils.data import DataLoader, DistributedSampler
    torch.set_num_threads(1)
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])

    def barrier(name):
        (folder / f"{name}-{rank}").touch()
        deadline = time.monotonic() + 60
        while not all((folder / f"{name}-{r}").exists() for r in range(world)):
            assert time.monotonic() < deadline, name
            time.sleep(0.01)

    def plain(samples):
        return samples

    def run(label, dataset, **options):
        source = dataset
        cached = stocache.CachedDataset(source, verbose=False, **options)
        barrier(f"{label}-made")
        sampler = DistributedSampler(cached, world, rank, shuffle=True)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(cached, 8, sampler=sampler, num_workers=2, collate_fn=plain):
                for sample in batch:
                    assert wrong(sample[0], sample, source.most) is None
            barrier(f"{label}-{epoch}")
        found = {"filled": cached.stats().filled, "loads": cached.stats().loads}
        barrier(f"{label}-end")
        cached.close()
        return found

    answers = {
        "shared": run("shared", Counted(folder / "shared.log", 64)),
        "apart": run("apart", Counted(folder / "apart.log", 64), memory="8MiB", shared=False),
        # each rank has a shard of its own: the same indices are other samples
        "shards": run("shards", Counted(folder / f"shards{rank}.log", 64), memory="8MiB"),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))
    """


def test_ranks_of_a_node_share_without_an_argument(tmp_path):
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    torchrun.launch(tmp_path / "rank.py", tmp_path, folder=tmp_path).output()
    ranks = torchrun.answers(tmp_path, 2)
    loads = lambda name: Counted(tmp_path / name, 64).loads()  # noqa: E731
    assert loads("shared.log") == Counter(range(64)), "once per node, not once per rank"
    assert [rank["shared"]["filled"] for rank in ranks] == [64, 64]
    apart = loads("apart.log")
    assert sum(apart.values()) > 64 and max(apart.values()) == 2
    assert sum(rank["apart"]["filled"] for rank in ranks) == sum(apart.values())
    for rank in range(2):
        mine = loads(f"shards{rank}.log")
        assert max(mine.values()) == 1 and sum(mine.values()) == ranks[rank]["shards"]["filled"]


def test_programs_that_give_the_same_name_share_one_cache(run_script, tmp_path, unique_name, log):
    program = """
        import sys, stocache
        from sources import Counted, wrong
        name, log = sys.argv[1:]
        options = {"name": name} if name else {}
        dataset = stocache.CachedDataset(
            Counted(log, 40, most=3000), "8MiB", probe=0, verbose=False, **options
        )
        print("open", flush=True)
        sys.stdin.readline()
        for idx in range(40):
            assert wrong(idx, dataset[idx], 3000) is None
        print(dataset.stats().filled, flush=True)
        sys.stdin.readline()
        """
    source = Counted(log, 40, most=3000)
    name = unique_name()
    programs = [run_script.start(program, given, log) for given in (name, name, "")]
    for p in programs:
        assert p.stdout.readline() == "open\n", p.stderr.read()
    for p, times in zip(programs, (1, 1, 2), strict=True):
        p.stdin.write("go\n")
        p.stdin.flush()
        assert p.stdout.readline() == "40\n", p.stderr.read()
        # the second finds what the first loaded; the third gave no name
        assert source.loads() == Counter([*range(40)] * times)
    for p in programs:
        p.communicate("end\n", timeout=60)


# Single flight


class Scripted(Counted):
    """Runs `act(idx)` while it loads."""

    def __init__(self, log, length, act, **options):
        super().__init__(log, length, **options)
        self.act = act

    def __getitem__(self, idx):
        self.note(idx)
        self.act(idx)
        return self.make(idx)


def test_a_sample_that_many_miss_at_once_is_loaded_by_one(
    cached, log, tmp_path, patience, start, wait_until
):
    gate = tmp_path / "gate"

    def slow(idx):
        while not gate.exists():
            time.sleep(0.002)

    patience(60)
    source = Scripted(log, 4, slow)
    dataset = cached(source, fingerprint="x")
    results = FORK.SimpleQueue()
    # __getitem__ and the batch of a DataLoader wait in the same way
    for ask in (lambda: dataset[1], lambda: dataset.__getitems__([1])[0]) * 3:
        start(lambda ask=ask: results.put(wrong(1, ask(), 64)))
    wait_until(lambda: dataset.stats().waits >= 5, "five wait for the sixth")
    assert source.loads() == {1: 1}
    gate.touch()
    assert [results.get() for _ in range(6)] == [None] * 6
    stats = dataset.stats()
    assert source.loads() == {1: 1} and stats.loads == 1
    assert (stats.hits, stats.misses, stats.waits) == (5, 1, 5), "who waits has a hit"


class SlowTogether(Together):
    def __getitem__(self, idx):
        return self.make(idx)  # not noted: asked for only to compare with it

    def __getitems__(self, indices):
        if indices[0] > indices[-1]:  # likewise: nobody asks for them in this order
            return [self.make(idx) for idx in indices]
        time.sleep(1)
        return super().__getitems__(indices)


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_samples_that_take_long_are_loaded_once(cached, log, start, kind):
    # a second each, which is longer than anybody waits for a loader of which nothing is known
    if kind == "one":
        source, asked = Scripted(log, 3, lambda idx: time.sleep(1)), [[0], [1], [2]]
    else:
        source, asked = SlowTogether(log, 24), [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    dataset = cached(source, fingerprint="x")
    results = FORK.SimpleQueue()

    def use():
        got = [s for indices in asked for s in dataset.__getitems__(indices)]
        results.put([wrong(idx, sample, 64) for idx, sample in enumerate(got)])

    for _ in range(4):
        start(use)
    assert [results.get() for _ in range(4)] == [[None] * len(source)] * 4
    assert source.once_each()
    stats = dataset.stats()
    assert (stats.loads, stats.misses, stats.hits) == (len(source), len(source), 3 * len(source))
    assert stats.waits <= 3 * len(source)


def test_a_loader_that_takes_much_longer_than_usual_is_not_waited_for(
    cached, log, tmp_path, patience, start, in_child, wait_until
):
    gate = tmp_path / "gate"

    def slow_there(idx):
        while os.getpid() == slow.value and not gate.exists():
            time.sleep(0.002)

    slow = FORK.Value("i", 0)

    def load():
        slow.value = os.getpid()
        dataset[1]

    patience(0.05)
    source = Scripted(log, 4, slow_there)
    dataset = cached(source, fingerprint="x")
    dataset[0]
    loader = start(load)
    wait_until(lambda: source.loads()[1] == 1, "the loader is at work")
    assert in_child(lambda: wrong(1, dataset[1], 64)) is None
    assert source.loads() == {0: 1, 1: 2} and dataset.stats().filled == 1
    gate.touch()
    loader.join(60)
    stats = dataset.stats()
    assert stats.filled == 2 and (stats.hits, stats.misses, stats.waits) == (0, 3, 1)


def test_without_waiting_all_would_load(cached, log, tmp_path, patience, start, wait_until):
    # the control: who has no patience loads the sample too
    gate = tmp_path / "gate"

    def slow(idx):
        while not gate.exists():
            time.sleep(0.002)

    patience(0)
    source = Scripted(log, 4, slow)
    dataset = cached(source, fingerprint="x")
    loaders = [start(lambda: dataset[1]) for _ in range(3)]
    wait_until(lambda: source.loads() == {1: 3}, "all three load")
    gate.touch()
    for loader in loaders:
        loader.join(60)
    assert dataset.stats().fills == 1, "only the first of them stores it"


def test_threads_of_one_process_load_a_sample_once(cached, log, tmp_path, patience, wait_until):
    gate = tmp_path / "gate"

    def slow(idx):
        while not gate.exists():
            time.sleep(0.002)

    patience(60)
    source = Scripted(log, 4, slow)
    dataset = cached(source, fingerprint="x")
    got = []
    threads = [threading.Thread(target=lambda: got.append(dataset[2])) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: dataset.stats().waits >= 3, "three wait for the fourth")
    gate.touch()
    for thread in threads:
        thread.join(60)
    assert [wrong(2, sample, 64) for sample in got] == [None] * 4 and source.loads() == {2: 1}
    stats = dataset.stats()
    assert (stats.hits, stats.misses, stats.waits) == (3, 1, 3)


@pytest.mark.parametrize("usual", [None, 0.001, 3600], ids=["unknown", "fast", "slow"])
def test_a_stopped_loader_stops_nobody_and_keeps_its_claim(
    cached, log, patience, start, in_child, wait_until, usual
):
    def act(idx):
        if os.getpid() == victim.value:
            os.kill(os.getpid(), signal.SIGSTOP)

    victim = FORK.Value("i", 0)

    def load():
        victim.value = os.getpid()
        assert wrong(1, dataset[1], 64) is None

    patience(0.05)
    source = Scripted(log, 4, act)
    dataset = cached(source, fingerprint="x")
    if usual is not None:  # what loading took so far; who waits for as long as that hangs
        dataset._stocache.records.note_loads(1, usual)
    loader = start(load)
    wait_until(lambda: victim.value and process_state(loader.pid) == "T", "the loader stops")

    def use():
        # the loader stays stopped until all of this has returned
        for _ in range(3):
            assert wrong(1, dataset[1], 64) is None
        for idx, sample in zip([0, 1], dataset.__getitems__([0, 1]), strict=True):
            assert wrong(idx, sample, 64) is None

    in_child(use)
    assert process_state(loader.pid) == "T"
    assert dataset.stats().filled == 1, "sample 1 is still the loader's to store"
    os.kill(loader.pid, signal.SIGCONT)
    loader.join(60)
    assert loader.exitcode == 0
    stats = dataset.stats()
    assert stats.filled == stats.fills == 2 and stats.lost == 0
    hits = stats.hits
    assert wrong(1, dataset[1], 64) is None and dataset.stats().hits == hits + 1


@pytest.mark.parametrize("policy", ["freeze", "lru"])
def test_the_claim_of_a_killed_loader_is_taken_over(
    cached, log, patience, start, in_child, policy, wait_until
):
    victim = FORK.Value("i", 0)

    def act(idx):
        if os.getpid() == victim.value:
            time.sleep(3600)

    def load():
        victim.value = os.getpid()
        dataset[1]

    patience(3600)  # who does not notice the death hangs
    source = Scripted(log, 4, act)
    dataset = cached(source, fingerprint="x", policy=policy)
    loader = start(load)
    wait_until(lambda: source.loads()[1] == 1, "the loader is at work")

    def kill_when_somebody_waits():
        wait_until(lambda: dataset.stats().waits > 0, "somebody waits")
        os.kill(loader.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_somebody_waits)
    killer.start()
    assert in_child(lambda: wrong(1, dataset[1], 64), timeout=60) is None
    killer.join()
    assert source.loads() == {1: 2} and dataset.stats().filled == 1
    dataset[1]
    assert source.loads() == {1: 2}, "what was taken over is kept"


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_a_source_that_raises_leaves_nothing_behind(cached, log, in_child, kind):
    source = Broken(log, 8)
    dataset = cached(source)
    get = dataset.__getitem__ if kind == "one" else lambda idx: dataset.__getitems__([1, idx])[1]
    Path(log + ".broken").touch()
    for _ in range(2):
        with pytest.raises(Fails) as caught:
            get(3)
        assert str(caught.value) == "the disk of sample 3 is on fire"
    assert source.loads()[3] == 2, "every access tries again"
    assert dataset.stats().filled == (0 if kind == "one" else 1)
    os.unlink(log + ".broken")
    waits = dataset.stats().waits
    assert in_child(lambda: wrong(3, get(3), 64)) is None
    assert dataset.stats().waits == waits, "the claim was released"
    assert wrong(3, get(3), 64) is None and source.loads()[3] == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_an_interrupted_load_releases_its_claim(cached, log, error):
    angry = [error("no")]

    def act(idx):
        if angry:
            raise angry.pop()

    source = Scripted(log, 4, act)
    dataset = cached(source, fingerprint="x")
    with pytest.raises(error):
        dataset[1]
    assert wrong(1, dataset[1], 64) is None
    assert dataset.stats().filled == 1 and dataset.stats().waits == 0


def test_a_batch_that_cannot_be_stored_releases_all_its_claims(cached, tmp_path):
    class Mixed(Together):
        def make(self, idx):
            return Plain(idx) if idx == 1 else idx

    source = Mixed(tmp_path / "loads", 8)
    dataset = cached(source, strict=True)
    with pytest.raises(TypeError, match="Plain"):
        dataset.__getitems__([0, 1, 2, 3])
    assert dataset.__getitems__([2, 3]) == [2, 3]
    stats = dataset.stats()
    assert stats.waits == 0, "a claim stayed behind"
    assert dataset._stocache.records.contains(2) and dataset._stocache.records.contains(3)


@pytest.mark.parametrize("fault", ["raises", "too few", "too many"])
def test_a_batch_that_cannot_be_loaded_releases_all_its_claims(cached, log, fault):
    class Faulty(Together):
        fault = None

        def __getitems__(self, indices):
            made = super().__getitems__(indices)
            if self.fault == "raises":
                raise Fails("no")
            return {"too few": made[1:], "too many": [*made, made[0]]}.get(self.fault, made)

    source = Faulty(log, 8)
    dataset = cached(source)
    dataset.__getitems__([6, 7])
    source.fault = fault
    if fault == "raises":
        with pytest.raises(Fails):
            dataset.__getitems__([0, 1, 2])
    else:
        with pytest.warns(RuntimeWarning, match="__getitems__ of the wrapped Faulty gives a list"):
            assert len(dataset.__getitems__([0, 1, 2])) == {"too few": 2, "too many": 4}[fault]
    source.fault = None
    assert dataset.stats().filled == 2
    assert [s[0] for s in dataset.__getitems__([0, 1, 2])] == [0, 1, 2]
    assert dataset.stats().waits == 0 and dataset.stats().filled == 5


def test_an_exception_of_the_source_crosses_from_the_worker(cached, log):
    source = Broken(log, 8)
    dataset = cached(source)
    Path(log + ".broken").touch()
    loader = DataLoader(
        dataset, 2, num_workers=1, multiprocessing_context="fork", collate_fn=verified
    )
    with pytest.raises(Fails, match="the disk of sample 3 is on fire"):
        list(loader)
    gc.collect()  # the workers end with the exception
    os.unlink(log + ".broken")
    assert [idx for batch in loader for idx in batch] == list(range(8))
    assert dataset.is_complete()


# Limits


def file_size(dataset) -> int:
    return os.stat(dataset.path).st_size


def test_a_cache_smaller_than_the_dataset_keeps_what_came_first(cached, log):
    # P16: the room for records holds exactly 40 samples
    source = Counted(log, 100, words=128)
    record = len(implementation._C.codec_encode(source.make(0), False)[1])
    record = -(-record // 16) * 16 + 16  # with its head
    dataset = cached(source, INDEX + 40 * record, backing="shm")
    stats = dataset.stats()
    room = stats.data_bytes // record
    assert 30 <= room < 100
    size = file_size(dataset)
    order = random.sample(range(100), 100)
    for epoch in range(3):
        for idx in order:
            assert complaint(idx, dataset[idx][1]) is None
        stats = dataset.stats()
        assert stats.used_bytes <= stats.data_bytes and file_size(dataset) == size
        assert stats.filled == stats.fills == room and stats.hits == epoch * room
        assert stats.misses == stats.loads == 100 * (epoch + 1) - stats.hits
    contains = dataset._stocache.records.contains
    assert [idx for idx in range(100) if contains(idx)] == sorted(order[:room])
    assert not stats.frozen and stats.evicted == 0 and stats.dropped == 3 * (100 - room)
    plan = stocache.plan(source, INDEX + stats.data_bytes + 18 * 100)
    assert plan.fits == room and plan.hit_rate == room / 100


@pytest.mark.parametrize("policy", ["freeze", "lru"])
def test_a_sample_larger_than_the_cache_passes_through(cached, policy):
    samples = [torch.arange(5), torch.arange(200_000), torch.arange(6)]
    dataset = cached(Fixed(samples), "1MiB", policy=policy)
    for turn in range(3):
        for idx, sample in enumerate(samples):
            assert same(dataset[idx], sample)
        assert dataset.stats().too_large == turn + 1
    stats = dataset.stats()
    assert stats.filled == 2 and stats.hits == 4 and not stats.frozen
    assert "3 too large to store" in str(stats)
    assert "too large" not in str(dataclasses.replace(stats, too_large=0))


def test_lru_makes_room_and_keeps_what_is_used(cached, log):
    source = Counted(log, 400, words=128)
    dataset = cached(source, INDEX + (128 << 10), policy="lru", backing="shm")
    size = file_size(dataset)
    for idx in [*range(400), *random.sample(range(400), 400)]:
        assert wrong_words(idx, dataset[idx]) is None
        assert complaint(7, dataset[7][1]) is None  # always in use
    stats = dataset.stats()
    assert stats.evicted > 100 and stats.used_bytes <= stats.data_bytes
    assert file_size(dataset) == size
    assert stats.filled == stats.fills - stats.evicted
    assert source.loads()[7] < 20, "what is used all the time stays"
    assert sum(source.loads().values()) > 600, "the rest does not fit"


def wrong_words(idx, sample):
    return complaint(idx, sample[1]) if sample[0] == idx else f"{sample[0]} instead of {idx}"


def read_at_random(dataset, most, seed, count, wrongs):
    """Verified reads, one by one and by the batch; for ever if count is None."""
    rng = random.Random(seed)
    done = 0
    while count is None or done < count:
        if rng.random() < 0.3:
            indices = [rng.randrange(len(dataset)) for _ in range(4)]
            samples = dataset.__getitems__(indices)
        else:
            indices = [rng.randrange(len(dataset))]
            samples = [dataset[indices[0]]]
        for idx, sample in zip(indices, samples, strict=True):
            if trouble := wrong(idx, sample, most):
                print(trouble, file=sys.stderr, flush=True)
                wrongs.value += 1
        done += len(indices)


def test_lru_in_many_processes_gives_right_bytes_while_it_evicts(cached, log, start, seed, scale):
    most = 2000
    source = Fixed([(idx, whole(idx, words_of(idx, most))) for idx in range(200)])
    dataset = cached(source, INDEX + (512 << 10), policy="lru", fingerprint="x")
    wrongs = FORK.Value("i", 0)
    count = scale(3000, 300_000)
    readers = [start(read_at_random, dataset, most, seed + n, count, wrongs) for n in range(3)]
    for reader in readers:
        reader.join(120)
        assert reader.exitcode == 0
    stats = dataset.stats()
    assert wrongs.value == 0
    assert stats.evicted > 1000 and stats.hits > 100, "there must be turnover and hits"
    assert stats.used_bytes <= stats.data_bytes


def test_a_cleared_cache_takes_other_samples_in_any_order(cached):
    # what clear() leaves of an index must not lead two samples to one place
    samples = [torch.full((50 + 16 * (idx % 3),), idx) for idx in range(60)]
    dataset = cached(Fixed(samples), policy="freeze")
    for _ in range(6):
        order = random.sample(range(60), 40)
        for idx in order:
            assert same(dataset[idx], samples[idx])
        for idx in order:
            assert same(dataset[idx], samples[idx]), f"sample {idx} is another one after clear()"
        assert dataset.verify(60) == 40
        dataset.clear()
        stats = dataset.stats()
        assert stats.filled == 0 and stats.used_bytes == 0
    dataset.warm(progress=False)
    assert all(same(dataset[idx], samples[idx]) for idx in range(60))


@pytest.fixture
def in_own_shm(in_child):
    """in_own_shm(f, options) is f() in a child whose /dev/shm is a small mount of its own."""

    def probe():
        try:
            mount_shm("size=1m")
        except OSError as error:
            return str(error)

    if os.geteuid() != 0 or in_child(probe):
        pytest.skip("needs root and mounts: a full /dev/shm is not covered")

    def run(function, options="size=64m"):
        def inside():
            mount_shm(options)
            return function()

        return in_child(inside)

    return run


@pytest.mark.parametrize("policy", ["freeze", "lru"])
def test_a_full_mount_freezes_the_cache_and_training_goes_on(in_own_shm, log, policy):
    # P6
    def scenario():
        source = Counted(log, 64, words=1 << 15)
        dataset = stocache.CachedDataset(
            source, "24MiB", policy=policy, backing="shm", verbose=False
        )
        for idx in range(10):
            dataset[idx]
        hog = hog_the_mount()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                for idx in range(64):
                    assert wrong_words(idx, dataset[idx]) is None
                for idx, sample in zip(range(64), dataset.__getitems__(range(64)), strict=True):
                    assert wrong_words(idx, sample) is None
        mine = [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]
        assert len(mine) == 1 and "frozen" in mine[0] and "\n" not in mine[0], mine
        stats = dataset.stats()
        assert stats.frozen and stats.filled == 10 and "frozen" in str(stats)
        assert source.loads()[5] == 1 and source.loads()[50] == 4
        os.unlink(hog)
        dataset.clear()
        assert not dataset.stats().frozen
        for idx in [*range(20), *range(20)]:
            assert wrong_words(idx, dataset[idx]) is None
        assert dataset.stats().filled == 20
        dataset.close()
        return os.listdir("/dev/shm")

    assert in_own_shm(scenario) == []


def test_workers_on_a_full_mount_warn_once_and_go_on(in_own_shm, log):
    def scenario():
        dataset = stocache.CachedDataset(
            Counted(log, 32, words=1 << 15), "24MiB", backing="shm", verbose=False
        )
        dataset[0]
        warned = FORK.Value("i", 0)
        hog = hog_the_mount()

        def work():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for idx in range(32):
                    assert wrong_words(idx, dataset[idx]) is None
            with warned.get_lock():
                warned.value += sum(issubclass(w.category, RuntimeWarning) for w in seen)

        workers = [FORK.Process(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        os.unlink(hog)
        return [worker.exitcode for worker in workers], warned.value

    assert in_own_shm(scenario) == ([0, 0, 0], 1)


# Arguments


@pytest.mark.parametrize(
    "memory, least, most",
    [
        (1 << 20, 1 << 20, 1 << 20),
        ("1MiB", 1 << 20, 1 << 20),
        (" 1.5 mib ", 3 << 19, 3 << 19),
        ("1MB", 10**6, 10**6),
        ("1m", 10**6, 10**6),
        ("2000kb", 2 * 10**6, 2 * 10**6),
        ("1048576", 1 << 20, 1 << 20),
        ("0.001GiB", 1 << 20, 2 << 20),
        (0.0005, 1 << 17, 1 << 30),
    ],
)
def test_memory_may_be_given_in_many_forms(cached, memory, least, most):
    dataset = cached([1, 2, 3], memory, backing="shm")
    size = file_size(dataset)
    assert most // 2 <= size <= most + 4096 if least == most else least // 2 <= size <= most
    assert dataset.stats().data_bytes <= most
    assert [dataset[idx] for idx in (0, 1, 2, 0)] == [1, 2, 3, 1]


@pytest.mark.parametrize(
    "memory, kind",
    [
        (0, ValueError),
        (-5, ValueError),
        (0.0, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        ("", ValueError),
        ("lots", ValueError),
        ("5 parsecs", ValueError),
        ("-1GiB", ValueError),
        ("1e400", ValueError),
        (2**70, ValueError),
        (None, TypeError),
        (True, TypeError),
        ([1], TypeError),
        (1, ValueError),
        ("1TiB", MemoryError),
    ],
)
def test_memory_that_makes_no_sense_is_one_clear_line(cached, memory, kind):
    with pytest.raises(kind) as caught:
        cached([1, 2, 3], memory)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300
    assert "memory" in text and "size_limit_gib" not in text, text


def test_sixteen_tebibytes_are_a_memory_error_that_says_what_there_is(cached):
    with pytest.raises(MemoryError, match="GiB"):
        cached([1, 2, 3], "16TiB")


class Unsized(Dataset):
    def __getitem__(self, idx):
        return idx


class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([1, 2, 3])


@pytest.mark.parametrize(
    "dataset, options, kind, words",
    [
        (5, {}, TypeError, ["dataset", "int"]),
        (Unsized(), {}, TypeError, ["dataset", "len"]),
        (Stream(), {}, TypeError, ["dataset", "map-style"]),
        ([1], {"policy": "fifo"}, ValueError, ["policy", "fifo", "freeze", "lru"]),
        ([1], {"policy": None}, TypeError, ["policy", "None"]),
        ([1], {"transform": 3}, TypeError, ["transform", "3", "function"]),
        ([1], {"backing": "disk"}, ValueError, ["backing", "disk", "memfd"]),
        ([1], {"name": ""}, ValueError, ["name", "letters"]),
        ([1], {"name": "a/b"}, ValueError, ["name", "letters"]),
        ([1], {"name": "x" * 500}, ValueError, ["name", "letters"]),
        ([1], {"name": 7}, ValueError, ["name", "7"]),
        ([1], {"fingerprint": b"x"}, TypeError, ["fingerprint", "str"]),
        ([1], {"keep": True}, ValueError, ["keep", "name"]),
        ([1], {"probe": "all"}, TypeError, ["probe", "all"]),
        ([1], {"probe": -1}, ValueError, ["probe", "-1"]),
    ],
)
def test_bad_arguments_are_one_clear_line(cached, dataset, options, kind, words):
    with pytest.raises(kind) as caught:
        cached(dataset, "1MiB", **options)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_the_default_is_half_of_what_is_free(cached):
    dataset = cached([1, 2, 3], 0.5)
    free = parse_size("memory", 1.0)
    assert 0.3 * free < dataset.stats().data_bytes < 0.6 * (free + dataset.stats().data_bytes)


# Pickles


def test_other_objects_need_a_word_of_permission(cached):
    sample = {"boxes": [1, Plain(5)]}
    closed = cached([sample, 2], strict=True)
    with pytest.raises(TypeError) as caught:
        closed[0]
    text = str(caught.value)
    assert "sample['boxes'][1]" in text and "Plain" in text and "allow_pickle=True" in text
    assert "\n" not in text
    assert closed[1] == 2 and closed.stats().filled == 1 and closed.stats().waits == 0
    opened = cached([sample, {1, 2}], allow_pickle=True)
    for _ in range(2):
        assert opened[0] == sample and opened[1] == {1, 2}
    assert opened.stats().hits == 2


def test_a_planted_pickle_is_not_run_without_permission(cached, unique_name, tmp_path):
    # P19
    mark = tmp_path / "bang"
    options = {"name": unique_name(), "fingerprint": "x", "probe": 4}
    planter = cached([(1, Bomb(mark)), 2], allow_pickle=True, **options)
    planter[0]
    assert not mark.exists(), "storing does not run it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = cached([(1, 1), 2], **{**options, "probe": 0})
        strict = cached([(1, 1), 2], **{**options, "probe": 0, "strict": True})
    with pytest.warns(RuntimeWarning) as told:
        assert reader[0] == (1, 1) and reader.__getitems__([0, 1]) == [(1, 1), 2]
        assert list(DataLoader(reader, 1, sampler=[0], collate_fn=list)) == [[(1, 1)]]
        assert reader.verify() < 2
    for read in (
        lambda: strict[0],
        lambda: strict.__getitems__([0, 1]),
        lambda: list(DataLoader(strict, 2, collate_fn=stocache.collate)),
    ):
        with pytest.raises(ValueError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert len(told) == 2 and not mark.exists(), "a pickle was run"
    assert reader[1] == 2
    planter[0]  # the control: with permission it runs
    assert mark.exists()


# Kills


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parts(4)
def test_killed_processes_leave_no_torn_sample_and_nothing_stuck(cached, scale, seed, policy):
    # P1, P2, P4
    most, length = 8000 if policy == "freeze" else 1500, 120
    samples = [(idx, whole(idx, words_of(idx, most))) for idx in range(length)]
    rng = random.Random(seed)
    wrongs = FORK.Value("i", 0, lock=False)
    kills = reads = 0
    for _ in range(scale(3, 100)):
        memory = "8MiB" if policy == "freeze" else INDEX + (512 << 10)
        dataset = cached(Fixed(samples), memory, policy=policy, fingerprint="x")
        readers = []
        try:
            for turn in range(20):
                while len(readers) < 3:
                    args = (dataset, most, rng.getrandbits(30), None, wrongs)
                    readers.append(FORK.Process(target=read_at_random, args=args))
                    readers[-1].start()
                for _ in range(30):
                    idx = rng.randrange(length)
                    assert wrong(idx, dataset[idx], most) is None
                    reads += 1
                victim = readers.pop(rng.randrange(3))
                os.kill(victim.pid, signal.SIGKILL)
                victim.join()
                kills += 1
                if policy == "freeze" and turn % 7 == 6:
                    break  # it is full by now: a new one
        finally:
            for reader in readers:
                reader.kill()
                reader.join()
        for _ in range(2):  # everything can be used by who is left
            for idx in range(length):
                assert wrong(idx, dataset[idx], most) is None
        stats = dataset.stats()
        assert stats.used_bytes <= stats.data_bytes
        assert stats.filled == length if policy == "freeze" else stats.evicted > length
        reads += stats.hits
        dataset.close()
    print(f"{reads} reads under {kills} kills")
    assert wrongs.value == 0 and reads > scale(3000, 100_000)


WRONG = 7  # the exit code that says so


def train(dataset, most: int, fatal: int | None, seed: int, shared) -> None:
    """An epoch in which one worker is killed at batch `fatal`, in a process of its own (as in
    test_faults.py, which says why)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.manual_seed(seed)
    loader = DataLoader(
        dataset, 4, shuffle=True, num_workers=2, multiprocessing_context="fork", collate_fn=list
    )
    iterator = iter(loader)
    shared[:2] = [worker.pid for worker in iterator._workers]
    try:
        for turn, batch in enumerate(iterator):
            for sample in batch:
                if wrong(sample[0], sample, most) is not None:
                    os._exit(WRONG)
            if turn == fatal:
                os.kill(shared[seed % 2], signal.SIGKILL)
    finally:
        shared[2] = 1


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parts(4)
def test_killed_dataloader_workers_cost_an_epoch_and_no_sample(cached, scale, seed, log, policy):
    rng = random.Random(seed)
    most = 1500
    codes = []
    for _ in range(scale(2, 100)):
        memory = "8MiB" if policy == "freeze" else INDEX + (512 << 10)
        dataset = cached(Counted(log, 96, most), memory, policy=policy)
        for fatal in (rng.randrange(12), rng.randrange(20), None):
            shared = FORK.RawArray("i", 3)
            args = (dataset, most, fatal, rng.getrandbits(30), shared)
            trainer = FORK.Process(target=train, args=args)
            trainer.start()
            trainer.join(60)
            if trainer.exitcode is None:
                assert shared[2], "the epoch hangs"
                trainer.kill()  # torch's own destructor waits for a lock that the dead held
                trainer.join()
            codes.append(0 if trainer.exitcode == 0 else 1)
            assert trainer.exitcode != WRONG, "a wrong sample"
            for file in (f for pid in shared[:2] for f in Path("/dev/shm").glob(f"torch_{pid}_*")):
                file.unlink()
        assert codes[-1] == 0, "without a kill the epoch ends"
        for idx in range(96):
            assert wrong(idx, dataset[idx], most) is None
        dataset.close()
    assert set(codes) == {0, 1}


def test_after_a_kill_of_everybody_the_next_start_cleans_up(run_script, wait_until, log):
    # P4
    child = run_script.start(
        """
        import os, sys, time, stocache
        from sources import Counted
        dataset = stocache.CachedDataset(
            Counted(sys.argv[1], 50), "8MiB", backing="shm", verbose=False
        )
        dataset.warm(progress=False)
        if os.fork():
            print(dataset.path, flush=True)
        time.sleep(3600)
        """,
        log,
    )
    path = child.stdout.readline().strip()
    assert os.path.exists(path)
    run_script.kill_group(child)
    stocache.CachedDataset([1], "1MiB", verbose=False).close()
    assert not os.path.exists(path)


def test_a_child_keeps_the_cache_that_its_parent_closed(cached, log, start, wait_until):
    # P5; a forked child that ends without ado leaves the name to its parent's exit or a sweep
    dataset = cached(Counted(log, 8), backing="shm")
    path, gate = dataset.path, FORK.Event()

    def hold():
        dataset[0]
        gate.wait(60)
        assert wrong(0, dataset[0], 64) is None

    child = start(hold)
    wait_until(lambda: dataset.stats().fills == 1, "the child has it open")
    dataset.close()
    stocache.sweep()
    assert os.path.exists(path), "a live cache was removed"
    gate.set()
    child.join(60)
    assert child.exitcode == 0
    stocache.sweep()
    assert not os.path.exists(path)


# Kept caches, other datasets under the same name, stale samples

# One program that makes the cache; more programs in one process, for starting one takes seconds.
KEEPER = """
    import json, os, sys, stocache
    answers = []
    for text, factor, probe in json.loads(sys.argv[2]):
        names = {"__name__": "source"}
        exec(compile(text, "source.py", "exec"), names)
        try:
            dataset = stocache.CachedDataset(
                names["Data"](factor), "8MiB", name=sys.argv[1], keep=True, backing="shm",
                probe=probe, verbose=False,
            )
        except ValueError as error:
            answers.append(str(error))
            continue
        before = dataset.stats().filled
        answers.append([before, sum(int(dataset[idx][0]) for idx in range(10))])
        dataset.close()
    print(json.dumps(answers))
    """

SOURCE = """
import torch

class Data:
    def __init__(self, factor):
        self.factor = factor
        self.files = [f"{n}.png" for n in range(10)]
        self.scale = lambda x: [x * y for y in (1,)][0]

    def __len__(self):
        return 10

    def __getitem__(self, idx):
        return torch.full([j for j in (3,)], self.scale(self.factor * idx) + 5)
"""


@pytest.fixture
def keep(run_script, unique_name):
    """keep((source, factor, probe), ...): a program that opens the kept cache so, one by one."""
    name = unique_name()
    yield lambda *steps: json.loads(run_script(KEEPER, name, json.dumps(steps)).stdout)
    for path in Path("/dev/shm").glob(f"stocache-*{name}*"):
        path.unlink()


def test_a_kept_cache_is_warm_in_the_next_process_unless_the_dataset_changed(keep):
    assert keep((SOURCE, 1, 0)) == [[0, 95]]
    same, moved, constant, name, attribute, again = keep(
        (SOURCE, 1, 4),
        ("# a comment\n\n" + SOURCE, 1, 4),
        (SOURCE.replace("+ 5", "+ 6"), 1, 0),
        (SOURCE.replace("torch.full(", "torch.full_like(torch.ones(3) * "), 1, 0),
        (SOURCE, 2, 0),
        (SOURCE, 1, 10),
    )
    assert same == [10, 95]
    for changed in (constant, name, attribute):
        assert isinstance(changed, str) and changed.startswith("fingerprint"), changed
        assert "other data" in changed and "\n" not in changed
        (old,) = re.findall(r"`stocache rm (\S+)`\)", changed)
        assert list(Path("/dev/shm").glob(f"stocache-*-{old}")), "it says how to remove the old one"
    assert again == [10, 95], "who was refused did no harm"
    assert moved == [10, 95], "where the code stands is no change"


def test_a_cache_of_other_data_that_is_in_use_says_who_has_to_end(cached, unique_name):
    name = unique_name()
    cached([1, 2], name=name, fingerprint="one")
    with pytest.raises(ValueError, match="other data; use another name or end the programs"):
        cached([1, 2], name=name, fingerprint="other")


def fingerprint_of(body: str, **attributes) -> str:
    """The fingerprint of a dataset whose __getitem__ has this body."""
    names = {"torch": torch, "__name__": "somewhere"}
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    text = "class Data:\n    def __len__(self):\n        return 3\n    def __getitem__(self, i):\n"
    exec(text + lines, names)
    dataset = names["Data"]()
    vars(dataset).update(attributes)
    return fingerprint(dataset).text


def test_the_fingerprint_changes_with_the_code_and_only_then():
    base = "return torch.zeros(3)"
    assert fingerprint_of(base) == fingerprint_of(base)
    bodies = [
        base,
        "return torch.ones(3)",  # another name
        "return torch.zeros(4)",  # another constant
        "return torch.zeros(3) + 1",
        "return self.a",
        "return self.b",
        "return [torch.zeros(j) for j in (1, 2)]",
        "return [torch.ones(j) for j in (1, 2)]",
        "return (lambda: self.a)()",
        "return (lambda: self.b)()",
        "import math\nreturn math.sin(i)",
        "import math\nreturn math.cos(i)",
    ]
    prints = [fingerprint_of(body) for body in bodies]
    assert len(set(prints)) == len(bodies), "two different codes have one fingerprint"
    nested = bodies[6]
    assert fingerprint_of(nested) == fingerprint_of("\n# moved down\n" + nested)
    values = [dict(a=1), dict(a=2), dict(b=1), dict(a=[1, {2}]), dict(a=torch.zeros(2)), {}]
    prints = [fingerprint_of(base, **value) for value in values]
    assert len(set(prints)) == len(values)


def test_a_stale_sample_is_found_and_named(cached, unique_name):
    name = unique_name()
    old = Fixed([torch.full((4,), idx) for idx in range(6)])
    first = cached(old, name=name, fingerprint="x")
    first.warm(progress=False)
    changed = [torch.full((4,), idx) for idx in range(6)]
    changed[2] += 1
    with pytest.raises(ValueError) as caught:
        cached(Fixed(changed), name=name, fingerprint="x", probe=6)[:6]
    text = str(caught.value)
    assert "sample 2 " in text and name in text and "stale" in text and "\n" not in text
    assert cached(old, name=name, fingerprint="x", probe=6).verify(6) == 6
    second = cached(Fixed(changed), name=name, fingerprint="x", probe=0)
    with pytest.raises(ValueError, match="sample 2 "):
        second.verify(6)
    second.clear()
    assert second.verify() == 0, "nothing is cached"
    second[2]
    assert second.verify() == 1


@pytest.mark.parametrize(
    "other",
    [torch.arange(5), torch.arange(4.0), (torch.arange(4),), None, torch.arange(4)[None]],
    ids=repr,
)
def test_a_stale_sample_of_another_kind_is_found_too(cached, other):
    source = Fixed([torch.arange(4)])
    dataset = cached(source)
    dataset[0]
    assert dataset.verify() == 1
    source.samples = [other]
    with pytest.raises(ValueError, match="sample 0 "):
        dataset.verify()


def test_a_random_dataset_is_warned_about(cached, unique_name):
    class Random(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, idx):
            return torch.rand(8)

    name = unique_name()
    first = cached(Random(), name=name, probe=0)
    first.warm(progress=False)
    second = cached(Random(), name=name)
    with pytest.warns(RuntimeWarning, match="transform") as seen:
        second[:4]
    assert sum("another sample" in str(warning.message) for warning in seen) == 1
    with pytest.warns(RuntimeWarning, match="another sample") as seen:
        assert first.verify() == 0
    (warning,) = (each for each in seen if "another sample" in str(each.message))
    assert warning.filename == __file__, "the warning points at the caller"


def test_numbers_of_a_worker_are_not_drawn_again_to_verify_its_samples(cached):
    class Random(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, idx):
            return torch.rand(8)

    dataset = cached(Random())
    dataset.warm(progress=False)  # the first numbers of a first worker
    with pytest.warns(RuntimeWarning, match="another sample"):
        assert dataset.verify() == 0


def test_verify_says_how_many_it_compared(cached, log):
    source = Counted(log, 50)
    dataset = cached(source)
    assert dataset.verify() == 0
    dataset.warm(indices=range(20), progress=False)
    assert dataset.verify(1000) == 20 and dataset.verify(7) == 7 and dataset.verify(0) == 0
    assert sum(source.loads().values()) == 20 + 27
    pickled = cached([{f"{n}" for n in range(20)}, Plain(3)], allow_pickle=True)
    pickled.warm(progress=False)
    assert pickled.verify() == 2


def test_equal_objects_with_other_pickles_are_not_stale(cached):
    # the order of a set depends on its history, and that of texts on the process
    one, other = {0, 8}, {8, 0}
    assert one == other and pickle.dumps(one) != pickle.dumps(other)
    source = Fixed([(one, torch.ones(2), {"a": [Plain(1)]})])
    dataset = cached(source, allow_pickle=True)
    dataset[0]
    source.samples = [(other, torch.ones(2), {"a": [Plain(1)]})]
    assert dataset.verify() == 1
    for stale in (
        ({0, 7}, torch.ones(2), {"a": [Plain(1)]}),
        (other, torch.zeros(2), {"a": [Plain(1)]}),
        (other, torch.ones(2), {"a": [Plain(2)]}),
        (other, torch.ones(2), {"b": [Plain(1)]}),
    ):
        source.samples = [stale]
        with pytest.raises(ValueError, match="sample 0 "):
            dataset.verify()


# Filling ahead, looking, closing


@pytest.mark.parametrize("workers", [0, 2])
def test_warm_fills_what_is_missing(cached, log, workers):
    source = Counted(log, 40)
    dataset = cached(source, transform=doubled)
    stats = dataset.warm(workers, indices=[3, 5, -1, 3], progress=False)
    assert source.loads() == {3: 1, 5: 1, 39: 1}
    assert stats.filled == 3 and not dataset.is_complete()
    stats = dataset.warm(workers, progress=False)
    assert source.once_each() and stats.filled == 40 and dataset.is_complete()
    dataset.warm(workers, progress=False)
    assert source.once_each(), "there was nothing to do"
    with pytest.raises(IndexError):
        dataset.warm(indices=[40], progress=False)


def test_warm_shows_progress_and_passes_errors_on(cached, log, capfd):
    source = Broken(log, 8)
    dataset = cached(source)
    Path(log + ".broken").touch()
    for workers in (0, 1):
        with pytest.raises(Fails, match="on fire"):
            dataset.warm(workers)
        gc.collect()  # the workers end with the exception
    os.unlink(log + ".broken")
    dataset.warm()
    assert "8" in capfd.readouterr().err
    assert dataset.is_complete()


def test_stats_add_up_and_print_in_one_line(cached, log):
    dataset = cached(Counted(log, 10, words=100))
    for idx in (0, 1, 0, 0):
        dataset[idx]
    stats = dataset.stats()
    fields = {field.name for field in dataclasses.fields(stats)}
    assert fields == {*dataset._stocache.records.stats(), "disk", "cluster"}
    assert stats.disk is None and stats.cluster is None
    assert (stats.hits, stats.misses, stats.loads, stats.fills, stats.filled) == (2, 2, 2, 2, 2)
    assert stats.hit_rate == 0.5 and stats.seconds_saved == stats.load_seconds > 0
    assert 1600 <= stats.bytes <= stats.used_bytes <= stats.data_bytes and stats.dataset_len == 10
    assert (stats.waits, stats.lost, stats.dropped, stats.evicted, stats.too_large) == (0,) * 5
    text = str(stats)
    assert "2 of 10 samples" in text and "50.0% hit rate" in text and "\n" not in text
    shown = repr(dataset)
    assert shown.startswith("CachedDataset(") and "2 of 10 samples" in shown
    assert dataset.name and dataset.path == f"/dev/shm/{Path(dataset.path).name}"
    dataset.close()
    assert "closed" in repr(dataset)


def test_a_miss_counts_once_with_the_collate_of_this_package(cached, log):
    source = Counted(log, 20, words=100)
    for memory, kept in (("8MiB", 20), (INDEX + (8 << 10), None)):
        dataset = cached(source, memory)
        loader = DataLoader(dataset, 5, collate_fn=stocache.collate)
        for epoch in range(1, 4):
            before = sum(source.loads().values())
            for _ in loader:
                pass
            stats = dataset.stats()
            kept = kept or stats.filled
            assert kept == stats.filled and (kept == 20 or memory != "8MiB")
            missed = 20 if epoch == 1 else 20 - kept
            assert sum(source.loads().values()) - before == missed, "a miss is loaded once"
            assert stats.hits + stats.misses == 20 * epoch, stats
            assert stats.hits == kept * (epoch - 1)


def test_the_first_line_says_what_fits(log, capsys):
    source = Counted(log, 50, words=128)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        assert capsys.readouterr().out == "" and source.loads() == {}, "nothing is known yet"
        dataset[:50]
        text = capsys.readouterr().out
        assert "50 samples of 1.03 KiB on average" in text and "All of them fit." in text
        assert text.count("\n") == 1 and source.once_each()
    with contextlib.closing(stocache.CachedDataset(source, INDEX + (20 << 10))) as dataset:
        dataset[:50]
        assert "expect a hit rate of" in capsys.readouterr().out
    with contextlib.closing(stocache.CachedDataset(source, "8MiB", verbose=False)) as dataset:
        dataset[:50]
        assert capsys.readouterr().out == ""


def test_a_plan_of_small_samples_counts_all_that_they_take():
    source = list(range(20_000))
    plan = stocache.plan(source, "1MiB")
    dataset = stocache.CachedDataset(source, "1MiB", verbose=False)
    dataset.warm(num_workers=1, progress=False)
    stats = dataset.stats()
    assert 0.98 * stats.filled < plan.fits <= stats.filled < 20_000
    dataset.close()


def test_a_plan_says_what_fits_before_anything_is_spent(log):
    source = Counted(log, 1000, words=128)
    before = set(os.listdir("/dev/shm"))
    plan = stocache.plan(source, "450KB")
    assert set(os.listdir("/dev/shm")) == before
    assert isinstance(plan, stocache.Plan) and plan.dataset_len == 1000
    assert 1 <= plan.sampled <= 16 and sum(source.loads().values()) == plan.sampled
    assert 1024 < plan.smallest == plan.largest == plan.mean < 1100
    assert plan.dataset_bytes == plan.mean * 1000
    assert plan.fits == int(plan.memory / plan.mean) and 200 < plan.fits < 300
    assert plan.hit_rate == plan.fits / 1000 and plan.load_seconds > 0
    text = str(plan)
    assert "1000 samples" in text and f"{plan.fits} fit" in text and "\n" not in text
    assert "All of them fit." in str(stocache.plan(source, "1GiB"))
    varied = stocache.plan(Counted(log, 100, most=1000), "1MiB")
    assert varied.smallest < varied.mean < varied.largest and " to " in str(varied)
    Path(log + ".broken").touch()
    dark = stocache.plan(Broken(log, 4).__class__(log, 4), "1MiB")
    assert dark.sampled == 3 and "sample 3 cannot be loaded (Fails: the disk" in str(dark)
    assert "is not known, because sample 3" in str(dataclasses.replace(dark, sampled=0))
    assert dark.failed and plan.failed is None and "because" not in text
    empty = stocache.plan([], "1MiB")
    assert empty.fits == empty.hit_rate == 0 and "0 samples" in str(empty)
    with pytest.raises(ValueError, match="memory"):
        stocache.plan(source, "nothing")
    refused = stocache.plan([Plain(1)], "1MiB")
    assert refused.sampled == 0 and "sample 0 cannot be stored (sample is a" in str(refused)
    assert stocache.plan([Plain(1)], "1MiB", allow_pickle=True).fits == 1


def test_a_plan_is_what_the_cache_then_holds(cached, log):
    source = Counted(log, 500, words=128)
    plan = stocache.plan(source, "450KB")
    dataset = cached(source, "450KB")
    dataset.warm(progress=False)
    assert abs(plan.fits - dataset.stats().filled) <= 8, "within two pages"


def test_a_closed_dataset_says_so(cached, log):
    dataset = cached(Counted(log, 8))
    dataset[0]
    path = dataset.path
    dataset.close()
    dataset.close()
    assert path is None or not os.path.exists(path)
    for use in (
        lambda: dataset[0],
        lambda: dataset.__getitems__([0]),
        lambda: dataset.stats(),
        lambda: dataset.clear(),
        lambda: dataset.verify(),
        lambda: dataset.warm(progress=False),
        lambda: dataset.name,
        lambda: pickle.dumps(dataset),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert len(dataset) == 8 and "closed" in repr(dataset)


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_copies_of_the_dataset_are_the_same_cache(cached, log, backing):
    source = Counted(log, 20)
    dataset = cached(source, backing=backing, transform=doubled)
    dataset[1]
    twins = [copy.deepcopy(dataset), copy.copy(dataset), pickle.loads(pickle.dumps(dataset))]
    for idx, twin in enumerate(twins):
        assert (twin.name, len(twin), twin.log) == (dataset.name, 20, log)
        twin[1], twin[2 + idx], dataset[2 + idx]
        assert torch.equal(twin[1][1], 2 * whole(1, words_of(1, 64)))
    assert source.loads() == {1: 1, 2: 1, 3: 1, 4: 1}
    del twin, twins
    gc.collect()
    dataset[1]
    assert source.loads()[1] == 1


def test_many_forked_processes_use_one_cache(cached, log, scale):
    source = Counted(log, 300, most=200)
    dataset = cached(source)
    wrongs = FORK.Value("i", 0)
    for _ in range(scale(3, 20)):
        children = []
        for n in range(20):
            args = (dataset, 200, n, 100, wrongs)
            children.append(FORK.Process(target=read_at_random, args=args))
            children[-1].start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * 20
    assert wrongs.value == 0
    assert max(source.loads().values()) == 1


def test_a_grandchild_and_its_parent_both_fill(cached, log):
    source = Counted(log, 30)
    dataset = cached(source)

    def descend(depth):
        for idx in range(depth, 30, 3):
            assert wrong(idx, dataset[idx], 64) is None
        if depth < 2:
            child = FORK.Process(target=descend, args=(depth + 1,))
            child.start()
            child.join()
            assert child.exitcode == 0

    descend(0)
    assert source.once_each() and dataset.is_complete()


def test_a_long_dataset_grows_no_private_memory(run_script, scale):
    # P8
    run_script(
        """
        import os, re, sys, traceback, stocache, torch
        torch.set_num_threads(1)
        N = int(sys.argv[1])

        def private_dirty():
            # what only this process maps counts as private, so the cache itself is left out
            maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
            others = [m for m in maps if m and m.split()[4] != inode]
            assert len(others) == len(maps) - 2, "one mapping of it, and nothing before the first"
            return sum(int(re.search(r"Private_Dirty:\\s+(\\d+)", m)[1]) for m in others) / 1024

        dataset = stocache.CachedDataset(
            range(N), N * 64 + (1 << 20), backing="shm", fingerprint="x", verbose=False
        )
        for idx in range(N):
            dataset[idx]
        assert dataset.is_complete()
        path = dataset.path
        blocks, inode = os.stat(path).st_blocks, str(os.stat(path).st_ino)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                dataset[0]
                before = private_dirty()
                for idx in range(N):
                    value = dataset[idx]
                assert value == idx
                for idx in range(0, N, 64):
                    dataset.__getitems__(range(idx, min(N, idx + 64)))
                dataset.is_complete(), dataset.stats()
                growth = private_dirty() - before
                assert growth <= 8, f"reading: {growth} MiB"
                # the control: an object per sample is what this measurement must see
                held = [dataset[idx] + 10**12 for idx in range(N)]
                assert private_dirty() - before > 8
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.stat(path).st_blocks == blocks, "reading made /dev/shm grow"
        """,
        scale(300_000, 3_000_000),
        timeout=600,
    )


def test_a_cache_of_millions_takes_no_memory_before_it_is_filled(cached):
    dataset = cached(range(3_000_000), "1GiB", backing="shm", fingerprint="x")
    assert file_size(dataset) > 900 << 20
    taken = os.stat(dataset.path).st_blocks * 512
    assert taken < 80 << 20, "only the index is reserved"
    assert dataset[2_999_999] == 2_999_999
    assert os.stat(dataset.path).st_blocks * 512 - taken <= 2 * 4096
