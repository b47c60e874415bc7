"""LazyShardDataset: parts of a dataset, one for each rank or node."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
from collections import ChainMap, Counter
from pathlib import Path

import numpy as np
import pytest
import stocache
import torch
import torchrun
from samples import complaint
from sources import Counted, Fixed, Together
from stocache import _C, CachedDataset, LazyShardDataset
from stocache._sharing.ranks import presumed, rank_and_ranks
from torch.utils.data import DataLoader, Subset

HERE = Path(__file__).parent
LENGTH = 101


@pytest.fixture
def shard(log):
    """Makes a LazyShardDataset without a disk; closes all at the end."""
    made = []

    def make(source=None, **options):
        options.setdefault("disk_size", None)
        options.setdefault("memory_size", "8MiB")
        options.setdefault("verbose", False)
        source = Counted(log, LENGTH, words=64) if source is None else source
        made.append(LazyShardDataset(source, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def node(monkeypatch):
    """Pretends that torchrun started this process, on a node with so many ranks."""

    def pretend(ranks, group=0):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("MASTER_PORT", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("GROUP_RANK", str(group))

    return pretend


def parts(shard, ranks, **options):
    return [shard(rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]


def indices(datasets):
    return [dataset.indices().tolist() for dataset in datasets]


def once_each(found, length=LENGTH):
    return Counter(itertools.chain.from_iterable(found)) == Counter(range(length))


# Who has what


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_each_sample_is_one_ranks(shard, ranks, shuffle):
    found = indices(parts(shard, ranks, shuffle=shuffle, seed=13))
    assert once_each(found)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    in_order = list(itertools.chain.from_iterable(found)) == list(range(LENGTH))
    assert in_order is not shuffle


def test_the_seed_decides(shard):
    first, again = indices([shard(seed=4)]), indices([shard(seed=4)])
    assert first == again
    assert first != indices([shard(seed=5)])
    assert indices([shard(seed=-1)]) != indices([shard(seed=1)])


@pytest.mark.parametrize("mode", ["node", "disk"])
def test_ranks_of_a_node_divide_its_part_anew_in_every_epoch(shard, node, mode):
    of_nodes = []
    for group in range(2):
        node(2, group)
        ranks = (2 * group, 2 * group + 1)
        datasets = [shard(rank=rank, num_replicas=4, mode=mode, seed=1) for rank in ranks]
        epochs = []
        for epoch in range(3):
            for dataset in datasets:
                dataset.set_epoch(epoch)
            epochs.append(indices(datasets))
        sets = [set(itertools.chain.from_iterable(found)) for found in epochs]
        assert sets[0] == sets[1] == sets[2]
        assert len({frozenset(found[0]) for found in epochs}) == 3
        of_nodes.append(sets[0])
    assert not of_nodes[0] & of_nodes[1]
    assert of_nodes[0] | of_nodes[1] == set(range(LENGTH))


def test_a_rank_visits_its_own_part_in_another_order_in_every_epoch(shard):
    dataset = shard(rank=1, num_replicas=3, seed=1)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(dataset.indices().tolist())
    assert len(set(map(tuple, orders))) == 3
    assert len({frozenset(order) for order in orders}) == 1
    dataset.set_epoch(1)
    assert dataset.indices().tolist() == orders[1]


@pytest.mark.parametrize("mode", ["rank", "node"])
def test_equal_parts(shard, node, mode):
    node(2)
    datasets = parts(shard, 2, equal=True, mode=mode)
    found = indices(datasets)
    assert {len(each) for each in found} == {LENGTH // 2}
    assert not set(found[0]) & set(found[1])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_lies_in_one_piece_is_one_ranks(shard, ranks):
    found = indices(parts(shard, ranks, chunk=7, seed=2))
    assert once_each(found)
    owners = {}
    for rank, each in enumerate(found):
        for index in each:
            owners.setdefault(index // 7, set()).add(rank)
    assert {len(of) for of in owners.values()} == {1}


def test_control_without_chunks_pieces_are_torn(shard):
    found = indices(parts(shard, 3, seed=2))
    owners = {}
    for rank, each in enumerate(found):
        for index in each:
            owners.setdefault(index // 7, set()).add(rank)
    assert {len(of) for of in owners.values()} != {1}


def test_arrays_say_what_lies_in_one_piece(shard):
    class Chunked(Fixed):
        chunks = (10, 4)

    found = indices(parts(lambda **o: shard(Chunked([torch.zeros(4)] * 50), **o), 2))
    assert {index // 10 for index in found[0]}.isdisjoint(index // 10 for index in found[1])


def test_an_array_on_disk_is_a_source(shard, tmp_path):
    array = np.memmap(tmp_path / "array", np.float32, "w+", shape=(20, 8))
    array[:] = np.arange(20)[:, None]
    array.flush()
    for rank in range(2):
        dataset = shard(array, rank=rank, num_replicas=2)
        for _ in range(2):
            got = [int(dataset[i][0]) for i in range(len(dataset))]
            assert got == dataset.indices().tolist()


def test_a_share_of_a_disk_that_shrinks_a_little_costs_nothing_of_what_is_there(
    shard, tmp_path, monkeypatch
):
    source = Fixed([torch.full((1000,), float(i)) for i in range(300)])
    free = 2 * 480 * 1024

    def opened_with(left):
        monkeypatch.setattr("stocache._sharing.disk._free", lambda *_: left)
        return shard(
            source, rank=0, num_replicas=1, shuffle=False, memory_size="64KiB", disk_size=0.5,
            disk_cache_path=tmp_path / "below", probe=0,
        )  # fmt: skip

    dataset = opened_with(free)
    assert [float(dataset[i][0]) for i in range(len(dataset))] == list(range(len(dataset)))
    assert dataset.store.flush()
    dataset.close()
    there = {}
    for less in (0, 1 << 12, 1 << 14, free // 2):  # others have written there since
        dataset = opened_with(free - less)
        there[less] = dataset.stats().disk.filled, dataset.stats().disk.data_bytes
        dataset.close()
    assert there[0][0] and there[0] == there[1 << 12] == there[1 << 14]
    assert there[free // 2][1] < there[0][1], "much less is less"


def test_control_ranks_with_other_seeds_overlap(shard):
    first, second = (shard(rank=rank, num_replicas=2, seed=rank) for rank in range(2))
    assert set(first.indices().tolist()) & set(second.indices().tolist())


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}, (5, 6)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, (0, 1)),  # a batch script is no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "RANK": "3",
          "WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "x", "WORLD_SIZE": "8"}, (0, 1)),
    ],
)  # fmt: skip
def test_launchers_say_which_rank_it_is(env, found):
    assert rank_and_ranks(None, None, env) == found
    assert rank_and_ranks(1, 16, env) == (1, 16)


def test_the_place_of_a_rank_among_very_many():
    """Looking through all ranks once for each node would take minutes."""
    rank = presumed(70_000, 1 << 17)
    assert (rank.node, rank.local, rank.ranks, len(rank.ranks_on)) == (70_000, 0, 1 << 17, 1 << 17)


# What fits


def test_what_does_not_fit_is_nobodys(shard):
    room = 40 * (64 * 8 + 64) + (180 << 10)
    datasets = parts(shard, 2, memory_size=room)
    found = indices(datasets)
    assert 2 * 30 <= sum(map(len, found)) < LENGTH
    assert not set(found[0]) & set(found[1])
    for dataset in datasets:
        for _ in range(2):
            for i in range(len(dataset)):
                dataset[i]
        assert dataset.stats().hits == len(dataset), "all that is in the part fits"


@pytest.mark.parametrize("mode", ["disk", "node"])
def test_what_only_one_rank_has_in_memory_is_not_what_the_node_keeps(
    shard, log, node, tmp_path, mode
):
    node(2)
    room = {"memory_size": 55 * (64 * 8 + 64) + (180 << 10), "disk_size": 55 * (64 * 8 + 128)}
    source = Counted(log, 2 * LENGTH, words=64)
    below = tmp_path / "below"
    found = indices(parts(shard, 2, source=source, mode=mode, disk_cache_path=below, **room))
    on_disk = {"disk": 55, "node": 110}[mode]
    assert on_disk - 15 <= sum(map(len, found)) <= on_disk + 5, [*map(len, found)]


def test_overflow_is_how_much_more_a_part_may_be(shard):
    few = shard(memory_size="200KiB")
    more = shard(memory_size="200KiB", overflow=0.5)
    assert 0 < len(few) < LENGTH
    assert abs(len(more) - 1.5 * len(few)) <= 1
    assert len(shard(memory_size="200KiB", overflow=100)) == LENGTH


def test_min_elements_that_cannot_be_met_are_told(shard):
    assert len(shard(min_elements=LENGTH)) == LENGTH
    with pytest.raises(ValueError, match="101 samples over 2 ranks are 50 each"):
        shard(min_elements=60, rank=0, num_replicas=2)
    with pytest.raises(ValueError, match=r"but a rank of node 0 gets \d+: .* hold about"):
        shard(min_elements=90, memory_size="200KiB")


def test_too_few_pieces_or_too_little_room_for_all_ranks_is_told(shard, tmp_path):
    with pytest.raises(ValueError, match=r"^a rank gets 0: chunk is 40, so 101 .* use chunk=25 or"):
        shard(chunk=40, num_replicas=4, rank=0)
    for chunk in (2**64, 2**70):
        with pytest.raises(ValueError, match="are 1 pieces for 2 ranks; use chunk=50 or less"):
            shard(chunk=chunk, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"^min_elements is 50, but a rank gets 40: chunk is 40"):
        shard(chunk=40, num_replicas=2, rank=0, min_elements=50)
    with pytest.raises(ValueError, match=r"^a rank of node 0 gets 0: .* memory hold .*; give more"):
        shard(memory_size="1KiB")
    below = tmp_path / "below"
    with pytest.raises(ValueError, match=r": 0.98 KiB on disk hold about 1 samples"):
        shard(mode="disk", disk_size=1000, min_elements=50, disk_cache_path=below)


def test_ranks_that_are_fewer_than_those_of_the_group_measure_themselves(shard, monkeypatch):
    """As where a model is spread over several processes, which have one part together."""
    room = 40 * (64 * 8 + 64) + (180 << 10)
    alone = [len(dataset) for dataset in parts(shard, 2, memory_size=room)]
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_rank", lambda: 3)
    assert [len(dataset) for dataset in parts(shard, 2, memory_size=room)] == alone
    assert sum(alone) < LENGTH


def test_shares_of_what_is_free_need_a_word_from_the_others(shard, monkeypatch):
    monkeypatch.setattr("stocache.sizes.free_memory", lambda: 400 << 10)
    with pytest.raises(ValueError, match="init_process_group"):
        shard(memory_size=0.5, rank=0, num_replicas=2)
    assert len(shard(memory_size=0.5)) < LENGTH  # nobody else is there


# Samples


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["torch", "stocache"])
def test_loaders_give_the_samples_of_the_part(shard, kind, start):
    dataset = shard(rank=1, num_replicas=2, seed=8)
    loader = {"torch": DataLoader, "stocache": stocache.DataLoader}[kind](
        dataset, 8, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen = []
        for numbers, rows in loader:
            seen += numbers.tolist()
            assert all(complaint(int(n), row) is None for n, row in zip(numbers, rows, strict=True))
        assert seen == dataset.indices().tolist()
    del loader
    assert dataset.memory_cache.misses.value == len(dataset)
    assert dataset.memory_cache.hits.value == 2 * len(dataset)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_workers_of_a_copy_see_its_epoch(shard, copied):
    original = shard(seed=8)
    dataset = copied(original)
    loader = DataLoader(
        dataset, 8, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert [n for numbers, _ in loader for n in numbers.tolist()] == dataset.indices().tolist()
    assert original.epoch == 0
    del loader
    dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_on_top(shard, workers):
    dataset = shard(rank=0, num_replicas=2)
    for _ in range(2):
        loader = stocache.DataLoader(
            dataset, 8, shuffle=True, num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        seen = [number for numbers, _ in loader for number in numbers.tolist()]
        assert sorted(seen) == sorted(dataset.indices().tolist())


@pytest.mark.parametrize("chosen", [[-1, 0], [10, 0]])
def test_no_index_leads_into_the_part_of_another_rank(shard, node, unique_name, chosen):
    """Where samples are dealt out in order, those of the next rank lie beside one's own."""
    node(2)
    source = Fixed([torch.tensor(i) for i in range(20)])
    ranks = parts(lambda **o: shard(source, **o), 2, shuffle=False, name=unique_name(), probe=0)
    for dataset in ranks:
        assert [int(sample) for sample in dataset] == dataset.indices().tolist()
    for dataset in ranks:
        own = dataset.indices().tolist()
        loader = stocache.DataLoader(
            Subset(dataset, chosen), 2, num_workers=1, multiprocessing_context="fork"
        )
        if chosen[0] < 0:
            assert [rows.tolist() for rows in loader] == [[own[-1], own[0]]]
        else:
            with pytest.raises(IndexError, match="index 10 of 10 samples of this rank"):
                list(loader)
            del loader
            gc.collect()  # its workers end before the cache


