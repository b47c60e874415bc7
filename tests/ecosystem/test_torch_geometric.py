"""PyTorch Geometric: graphs, and its loader."""

from __future__ import annotations

import torch
from checks import back
from sources import Fixed
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader


def graph(i: int) -> Data:
    nodes = 3 + i
    made = Data(y=torch.tensor([i]), edge_index=torch.randint(nodes, (2, 2 * nodes)))
    made.x = torch.rand(nodes, 4)
    made.name = f"graph {i}"
    made.more = {"a": [torch.ones(i), None]}
    return made


def hetero(i: int) -> HeteroData:
    made = HeteroData()
    made["paper"].x = torch.rand(4, 2) + i
    made["author"].x = torch.rand(3, 5)
    made["author", "writes", "paper"].edge_index = torch.randint(3, (2, 6))
    made.year = 2026
    return made


def equal(got, want) -> bool:
    if isinstance(want, torch.Tensor):
        return type(got) is type(want) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, dict):
        return list(got) == list(want) and all(equal(got[key], want[key]) for key in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(equal, got, want))
    return type(got) is type(want) and got == want


def test_graphs_come_back():
    for i in range(4):
        for value in (graph(i), hetero(i), Data(), HeteroData()):
            got = back(value)
            assert type(got) is type(value) and equal(got.to_dict(), value.to_dict())
            assert got.keys() == value.keys() and str(got) == str(value)
            assert got.num_nodes == value.num_nodes


def beside(store):
    return {
        name: value for name, value in vars(store).items() if name not in ("_mapping", "_parent")
    }


def test_what_a_graph_keeps_beside_its_attributes():
    """What begins with an underscore is no item of a graph."""
    one, many = graph(2), hetero(2)
    one._source = many._source = many["paper"]._source = ("a.txt", torch.ones(2))
    one.num_nodes = many["author"].num_nodes = 9
    vars(one)["own"] = {"a": 1}
    for value in (one, many):
        got = back(value)
        assert equal(got.to_dict(), value.to_dict()) and str(got) == str(value)
        assert got.keys() == value.keys() and got.num_nodes == value.num_nodes
        for mine, stores in zip(got.stores, value.stores, strict=True):
            assert equal(beside(mine), beside(stores)) and mine._parent() is got
        assert equal(got._source[1], value._source[1]) and got._source[0] == "a.txt"
    assert back(one).own == {"a": 1}
    assert back(many)["paper"]._source[0] == "a.txt" and "_source" not in back(one)


def test_their_loader(cached):
    for make in (graph, hetero):
        graphs = [make(i) for i in range(8)]
        dataset = cached(Fixed(graphs))
        for workers in (0, 2):
            expected = list(DataLoader(graphs, 3, num_workers=workers))
            for _ in range(2):
                batches = list(DataLoader(dataset, 3, num_workers=workers))
                assert len(batches) == len(expected)
                for got, want in zip(batches, expected, strict=True):
                    assert type(got) is type(want) and got.num_graphs == want.num_graphs
                    assert equal(got.to_dict(), want.to_dict())
        assert dataset.stats().loads == 8
