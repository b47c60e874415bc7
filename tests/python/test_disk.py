"""A dataset whose samples lie in memory and on disk: where they come from, and the next run."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import random
import re
import shutil
import stat
import time
import warnings
from collections import Counter
from pathlib import Path

import kernel
import pytest
import stocache
import torch
from kernel import become_nobody, root_only
from samples import complaint, whole
from sources import FORK, INDEX, Counted, Fixed, Point, wrong
from stocache._compare import same
from torch.utils.data import DataLoader

WORDS = 512  # of a sample: 4 KiB
LOADERS = {"torch": DataLoader, "stocache": stocache.DataLoader}


@pytest.fixture
def below(tmp_path):
    return tmp_path / "below"


@pytest.fixture
def on_disk(cached, below):
    """A CachedDataset with so many samples of room in memory, and a disk below."""

    def make(source, memory=16, disk="16MiB", **options):
        options.setdefault("disk_path", below)
        return cached(source, INDEX + memory * (WORDS * 8 + 128), disk=disk, **options)

    return make


def fixed(log, length=100):
    return Counted(log, length, words=WORDS)


def check(sample, index):
    number, row = sample
    assert number == index and row.numel() == WORDS
    assert complaint(index, row) is None


def epoch(dataset, kind="torch", workers=0, batch=8, **options):
    seen = Counter()
    if workers:
        options.setdefault("multiprocessing_context", "fork")
    loader = LOADERS[kind](dataset, batch, shuffle=True, num_workers=workers, **options)
    for numbers, rows in loader:
        for number, row in zip(numbers.tolist(), rows, strict=True):
            assert complaint(number, row) is None
            seen[number] += 1
    assert seen == Counter(range(len(dataset)))


def files(below, kind):
    return sorted(below.glob(f"*/*.{kind}"))


# Where samples are


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_what_does_not_fit_into_memory_comes_from_disk(on_disk, log, kind, workers, policy):
    source = fixed(log)
    room = 16 if policy == "freeze" else 64  # of which there are 32 regions
    dataset = on_disk(source, room, policy=policy)
    for _ in range(3):
        epoch(dataset, kind, workers)
    assert source.once_each()
    stats = dataset.stats()
    # Where samples leave memory, a batch may have to be made again, and is counted again.
    assert stats.misses == 100 and (stats.hits == 200 or (policy == "lru" and stats.hits > 200))
    assert 0 < stats.filled <= room + 1 and stats.disk.hits >= 2 * (100 - room) - 2
    assert dataset.flush() and dataset.is_complete() and "on disk" in str(stats)


def test_a_sample_and_many_are_read_from_disk_alone(on_disk, log):
    source = fixed(log)
    dataset = on_disk(source, memory=1)
    for index in range(100):
        check(dataset[index], index)
    assert dataset.flush()
    for index in range(99, -1, -1):
        check(dataset[index], index)
    for index, sample in enumerate(dataset[:]):
        check(sample, index)
    numbers, rows = dataset.batches[list(range(50, 100))]
    assert numbers.tolist() == list(range(50, 100))
    assert all(complaint(50 + k, row) is None for k, row in enumerate(rows))
    assert source.once_each()


def test_samples_of_any_size_and_kind_come_back_from_disk(cached, below):
    samples = [
        {"a": torch.arange(n), "b": [n, str(n), None], "c": (torch.ones(2, n),)}
        for n in range(1, 400)
    ]
    dataset = cached(Fixed(samples), INDEX, disk="32MiB", disk_path=below)
    for _ in range(2):
        for sample, other in zip(samples, dataset, strict=True):
            assert torch.equal(sample["a"], other["a"]) and sample["b"] == other["b"]
            assert torch.equal(sample["c"][0], other["c"][0])
    assert dataset.stats().disk.hits >= 390


def test_an_edited_sample_is_not_edited_on_disk(on_disk, log):
    dataset = on_disk(fixed(log), memory=1, transform=lambda sample: (sample[0], sample[1].zero_()))
    for _ in range(2):
        assert all(not row.any() for _, row in dataset)
    dataset.transform = None
    for index, sample in enumerate(dataset):
        check(sample, index)


def test_both_levels_are_one_room_for_what_stays(on_disk, log):
    """freeze: what is in memory is not on disk as well where there is no room for both."""
    source = fixed(log, 400)
    dataset = on_disk(source, memory=100, disk=str(240 * 4096))
    for _ in range(3):
        epoch(dataset)
    stats = dataset.stats()
    there = stats.filled + stats.disk.filled
    assert stats.filled >= 95 and stats.disk.filled >= 160
    # The first are in both: not enough is known yet.
    assert 0 <= sum(source.loads().values()) - (400 + 2 * (400 - there)) <= 2 * 16


def test_what_was_not_used_for_longest_leaves_both(on_disk, log, below):
    source = fixed(log, 400)
    dataset = on_disk(source, memory=64, disk=str(128 * 4096), policy="lru")
    for _ in range(3):
        epoch(dataset, workers=2)
    stats = dataset.stats()
    assert stats.disk.evicted > 0 and stats.hits > 0
    assert sum(file.stat().st_blocks * 512 for file in files(below, "dat")) <= 128 * 4096


@pytest.mark.parametrize("key", [None, str])
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_workers_that_are_started_fresh_find_the_disk(on_disk, log, start, key):
    source = fixed(log)
    dataset = on_disk(source, key=key)
    for _ in range(2):
        epoch(dataset, workers=1, multiprocessing_context=start)
    assert source.once_each()


# The next run


RUN = """
    import sys, torch, stocache
    from sources import Counted
    log, below, what = sys.argv[1:]
    source = Counted(log, 100, words=512)
    dataset = stocache.CachedDataset(source, "1MiB", disk="16MiB", disk_path=below, probe=0)
    for _ in range(2):
        for index in range(100):
            number, row = dataset[index]
            assert number == index and row.numel() == 512
    stats = dataset.stats()
    print(sum(source.loads().values()), stats.disk.filled)
    sys.stdout.flush()
    if what == "killed":
        dataset.flush()
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["ends", "killed"])
def test_the_next_run_finds_what_the_last_one_left(run_script, log, below, end):
    first = run_script(RUN, log, below, end, check=False)
    assert first.returncode == (0 if end == "ends" else -9), first.stderr
    assert first.stdout.split()[0] == "100"
    second = run_script(RUN, log, below, "ends")
    assert second.stdout.split() == ["100", "100"], "nothing is loaded again"