def test_a_source_that_loads_many_at_once_does(shard, log):
    source = Together(log, LENGTH, words=64)
    dataset = shard(source, rank=0, num_replicas=2)
    seen = [n for numbers, _ in DataLoader(dataset, 10) for n in numbers.tolist()]
    assert seen == dataset.indices().tolist()
    assert max(source.groups()) == 10


def test_single_samples_slices_and_lists(shard):
    dataset = shard(rank=1, num_replicas=2)
    order = dataset.indices().tolist()
    assert dataset[0][0] == order[0] and dataset[-1][0] == order[-1]
    assert [number for number, _ in dataset[:4]] == order[:4]
    assert [number for number, _ in dataset[[3, 0]]] == [order[3], order[0]]
    assert [number for number, _ in dataset[torch.tensor([2, 1])]] == [order[2], order[1]]
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[index]
    for mask in ([True, False], torch.tensor([True, False]), np.array([True, False])):
        with pytest.raises(TypeError, match="a list of bool cannot choose samples"):
            dataset[mask]
    assert [number for number, _ in dataset] == order


def test_a_transform_runs_on_what_is_handed_out(shard):
    dataset = shard(transform=lambda sample: -sample[0])
    assert [dataset[i] for i in range(5)] == [-n for n in dataset.indices()[:5].tolist()]
    dataset.transform = None
    assert dataset[0][0] == int(dataset.indices()[0])


