"""A dataset whose ``__getitems__`` gives as many samples as there are indices, and not those of the
indices: in another order, or made to fit their batch. Nothing of that is stored under an index."""

from __future__ import annotations

import collections
import random
import threading
import time
import warnings

import pytest
import stocache
import torch
from sources import INDEX, Fixed
from stocache._compare import same
from stocache._dataset import together
from stocache._dataset.samples import Samples
from stocache._dataset.together import Together
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

N = 24
OTHERS = "gives other samples than .* does, in another order or made to fit their batch"


class Rows(Dataset):
    """Sample i has 1 to 7 numbers."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return torch.full((1 + idx % 7,), float(idx))


class Sorted(Rows):
    """Reads in increasing order, as h5py wants it."""

    def __getitems__(self, indices):
        return [self[idx] for idx in sorted(indices)]


class SortedInPlace(Rows):
    """Changes the list that it is given, too."""

    def __getitems__(self, indices):
        indices.sort()
        return [self[idx] for idx in indices]


class Padded(Rows):
    """To the longest of a batch, as a tokenizer does it."""

    def __getitems__(self, indices):
        return list(pad_sequence([self[idx] for idx in indices], batch_first=True))


class PaddedOnly(Padded):
    """Loads also single samples by ``__getitems__``, and in no other way."""

    def __getitem__(self, idx):
        raise NotImplementedError

    def __getitems__(self, indices):
        rows = [torch.full((1 + idx % 7,), float(idx)) for idx in indices]
        return list(pad_sequence(rows, batch_first=True))


class Numbered(Rows):
    """By their place in the batch."""

    def __getitems__(self, indices):
        return [(place, self[idx]) for place, idx in enumerate(indices)]


class ByFile(Rows):
    """One file after the other, in the order in which they are met: the first stays the first, and
    the last often the last."""

    def __getitems__(self, indices):
        files = collections.defaultdict(list)
        for idx in indices:
            files[idx % 2].append(self[idx])
        return [row for file in files.values() for row in file]


KINDS = [Sorted, SortedInPlace, Padded, PaddedOnly, Numbered, ByFile]


def listed(batch):
    return repr(batch)


def epochs(dataset, loader=DataLoader, workers=0, size=4, **options):
    order = torch.Generator().manual_seed(5)
    options = {"shuffle": True, "generator": order, **options}
    loader = loader(dataset, size, num_workers=workers, collate_fn=listed, **options)
    return [list(loader) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_such_samples_are_those_of_torch(cached, kind, loader, workers):
    dataset = cached(kind())
    assert epochs(dataset, loader, workers) == epochs(kind())
    if kind is not PaddedOnly:
        assert repr([dataset[idx] for idx in range(N)]) == repr([kind()[idx] for idx in range(N)])
        assert dataset.verify(N) == N


class OnlyTogether(Rows):
    """Has no other way, and gives the samples of the indices."""

    def __getitem__(self, idx):
        raise NotImplementedError

    def __getitems__(self, indices):
        return [torch.full((3,), float(idx)) for idx in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, stocache.DataLoader])
@pytest.mark.parametrize("memory", ["8MiB", INDEX + 400])
def test_samples_that_only_come_together_come_so_also_if_one_is_missing(
    cached, memory, loader, workers
):
    dataset = cached(OnlyTogether(), memory, fingerprint="x")
    for _ in range(2):  # the last batch is of one
        rows = torch.cat(list(loader(dataset, 23, num_workers=workers)))
        assert rows[:, 0].tolist() == list(range(N))
    assert [int(row[0]) for row in dataset.__getitems__([3, 3, 5, 3])] == [3, 3, 5, 3]


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_that_batches_are_whole_may_be_found_by_another_process_at_any_time(cached, monkeypatch):
    dataset = cached(PaddedOnly())
    load = Samples._load_many

    def load_many(self, *arguments):
        self._together._until_others.count()  # as another process does it
        return load(self, *arguments)

    monkeypatch.setattr(Samples, "_load_many", load_many)
    batch = dataset.__getitems__([1, 2, 3])
    assert repr(batch) == repr(PaddedOnly().__getitems__([1, 2, 3]))


def asked_while_others_find_it(cached, monkeypatch, moment):
    """A batch of which the longest is in memory, while another process finds at this moment that
    batches are padded: what came of it, and whether it was found before."""
    monkeypatch.setattr(Together, "_is_next", never)
    dataset = cached(Padded())
    dataset[6]
    gives_others, asked = Together.gives_others, []

    def from_now_on(self):
        asked.append(None)
        if len(asked) == moment + 1:
            self._until_others.count()
        return gives_others(self)

    with monkeypatch.context() as patched:
        patched.setattr(Together, "gives_others", from_now_on)
        lengths = [len(row) for row in dataset.__getitems__([6, 1, 2, 3])]
    return lengths, len(asked) > moment


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_no_sample_of_a_whole_batch_is_made_alone_whenever_it_is_found(cached, monkeypatch):
    moments = 0
    while True:
        lengths, found = asked_while_others_find_it(cached, monkeypatch, moments)
        if not found:
            break
        assert lengths == [7, 7, 7, 7], moments
        moments += 1
    assert moments >= 4 and lengths == [7, 4, 4, 4], "nobody had found it"


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_control_who_only_asks_first_makes_samples_alone(cached, monkeypatch):
    gives_whole_batches = Together.gives_whole_batches
    monkeypatch.setattr(
        Samples, "_if_found_meanwhile", lambda self, whole: gives_whole_batches(self._together)
    )
    seen = [asked_while_others_find_it(cached, monkeypatch, moment)[0] for moment in range(4)]
    assert [7, 2, 3, 4] in seen


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
def test_an_order_is_seen_at_whatever_place(cached):
    for seed in range(40):
        dataset = cached(ByFile())
        order = torch.Generator().manual_seed(seed)
        for _ in DataLoader(dataset, 6, shuffle=True, generator=order, collate_fn=listed):
            pass
        assert all(int(dataset[idx][0]) == idx for idx in range(N)), seed
        dataset.close()


class SortedList(Fixed):
    def __getitems__(self, indices):
        return [self[idx] for idx in sorted(indices)]


def test_another_default_device_hides_nothing(cached):
    dataset = cached(SortedList([torch.tensor([float(idx), 0.5]) for idx in range(8)]))
    with torch.device("meta"), pytest.warns(RuntimeWarning, match=OTHERS):
        dataset.__getitems__([3, 1, 2])
    rows = [torch.tensor([1.0, 5.5]), torch.tensor([2.0, 5.5])]
    arrays = [row.numpy() for row in rows]
    with torch.device("meta"):
        for one, other in (rows, arrays, [array[0] for array in arrays]):
            assert same(one, other) is False and same(one, one) is True


def test_what_cannot_be_stored_is_not_copied(cached):
    class Row:
        def __init__(self, dataset):
            self.dataset = dataset

        def __deepcopy__(self, memo):
            raise AssertionError("the whole dataset")

    class Objects(Fixed):
        def __getitems__(self, indices):
            return [Row(self) for _ in indices]

        def __getitem__(self, idx):
            return Row(self)

    dataset = cached(Objects(range(8)))
    with pytest.warns(RuntimeWarning, match="cannot be stored|is not supported|Row"):
        assert all(type(row) is Row for row in dataset.__getitems__([3, 1, 2]))


def never(*_):
    return False


def test_control_without_a_look_they_are_stored_under_other_indices(cached, monkeypatch):
    monkeypatch.setattr(Together, "_is_next", never)
    dataset = cached(Sorted())
    assert epochs(dataset) != epochs(Sorted())
    assert any(int(dataset[idx][0]) != idx for idx in range(N))
    padded = cached(Padded())
    assert epochs(padded) != epochs(Padded())


def test_it_is_told_once_and_what_to_do(cached):
    dataset = cached(Sorted())
    with pytest.warns(RuntimeWarning, match=OTHERS) as seen:
        epochs(dataset)
    (told,) = (str(each.message) for each in seen)
    assert "Sorted[i]" in told and "without __getitems__" in told and "\n" not in told
    assert dataset.stats().filled == 0


def stored_before_it_is_known(cached):
    """A padded sample is stored from a batch of which the longest was compared; the next one shows
    that they are padded."""
    dataset = cached(Padded())
    dataset.__getitems__([7, 6, 13])
    assert dataset.stats().filled == 3
    with pytest.warns(RuntimeWarning, match=OTHERS):
        dataset.__getitems__([0, 1])
    return dataset


def test_what_was_stored_from_earlier_batches_is_removed(cached):
    dataset = stored_before_it_is_known(cached)
    assert dataset.stats().filled == 0
    assert len(dataset[7]) == 1
    dataset.__getitems__([6, 7, 13])
    assert dataset.stats().filled == 1, "no batch is stored any more"


def test_control_what_is_not_removed_is_handed_out(cached, monkeypatch):
    monkeypatch.setattr(Samples, "_clear_if_in_doubt", lambda self: None)
    assert len(stored_before_it_is_known(cached)[7]) == 7


def found_by_a_worker(cached):
    dataset = cached(Padded())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        list(DataLoader(dataset, 4, num_workers=1, collate_fn=listed))
        dataset.warm(progress=False)
        return [len(row) for row in dataset.__getitems__([0, 6])]


def test_what_a_worker_finds_is_known_to_all(cached):
    assert found_by_a_worker(cached) == [7, 7]


def test_control_what_only_the_worker_knows_is_not(cached, monkeypatch):
    class Alone(together.Countdown):
        def __init__(self, start):
            self._left = [start]

    monkeypatch.setattr(together, "Countdown", Alone)
    assert found_by_a_worker(cached) == [1, 7]


class SortedLater(Rows):
    """In increasing order, once nobody looks any more."""

    sorts = False

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        return [self[idx] for idx in (sorted(indices) if self.sorts else indices)]


def found_while_waiting(cached):
    """Asked for 51, 50 and two that another one is loading, who finds in the meantime that batches
    are none of these samples."""
    source = SortedLater()
    dataset = cached(source)
    samples = dataset._stocache
    for first in range(0, 48, 4):  # until nobody looks
        samples.get_many([first + 1, first, first + 3, first + 2])
        samples.get_many([first, first + 1, first + 2, first + 3])
    held = samples.records.acquire([61, 60], 0.0)
    held.to_load()
    source.sorts = True
    waits = samples.records.stats()["waits"]
    found = []
    thread = threading.Thread(target=lambda: found.append(samples.get_many([51, 61, 60])))
    thread.start()
    while samples.records.stats()["waits"] == waits:
        time.sleep(0.001)
    samples._together._until_others.count()
    held.__exit__(None, None, None)
    thread.join()
    return [same(sample, source[idx]) for sample, idx in zip(found[0], (51, 61, 60), strict=True)]


def test_what_others_find_while_they_are_waited_for_counts(cached):
    assert found_while_waiting(cached) == [True, True, True]


def test_control_who_does_not_ask_again_gives_others(cached, monkeypatch):
    asked = Together.gives_whole_batches
    main = threading.current_thread()
    monkeypatch.setattr(
        Together,
        "gives_whole_batches",
        lambda self: threading.current_thread() is main and asked(self),
    )
    assert found_while_waiting(cached) != [True, True, True]


# What is no reason


class Noisy(Rows):
    """Another sample every time, whoever asks."""

    def __getitem__(self, idx):
        return torch.rand(2), random.random() < 0.5

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def test_of_a_random_dataset_nothing_is_concluded(cached):
    dataset = cached(Noisy(), probe=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(dataset)
    assert dataset.is_complete() and dataset.stats().loads == N


class Flipped(Rows):
    """At random, and seldom: single samples may agree by chance where a batch does not."""

    def __init__(self):
        self.flips = iter([True] + [False] * 1000)

    def __getitem__(self, idx):
        return -super().__getitem__(idx) if next(self.flips) else super().__getitem__(idx)

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def test_a_batch_that_is_another_when_asked_again_is_random(cached):
    dataset = cached(Flipped())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(dataset)
    assert dataset.is_complete()


class Agreeing(Fixed):
    """Samples as they are, and a note of who asked."""

    def __init__(self, count=256):
        super().__init__([torch.full((3,), float(idx)) for idx in range(count)])
        self.single = collections.Counter()

    def __getitem__(self, idx):
        self.single[idx] += 1
        return super().__getitem__(idx)

    def __getitems__(self, indices):
        torch.rand(1)
        return [self.samples[idx] for idx in indices]


def test_few_are_compared(cached):
    source = Agreeing()
    dataset = cached(source, probe=0)
    for first in range(0, 256, 4):
        dataset.__getitems__(range(first, first + 4))
    assert sorted(source.single) == [1, 6, 12], "of the batches 1, 2 and 4, another place each"
    assert dataset.is_complete() and dataset.stats().loads == 256
    source = Agreeing()
    dataset = cached(source, probe=0)
    for first in range(0, 256, 4):
        dataset.__getitems__(range(first + 3, first - 1, -1))
    assert len(source.single) == 4, "in another order the first four"
    dataset = cached(Agreeing(), probe=0)
    for idx in range(8):
        dataset.__getitems__([idx])
    assert dataset.dataset.single == collections.Counter(range(8)), "the first; others are such"


def test_a_subset_of_a_plain_dataset_is_not_compared(cached):
    source = Agreeing()
    plain = Fixed(source.samples)
    loads = []
    plain.__class__ = type("Counting", (Fixed,), {"__getitem__": lambda self, i: loads.append(i)})
    dataset = cached(Subset(Subset(plain, range(256)), range(255, -1, -1)))
    dataset.__getitems__(range(3, -1, -1))
    assert loads == [252, 253, 254, 255], "each of them once"
    dataset = cached(Subset(source, range(8)), probe=0)
    dataset.__getitems__([0, 1, 2])
    assert sorted(source.single) == [1], "one that loads many itself is"


def test_comparing_draws_no_number(cached):
    def after(dataset):
        torch.manual_seed(1)
        dataset.__getitems__([2, 1, 0])
        return torch.rand(1).item()

    class Draws(Agreeing):
        def __getitem__(self, idx):
            random.random()
            torch.rand(1)
            return super().__getitem__(idx)

        def __getitems__(self, indices):
            return super().__getitems__(indices)

    random.seed(3)
    expected = random.Random(3).random()
    assert after(cached(Draws())) == after(Draws())
    assert random.random() == expected


class Reused(Rows):
    """Answers in memory of its own, every time in the same."""

    def __init__(self):
        self.memory = torch.zeros(N, 3)

    def __getitem__(self, idx):
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices):
        for row, idx in zip(self.memory, indices, strict=False):
            row.fill_(idx)
        return list(self.memory[: len(indices)])


def test_a_dataset_may_answer_in_the_same_memory_again(cached):
    dataset = cached(Reused())
    for batch in ([3, 1, 2], [5, 7, 6, 4]):
        assert [int(row[0]) for row in dataset.__getitems__(batch)] == batch
    assert [int(dataset[idx][0]) for idx in range(1, 8)] == list(range(1, 8))


def test_control_without_a_copy_it_overwrites_its_answer(cached, monkeypatch):
    monkeypatch.setattr(together, "as_stored", lambda sample: sample)
    with pytest.warns(RuntimeWarning, match=OTHERS):
        cached(Reused()).__getitems__([3, 1, 2])


class ManyOnly(Rows):
    """Gives nothing for a single index, in any way."""

    fails = True

    def __getitem__(self, idx):
        if self.fails:
            raise ValueError("two samples at least")
        return torch.full((9,), float(idx))

    def __getitems__(self, indices):
        if len(indices) < 2:
            raise ValueError("two samples at least")
        return [torch.full((9,), float(idx)) for idx in indices]


def test_where_single_samples_cannot_be_had_nothing_is_cached(cached):
    dataset = cached(ManyOnly())
    with pytest.warns(RuntimeWarning, match=r"where ManyOnly\[\d+\] raises ValueError\('two"):
        assert epochs(dataset) == epochs(ManyOnly())
    assert dataset.stats().filled == 0


def test_trouble_of_late_is_no_reason(cached):
    source = ManyOnly()
    source.fails = False
    dataset = cached(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset.__getitems__([1, 0])
        source.fails = True
        dataset.__getitems__([3, 2])
    assert dataset.stats().filled == 4


# Where torch finds __getitems__


class Own(Rows):
    def __init__(self):
        self.__getitems__ = lambda indices: [self[idx] * 2 for idx in indices]


class Forwards(Rows):
    def __init__(self):
        self.inner = Numbered()

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


class Without(Sorted):
    __getitems__ = None


@pytest.mark.filterwarnings("ignore:__getitems__ of the wrapped")
@pytest.mark.parametrize("kind", [Own, Forwards, Without])
def test_it_is_found_where_torch_finds_it(cached, kind):
    assert epochs(cached(kind())) == epochs(kind())


def test_control_who_looks_at_the_class_alone_does_not_find_it(cached, monkeypatch):
    monkeypatch.setattr(together, "function_of", lambda source: None)
    for kind in (Own, Forwards):
        assert epochs(cached(kind())) != epochs(kind())