def test_workers_write_what_they_have_before_they_end(on_disk, log, below):
    source = fixed(log)
    dataset = on_disk(source, memory=1)
    epoch(dataset, workers=2)
    dataset.close()
    again = on_disk(source, memory=1, probe=0)
    epoch(again)
    assert source.once_each()


def test_a_few_samples_of_another_run_are_compared(on_disk, log):
    source = fixed(log)
    dataset = on_disk(source)
    epoch(dataset)
    dataset.close()
    again = on_disk(source, probe=3)
    epoch(again)
    assert sum(source.loads().values()) == 103
    assert again.stats().hits == 100


def test_samples_that_became_others_are_noticed(on_disk, log):
    samples = [whole(index, WORDS) for index in range(50)]
    options = {"name": "same", "fingerprint": "the same, says the user"}
    dataset = on_disk(Fixed(samples), **options)
    assert sum(1 for _ in dataset) == 50
    dataset.close()
    others = on_disk(Fixed([whole(index, WORDS, version=1) for index in range(50)]), **options)
    with pytest.raises(ValueError, match="stale"):
        others[0]


def test_that_what_is_on_disk_became_stale_is_told_with_where_it_is(on_disk, below):
    options = {"fingerprint": "the same, says the user"}
    dataset = on_disk(Fixed([whole(index, WORDS) for index in range(50)]), **options)
    assert sum(1 for _ in dataset) == 50
    dataset.close()
    (folder,) = below.iterdir()
    others = on_disk(Fixed([whole(index, WORDS, version=1) for index in range(50)]), **options)
    with pytest.warns(RuntimeWarning, match=f"stale.*{re.escape(str(folder))}"):
        sample = others[0]
    assert torch.equal(sample, whole(0, WORDS, version=1))


def test_other_data_are_kept_apart(on_disk, below):
    one = on_disk(Fixed([torch.zeros(4)] * 8))
    other = on_disk(Fixed([torch.ones(4)] * 8))
    for _ in range(2):
        assert not any(sample.any() for sample in one)
        assert all(sample.all() for sample in other)
    assert len(list(below.iterdir())) == 2


def test_a_name_for_other_data_is_refused_or_cleared(on_disk, below):
    made = on_disk(Fixed([torch.zeros(4)] * 8), name="mine")
    made[0]
    made.close()
    (folder,) = below.iterdir()
    other = Fixed([torch.ones(4)] * 8)
    with pytest.raises(ValueError, match=r"other data \(what differs: samples\).*on_change"):
        on_disk(other, name="mine")
    assert folder.exists()
    dataset = on_disk(other, name="mine", on_change="clear")
    assert dataset[0].all() and not folder.exists()


def test_a_store_of_a_newer_format_stays_as_it_is(on_disk, log, below):
    source = fixed(log)
    on_disk(source).close()
    (store,) = below.glob("*/store")
    contents = bytearray(store.read_bytes())
    contents[8] += 1
    store.write_bytes(contents)
    with pytest.raises(RuntimeError, match="it has format 2, this stocache reads format 1"):
        on_disk(source)
    assert store.read_bytes() == contents


