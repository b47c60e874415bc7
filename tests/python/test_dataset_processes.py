"""No sample is loaded in a process that would not have loaded it without a cache."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import stocache
import torch
from handles import (
    BYTES,
    Eager,
    InFile,
    NotHere,
    Unpicklable,
    Zipped,
    expected,
    plain,
    write_samples,
    write_zip,
)
from sources import FORK, Counted, Fixed, words_of
from stocache import _C, _compare
from stocache._dataset import apart as implementation
from torch.utils.data import DataLoader, Dataset

LENGTH = 400
FILE_BUFFER = 4096


@contextlib.contextmanager
def kept(source, name, **options):
    """A cache over `source` that is complete and outlives its processes; removed afterwards."""
    options = {"name": name, "keep": True, "fingerprint": "x", "verbose": False, **options}
    first = stocache.CachedDataset(source, "8MiB", **options)
    path = first._stocache.records.location()["path"]
    try:
        first.warm(progress=False)
        first.close()
        yield options
    finally:
        Path(path).unlink(missing_ok=True)


USES = {
    "constructed": lambda ds, source: None,
    "warmed": lambda ds, source: ds.warm(num_workers=0, indices=range(20), progress=False),
    "verified": lambda ds, source: (ds.warm(0, range(20), progress=False), ds.verify(8)),
    "planned": lambda ds, source: stocache.plan(source, "8MiB"),
}


def wrongs(dataset, workers=2):
    """How many samples are wrong, as workers read them and as they are cached."""
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=plain)
    wrong = 0
    found = [sample for batch in loader for sample in batch]
    wrong += sum(found.count(expected(idx)) != 1 for idx in range(len(dataset)))
    loader = DataLoader(dataset, 4, collate_fn=plain)
    for n, batch in enumerate(loader):
        wrong += sum(sample != expected(4 * n + k) for k, sample in enumerate(batch))
    return wrong


@pytest.mark.parametrize("use", USES)
def test_files_that_are_opened_lazily_are_opened_by_the_workers(tmp_path, use):
    source = InFile(write_samples(tmp_path / "samples", LENGTH), LENGTH, nap=2e-4)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        USES[use](dataset, source)
        assert source.file is None
        assert wrongs(dataset) == 0


def test_a_file_that_is_open_when_workers_are_forked_mixes_their_reads(tmp_path):
    # the control of the test above: it would see what loading one sample here does
    source = InFile(write_samples(tmp_path / "samples", LENGTH), LENGTH, nap=2e-4)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        source[0]
        assert wrongs(dataset) > 0


def test_a_kept_cache_is_joined_without_opening_a_file(tmp_path, unique_name):
    source = InFile(write_samples(tmp_path / "samples", LENGTH), LENGTH, nap=2e-4)
    with kept(source, unique_name()) as options:
        options["verbose"] = True
        with contextlib.closing(stocache.CachedDataset(source, "8MiB", **options)) as dataset:
            assert source.file is None
            dataset.clear()
            assert wrongs(dataset) == 0


@pytest.mark.parametrize("use", USES)
def test_an_archive_that_is_opened_lazily_is_opened_by_the_workers(tmp_path, use):
    source = Zipped(write_zip(tmp_path / "samples.zip", 60), 60)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        USES[use](dataset, source)
        assert source.file is None and wrongs(dataset) == 0


def test_a_handle_that_cannot_be_pickled_stays_in_the_workers(tmp_path):
    source = Unpicklable(write_samples(tmp_path / "samples", 24), 24)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        for use in USES.values():
            use(dataset, source)
        loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn")
        assert [sample for batch in loader for sample in batch] == [*map(expected, range(24))]
        source[0]  # the control
        with pytest.raises(TypeError, match="cannot be pickled"):
            list(loader)


def read_across_the_buffer(source):
    """Whether a sample is right of which the beginning is in the buffer of the file, and the end
    is not. Sample 0 was read."""
    idx = FILE_BUFFER // BYTES
    return source[idx] == expected(idx)


@pytest.mark.parametrize("use", ["warmed", "verified", "planned"])
def test_the_offset_of_a_file_that_is_open_stays_where_it_is(tmp_path, use):
    source = Eager(write_samples(tmp_path / "samples", 1000), 1000)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB", verbose=False)) as dataset:
        assert source[0] == expected(0)
        before = os.lseek(source.file.fileno(), 0, os.SEEK_CUR)
        USES[use](dataset, source)
        assert os.lseek(source.file.fileno(), 0, os.SEEK_CUR) == before
        assert read_across_the_buffer(source)


def test_a_child_that_shares_the_offset_moves_it(tmp_path, monkeypatch):
    # the control of the test above
    source = Eager(write_samples(tmp_path / "samples", 1000), 1000)
    monkeypatch.setattr(implementation, "_have_own_offsets", lambda: None)
    assert source[0] == expected(0)
    stocache.plan(source, "8MiB")
    assert not read_across_the_buffer(source)


def test_nothing_is_loaded_and_no_number_drawn_in_this_process(unique_name):
    source = NotHere(40)

    def numbers():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = numbers()
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        stocache.plan(source, "8MiB")
        dataset.warm(0, range(5), progress=False)
        dataset.warm(2, range(10), progress=False)
        assert dataset.verify() == 10
    with kept(source, unique_name()) as options:
        stocache.CachedDataset(source, "8MiB", **{**options, "verbose": True}).close()
    assert numbers() == before
    with pytest.raises(AssertionError, match="nobody asked"):
        source[0]  # the control


def test_what_is_drawn_is_what_is_drawn_without_printing(capsys):
    class Drawing(Fixed):
        def __getitem__(self, idx):
            return self.samples[idx] + int(torch.randint(1, (1,)))

    def drawn(**options):
        torch.manual_seed(3)
        source = Drawing(list(range(40)))
        dataset = stocache.CachedDataset(source, "8MiB", **options) if options else source
        for idx in range(40):
            dataset[idx]
        if options:
            dataset.close()
        return torch.rand(1).item()

    assert drawn() == drawn(verbose=True) == drawn(verbose=False)
    assert capsys.readouterr().out.count("40 samples") == 1


def test_samples_are_loaded_apart_while_threads_run(log):
    source = Counted(log, 40)
    stop = threading.Event()

    def work():
        rows = torch.rand(200, 200)
        while not stop.is_set():
            rows = (rows @ rows).clamp(0, 1)
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with contextlib.closing(stocache.CachedDataset(source, "8MiB", verbose=False)) as dataset:
            for _ in range(2):
                assert stocache.plan(source, "8MiB").sampled == 16
                dataset.warm(progress=False)
                assert dataset.verify(40) == 40
                dataset.clear()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_worker_may_plan_and_verify_itself(log):
    source = Counted(log, 20)

    def inside():
        dataset = stocache.CachedDataset(source, "8MiB", verbose=False)
        dataset.warm(progress=False)
        found = dataset.verify(), stocache.plan(source, "8MiB").sampled
        dataset.close()
        return found

    receive, send = FORK.Pipe(duplex=False)
    # a daemon, as the workers of a DataLoader are: it may not have children
    child = FORK.Process(target=lambda: send.send(inside()), daemon=True)
    child.start()
    assert receive.poll(60) and receive.recv() == (16, 16)
    child.join()


# The line that says what fits


def test_the_line_comes_once_from_whoever_stores_enough(log, capfd):
    source = Counted(log, 60, words=128)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        for _ in range(2):
            loader = DataLoader(dataset, 4, num_workers=2, collate_fn=plain)
            assert sum(map(len, loader)) == 60
        dataset.clear()
        for idx in range(60):
            dataset[idx]
        text = capfd.readouterr().out
        assert text.count("60 samples of ") == 1 and text.count("\n") == 1
        assert "All of them fit." in text
    assert sum(source.loads().values()) == 120, "nothing was loaded for the line"


def test_the_line_comes_early(log, capfd):
    source = Counted(log, 60)
    with contextlib.closing(stocache.CachedDataset(source, "8MiB")) as dataset:
        for idx in range(15):
            dataset[idx]
        assert capfd.readouterr().out == ""
        dataset[15]
        assert "60 samples of " in capfd.readouterr().out
    with contextlib.closing(stocache.CachedDataset([b"x"] * 3, "8MiB")) as dataset:
        dataset[:3]
        assert "3 samples of " in capfd.readouterr().out
    with contextlib.closing(stocache.CachedDataset(source, "8MiB", verbose=False)) as dataset:
        dataset[:60]
        assert capfd.readouterr().out == ""


def test_the_line_does_not_repeat_what_the_parent_has_yet_to_print(run_script):
    done = run_script(
        """
        import os, sys, stocache
        sys.stdout.write("said once\\n")
        dataset = stocache.CachedDataset(list(range(40)), "8MiB")
        child = os.fork()
        if child == 0:
            dataset[:40]
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert done.stdout.count("said once") == 1 and done.stdout.count("40 samples") == 1


