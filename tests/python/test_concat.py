"""Batches of samples of several CachedDatasets, one after the other."""

from __future__ import annotations

import gc

import pytest
import stocache
import torch
from kinds import WORDS
from samples import whole
from sources import INDEX, Fixed, same
from stocache import _C
from stocache._loading import sources
from stocache._torch.order import Drawn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Subset

LENGTHS = (13, 30, 1, 17)


def samples_of(number: int, length: int, words: int = WORDS):
    return [(1000 * number + idx, whole(idx, words, number)) for idx in range(length)]


ROOM = {"all": "32MiB", "half": INDEX + 8 * (8 * WORDS + 64), "none": INDEX + 8192}


@pytest.fixture
def joined(cached):
    """The plain datasets one after the other, and the same with each in a cache of its own."""

    def make(share="all", words=WORDS, **options):
        plain = [Fixed(samples_of(k, n, words)) for k, n in enumerate(LENGTHS)]
        room = ROOM[share]
        made = [cached(part, room, fingerprint=f"{k}", **options) for k, part in enumerate(plain)]
        return ConcatDataset(plain), ConcatDataset(made)

    return make


def epochs(kind, dataset, seed=7, **options):
    torch.manual_seed(seed)
    loader = kind(dataset, 8, **options)
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", ROOM)
def test_epochs_are_torchs(joined, share, workers, policy):
    plain, made = joined(share, policy=policy)
    options = {"shuffle": True, "num_workers": workers}
    assert same(epochs(stocache.DataLoader, made, **options), epochs(DataLoader, plain, **options))
    stats = [part.stats() for part in made.datasets]
    for part, length in zip(stats, LENGTHS, strict=True):
        assert part.hits + part.misses == 3 * length
        assert share != "all" or part.loads == length
    assert share == "none" or policy == "lru" or sum(part.hits for part in stats) > len(made) / 2


