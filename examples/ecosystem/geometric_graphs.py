"""Graphs of PyTorch Geometric, with its own loader.

python examples/ecosystem/geometric_graphs.py
"""

from __future__ import annotations

from typing import Any

import torch
from stocache import CachedDataset
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


class Graphs(Dataset[Any]):
    """Stands for graphs that take long to make."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, idx: int) -> Data:
        nodes = 5 + idx % 7
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        return Data(x=torch.rand(nodes, 8), edge_index=edges, y=torch.tensor([idx % 2]))


dataset = CachedDataset(Graphs(), "16MiB", verbose=False)
for _ in range(2):
    for batch in DataLoader(dataset, batch_size=8, shuffle=True):
        assert batch.num_graphs == 8 and batch.x.shape[1] == 8

print(dataset[3])
print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