def test_a_line_that_nobody_can_read_is_no_error(run_script):
    done = run_script(
        """
        import os, sys, stocache
        for closed in (lambda: os.close(1), sys.stdout.close, lambda: setattr(sys, "stdout", None)):
            closed()
            dataset = stocache.CachedDataset(list(range(40)), "8MiB")
            assert dataset[:40] == list(range(40))
            dataset.close()
        os._exit(0)
        """
    )
    assert done.stderr == ""


# A cache that was joined is compared where its samples are asked for


def test_the_first_hits_are_compared_by_the_workers(log, unique_name):
    source = Counted(log, 40)
    with kept(source, unique_name(), probe=5) as options:
        before = sum(source.loads().values())
        with contextlib.closing(stocache.CachedDataset(source, "8MiB", **options)) as dataset:
            for _ in range(3):
                loader = DataLoader(dataset, 4, num_workers=2, collate_fn=plain)
                assert sorted(idx for batch in loader for idx, _ in batch) == list(range(40))
            # Each of six workers by itself would make it 30; two that count at once count as one.
            assert 5 <= sum(source.loads().values()) - before < 10, "all workers together"
        before = sum(source.loads().values())
        with contextlib.closing(stocache.CachedDataset(source, "8MiB", **options)) as dataset:
            assert not dataset._stocache.is_settled()
            loader = DataLoader(
                dataset, 4, num_workers=1, multiprocessing_context="spawn", collate_fn=plain
            )
            assert sum(map(len, loader)) == 40
            assert dataset._stocache.is_settled(), "what spawned workers compared counts here too"
            for idx in range(40):
                assert dataset[idx][1].numel() == words_of(idx, 64)
            assert sum(source.loads().values()) - before == 5