@pytest.mark.parametrize("kind", [DataLoader, stocache.DataLoader])
def test_a_subclass_says_what_its_samples_are(kind):
    class Negative(LazyShardDataset):
        def __getitem__(self, index):
            return -super().__getitem__(index)

    source = Fixed([torch.tensor(i) for i in range(20)])
    with Negative(source, disk_size=None, memory_size="8MiB", verbose=False) as dataset:
        for _ in range(2):
            assert torch.cat(list(kind(dataset, 5))).tolist() == (-dataset.indices()).tolist()


def test_attributes_are_the_datasets(shard):
    dataset = shard()
    assert dataset.words == 64
    with pytest.raises(AttributeError):
        _ = dataset.nothing


@pytest.mark.parametrize("name", ["batches", "clear", "is_complete", "prefetch", "verify"])
def test_what_means_the_cache_does_not_lead_past_it(shard, name):
    """Neither to the list that is cached, which would be emptied, nor to another cache."""
    samples = [torch.tensor(i) for i in range(20)]
    with CachedDataset(samples, "4MiB", verbose=False) as cached:
        for source in (samples, cached):
            dataset = shard(source, num_replicas=2, rank=1)
            with pytest.raises(AttributeError, match=rf"has no {name}; its \.store has"):
                getattr(dataset, name)
            assert hasattr(dataset.store, name)


