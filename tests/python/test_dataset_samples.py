"""A CachedDataset hands out what its source, its subclass and its transform make of a sample."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from pathlib import Path

import pytest
import stocache
import torch
from sources import FORK, INDEX, Counted, Fixed, Plain, Together, doubled
from stocache import _C
from stocache import cached_dataset as implementation
from stocache._dataset.samples import Samples
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset


def rows(count=8):
    return Fixed([torch.full((3,), idx) for idx in range(count)])


def through_loaders(dataset):
    """The first number of every sample, as each kind of loader hands it out."""
    for make in (
        lambda: DataLoader(dataset, 4),
        lambda: DataLoader(dataset, 4, num_workers=1),
        lambda: DataLoader(dataset, 4, collate_fn=stocache.collate),
        lambda: stocache.DataLoader(dataset, 4),
        lambda: stocache.DataLoader(dataset, 4, num_workers=1),
        lambda: DataLoader(Subset(dataset, range(len(dataset))), 4),
        lambda: stocache.DataLoader(Subset(dataset, range(len(dataset))), 4),
        lambda: stocache.DataLoader(ConcatDataset([dataset]), 4),
        lambda: DataLoader(dataset, batch_size=None),
    ):
        for _ in range(2):
            yield [int(n) for batch in make() for n in batch.reshape(-1, 3)[:, 0]]


# A subclass's __getitem__ says what a sample is


class AddsHundred(stocache.CachedDataset):
    def __getitem__(self, index):
        return super().__getitem__(index) + 100


class AddsInBatches(AddsHundred):
    def __getitems__(self, indices):
        return [sample + 100 for sample in super().__getitems__(indices)]


class InheritsBoth(AddsInBatches):
    pass


@pytest.mark.parametrize("kind", [AddsHundred, InheritsBoth])
def test_the_items_of_a_subclass_are_those_of_its_batches(kind):
    with contextlib.closing(kind(rows(), "8MiB", verbose=False)) as dataset:
        for found in through_loaders(dataset):
            assert found == list(range(100, 108))
        dataset.warm(progress=False)
        for found in through_loaders(dataset):
            assert found == list(range(100, 108))


def test_without_a_look_at_the_class_a_subclass_is_bypassed(monkeypatch):
    # the control of the test above
    monkeypatch.setattr(implementation.attributes, "defines_items_anew", lambda kind: False)
    with contextlib.closing(AddsHundred(rows(), "8MiB", verbose=False)) as dataset:
        assert int(dataset[3][0]) == 103
        assert next(iter(DataLoader(dataset, 4)))[:, 0].tolist() == [0, 1, 2, 3]


class WithAnItemOfItsOwn(Together):
    """Inherits a __getitems__ that knows nothing of what it does to a sample."""

    def __getitem__(self, idx):
        number, row = super().__getitem__(idx)
        return number + 100, row


class OverOther(Dataset):
    """Forwards what it does not have, as wrappers do."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, idx):
        number, row = self.inner[idx]
        return number + 100, row

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


def test_the_items_of_a_source_are_what_is_cached(cached, log):
    dataset = cached(WithAnItemOfItsOwn(log, 8))
    for _ in range(2):
        assert [number for number, _ in dataset.__getitems__(range(8))] == list(range(100, 108))
    assert dataset[3][0] == 103


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped OverOther gives other samples")
def test_a_getitems_that_is_forwarded_makes_batches_as_with_torch(cached, log):
    source = OverOther(Together(log, 8))
    dataset = cached(source)
    for _ in range(2):
        batches = [numbers.tolist() for numbers, _ in DataLoader(dataset, 1)]
        assert batches == [numbers.tolist() for numbers, _ in DataLoader(source, 1)]
        assert [number for number, _ in dataset.__getitems__([3, 1])] == [3, 1], "past its items"
        assert [dataset[idx][0] for idx in (1, 3)] == [101, 103]


# A transform edits copies