def test_a_stale_sample_is_not_served(unique_name):
    source = Fixed([torch.full((4,), idx) for idx in range(20)])
    changed = Fixed([torch.full((4,), idx + 1) for idx in range(20)])
    with kept(source, unique_name()) as options:
        with contextlib.closing(stocache.CachedDataset(changed, "8MiB", **options)) as dataset:
            for _ in range(2):
                with pytest.raises(ValueError, match=r"sample 3 .* stale"):
                    dataset[3]
            for loader in (
                DataLoader(dataset, 4),
                DataLoader(dataset, 4, num_workers=1),
                DataLoader(dataset, 4, collate_fn=stocache.collate),
                stocache.DataLoader(dataset, 4),
                stocache.DataLoader(dataset, 4, num_workers=1),
            ):
                with pytest.raises(ValueError, match="stale"):
                    list(loader)
        with contextlib.closing(
            stocache.CachedDataset(changed, "8MiB", **{**options, "probe": 0})
        ) as dataset:
            assert int(dataset[3][0]) == 3, "the control: without the comparison it is served"


def test_a_source_that_is_gone_is_no_reason_not_to_use_the_cache(tmp_path, unique_name):
    source = InFile(write_samples(tmp_path / "samples", 20), 20)
    with kept(source, unique_name()) as options:
        os.unlink(source.path)
        with contextlib.closing(stocache.CachedDataset(source, "8MiB", **options)) as dataset:
            assert dataset[:20] == [*map(expected, range(20))]


def test_numbers_drawn_to_tell_random_from_stale_are_drawn_again(unique_name):
    class Random(Fixed):
        def __getitem__(self, idx):
            return torch.rand(4), np.random.rand(), random.random()

    source = Random([None] * 20)

    def rest(dataset):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        dataset[3]
        return torch.rand(1).item(), np.random.rand(), random.random()

    without = rest(source)
    with (
        kept(source, unique_name()) as options,
        contextlib.closing(stocache.CachedDataset(source, "8MiB", **options)) as dataset,
    ):
        with pytest.warns(RuntimeWarning, match="another sample"):
            assert rest(dataset) == without
        assert dataset._stocache.records.get(3, False) is not _C.MISS