def test_objects_of_other_types_are_stored_if_that_is_allowed(shard):
    dataset = shard(Fixed([ChainMap({"i": i}) for i in range(20)]), allow_pickle=True)
    for _ in range(2):
        assert list(dataset) == [ChainMap({"i": i}) for i in dataset.indices().tolist()]
    assert dataset.stats().hits == 20
    with pytest.raises(ValueError, match="sample 0 cannot be stored"):
        shard(Fixed([object()] * 20))


def test_a_dataset_that_changes_its_length_is_told(shard):
    samples = [torch.zeros(4)] * 20
    dataset = shard(Fixed(samples))
    samples.append(torch.zeros(4))
    with pytest.raises(ValueError, match="had 20 samples and has 21 now"):
        dataset.set_epoch(1)


def test_an_epoch_goes_on_where_it_was(shard):
    dataset = shard(rank=1, num_replicas=2, seed=4)
    dataset.set_epoch(2)
    loader = stocache.DataLoader(dataset, 5)
    batches = iter(loader)
    seen = [next(batches)[0].tolist() for _ in range(3)]
    states = pickle.loads(pickle.dumps((dataset.state_dict(), loader.state_dict())))
    rest = [numbers.tolist() for numbers, _ in batches]
    again = shard(rank=1, num_replicas=2, seed=4)
    again.load_state_dict(states[0])
    loader = stocache.DataLoader(again, 5)
    loader.load_state_dict(states[1])
    assert [numbers.tolist() for numbers, _ in loader] == rest
    assert list(itertools.chain.from_iterable(seen + rest)) == again.indices().tolist()
    with pytest.raises(ValueError, match="rank was 1 and is 0"):
        shard(rank=0, num_replicas=2, seed=4).load_state_dict(states[0])
    for what, value in (("shuffle", False), ("chunk", 5), ("equal", True)):  # another order
        other = shard(rank=1, num_replicas=2, seed=4, **{what: value})
        with pytest.raises(ValueError, match=f"{what} was .* and is {value}"):
            other.load_state_dict(states[0])