@pytest.mark.parametrize("damage", [b"", b"no header", bytes(72)])
def test_a_damaged_store_costs_one_warning_and_its_samples(on_disk, log, below, damage):
    source = fixed(log)
    options = {"name": "mine", "memory": 1, "probe": 0}
    dataset = on_disk(source, **options)
    epoch(dataset)
    dataset.close()
    (store,) = below.glob("*/store")
    store.write_bytes(damage)
    with pytest.warns(RuntimeWarning, match="could not be read.*made anew") as caught:
        again = on_disk(source, **options)
        for _ in range(2):
            epoch(again)
    assert len(caught) == 1 and sum(source.loads().values()) == 200
    again.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(on_disk(source, **options))
    assert sum(source.loads().values()) == 200, "and the next run finds them"


# Keys


class Files:
    """Samples of a list of names."""

    def __init__(self, names, log):
        self.names = names
        self.source = Counted(log, 1, words=WORDS)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        self.source.note(index)
        number = int(self.names[index])
        return number, whole(number, WORDS)

    def key(self, index):
        return Path(self.names[index]), 7


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list_that_changes_keeps_what_is_the_same(on_disk, log, workers):
    def run(names):
        source = Files(names, log)
        dataset = on_disk(source, memory=1, key=source.key, probe=0)
        for numbers, rows in DataLoader(dataset, 8, num_workers=workers):
            assert all(complaint(n, row) is None for n, row in zip(numbers, rows, strict=True))
        dataset.close()
        loads = sum(source.source.loads().values())
        Path(log).unlink()
        return loads

    names = [str(number) for number in range(60)]
    assert run(names) == 60
    assert run([*reversed(names), *map(str, range(100, 120))]) == 20
    Path(log).touch()
    assert run(names[30:]) == 0


def test_a_file_that_is_in_a_list_twice_is_found_twice(on_disk, log):
    names = [str(number % 20) for number in range(60)]
    for _ in range(2):
        source = Files(names, log)
        dataset = on_disk(source, memory=1, key=source.key, probe=0)
        for index in range(60):
            assert dataset[index][0] == index % 20
        dataset.close()
        loads = sum(source.source.loads().values())
    assert loads == 60, "none in the second run"


def test_without_a_key_a_longer_list_is_other_data(on_disk, log, below):
    for names in (["1", "2"], ["1", "2", "3"]):
        dataset = on_disk(Files(names, log))
        assert dataset[0][0] == 1
    assert len(list(below.iterdir())) == 2


def test_what_is_no_key_is_refused(on_disk, log):
    with pytest.raises(TypeError, match=r"key\(0\) is a object; use a str"):
        on_disk(fixed(log), key=lambda index: object())
    with pytest.raises(TypeError, match="a function of the index"):
        on_disk(fixed(log), key="name")


# Samples of classes


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Labelled:
    row: torch.Tensor
    colour: Colour


class Sized(torch.Tensor):
    """A tensor of a class of its own."""


def of_classes(index):
    row = whole(index, WORDS)
    return [
        Point(index, row),
        Labelled(row, list(Colour)[index % 2]),
        {"x": row.as_subclass(Sized), "at": Path(f"/{index}")},
    ][index % 3]