@pytest.mark.parametrize("memory", ["8MiB", INDEX + 4096])
@pytest.mark.parametrize("kind", ["list", "TensorDataset", "own batches"])
def test_a_transform_that_edits_does_not_reach_the_source(cached, memory, kind):
    table = torch.arange(24).reshape(8, 3)
    wide = torch.ones(8, 4000)  # with these, few fit into the small memory
    source = {
        "list": [(table[idx], wide[idx]) for idx in range(8)],
        "TensorDataset": TensorDataset(table, wide),
        "own batches": Batched([(table[idx], wide[idx]) for idx in range(8)]),
    }[kind]

    def edits(sample):
        sample[0].mul_(2)
        sample[1].zero_()
        return sample

    dataset = cached(source, memory, transform=edits)
    for _ in range(3):
        for idx in range(8):
            assert torch.equal(dataset[idx][0], 2 * torch.arange(3 * idx, 3 * idx + 3))
        for number, batch in enumerate(dataset.__getitems__([1, 1, 5, 7])):
            assert int(batch[0][0]) == 6 * [1, 1, 5, 7][number]
    assert torch.equal(table, torch.arange(24).reshape(8, 3)) and wide.all()
    assert dataset.stats().filled < 8 or memory == "8MiB"


class Batched(Fixed):
    def __getitems__(self, indices):
        return [self.samples[idx] for idx in indices]


def test_a_transform_of_a_sample_that_cannot_be_stored_edits_a_copy_too(cached):
    source = [{"row": torch.ones(3), "other": Plain({1, 2})} for _ in range(4)]

    def edits(sample):
        sample["row"].mul_(2)
        sample["other"].value.add(3)
        return sample

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        dataset = cached(source, transform=edits)
        for _ in range(2):
            found = dataset[1]
            assert found["row"].tolist() == [2, 2, 2] and found["other"] == Plain({1, 2, 3})
    assert source[1]["row"].tolist() == [1, 1, 1] and source[1]["other"] == Plain({1, 2})


def test_a_transform_that_is_given_the_source_itself_edits_it(cached, monkeypatch):
    # the control of the tests above
    monkeypatch.setattr(Samples, "_copied", lambda self, index, sample: sample)
    source = [(0, torch.ones(3))]
    cached(source, transform=doubled)[0]
    assert source[0][1].tolist() == [2, 2, 2]


def test_a_copy_for_a_transform_counts_neither_as_a_hit_nor_as_a_load(cached, log):
    dataset = cached(Counted(log, 8), transform=lambda sample: sample)
    dataset[:8], dataset[3]
    stats = dataset.stats()
    assert (stats.hits, stats.misses, stats.loads) == (1, 8, 8)


# A sample that cannot be stored


class OneOfAnotherType(Fixed):
    def __getitem__(self, idx):
        sample = {"row": torch.full((3,), idx), "boxes": [idx]}
        if idx % 10 == 7:
            sample["boxes"].append(Plain(1))
        return sample