# The next run


def test_another_number_of_ranks_keeps_what_is_still_the_same(shard, log, tmp_path, node):
    options = {"disk_size": "64MiB", "disk_cache_path": tmp_path / "below", "seed": 6}
    node(2)
    first = parts(shard, 2, **options)
    for dataset in first:
        for i in range(len(dataset)):
            dataset[i]
    for dataset in first:
        dataset.flush()
        dataset.close()
    source = first[0].dataset
    assert set(source.loads()) == set(range(LENGTH))
    node(1)
    for rank in range(3):  # one after the other, on the node that two had before
        Path(log).unlink()
        dataset = shard(rank=rank, num_replicas=3, probe=0, **options)
        Path(log).unlink(missing_ok=True)  # samples that were measured
        got = [dataset[i][0] for i in range(len(dataset))]
        assert got == dataset.indices().tolist()
        assert not source.loads(), "all of it is on disk"
        dataset.close()
        Path(log).touch()


def test_what_was_kept_of_another_part_is_refused(shard, unique_name):
    """Samples are known by their place in a part: in another part that is another sample."""
    name = unique_name()
    source = Fixed([torch.tensor(i) for i in range(20)])
    options = {"num_replicas": 2, "name": name, "keep": True, "fingerprint": "same"}
    first = shard(source, rank=0, **options)
    for i in range(len(first)):
        first[i]
    first.close()
    with pytest.raises(ValueError, match="fingerprint"):
        shard(source, rank=1, **options)
    other = shard(source, rank=1, on_change="clear", **options)
    assert [int(sample) for sample in other] == other.indices().tolist()
    other.close()
    stocache.node.remove(name)


def test_what_was_kept_of_other_data_is_refused(shard, unique_name):
    options = {"name": unique_name(), "keep": True, "probe": 0}
    first = shard(Fixed([torch.zeros(4)] * 20), **options)
    first[:]
    first.close()
    with pytest.raises(ValueError, match="fingerprint"):
        shard(Fixed([torch.ones(4)] * 20), **options)
    again = shard(Fixed([torch.zeros(4)] * 20), **options)
    assert again.stats().filled == 20
    again.close()
    stocache.node.remove(options["name"])


