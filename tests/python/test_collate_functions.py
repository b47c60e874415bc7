"""What a program registers in torch's default_collate_fn_map counts in batches that are gathered
natively, as it does in torch's own."""

from __future__ import annotations

import collections
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import stocache
import torch
from samples import gathered_natively
from stocache._torch import collation
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

Pair = namedtuple("Pair", "a b")
SAMPLES = {
    "tensor": lambda i: torch.full((3,), i),
    "int": lambda i: i,
    "bool": lambda i: i % 2 == 0,
    "float": lambda i: i / 2,
    "str": lambda i: str(i),
    "bytes": lambda i: b"%d" % i,
    "tuple": lambda i: (i, 1.5),
    "list": lambda i: [torch.tensor(i), "x"],
    "ints": lambda i: [i, i + 1],
    "floats": lambda i: [i / 2, 1.5],
    "size": lambda i: torch.Size([i, 2]),
    "dict": lambda i: {"x": i},
    "ordered": lambda i: OrderedDict(x=i),
    "pair": lambda i: Pair(i, i),
    "array": lambda i: np.full(3, i),
    "scalar": lambda i: np.float32(i),
}
KEYS = [
    torch.Tensor, int, bool, float, str, bytes, tuple, list, dict, OrderedDict, Pair, object,
    collections.abc.Mapping, collections.abc.Sequence, torch.Size, np.ndarray, np.float32,
    np.number,
]  # fmt: skip


class Samples(torch.utils.data.Dataset):
    def __init__(self, name):
        self.make = SAMPLES[name]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.make(index)


class Collated(list):
    """What the registered function makes of a batch."""


def registered(batch, *, collate_fn_map=None):
    return Collated([str(sample) for sample in batch])


def batches(dataset, **options):
    return [repr(batch) for batch in DataLoader(dataset, batch_size=4, **options)]


def gathered(dataset):
    return [repr(dataset.batches[indices]) for indices in ([0, 1, 2, 3], [4, 5, 6, 7])]


def cached(name):
    dataset = stocache.CachedDataset(Samples(name), memory="4MB", verbose=False)
    for index in range(len(dataset)):
        dataset[index]
    return dataset


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.__name__)
def test_a_registered_function_is_called_as_without_the_cache(monkeypatch, key):
    for name in SAMPLES:
        dataset = cached(name)
        expected = batches(Samples(name))
        assert gathered(dataset) == expected
        with monkeypatch.context() as patched:
            patched.setitem(default_collate_fn_map, key, registered)
            expected = batches(Samples(name))
            assert gathered(dataset) == expected, name
            loader = stocache.DataLoader(dataset, batch_size=4)
            assert [repr(batch) for batch in loader] == expected, name
        # And taken back: gathered again.
        assert gathered_natively(dataset, [0, 1]) is not stocache._C.MISS, name


def test_only_samples_with_such_a_part_are_collated_otherwise(monkeypatch):
    class Own:
        pass

    tensors, texts = cached("tensor"), cached("str")
    monkeypatch.setitem(default_collate_fn_map, Own, registered)
    assert gathered_natively(tensors, [0, 1]) is not stocache._C.MISS
    monkeypatch.setitem(default_collate_fn_map, str, registered)
    assert gathered_natively(tensors, [0, 1]) is not stocache._C.MISS
    assert gathered_natively(texts, [0, 1]) is stocache._C.MISS


def test_another_map_in_its_place_counts(monkeypatch):
    texts = cached("str")
    own = {**default_collate_fn_map, str: registered}
    monkeypatch.setattr(collation.torchs, "default_collate_fn_map", own)
    assert gathered_natively(texts, [0, 1]) is stocache._C.MISS


def test_the_map_as_torch_has_it_changes_nothing():
    assert collation.changed_kinds(default_collate_fn_map) == b""
    every = b"".join(kind for kind, _ in collation._native()) + b"P"
    assert set(collation.changed_kinds({**default_collate_fn_map, "no type": registered})) == set(
        every
    )


@pytest.mark.parametrize("name", ["tensor", "pair"])
def test_not_asking_for_registered_functions_is_noticed(run_script, name):
    """The control: nothing is asked, and the registered function is not called."""
    run_script(
        f"""
        import sys
        sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
        from stocache._torch import collation
        collation.changed_kinds = lambda functions: b""
        import test_collate_functions as tests
        from torch.utils.data._utils.collate import default_collate_fn_map
        dataset = tests.cached({name!r})
        key = type(dataset[0])
        default_collate_fn_map[key] = tests.registered
        expected = tests.batches(tests.Samples({name!r}))
        assert tests.gathered(dataset) != expected
        """
    )
