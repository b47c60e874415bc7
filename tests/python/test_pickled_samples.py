"""Samples of types that only pickle knows: compared part by part, stored by content."""

from __future__ import annotations

import datetime
import decimal
import functools
import pathlib
import pickle
import random
import warnings

import pytest
import torch
from stocache import _C, _compare
from stocache._compare import same
from stocache._pickling import dumps

np = pytest.importorskip("numpy")


class Graph:
    """As a PyG Data: tensors in attributes, a store that refers back, no __eq__."""

    def __init__(self, seed: int, nodes: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.rand(nodes, 3, generator=generator)
        self.edge_index = torch.randint(nodes, (2, 8), generator=generator)
        self.extra = {"name": f"graph {seed}", "mask": np.arange(nodes) % 2 == 0, "labels": {1, 2}}
        self.parent = self
        self.nan = float("nan")


class Tagged(torch.Tensor):
    """A subclass of torch.Tensor with an attribute."""


class Careless:
    """Counts how often it was looked at, which is no part of its meaning."""

    looks = 0

    def __init__(self, value: int) -> None:
        self.value = value
        Careless.looks += 1
        self.number = Careless.looks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Careless) and self.value == other.value

    __hash__ = None


class Opaque:
    """Does not say what it consists of."""

    def __reduce__(self):
        raise KeyError("own")


def tagged(values, tag):
    made = torch.as_tensor(values).as_subclass(Tagged)
    made.tag = tag
    return made


def structured(value):
    made = np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])
    made["b"] = value
    return made


def objects(value):
    made = np.empty(2, dtype=object)
    made[:] = [torch.ones(2) * value, "text"]
    return made


def cyclic(value):
    made = [value, {"x": {1, 2}}]
    made.append(made)
    return made