NESTED = {
    "subset": lambda made: Subset(made, list(range(60, 2, -3))),
    "array": lambda made: Subset(made, torch.arange(60).numpy()[::-7]),
    "subset of a subset": lambda made: Subset(Subset(made, range(5, 50)), [1, 44, 3, 20, 2]),
    "of subsets": lambda made: ConcatDataset(
        [Subset(made.datasets[0], [3, 1, 2]), made.datasets[1], Subset(made, [60, 0])]
    ),
    "of one": lambda made: ConcatDataset(made.datasets[1:2]),
    "twice the same": lambda made: ConcatDataset([made.datasets[0], made.datasets[0]]),
    "of concatenations": lambda made: ConcatDataset([made, Subset(made, [13, 12]), made]),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", ["all", "half"])
@pytest.mark.parametrize("nested", NESTED)
def test_subsets_and_concatenations_of_them(joined, nested, share, workers):
    plain, made = map(NESTED[nested], joined(share))
    options = {"shuffle": True, "num_workers": workers}
    assert same(epochs(stocache.DataLoader, made, **options), epochs(DataLoader, plain, **options))


def test_complete_ones_are_gathered_here_and_no_worker_is_started(joined):
    _, made = joined()
    for part in made.datasets:
        part.warm(progress=False)
    for dataset in (made, *(nested(made) for nested in NESTED.values())):
        batches = iter(stocache.DataLoader(dataset, 8, num_workers=2))
        assert len([len(batch) for batch in batches]) == (len(dataset) + 7) // 8
        assert not hasattr(batches, "_workers")


def test_only_what_is_missing_is_asked_of_workers(joined):
    _, made = joined()
    for part in (made.datasets[0], made.datasets[3]):
        part.warm(progress=False)
    for _ in range(2):
        list(stocache.DataLoader(made, 8, num_workers=2))
    assert [part.stats().loads for part in made.datasets] == list(LENGTHS)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_is_not_cached_makes_it_torchs(joined, workers):
    plain, made = joined()
    mixed = ConcatDataset([made.datasets[0], plain.datasets[1]])
    assert stocache.DataLoader(mixed, 8)._stocache_source() is None
    expected = ConcatDataset(plain.datasets[:2])
    got = list(stocache.DataLoader(mixed, 8, num_workers=workers))
    assert same(got, list(DataLoader(expected, 8)))


class Scaled(ConcatDataset):
    def __getitem__(self, idx):
        number, row = super().__getitem__(idx)
        return number, 2 * row


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_of_concat_dataset_is_asked_itself(joined, workers):
    plain, made = joined()
    got = list(stocache.DataLoader(Scaled(made.datasets), 8, num_workers=workers))
    assert same(got, list(DataLoader(Scaled(plain.datasets), 8)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_of_one_of_them_runs(joined, workers):
    plain, made = joined()
    for _ in range(2):
        list(stocache.DataLoader(made, 8, num_workers=workers))
    made.datasets[1].transform = lambda sample: (-sample[0], sample[1])
    numbers = [n for batch in stocache.DataLoader(made, 8, num_workers=workers) for n in batch[0]]
    expected = [-n if 13 <= idx < 43 else n for idx, (n, _) in enumerate(plain)]
    assert numbers == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", ["all", "half"])
def test_samples_of_other_shapes_and_kinds(cached, share, workers):
    """Each of the datasets can be gathered; batches of two of them cannot."""
    room = "32MiB" if share == "all" else INDEX + 3000
    parts = [
        [torch.full((5,), float(idx)) for idx in range(20)],
        [torch.full((5,), idx) for idx in range(20)],
        [torch.full((5,), float(idx)) for idx in range(20)],
        [float(idx) for idx in range(20)],
    ]
    batches = [[n, 20 + n, 40 + n] for n in range(0, 20, 3)]
    batches += [[n, 40 + n] for n in range(20)] + [[60 + n, 61 + n] for n in range(0, 20, 2)]
    plain = ConcatDataset([Fixed(part) for part in parts])
    made = ConcatDataset(
        [cached(p, room, fingerprint=f"{k}") for k, p in enumerate(plain.datasets)]
    )
    good = [batch for batch in batches if len(batch) == 2]
    for _ in range(2):
        got = list(stocache.DataLoader(made, batch_sampler=good, num_workers=workers))
        assert same(got, list(DataLoader(plain, batch_sampler=good)))
        # torch.stack of floats and ints gives floats
        got = list(stocache.DataLoader(made, batch_sampler=batches, num_workers=workers))
        assert same(got, list(DataLoader(plain, batch_sampler=batches)))


def second_batch_fails(kind, dataset, wrong, workers):
    """With which error. Its worker ends here, before the caches are closed."""
    batches = iter(kind(dataset, batch_sampler=[[0, 1], [2, wrong]], num_workers=workers))
    next(batches)
    try:
        next(batches)
    except Exception as error:
        found = type(error)
    del batches
    gc.collect()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_negative_indices_and_those_that_do_not_exist(joined, workers):
    plain, made = joined()
    list(stocache.DataLoader(made, 8))
    order = [[-1, 0, -61], [60, -2]]
    got = list(stocache.DataLoader(made, batch_sampler=order, num_workers=workers))
    assert same(got, list(DataLoader(plain, batch_sampler=order)))
    for wrong, error in ((61, IndexError), (-62, ValueError)):
        assert second_batch_fails(DataLoader, plain, wrong, workers) is error
        assert second_batch_fails(stocache.DataLoader, made, wrong, workers) is error


@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_is_cleared_in_mid_epoch_is_loaded_again(joined, workers):
    plain, made = joined()
    expected = list(DataLoader(plain, 8))
    loader = stocache.DataLoader(made, 8, num_workers=workers)
    list(loader)
    seen = []
    for n, batch in enumerate(loader):
        seen.append(batch)
        if n in (0, 3):
            made.datasets[1].clear()
    assert same(seen, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_in_its_middle(joined, workers):
    _, made = joined("half")
    torch.manual_seed(3)
    loader = stocache.DataLoader(made, 8, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    rest = list(batches)
    again = stocache.DataLoader(made, 8, shuffle=True, num_workers=workers)
    again.load_state_dict(state)
    assert same(list(again), rest)


def test_a_batch_transform_gets_their_batches(joined):
    _, made = joined("half")

    def transform(batch, generator):
        return batch[0], torch.randint(100, (len(batch[0]),), generator=generator)

    def seen(workers):
        torch.manual_seed(5)
        options = {"num_workers": workers, "batch_transform": transform}
        return [b for _ in range(2) for b in stocache.DataLoader(made, 8, **options)]

    assert same(seen(0), seen(2))


# Where rows are


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_are_located_whatever_their_indices_come_in(joined, nested, frozen):
    plain, made = map(NESTED[nested], joined())
    source = sources.source_of(made, frozen)
    order = torch.randperm(len(made))
    numbers = [plain[idx][0] for idx in order.tolist()]
    for indices in (order.tolist(), sources.Drawn(order), tuple(order.numpy())):
        located = source.locate(indices)
        indices, which = located.numbers()
        which = which or [0] * len(indices)
        rows = zip(which, indices, strict=True)
        assert [source.parts[part][idx][0] for part, idx in rows] == numbers


def test_control_rows_that_are_looked_for_in_the_wrong_dataset_are_seen(joined, monkeypatch):
    plain, made = joined()
    options = {"shuffle": True}
    expected = epochs(DataLoader, plain, **options)
    init = sources._Joined.__init__

    def moved(self, unders, ends):
        init(self, unders, [end + 1 if k == 0 else end for k, end in enumerate(ends)])

    monkeypatch.setattr(sources._Joined, "__init__", moved)
    with pytest.raises((AssertionError, IndexError)):
        assert same(epochs(stocache.DataLoader, made, **options), expected)


def test_what_is_no_list_of_stores_is_refused(cached):
    dataset = cached([1, 2, 3])
    dataset.warm(progress=False)
    records = dataset._stocache.records
    for stores, which, indices, error in [
        ([records], [0, 0], [1], ValueError), ([], [], [], ValueError),
        ([records], [1], [0], ValueError), ([records], [-1], [0], ValueError),
        ([5], [0], [0], TypeError), ((records,), [0], [0], TypeError),
        ([records], ["x"], [0], TypeError),
    ]:  # fmt: skip
        with pytest.raises(error):
            _C.gather_from(stores, which, indices, 1, False)
    assert _C.gather_from([records, records], [0, 1], [0, 2], 1, False).finish(0).tolist() == [1, 3]
    assert _C.gather_from([records], [0], [3], 1, False).missing() is None


def test_a_sampler_of_batches_of_its_own(joined):
    plain, made = joined()
    list(stocache.DataLoader(made, 8))
    order = list(BatchSampler(RandomSampler(plain), 5, drop_last=False))
    got = list(stocache.DataLoader(made, batch_sampler=order, num_workers=1))
    assert same(got, list(DataLoader(plain, batch_sampler=order)))


def test_an_index_of_a_subset_that_is_none_is_nobodys(joined):
    """It was a row that nobody filled in: whatever sample the memory there named."""
    _, made = joined()
    source = sources.source_of(Subset(made, [0, len(made)]), frozen=True)
    assert source.locate(Drawn(torch.tensor([0]))).numbers() == ([0], [0])
    with pytest.raises(IndexError, match=f"index {len(made)} of {len(made)} samples"):
        source.locate(Drawn(torch.tensor([0, 1])))