def shows_warnings(worker):
    """In place of pytest, which keeps them in the process that warns."""
    warnings.showwarning = lambda text, *rest, **more: print(text, file=sys.stderr, flush=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_stored_passes_through(cached, workers, recwarn, capfd):
    dataset = cached(OneOfAnotherType([None] * 20))
    for epoch in (1, 2, 3):
        loader = DataLoader(
            dataset, 4, num_workers=workers, collate_fn=list, worker_init_fn=shows_warnings
        )
        found = [sample for batch in loader for sample in batch]
        assert [int(sample["row"][0]) for sample in found] == list(range(20))
        assert found[17]["boxes"] == [17, Plain(1)]
        stats = dataset.stats()
        assert stats.filled == 18 and stats.unsupported == 2 * epoch and stats.waits == 0
    told = [str(w.message) for w in recwarn] + capfd.readouterr().err.splitlines()
    told = [line for line in told if "is not cached" in line]
    assert len(told) == 1, "once for all processes and epochs"
    assert "sample['boxes'][1]" in told[0] and "allow_pickle=True" in told[0]
    assert "2 of types that are not stored" not in str(stats)
    assert "6 of types that are not stored" in str(stats)


def test_strict_makes_an_error_of_it(cached):
    # which is also the control: this is what would end an epoch
    dataset = cached(OneOfAnotherType([None] * 20), strict=True)
    for _ in range(2):
        with pytest.raises(TypeError, match="boxes"):
            list(DataLoader(dataset, 4, collate_fn=list))
    assert dataset[8]["boxes"] == [8] and dataset.stats().waits == 0


def test_a_sample_that_fails_while_it_is_stored_passes_through(cached):
    class Sour:
        def __reduce__(self):
            raise RuntimeError("not today")

    dataset = cached(Fixed([Sour(), 1]), allow_pickle=True)
    with pytest.warns(RuntimeWarning, match="sample 0 is not cached"):
        assert isinstance(dataset[0], Sour)
    assert dataset[:2][1] == 1


def test_a_warning_that_was_asked_for_as_an_error_is_one(cached):
    dataset = cached(Fixed([Plain(0), 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="Plain"):
            dataset[0]
        assert dataset[0] == Plain(0), "once"


def test_a_sample_that_is_too_large_is_warned_about_once(cached):
    dataset = cached([torch.zeros(100_000), torch.zeros(1)], INDEX + (64 << 10))
    with pytest.warns(RuntimeWarning, match="sample 0 is larger than the cache") as seen:
        dataset[0], dataset[0], dataset[1]
    assert len(seen) == 1 and dataset.stats().too_large == 2


def test_a_sample_that_is_too_large_for_memory_and_disk_is_told_so(cached, tmp_path):
    samples = [torch.zeros(2**20), torch.zeros(1)]
    dataset = cached(samples, INDEX + (64 << 10), disk="2MiB", disk_path=tmp_path)
    with pytest.warns(RuntimeWarning, match="in memory, not taken by the disk, and loaded") as seen:
        dataset[0], dataset[0], dataset[1]
    assert len(seen) == 1 and str(seen[0].message).endswith("give it more memory or disk")


# Interrupts


def is_free(dataset, index):
    with dataset._stocache.records.acquire([index], 0.0) as samples:
        if not samples.to_load():
            return True
        with contextlib.suppress(TypeError):
            return samples.put(index, object(), False) is not _C.Put.STORED_ELSEWHERE
        return True


@pytest.mark.parametrize("batch", [False, True])
def test_an_interrupt_at_any_line_leaves_no_claim(cached, log, batch):
    source = Together(log, 400)
    dataset = cached(source)
    codes = {
        function.__code__
        for function in (Samples.load, Samples._load_many, Samples._load_together, Samples._store,
                         source.__getitems__.__func__)
    }  # fmt: skip
    interrupted = 0
    for line in range(60):
        left = line

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code not in codes:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return trace

        chosen = [4 * line + k for k in range(4)]
        sys.settrace(trace)
        try:
            dataset.__getitems__(chosen) if batch else dataset[chosen[0]]
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert all(is_free(dataset, index) for index in chosen), f"after {line} lines"
    assert interrupted > 10
    # The control: a claim that is held is seen.
    with dataset._stocache.records.acquire([399], 0.0) as samples:
        samples.to_load()
        assert not is_free(dataset, 399)


# Exceptions that end a loop


class RunsDry:
    """A transform whose iterator has four numbers."""

    def __init__(self):
        self.numbers = iter(range(4))

    def __call__(self, row):
        return row + next(self.numbers)


def test_a_transform_that_runs_dry_shortens_no_batch(cached):
    for ask in (lambda dataset: dataset.__getitems__(range(8)), lambda dataset: dataset[:]):
        with pytest.raises(StopIteration):
            ask(cached(rows(), transform=RunsDry()))
    for loader in (DataLoader, stocache.DataLoader):
        batches = list(loader(cached(rows(), transform=RunsDry()), 3))
        assert [len(batch) for batch in batches] == [3], "the epoch ends, as with torch"


def test_control_what_is_mapped_ends_without_a_word(cached, monkeypatch):
    def mapped(self, transform, samples, indices):
        return list(map(transform, samples))

    monkeypatch.setattr(Samples, "transformed", mapped)
    dataset = cached(rows(), transform=RunsDry())
    assert [len(batch) for batch in DataLoader(dataset, 3, sampler=range(6))] == [3, 1]


class ShorterThanItSays(Dataset):
    """Its end is an IndexError, as iteration without __iter__ wants it."""

    def __len__(self):
        return 10

    def __getitem__(self, idx):
        if idx >= 7:
            raise IndexError(idx)
        return idx


def test_iteration_ends_where_the_source_does(cached):
    dataset = cached(ShorterThanItSays())
    for _ in range(2):
        assert list(dataset) == list(ShorterThanItSays()) == list(range(7))
    with pytest.raises(IndexError):  # control: it does not end there by itself
        [dataset[idx] for idx in range(len(dataset))]


# Slices and lists


def test_slices_and_lists_give_lists_of_samples(cached, log):
    dataset = cached(Counted(log, 10), transform=lambda sample: sample[0])
    assert dataset[:4] == [0, 1, 2, 3] and dataset[-2:] == [8, 9] and dataset[8:2:-3] == [8, 5]
    assert dataset[[0, 2]] == [0, 2] and dataset[[-1, 3, 3]] == [9, 3, 3] and dataset[[]] == []
    assert dataset[range(2, 4)] == [2, 3]
    assert dataset[torch.tensor([4, 1])] == [4, 1] == dataset[torch.tensor([4, 1]).numpy()]
    assert dataset[20:] == [] and dataset[torch.tensor(5)] == 5
    for index in ([True, False], ["a"], [1.5], (1, 2)):
        with pytest.raises(TypeError):
            dataset[index]
    part = Subset(dataset, [7, 8, 9])
    assert part[[0, 2]] == [7, 9], "as torch's Subset asks"
    with pytest.raises(IndexError):
        cached(list(range(10)))[[0, 10]]


# Workers that change their dataset


class Opened(Dataset):
    """Needs a handle that a worker_init_fn sets."""

    handle = None

    def __init__(self, length):
        self.length = length
        self.offset = 0

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        assert self.handle == os.getpid()
        return idx + self.offset


def opens(worker):
    info = torch.utils.data.get_worker_info()
    info.dataset.handle = os.getpid()
    info.dataset.offset = 1000


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_what_a_worker_sets_reaches_the_source(cached, context):
    dataset = cached(Opened(8))
    loader = DataLoader(
        dataset, 4, num_workers=1, worker_init_fn=opens, multiprocessing_context=context
    )
    assert torch.cat(list(loader)).tolist() == list(range(1000, 1008))
    assert dataset.dataset.offset == 0
    dataset.clear()
    with pytest.raises(AssertionError):
        dataset.warm(progress=False)
    gc.collect()  # the workers end with the exception
    dataset.warm(1, None, False, context, opens)
    assert dataset[:] == list(range(1000, 1008))


def test_a_name_and_a_path_of_the_source_are_those_of_the_source(cached):
    source = rows()
    dataset = cached(source)
    assert dataset.name and (dataset.path is None or dataset.path.startswith("/dev/shm/"))
    source.path, source.name = "pictures", "train"
    assert (dataset.path, dataset.name) == ("pictures", "train")


def test_a_forked_child_that_sets_what_is_new_keeps_it(cached):
    dataset = cached(rows())

    def child(send):
        dataset.mine = 5
        send.send(dataset.mine)

    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=child, args=(send,))
    process.start()
    assert receive.poll(60) and receive.recv() == 5
    process.join()
    assert not hasattr(dataset, "mine")


# Keys that are not cached


class ByKey(Dataset):
    """Takes what its sampler yields: an index and a size, a name, an index beyond its length."""

    def __init__(self, many=False):
        self.many = many

    def __len__(self):
        return 8

    def __getitem__(self, key):
        if isinstance(key, tuple):
            return torch.full((key[1],), key[0])
        return torch.full((2,), ord(key) if isinstance(key, str) else key % 8)


class ManyByKey(ByKey):
    def __getitems__(self, keys):
        return [self[key] for key in keys]


KEYS = {
    "pairs": [(idx, 3) for idx in range(8)],
    "names": list("abcdefgh"),
    "wrapping": list(range(4, 12)),
    "far below": [-9, 1, 2, -20],
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("source", [ByKey, ManyByKey])
def test_other_keys_are_passed_on(cached, source, kind, keys):
    options = {"sampler": KEYS[keys], "batch_size": 2}
    expected = torch.cat(list(DataLoader(source(), **options)))
    for warm in (False, True):
        dataset = cached(source())
        if warm:
            dataset.warm(progress=False)
        with pytest.warns(RuntimeWarning, match=r"index .* is passed on to the dataset") as seen:
            for _ in range(2):
                assert torch.equal(torch.cat(list(kind(dataset, **options))), expected)
                assert torch.equal(dataset[KEYS[keys][-1]], expected[-1])
        assert len(seen) == 1 and dataset.stats().unsupported >= 4
        with_workers = list(kind(dataset, num_workers=1, **options))
        assert torch.equal(torch.cat(with_workers), expected)
        augmented = cached(source(), transform=lambda row: row.add_(1))
        with pytest.warns(RuntimeWarning, match="passed on"):
            assert torch.equal(torch.cat(list(kind(augmented, **options))), expected + 1)


class WithPadding(Dataset):
    """Its sampler fills batches up with -1, which it gives a meaning of its own."""

    def __init__(self, log=None):
        self.log, self.main = log, os.getpid()

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        if self.log is not None and os.getpid() == self.main:
            Path(self.log).touch()
        return torch.full((2,), 1000 if idx < 0 else idx)


class FromTheEnd(WithPadding):
    def __getitem__(self, idx):
        return super().__getitem__(idx % 8)


UP_TO_END = [[0, 1], [2, -1], [-8, 7]]


@pytest.mark.filterwarnings("ignore:index -1 is passed on to the dataset")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("source", [WithPadding, FromTheEnd])
def test_a_negative_index_means_what_it_means_to_the_dataset(cached, log, source, kind, workers):
    expected = [batch.tolist() for batch in DataLoader(source(), batch_sampler=UP_TO_END)]
    for warm in (False, True):
        dataset = cached(source(log if workers else None))
        if warm:
            dataset.warm(progress=False)
        loader = kind(dataset, batch_sampler=UP_TO_END, num_workers=workers)
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == expected
        assert not Path(log).exists(), "nothing is loaded beside the workers"
        assert dataset.stats().filled == (8 if warm else 4 if source is FromTheEnd else 2)
        dataset.dataset.log = None
        assert torch.equal(dataset[-1], source()[-1]) and torch.equal(dataset[7], source()[7])
        augmented = cached(source(), transform=lambda row: row.add_(1))
        assert torch.equal(augmented[[2, -1]][1], source()[-1] + 1)


def test_control_who_always_counts_from_the_end_gives_another_sample(cached, monkeypatch):
    monkeypatch.setattr(Samples, "_is_from_end", lambda *_: True)
    assert cached(WithPadding())[-1].tolist() == [7, 7] != WithPadding()[-1].tolist()


def test_control_who_finds_out_where_nothing_may_be_loaded_is_seen(cached, log, monkeypatch):
    places = Samples._places
    monkeypatch.setattr(Samples, "_places", lambda self, keys, may_load=True: places(self, keys))
    dataset = cached(FromTheEnd(log))
    dataset.warm(progress=False)
    list(stocache.DataLoader(dataset, batch_sampler=UP_TO_END, num_workers=1))
    assert Path(log).exists()


def test_what_is_counted_from_the_end_is_cached(cached):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in ([5, 6, 7], TensorDataset(torch.arange(3)), rows(3)):
            dataset = cached(source)
            for _ in range(3):
                dataset[-1], dataset[[-1, 0]]
            stats = dataset.stats()
            assert (stats.loads, stats.filled, stats.hits) == (2, 2, 7)


def test_finding_out_draws_no_number(cached):
    class Noisy(WithPadding):
        def __getitem__(self, idx):
            return torch.rand(2)

    def after(dataset):
        torch.manual_seed(1)
        return dataset[-1].tolist(), torch.rand(1).item()

    with pytest.warns(RuntimeWarning, match="index -1 is passed on"):  # for all that is known
        assert after(cached(Noisy())) == after(Noisy())


def test_control_a_number_of_every_key_ends_the_epoch(cached, monkeypatch):
    monkeypatch.setattr(Samples, "_place", Samples.place)
    monkeypatch.setattr(Samples, "_places", lambda self, keys: [self.place(key) for key in keys])
    for keys, error in (("pairs", TypeError), ("wrapping", (IndexError, RecursionError))):
        with pytest.raises(error):
            list(DataLoader(cached(ByKey()), 2, sampler=KEYS[keys]))


def test_a_source_that_knows_its_end_says_so_itself(cached):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = cached([1, 2, 3])
        for index in (3, -4):
            with pytest.raises(IndexError, match="list index out of range"):
                dataset[index]
        with pytest.raises(IndexError):
            dataset.__getitems__([1, 3])
        with pytest.raises(TypeError):
            dataset["one"]
        assert list(dataset) == [1, 2, 3] and 2 in dataset and dataset.stats().unsupported == 0
        assert [int(row[0]) for row in cached(ByKey())] == list(range(8)), "len() ends the loop"


# Nothing at all


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_an_empty_dataset_is_an_empty_epoch(cached, kind):
    dataset = cached([])
    assert len(dataset) == 0 and list(dataset) == [] and dataset[:] == []
    assert dataset.is_complete() and dataset.stats().dataset_len == 0
    assert "0 of 0 samples" in str(dataset.warm(progress=False)) and dataset.verify() == 0
    for workers in (0, 1):
        assert [*kind(dataset, 4, num_workers=workers)] == [*DataLoader([], 4)] == []
    assert len(torch.utils.data.ConcatDataset([dataset, cached([1, 2])])) == 2
    with pytest.raises(IndexError):
        dataset[0]
    assert "0 of 0 samples" in repr(dataset)