PAIRS = {
    "graph": (lambda: Graph(1), lambda: Graph(2)),
    "graphs": (lambda: [Graph(1), Graph(2)], lambda: [Graph(1), Graph(3)]),
    "set": (lambda: {"a", "b", 3, 2.5}, lambda: {"a", "b", 3, 2.75}),
    "subclass": (lambda: tagged([1.0, 2.0], "x"), lambda: tagged([1.0, 2.5], "x")),
    "attribute of a subclass": (lambda: tagged([1.0], "x"), lambda: tagged([1.0], "y")),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda: (2 * torch.eye(3)).to_sparse()),
    "parameter": (
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.nn.Parameter(torch.zeros(3)),
    ),
    "module": (
        lambda: torch.manual_seed(0) and torch.nn.Linear(2, 2),
        lambda: torch.manual_seed(1) and torch.nn.Linear(2, 2),
    ),
    "nan": (lambda: ({1}, float("nan")), lambda: ({1}, 1.0)),
    "nan in a tensor": (
        lambda: ({1}, torch.tensor([1.0, float("nan")])),
        lambda: ({1}, torch.tensor([2.0, float("nan")])),
    ),
    "structured": (lambda: structured(1), lambda: structured(2)),
    "objects": (lambda: objects(1), lambda: objects(2)),
    "date": (lambda: datetime.datetime(2020, 1, 2), lambda: datetime.datetime(2020, 1, 3)),
    "path": (lambda: pathlib.Path("a/b"), lambda: pathlib.Path("a/c")),
    "decimal": (lambda: decimal.Decimal("1.5"), lambda: decimal.Decimal("1.6")),
    "partial": (lambda: functools.partial(dumps, 1), lambda: functools.partial(dumps, 2)),
    "function": (lambda: [dumps], lambda: [same]),
    "generator": (lambda: random.Random(1), lambda: random.Random(2)),
    "dtype": (lambda: ({1}, torch.float32), lambda: ({1}, torch.float64)),
    "own equality": (lambda: Careless(1), lambda: Careless(2)),
    "cycle": (lambda: cyclic(1), lambda: cyclic(2)),
    "types": (lambda: ({1}, 1), lambda: ({1}, True)),
    "length": (lambda: [{1}], lambda: [{1}, {1}]),
    "keys": (lambda: {"a": {1}}, lambda: {"b": {1}}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_samples_are_found_equal_and_others_not(name):
    make, make_other = PAIRS[name]
    assert same(make(), make()) is True
    assert same(make(), pickle.loads(dumps(make()))) is True
    assert same(make(), make_other()) is False


def test_what_cannot_be_told_is_neither():
    assert same(Opaque(), Opaque()) is None
    assert same([Opaque(), 1], [Opaque(), 1]) is None
    assert same([Opaque(), 1], [Opaque(), 2]) is False  # whatever the first part is
    assert same({Opaque()}, {Opaque()}) is None
    deep_one, deep_other = {1}, {1}
    for _ in range(100_000):
        deep_one, deep_other = [deep_one], [deep_other]
    assert same(deep_one, deep_other) is None


def test_a_comparison_runs_no_comparison_of_a_tensor():
    """`==` on these is a tensor, whose truth is ambiguous."""

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert function.__name__ not in ("eq", "__eq__", "ne"), "it was compared with =="
            return super().__torch_function__(function, types, args, kwargs or {})

    globals()["Refuses"] = Refuses
    Refuses.__qualname__ = "Refuses"
    one, other = (torch.ones(3).as_subclass(Refuses) for _ in range(2))
    assert same(one, other) is True


# By content


def views():
    base = torch.arange(3 << 20, dtype=torch.float32)
    return {
        "slice": base[1000:4000],
        "rows": base.view(1024, -1)[7],
        "column": base.view(1024, -1)[:, 5],
        "steps": base[::4096],
        "transposed": base[: 64 * 32].view(64, 32).t(),
        "channels last": base[: 2 * 3 * 8 * 8]
        .view(2, 3, 8, 8)
        .contiguous(memory_format=torch.channels_last)[:1],
        "expanded": base[5:6].expand(1 << 20),
        "windows": base[:1000].unfold(0, 100, 1),
        "empty": base[:0],
        "scalar": base[7],
        "parameter": torch.nn.Parameter(base[:100]),
        "subclass": tagged(base, "x")[:100],
        "gradient": base[:50].clone().requires_grad_()[:10],
    }


@pytest.mark.parametrize("name", views())
def test_a_view_is_stored_without_the_rest_of_its_memory(name):
    view = views()[name]
    distinct = len(set(view.detach().flatten().tolist()))
    stored = dumps([view])
    assert len(stored) < 4 * distinct + 4000
    again = pickle.loads(stored)[0]
    assert type(again) is type(view)
    assert again.shape == view.shape and again.dtype == view.dtype
    assert again.requires_grad == view.requires_grad
    assert torch.equal(again, view)
    if view.is_contiguous(memory_format=torch.contiguous_format):
        assert again.is_contiguous()
    assert getattr(again, "tag", None) == getattr(view, "tag", None)


def test_control_pickle_itself_stores_all_of_it():
    assert len(pickle.dumps(views()["slice"])) > 12 << 20


def test_one_tensor_that_occurs_twice_stays_one():
    view = torch.arange(1000)[:10]
    one, other, third = pickle.loads(dumps([view, view, view[:5]]))
    assert one is other
    third[0] = 9
    assert one[0] == 0  # two views of one memory come back as two tensors


def test_what_is_no_view_is_pickled_as_ever():
    for value in (torch.ones(100), [1, "a"], torch.eye(3).to_sparse(), torch.ones(3).conj()):
        assert dumps(value) == pickle.dumps(value, 5)
    lazy = torch.tensor([1 + 2j, 3j, 5]).conj()[:1]
    assert torch.equal(pickle.loads(dumps(lazy)), lazy)


def test_the_codec_stores_views_inside_pickled_objects_by_content():
    base = torch.zeros(3 << 20)
    _, record = _C.codec_encode({"boxes": {base[:3000]}}, True)
    assert len(record) < 16_000
    schema, record = _C.codec_encode(Graph(3), True)
    assert same(_C.codec_decode(schema, record, True), Graph(3))


# In a dataset


class Graphs:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Graph:
        return Graph(self.seed + index)


def test_verify_and_every_join_compare_what_pickle_stored(cached, unique_name):
    first = cached(Graphs(), allow_pickle=True, name=unique_name(), fingerprint="x")
    for i in range(12):
        first[i]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first.verify() == 12
        again = cached(Graphs(), allow_pickle=True, name=first.name, fingerprint="x")
        assert again.verify() == 12
        for i in range(12):
            assert same(again[i], Graph(i))


def test_a_stale_cache_of_pickled_samples_is_told(cached, unique_name):
    first = cached(Graphs(), allow_pickle=True, name=unique_name(), fingerprint="x")
    for i in range(12):
        first[i]
    other = cached(Graphs(100), allow_pickle=True, name=first.name, fingerprint="x", probe=0)
    with pytest.raises(ValueError, match="the cache is stale"):
        other.verify()


def test_samples_that_cannot_be_compared_are_no_error(cached, monkeypatch):
    ds = cached([{1}, {2}], allow_pickle=True)
    ds[0], ds[1]
    monkeypatch.setattr(_compare._Comparison, "same", lambda self, one, other: None)
    monkeypatch.setattr(type(ds._stocache.records), "differs", lambda *_: True)
    with pytest.warns(RuntimeWarning, match="cannot be compared"):
        assert ds.verify() == 0


def test_control_comparing_with_equals_is_noticed(cached, monkeypatch):
    ds = cached(Graphs(), allow_pickle=True)
    for i in range(12):
        ds[i]
    monkeypatch.setattr(_compare._Comparison, "same", lambda self, one, other: bool(one == other))
    with pytest.warns(RuntimeWarning, match="every time"):
        ds.verify()