class Classes(Counted):
    def make(self, idx):
        return of_classes(idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_classes_come_back_in_the_next_run(on_disk, log, workers):
    source = Classes(log, 60)
    for run in range(3):
        dataset = on_disk(source, memory=1, probe=0)
        loader = DataLoader(dataset, None, num_workers=workers, multiprocessing_context=None)
        for index, sample in enumerate(loader):
            wanted = of_classes(index)
            assert type(sample) is type(wanted) and same(sample, wanted) is True
        dataset.close()
        loads = sum(source.loads().values())
        # One of each kind makes its classes known. Workers may be at several at the same time.
        assert loads == 60 if run == 0 else 60 + run <= loads <= 60 + run * 3 * (1 + workers)


def test_a_sample_of_a_class_is_compared_in_the_next_run(on_disk, log):
    samples = [Point(index, whole(index, WORDS)) for index in range(20)]
    options = {"name": "same", "fingerprint": "the same, says the user", "memory": 1}
    dataset = on_disk(Fixed(samples), **options)
    assert sum(1 for _ in dataset) == 20
    dataset.close()
    others = on_disk(Fixed([Point(index, torch.zeros(WORDS)) for index in range(20)]), **options)
    with pytest.raises(ValueError, match="stale"):
        others[0]


PLANT = """
    import sys, stocache, torch
    folder, what = sys.argv[1:]
    sys.path.insert(0, folder)

    class Data:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if what == "plain":
                return torch.full((600,), index)
            import planted
            return planted.Pair(index, torch.full((600,), index))

    dataset = stocache.CachedDataset(
        Data(), "1MiB", disk="16MiB", disk_path=folder + "/below", probe=0, fingerprint="one",
        verbose=False,
    )
    samples = [dataset[i] for i in range(20)] + dataset[:]
    loads = dataset.stats().loads
    print(loads, "planted" in sys.modules, type(samples[0]).__name__)
"""


def test_no_class_is_imported_because_a_disk_names_it(run_script, tmp_path):
    module = "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\n"
    (tmp_path / "planted.py").write_text(module)

    def run(what):
        return run_script(PLANT, tmp_path, what).stdout.split()

    assert run("pair") == ["20", "True", "Pair"]
    # The control: who stores such samples gets them, but for the first.
    assert run("pair") == ["1", "True", "Pair"]
    assert run("plain") == ["20", "False", "Tensor"]


# Compression


@pytest.mark.parametrize("way", ["zstd", "lz4"])
def test_packed_samples_take_less_and_come_back(on_disk, log, below, way):
    source = Counted(log, 100, words=WORDS)
    source.make = lambda index: (index, torch.full((WORDS,), index))
    dataset = on_disk(source, memory=1, compression=way)
    assert [number for number, _ in dataset] == list(range(100))
    assert dataset.flush()
    plain, packed = 100 * WORDS * 8, dataset.stats().disk.used_bytes
    assert packed < plain / 4
    dataset.close()
    # Whoever reads it need not say so; and what is written then is not packed.
    again = on_disk(source, memory=1, probe=0)
    for index, (number, row) in enumerate(again):
        assert number == index and row.tolist() == [index] * WORDS
    rows = next(iter(stocache.DataLoader(again, 100)))[1]
    assert torch.equal(rows, torch.arange(100)[:, None].expand(100, WORDS))
    assert source.once_each()


def test_damage_in_packed_samples_is_a_miss(on_disk, log, below, seed):
    rng = random.Random(seed)
    samples = [torch.full((WORDS,), index) for index in range(100)]
    dataset = on_disk(Fixed(samples), memory=1, compression="zstd")
    assert len(dataset[:]) == 100
    dataset.close()
    (file,) = [file for file in files(below, "dat") if b"stor" in file.read_bytes()]
    contents = bytearray(file.read_bytes())
    used = contents.rindex(b"stor")
    for _ in range(50):
        contents[rng.randrange(used)] ^= 1 << rng.randrange(8)
    file.write_bytes(contents)
    again = on_disk(Fixed(samples), memory=1, probe=0)
    assert all(torch.equal(a, b) for a, b in zip(again[:], samples, strict=True))
    assert again.stats().misses > 0


def test_a_plan_says_what_compression_buys(log):
    constant = Fixed([torch.full((100_000,), index) for index in range(64)])
    made = stocache.plan(constant, "16MiB", disk="16MiB")
    assert made.packings["zstd"].ratio > 10 and made.packings["lz4"].ratio > 5
    assert made.packings["zstd"].pays_below > 0 and made.packings["zstd"].pack_seconds > 0
    assert re.search(r'compression="zstd": \d+ times the room, and faster from a disk', str(made))
    assert made.fits < 64
    packed = stocache.plan(constant, "16MiB", disk="16MiB", compression="zstd")
    assert packed.fits == 64 and "All of them fit." in str(packed)
    noise = Fixed([torch.randint(0, 256, (10_000,), dtype=torch.uint8) for _ in range(4)])
    assert 'compression="lz4": no gain.' in str(stocache.plan(noise, "16MiB", disk="1GiB"))
    assert not stocache.plan(noise, "16MiB").packings
    with pytest.raises(ValueError, match="compression= needs disk="):
        stocache.plan(noise, "16MiB", compression="lz4")


# Ahead of use


@pytest.mark.parametrize("kind", ["one", "many", "batches"])
def test_samples_that_were_announced_are_read_once_and_right(on_disk, log, kind, seed):
    source = fixed(log, 400)
    dataset = on_disk(source, memory=1)
    epoch(dataset)
    assert dataset.flush()
    order = random.Random(seed).sample(range(400), 400)
    before = dataset.stats().disk.hits
    dataset.prefetch(order)
    for at in range(0, 400, 40):
        part = order[at : at + 40]
        if kind == "one":
            for index in part:
                check(dataset[index], index)
        elif kind == "many":
            for index, sample in zip(part, dataset[part], strict=True):
                check(sample, index)
        else:
            numbers, rows = dataset.batches[part]
            assert numbers.tolist() == part
            assert all(complaint(n, row) is None for n, row in zip(part, rows, strict=True))
    # Threads that want samples of one read at the same moment may read some themselves, more of
    # them on a busy machine. Where nothing is kept of what was announced, all are read twice.
    assert source.once_each() and dataset.stats().disk.hits - before < 600


def test_what_was_announced_may_be_anything(on_disk, cached, log):
    dataset = on_disk(fixed(log), memory=1)
    dataset.prefetch(range(100))  # nothing is there yet
    epoch(dataset)
    dataset.prefetch([5, 5, -1, 7])
    dataset.prefetch([])
    dataset.prefetch(torch.arange(100))
    check(dataset[99], 99)
    with pytest.raises(IndexError, match="out of bounds"):
        dataset.prefetch([100])
    epoch(dataset, workers=2)  # which have an order of their own, or none
    dataset.prefetch(range(100))
    dataset.clear()
    check(dataset[3], 3)
    dataset.prefetch(range(100))
    dataset.close()
    cached(Fixed([torch.zeros(3)])).prefetch([0])  # without a disk there is nothing to do


# Temporary levels


def test_a_temporary_level_goes_with_its_last_process(on_disk, log, below):
    dataset = on_disk(fixed(log), memory=1, temporary=True)
    for _ in range(2):
        epoch(dataset, workers=2)
    (folder,) = below.iterdir()
    other = on_disk(fixed(log), memory=1, probe=0)
    dataset.close()
    assert folder.exists(), "another one uses it"
    epoch(other)
    other.close()
    assert not folder.exists()


def test_a_temporary_level_goes_at_the_end_of_a_program(run_script, log, below):
    run_script(RUN.replace("probe=0", "probe=0, temporary=True"), log, below, "ends")
    assert not list(below.iterdir())


def test_what_a_killed_job_left_of_a_temporary_level_goes_with_the_next(
    run_script, on_disk, log, below
):
    run_script(RUN.replace("probe=0", "probe=0, temporary=True"), log, below, "killed", check=False)
    (left,) = below.iterdir()
    on_disk(Fixed([torch.zeros(4)] * 8))
    assert not left.exists()


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=root_only)])
def test_a_temporary_level_is_not_marked_through_a_link(on_disk, log, below, tmp_path, others):
    dataset = on_disk(fixed(log), temporary=True)
    (folder,) = below.iterdir()
    dataset.close()
    assert not folder.exists()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for path in (folder, Path(f"{folder}-u{os.geteuid()}")):
        path.mkdir(mode=0o700)
        (path / "temporary").symlink_to(precious)
        if others:
            os.chown(path, 65534, 65534)
    if others:
        with pytest.raises(Exception, match="belongs to user 65534"):
            on_disk(fixed(log), temporary=True)
    else:
        check(on_disk(fixed(log), temporary=True)[3], 3)
    assert precious.read_text() == "mine"