# What is the same up to rounding


class Rounded(Dataset):
    """A mean, whose last digits depend on who computes it."""

    def __init__(self, share=0.0):
        self.share = share

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        row = torch.arange(1.0, 9.0) + idx
        return row * (1 + self.share), float(row.mean() * (1 + self.share)), idx


@pytest.mark.parametrize("share, stale", [(0.0, False), (1e-6, False), (1e-4, True), (0.1, True)])
def test_rounding_is_no_other_sample_and_a_change_is(unique_name, share, stale):
    with kept(Rounded(), unique_name(), probe=4) as options:
        other = stocache.CachedDataset(Rounded(share), "8MiB", **options)
        with contextlib.closing(other) as dataset:
            if stale:
                with pytest.raises(ValueError, match="stale"):
                    dataset[3]
                with pytest.raises(ValueError, match="stale"):
                    dataset.verify()
            else:
                assert dataset[3][2] == 3 and dataset.verify() == 8


def test_control_bit_by_bit_rounding_is_stale(unique_name, monkeypatch):
    monkeypatch.setattr(_compare, "_ROUNDING", 0.0)
    with kept(Rounded(), unique_name()) as options:
        other = stocache.CachedDataset(Rounded(1e-6), "8MiB", **options)
        with contextlib.closing(other) as dataset, pytest.raises(ValueError, match="stale"):
            dataset[3]


TIME = 1.7e9  # with labels beside it, what may be rounding is more than the labels are


def pairs_of_rows():
    """Two rows with and without the same label, of every kind."""
    yield lambda label: torch.tensor([TIME, label, 0.25], dtype=torch.float64)
    yield lambda label: torch.tensor([TIME, label, 0.25])
    yield lambda label: torch.tensor([TIME, complex(0.25, label)])
    yield lambda label: torch.tensor([30_000, label, 0.25], dtype=torch.float16)
    yield lambda label: torch.tensor([30_000, label, 0.25], dtype=torch.float16).numpy()
    yield lambda label: torch.tensor([TIME, 65_534 + label]).numpy()


def test_labels_beside_a_large_number_are_not_rounded_away(cached):
    for row in pairs_of_rows():
        assert _compare.same(row(1), row(1)) and _compare.same(row(0), row(1)) is False
        dataset = cached(Fixed([row(0)] * 4))
        assert len(dataset[:]) == 4 == dataset.verify()
        dataset.dataset.samples = [row(1)] * 4
        with pytest.raises(ValueError, match="stale"):
            dataset.verify()


def test_control_where_whole_numbers_are_as_others_they_are(monkeypatch):
    monkeypatch.setattr(_compare, "_WHOLE", 0)
    assert all(_compare.same(row(0), row(1)) for row in pairs_of_rows())


def test_what_is_whole_by_chance_may_be_rounding():
    for one, other, largest, dtype in (
        (201, 202, 30_000, torch.bfloat16),  # the next number that it has
        (3000, 3002, 30_000, torch.float16),
        (70_000, 70_001, TIME, torch.float32),
    ):
        rows = [torch.tensor([number, largest], dtype=dtype) for number in (one, other)]
        assert not torch.equal(*rows) and _compare.same(*rows)


THREADS = """
import sys, torch, stocache

class Sums(torch.utils.data.Dataset):
    rows = torch.rand(4, 1_000_003, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        return self.rows[idx].sum()

sums = []
for threads in (4, 1):
    torch.set_num_threads(threads)
    dataset = stocache.CachedDataset(
        Sums(), "8MiB", name=sys.argv[1], fingerprint="x", verbose=False
    )
    sums.append([float(Sums()[idx]) for idx in range(4)])
    dataset[:]  # loads and stores, or compares
    assert dataset.verify() == 4
    kept = dataset if threads == 4 else None
print("sums differ" if sums[0] != sums[1] else "sums do not differ")
"""


def test_another_number_of_threads_makes_no_other_sample(run_script, unique_name):
    done = run_script(THREADS, unique_name())
    assert done.stdout == "sums differ\n", "this is what there was to be forgiven"