def test_other_data_have_another_folder(shard, tmp_path):
    options = {"disk_size": "64MiB", "disk_cache_path": tmp_path / "below"}
    for value in (1.0, 2.0):
        dataset = shard(Fixed([torch.full((4,), value)] * 20), **options)
        assert all(float(dataset[i][0]) == value for i in range(20))
        dataset.flush()
        dataset.close()


def test_two_datasets_with_one_fingerprint_do_not_mix(shard, tmp_path):
    """Such as those for training and for validation, whose preparation has one version."""

    class Negative(Fixed):
        def __getitem__(self, index):
            return -super().__getitem__(index)

    samples = [torch.tensor(i) for i in range(1, 31)]
    options = {"disk_size": "64MiB", "disk_cache_path": tmp_path / "below", "probe": 0}
    for source in (Fixed(samples), Negative(samples), Fixed(samples[10:])):
        with shard(source, fingerprint="v1", **options) as dataset:
            found = [int(source[index]) for index in dataset.indices().tolist()]
            assert [int(sample) for sample in dataset] == found
            dataset.flush()
    with shard(Fixed(samples), fingerprint="v1", **options) as dataset:
        assert dataset.stats().disk.filled == 30


# What it tells


def test_the_first_line_tells_what_there_is(shard, capfd):
    shard(rank=1, num_replicas=4, verbose=True)
    said = capfd.readouterr().out
    assert said.startswith("Node 1 of 4 keeps 25 of 101 samples in up to ")
    assert said.endswith("Rank 1 of 4 visits 25 in an epoch.\n")
    shard(memory_size="200KiB", equal=True, verbose=True)
    assert re.search(r"^This node .*; \d+ of the dataset are nobody's\.$", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank is 2; with 2 ranks it is from 0 to 1"),
        ({"rank": -1, "num_replicas": 2}, ValueError, "rank is -1"),
        ({"rank": 0, "num_replicas": 0}, ValueError, "there is 1 rank at least"),
        ({"rank": "0"}, TypeError, "a whole number is needed"),
        ({"mode": "ranks"}, ValueError, 'mode is \'ranks\'; use "rank", "node" or "disk"'),
        ({"memory_size": -1}, ValueError, "memory_size is -1"),
        ({"memory_size": "much"}, ValueError, "memory_size is 'much'"),
        ({"memory_size": None}, TypeError, "memory_size is None"),
        ({"disk_size": -1}, ValueError, "disk_size is -1"),
        ({"overflow": -0.1}, ValueError, "overflow is -0.1; use 0 or more"),
        ({"overflow": "a bit"}, TypeError, "a fraction such as 0.1 is needed"),
        ({"min_elements": -1}, ValueError, "min_elements is -1; use 0 or more"),
        ({"chunk": 0}, ValueError, "chunk is 0; use 1 or more"),
        ({"seed": 0.5}, TypeError, "seed is 0.5; a whole number is needed"),
    ],
)
def test_bad_input_is_told_in_one_sentence(shard, tmp_path, options, error, said):
    options.setdefault("disk_cache_path", tmp_path / "below")
    with pytest.raises(error) as raised:
        shard(**options)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_whole_numbers_of_numpy_and_torch_are_numbers(shard):
    dataset = shard(rank=np.int64(1), num_replicas=torch.tensor(2), seed=np.uint8(3))
    assert (dataset.rank.number, dataset.rank.ranks) == (1, 2)
    dataset.set_epoch(np.int64(2))
    assert dataset.epoch == 2
    dataset.set_epoch(2**63 - 1)
    assert len(set(dataset.indices().tolist())) == len(dataset)
    with pytest.raises(ValueError, match=r"epoch is \d+; use less than 2\*\*63"):
        dataset.set_epoch(2**63)


def test_what_is_no_map_is_refused(shard):
    with pytest.raises(TypeError, match=r"one with len\(\) and dataset\[i\] is needed"):
        shard(iter([1]))


def test_a_position_outside_is_an_error():
    with pytest.raises(IndexError, match="3 is no position of 3"):
        _C.permuted(3, 3, 0, 0, 0)
    with pytest.raises(IndexError):
        _C.permuted(torch.tensor([0, -1]), 3, 0, 0, 0)
    assert sorted(_C.permuted(range(3), 3, 0, 0, 0).tolist()) == [0, 1, 2]