def test_a_level_that_others_keep_does_not_become_temporary(on_disk, log, below):
    on_disk(fixed(log)).close()
    on_disk(fixed(log), temporary=True).close()
    assert len(list(below.iterdir())) == 1


# Trouble


def test_damaged_files_are_misses(on_disk, log, below, seed, scale):
    rng = random.Random(seed)
    source = fixed(log)
    for _ in range(scale(5, 100)):
        dataset = on_disk(source, memory=1)
        epoch(dataset)
        dataset.close()
        for file in (*files(below, "dat"), *files(below, "log")):
            with open(file, "r+b") as opened:
                size = 100 * 4096 if file.suffix == ".dat" else file.stat().st_size
                for _ in range(20):
                    opened.seek(rng.randrange(size))
                    opened.write(bytes([rng.randrange(256)]))
                if rng.random() < 0.2:
                    opened.truncate(rng.randrange(size))
        again = on_disk(source, memory=1, probe=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            epoch(again)
            epoch(again)
        again.close()
    assert sum(source.loads().values()) > 100, "something was damaged"


def churn(log, below, seed, policy):
    """Reads samples at random, and empties everything now and then, until it is killed."""
    rng = random.Random(seed)
    source = Counted(log, 200, words=WORDS)
    options = {"disk": "1MiB", "disk_path": below, "policy": policy, "verbose": False, "probe": 0}
    dataset = stocache.CachedDataset(source, INDEX + 64 * 4224, **options)
    os.write(2, b".")
    while True:
        for index in rng.sample(range(200), 50):
            check(dataset[index], index)
        if rng.random() < 0.02:
            dataset.clear()


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parts(4)
def test_killed_writers_leave_nothing_torn(below, log, seed, scale, policy, monkeypatch):
    monkeypatch.setattr(Counted, "note", lambda self, index: None)
    rng = random.Random(seed)
    children, kills = [], scale(25, 4000)
    try:
        for _ in range(kills):
            while len(children) < 2:
                args = (log, below, rng.getrandbits(30), policy)
                children.append(FORK.Process(target=churn, args=args))
                children[-1].start()
            time.sleep(rng.uniform(0.01, 0.2))
            victim = children.pop(rng.randrange(2))
            victim.kill()
            victim.join()
            assert victim.exitcode == -9, "it saw a sample that is not whole"
    finally:
        for child in children:
            child.kill()
            child.join()
    dataset = stocache.CachedDataset(
        Counted(log, 200, words=WORDS), INDEX + 64 * 4224, disk="1MiB", disk_path=below,
        policy=policy, verbose=False,
    )  # fmt: skip
    epoch(dataset)
    assert dataset.flush()
    epoch(dataset)  # the last of them may have emptied everything just before it was killed
    assert dataset.stats().disk.hits > 0 and dataset.stats().disk.errors == 0
    dataset.close()
    stocache.sweep()  # what the dead left


def test_a_folder_that_is_removed_in_mid_epoch_harms_nobody(on_disk, log, below):
    dataset = on_disk(fixed(log), memory=4)
    epoch(dataset)
    loader = iter(DataLoader(dataset, 5))
    for _ in range(3):
        next(loader)
    shutil.rmtree(below)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for numbers, rows in loader:
            assert all(complaint(n, row) is None for n, row in zip(numbers, rows, strict=True))
        epoch(dataset)
        epoch(dataset, "stocache", workers=2)


@pytest.mark.parametrize("key", [None, str], ids=["numbers", "keys"])
def test_who_comes_when_the_disk_is_gone_goes_on_without_it(on_disk, log, below, key):
    """A pickled dataset, as spawned workers get it, in every epoch."""
    dataset = on_disk(fixed(log), memory=200, key=key)
    epoch(dataset)
    pickled = pickle.dumps(dataset)
    assert dataset.flush()  # who writes there makes files while they are removed
    shutil.rmtree(below)
    if key is not None:
        dataset.close()  # and with the table the keys
    below.write_text("in its place")
    with pytest.warns(RuntimeWarning, match="goes on without the disk level") as caught:
        again = pickle.loads(pickled)
        another = pickle.loads(pickled)
    assert len(caught) == 1
    for index in range(100):
        check(again[index], index)
    epoch(again, "stocache")
    assert again.flush() and again.stats().disk.filled == 0
    again.close()
    another.close()


def test_spawned_workers_go_on_without_a_disk_that_is_gone(on_disk, log, below):
    dataset = on_disk(fixed(log), memory=200)
    shutil.rmtree(below)
    below.write_text("in its place")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epoch(dataset, workers=1, multiprocessing_context="spawn")


def test_a_disk_that_cannot_be_read_is_told_of_where_batches_are_gathered(on_disk, log, below):
    dataset = on_disk(fixed(log), memory=1)
    epoch(dataset)
    assert dataset.flush()
    for file in files(below, "dat"):
        file.unlink()
        file.mkdir()
    loader = stocache.DataLoader(dataset, 10, num_workers=1, multiprocessing_context="fork")
    with pytest.warns(RuntimeWarning, match="cannot read from the disk level") as caught:
        assert sum(len(numbers) for numbers, _ in loader) == 100
    assert len(caught) == 1


@root_only
def test_a_full_disk_costs_one_warning_and_is_used_again_when_there_is_room(
    log, in_child, below, scale
):
    waits = scale(0, 11)  # after trouble the disk is left alone for 10 s

    def run():
        kernel.mount_at(below, "size=6m")
        hog = below / "hog"
        hog.write_bytes(bytes(3 << 20))
        source = Counted(log, 1000, words=WORDS)
        options = {"disk": "8MiB", "disk_path": below / "here", "verbose": False}
        dataset = stocache.CachedDataset(source, INDEX + 8 * 4096, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                epoch(dataset)
                dataset.flush()
        said = [str(each.message) for each in caught]
        full = dataset.stats().disk.filled
        hog.unlink()
        time.sleep(waits)
        epoch(dataset)
        dataset.flush()
        stats = dataset.stats().disk
        dataset.close()
        return said, full, stats.filled, stats.errors, sum(source.loads().values())

    below.mkdir()
    said, full, then, errors, loads = in_child(run)
    assert len(said) == 1 and "No space left" in said[0], said
    assert 0 < full < 1000 and errors > 0 and loads < 3000 - full
    assert then > full if waits else then == full


def test_a_folder_that_cannot_be_written_is_refused_with_a_remedy(on_disk, log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        on_disk(fixed(log), disk_path=tmp_path / "file" / "below")


def test_what_is_written_is_private(on_disk, log, below):
    before = os.umask(0)
    try:
        dataset = on_disk(fixed(log))
        epoch(dataset)
        dataset.flush()
    finally:
        os.umask(before)
    for path in (below, *below.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# Handling


def test_clear_and_delete(on_disk, log, below):
    source = fixed(log)
    dataset = on_disk(source)
    epoch(dataset)
    dataset.clear()
    assert dataset.stats().disk.filled == 0 and not dataset.is_complete()
    epoch(dataset)
    epoch(dataset)
    assert sum(source.loads().values()) == 200
    dataset.delete()
    assert not list(below.iterdir())
    assert not dataset._stocache.records.is_open()


def test_that_others_write_is_told_with_a_remedy(on_disk, log):
    """Two lists of one class, known by keys: they are found in one folder."""
    files = [Files([str(number) for number in range(first, 50, 2)], log) for first in (0, 1)]
    first, second = ({"key": source.key, "probe": 0, "memory": 1} for source in files)
    on_disk(files[0], **first)
    with pytest.warns(RuntimeWarning, match="another dataset.*name="):
        reads = on_disk(files[1], **second)
    assert not reads.stats().disk.writes
    with pytest.raises(RuntimeError, match=r"others write to .*end them first"):
        reads.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writes = on_disk(files[1], name="validation", **second)
    assert writes.stats().disk.writes


class Sorting(Counted):
    """Gives many samples in an order of its own."""

    def __getitems__(self, indices):
        return [self.make(index) for index in sorted(indices)]


@pytest.mark.parametrize("kind", LOADERS)
def test_what_cannot_be_cleared_is_not_used(on_disk, log, kind):
    on_disk(Sorting(log, 100, words=WORDS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = on_disk(
            Sorting(log, 100, words=WORDS), memory=64, policy="lru"
        )  # reads beside it
        epoch(dataset, kind)
        for index in range(100):
            check(dataset[index], index)


class Versions(Fixed):
    version = 0

    def __getitem__(self, index):
        return index, whole(index, WORDS, version=self.version)


def test_what_was_read_ahead_and_cleared_since_is_loaded_anew(on_disk):
    source = Versions(range(64))
    dataset = on_disk(source, memory=1)
    assert sum(1 for _ in dataset) == 64
    assert dataset.flush()
    loader = iter(stocache.DataLoader(dataset, 8))
    next(loader)  # the next ones are being read
    source.version = 1
    dataset.clear()
    for index in range(8, 32):
        dataset[index]  # all of them are there again
    for numbers, rows in loader:
        for index, row in zip(numbers.tolist(), rows, strict=True):
            assert torch.equal(row, whole(index, WORDS, version=1)), index


def test_what_was_announced_and_cleared_since_is_loaded_anew(on_disk, seed):
    source = Versions(range(64))
    dataset = on_disk(source, memory=1)
    assert sum(1 for _ in dataset) == 64
    assert dataset.flush()
    order = random.Random(seed).sample(range(64), 64)
    dataset.prefetch(order)
    source.version = 1
    dataset.clear()
    dataset.warm(num_workers=2, progress=False)
    for index in order:
        assert torch.equal(dataset[index][1], whole(index, WORDS, version=1)), index


def test_two_jobs_on_one_folder_do_not_disturb_each_other(on_disk, log):
    source = fixed(log)
    first = on_disk(source, memory=4)
    epoch(first)
    first.flush()

    def second():
        other = on_disk(source, memory=4, probe=0)
        for _ in range(2):
            epoch(other)
        other.close()

    children = [FORK.Process(target=second) for _ in range(3)]
    for child in children:
        child.start()
    for _ in range(3):
        epoch(first)
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert source.once_each()


def as_another_user(act, folder):
    """Runs `act` as somebody else, in a process of its own."""

    def child():
        become_nobody(folder)
        act()

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    return process.exitcode


@root_only
def test_two_users_of_one_folder_have_levels_of_their_own(tmp_path):
    shared = tmp_path / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)
    samples = [whole(index, WORDS) for index in range(20)]

    def run(**options):
        dataset = stocache.CachedDataset(
            Fixed(samples), INDEX, disk="1MiB", disk_path=shared, fingerprint="one", probe=0,
            verbose=False, **options,
        )  # fmt: skip
        before = dataset.stats().disk.filled
        assert same(list(dataset), samples) is True
        dataset.close()
        return before

    def theirs():
        assert [run(), run()] == [0, 20], "the first finds nothing, and the next one what it left"
        assert [run(name="mine"), run(name="mine")] == [0, 20]

    assert [run(), run(), run(name="mine")] == [0, 20, 0]
    assert as_another_user(theirs, tmp_path) == 0
    assert [run(), run(name="mine")] == [20, 20], "nobody has disturbed them"
    folders = {folder.name: folder.stat().st_uid for folder in shared.iterdir()}
    assert sorted(folders.values()) == [0, 0, 65534, 65534]
    assert all(name.endswith("-u65534") for name, uid in folders.items() if uid)


@root_only
def test_a_folder_of_another_user_is_refused_with_a_remedy(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)

    def act():
        with pytest.raises(PermissionError, match=r"of user 0, .*mode 1777"):
            stocache.CachedDataset(Fixed([torch.zeros(3)]), "1MiB", disk_path=theirs)

    assert as_another_user(act, tmp_path) == 0


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"disk": "1GiB"}, ValueError, "disk= needs disk_path="),
        ({"key": str}, ValueError, "key= needs disk_path="),
        ({"compression": "zstd"}, ValueError, "compression= needs disk_path="),
        ({"temporary": True}, ValueError, "temporary= needs disk_path="),
        ({"compression": "gzip", "disk_path": "x"}, ValueError, "compression 'gzip' is not known"),
        ({"disk": 0, "disk_path": "x"}, ValueError, "disk is 0; it must be"),
        ({"disk": "many", "disk_path": "x"}, ValueError, "disk is 'many'"),
        ({"disk": 2.0, "disk_path": "x"}, ValueError, "a fraction is above 0"),
        ({"disk": 10, "disk_path": "x"}, ValueError, "disk"),
        ({"disk_path": 7}, TypeError, "disk_path is 7; a folder is needed"),
    ],
)
def test_bad_input_is_told_in_one_sentence(options, error, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(said)):
        stocache.CachedDataset(Fixed([torch.zeros(3)]), "1MiB", verbose=False, **options)


def test_a_share_of_what_is_free_is_given(on_disk, log, below):
    dataset = on_disk(fixed(log), disk=0.001)
    free = shutil.disk_usage(below).free
    assert 0.0005 * free < dataset.stats().disk.data_bytes < 0.002 * free
    dataset.delete()


def test_a_share_that_shrinks_a_little_costs_nothing_of_what_is_there(on_disk, log, monkeypatch):
    def on_disk_with(free):
        monkeypatch.setattr("stocache._sharing.disk._free", lambda *_: free)
        return on_disk(fixed(log), memory=1, disk=0.5, probe=0)

    free = 2 * 480 * 1024
    dataset = on_disk_with(free)
    epoch(dataset)
    dataset.close()
    there = {}
    for less in (0, 1 << 12, 1 << 14, free // 2):  # others have written there since
        dataset = on_disk_with(free - less)
        there[less] = dataset.stats().disk.filled, dataset.stats().disk.data_bytes
        dataset.close()
    assert there[0] == there[1 << 12] == there[1 << 14] and there[0][1] == free // 2
    assert there[free // 2][1] < free // 2, "much less is less"


def test_the_first_line_tells_of_both_levels(log, below, capfd):
    dataset = stocache.CachedDataset(fixed(log), "512KiB", disk="16MiB", disk_path=below)
    epoch(dataset)
    said = capfd.readouterr().out
    assert "in memory and 16.0 MiB on disk. All of them fit." in said
    assert "and 1.00 GiB on disk" in str(stocache.plan(fixed(log), "512KiB", disk="1GiB"))
    dataset.delete()


# In the words of BiLevelCache


def test_the_example_of_bilevelcache(log, tmp_path):
    path = tmp_path / "cache"
    data = Counted(log, 300, most=WORDS)
    cached_dataset = stocache.BiLevelCachedDataset(
        data,
        memory_cache_size=INDEX + 200_000,
        disk_cache_size=300_000,
        disk_cache_path=path,
        verbose=False,
    )
    loader_kwargs = {"batch_size": None, "num_workers": 2, "shuffle": True}
    for _ in range(3):
        seen = Counter()
        for sample in DataLoader(cached_dataset, **loader_kwargs):
            assert wrong(int(sample[0]), sample, WORDS) is None
            seen[int(sample[0])] += 1
        assert seen == Counter(range(300))
    memory, disk = cached_dataset.memory_cache, cached_dataset.disk_cache
    assert memory.hits.value + memory.misses.value == 900
    assert disk.hits.value + disk.misses.value == memory.misses.value
    assert disk.misses.value == sum(data.loads().values()) < 900
    assert min(memory.hits.value, disk.hits.value) > 0
    assert cached_dataset.stats().disk.evicted > 0
    shutil.rmtree(path)
    assert wrong(5, cached_dataset[5], WORDS) is None
    cached_dataset.close()


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_the_example_of_bilevelcache_over_files_of_jpeg(tmp_path, below):
    """As its description has it, with other paths and sizes."""
    torchvision = pytest.importorskip(
        "torchvision", reason="torchvision is not installed: no folder of JPEG files is read"
    )
    from PIL import Image

    count, kinds = 120, 3
    files = tmp_path / "images"
    for number in range(count):
        file = files / f"{number % kinds}" / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        noise = torch.Generator().manual_seed(number)
        size = (48 + number % 7, 40 + number % 5, 3)
        picture = torch.randint(0, 256, size, dtype=torch.uint8, generator=noise)
        Image.fromarray(picture.numpy()).save(file, quality=90)
    transforms = torchvision.transforms
    data = torchvision.datasets.ImageFolder(
        str(files), transforms.Compose([transforms.CenterCrop(32), transforms.PILToTensor()])
    )
    expected = Counter((label, picture.numpy().tobytes()) for picture, label in data)
    cached_dataset = stocache.BiLevelCachedDataset(
        data,
        memory_cache_size=INDEX + 130_000,
        disk_cache_size=200_000,
        disk_cache_path=below,
        verbose=False,
    )
    loader_kwargs = {"batch_size": 4, "num_workers": 2, "pin_memory": True, "shuffle": True}
    loader = DataLoader(cached_dataset, **loader_kwargs)
    for _ in range(3):
        seen = Counter()
        for pictures, labels in loader:
            assert pictures.shape[1:] == (3, 32, 32)
            for picture, label in zip(pictures, labels.tolist(), strict=True):
                seen[label, picture.numpy().tobytes()] += 1
        assert seen == expected
    memory, disk = cached_dataset.memory_cache, cached_dataset.disk_cache
    assert min(memory.hits.value, disk.hits.value, disk.misses.value) > 0
    assert memory.hits.value + memory.misses.value == 3 * count
    assert cached_dataset.stats().disk.evicted > 0
    shutil.rmtree(below)
    assert sum(len(labels) for _, labels in loader) == count
    cached_dataset.close()


def test_a_second_level_below_is_refused(on_disk, log, tmp_path):
    dataset = on_disk(fixed(log))
    with pytest.raises(ValueError, match="open already"):
        dataset._stocache.records.open_disk(bytes(tmp_path / "other"), 1 << 24, "", b"", 0, "none")
