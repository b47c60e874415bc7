"""A cached sample that cannot be read any more: its class has another name now, or it was stored
with pickle, which is not allowed here. It is a miss, and no error in the middle of an epoch."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import types
import warnings
from pathlib import Path

import pytest
import stocache
import torch
from sources import Plain
from stocache._dataset.comparing import UNKNOWN, compare
from stocache._dataset.samples import Samples
from torch.utils.data import DataLoader, Dataset

READ = "is cached and cannot be read, so it is loaded every time"


@dataclasses.dataclass
class New:
    """What the class Old is called now."""

    x: int


Old = dataclasses.make_dataclass("Old", [("x", int)])
Pair = collections.namedtuple("Pair", "x y")


class Source(Dataset):
    """Its samples 5 to 7 are of another kind; notes in a file if the main process loads one."""

    def __init__(self, make, log=None, many=range(5, 8)):
        self.make, self.log, self.main, self.many = make, log, os.getpid(), many

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        if self.log is not None and os.getpid() == self.main:
            Path(self.log).touch()
        return self.make(idx) if idx in self.many else idx


def renamed(idx):
    return New(idx)


def unpickled(idx):
    return Plain(idx)


KINDS = {"its class": (Old, renamed, False), "pickle": (unpickled, unpickled, True)}


@pytest.fixture(params=KINDS)
def joined(request, cached, unique_name, monkeypatch):
    """Makes a CachedDataset on a cache that somebody filled who could read all of it."""
    before, now, allow_pickle = KINDS[request.param]
    module = types.ModuleType("module_of_old")
    module.Old = Old
    monkeypatch.setattr(Old, "__module__", "module_of_old")
    monkeypatch.setitem(sys.modules, "module_of_old", module)
    name = unique_name()

    def join(log=None, **options):
        options = {"name": name, "fingerprint": "x", **options}
        filler = cached(Source(before), allow_pickle=allow_pickle, **{**options, "transform": None})
        for idx in range(8):
            filler[idx]
        del module.Old
        return cached(Source(now, log), **options)

    return join


def epochs(loader, dataset, workers):
    loader = loader(dataset, 4, num_workers=workers, collate_fn=list)
    return [batch for _ in range(2) for batch in loader]


def test_it_is_loaded_and_told_once(joined):
    dataset = joined()
    source = dataset.dataset
    with pytest.warns(RuntimeWarning, match=READ) as seen:
        assert [dataset[idx] for idx in range(8)] == [source[idx] for idx in range(8)]
        assert dataset.__getitems__([7, 0]) == [source[7], 0] and dataset[4:6] == [4, source[5]]
        for loader in (DataLoader, stocache.DataLoader):
            for workers in (0, 1):
                assert epochs(loader, dataset, workers) == epochs(DataLoader, source, 0)
    (told,) = (str(each.message) for each in seen)
    assert "clear()" in told and "\n" not in told and ("Old" in told or "allow_pickle=True" in told)
    stats = dataset.stats()
    assert stats.filled == 8 and stats.waits == 0, "what was stored stays, and nobody waits"


def test_a_transform_gets_what_was_loaded(joined):
    dataset = joined(transform=repr)
    with pytest.warns(RuntimeWarning, match=READ):
        assert [dataset[7], *dataset.__getitems__([7, 0])] == [repr(dataset.dataset[7])] * 2 + ["0"]


def test_strict_makes_an_error_of_it(joined):
    dataset = joined(strict=True, probe=0)
    for read in (lambda: dataset[7], lambda: dataset.__getitems__([0, 7])):
        with pytest.raises(ValueError, match=r"class .* is not found|allow_pickle=True"):
            read()


def test_control_who_takes_it_for_a_hit_ends_the_epoch(joined, monkeypatch):
    def read(self, place, counted=True):
        return self.records.get(place, self.allow_pickle, counted)

    monkeypatch.setattr(Samples, "_read", read)
    dataset = joined(probe=0)
    with pytest.raises(ValueError):
        epochs(DataLoader, dataset, 0)


def test_it_is_not_stale(joined):
    dataset = joined()
    records = dataset._stocache.records
    assert compare(records, dataset.dataset, 7, False) == UNKNOWN
    with pytest.warns(RuntimeWarning, match="3 of 8 samples cannot be compared"):
        assert dataset.verify() == 5
    with pytest.raises(ValueError, match="stale"):  # control: another one that can be read
        stocache.CachedDataset(
            Source(str, many=range(3)), "8MiB", name=dataset.name, fingerprint="x", verbose=False
        )[1]


def gathered_beside_workers(dataset):
    dataset.dataset.make = int
    loader = stocache.DataLoader(dataset, 2, sampler=[0, 1, 2, 5], num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):  # the first look at samples of a joined cache is the workers'
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 5]]


def test_nothing_is_loaded_in_a_process_that_has_workers(joined, log):
    gathered_beside_workers(joined(log))
    assert not Path(log).exists()


def test_control_who_gets_it_loads_it(joined, log, monkeypatch):
    # In the training process, where a batch could not be gathered.
    monkeypatch.setattr(Samples, "counted_from_start", lambda self, indices: self.get_many(indices))
    gathered_beside_workers(joined(log))
    assert Path(log).exists()


def test_a_batch_of_them_is_collated_from_what_was_loaded(cached, unique_name, monkeypatch):
    module = types.ModuleType("module_of_pair")
    module.Pair = Pair
    monkeypatch.setattr(Pair, "__module__", "module_of_pair")
    monkeypatch.setitem(sys.modules, "module_of_pair", module)
    options = {"name": unique_name(), "fingerprint": "x", "probe": 0}
    filler = cached(Source(lambda idx: Pair(torch.ones(2), idx), many=range(8)), **options)
    expected = [(batch.x.tolist(), batch.y.tolist()) for batch in DataLoader(filler, 4)]
    del module.Pair
    dataset = cached(Source(lambda idx: (torch.ones(2), idx), many=range(8)), **options)
    with pytest.warns(RuntimeWarning, match=READ):
        for loader in (stocache.DataLoader(dataset, 4), stocache.DataLoader(dataset, 4)):
            assert [(x.tolist(), y.tolist()) for x, y in loader] == expected