# Under torchrun


@pytest.fixture(params=[(1, 2), (2, 2), (1, 4)], ids=lambda p: f"{p[0]}x{p[1]}")
def world(request, once):
    """What each rank of so many nodes saw in shard_ranks.py."""
    nodes, ranks = request.param

    def launch(folder):
        torchrun.launch(
            HERE / "shard_ranks.py", folder, folder=folder, nodes=nodes, ranks=ranks
        ).output()
        return torchrun.answers(folder, nodes * ranks)

    _, answers = once(f"shards-{nodes}x{ranks}", launch)
    return nodes, ranks, lambda scenario: [answer[scenario] for answer in answers]


@pytest.mark.parametrize("scenario", ["rank", "node", "disk", "chunks"])
def test_ranks_visit_disjoint_parts_and_load_each_sample_once(world, scenario):
    _, _, ask = world
    answers = ask(scenario)
    for epoch in range(3):
        assert once_each([answer["seen"][epoch] for answer in answers])
    loads = {answer["node"]: answer["loads"] for answer in answers}
    assert once_each(loads.values()), "each sample is loaded once, by one node"


@pytest.mark.parametrize("scenario", ["rank", "node"])
def test_ranks_count_for_themselves(world, scenario):
    _, _, ask = world
    answers = ask(scenario)
    for answer in answers:
        hits, misses, from_disk, _ = answer["counts"]
        assert hits + misses == sum(map(len, answer["seen"]))
        assert from_disk == 0
    assert sum(answer["counts"][1] for answer in answers) == LENGTH


@pytest.mark.parametrize("scenario", ["equal", "equal node"])
def test_ranks_agree_on_equal_parts(world, scenario):
    nodes, ranks, ask = world
    answers = ask(scenario)
    for epoch in range(3):
        seen = [answer["seen"][epoch] for answer in answers]
        assert len(set(map(len, seen))) == 1
        assert max(Counter(itertools.chain.from_iterable(seen)).values()) == 1
        assert len(seen[0]) >= LENGTH // (nodes * ranks) - 1


def test_the_example_of_bilevelcache(world):
    nodes, ranks, ask = world
    answers = ask("example")
    assert sum(answer["length"] for answer in answers) == LENGTH
    for answer in answers:
        assert answer["cached"] == 8
        assert answer["misses"] == answer["hits"] == answer["length"] >= LENGTH // (nodes * ranks)


def test_the_example_prepares_all_and_finds_it_in_the_next_run(tmp_path):
    example = HERE.parents[1] / "examples" / "preprocess.py"
    environment = {"SAMPLES": "80", "FOLDER": str(tmp_path / "prepared")}
    for prepared in (80, 0):
        said = torchrun.launch(
            example, folder=tmp_path, ranks=4, environment=lambda node: environment
        ).output()
        assert f"{prepared} samples were prepared on this node" in said
        assert said.count("80 samples visited, 20 of them by each rank") == 2


def test_ranks_that_disagree_are_all_told(world):
    _, _, ask = world
    for said in ask("disagreement"):
        assert said.startswith("the ranks disagree: rank 0 has seed=4, rank 1 has seed=5")
    for said in ask("trouble"):
        troubles = ("memory_size is 'much'", "overflow is -1.0", "mode is 'ranks'")
        for line, trouble in zip(said, troubles, strict=True):
            assert line.startswith(f"rank 1: {trouble}")


def test_nodes_with_room_take_what_others_have_not(world):
    nodes, _, ask = world
    found = ask("capacities")
    seen = Counter(itertools.chain.from_iterable(found))
    assert max(seen.values()) == 1
    if nodes == 1:
        assert 0 < len(seen) < LENGTH
    else:
        assert len(seen) == LENGTH
        assert len(found[-1]) > len(found[0]) + 5


def test_what_a_rank_did_not_load_ahead_others_did(world):
    _, _, ask = world
    assert {answer["loads"] for answer in ask("warmed")} == {0}
