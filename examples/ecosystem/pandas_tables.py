"""Tables of pandas beside tensors.

python examples/ecosystem/pandas_tables.py
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from stocache import CachedDataset
from torch.utils.data import Dataset


class Patients(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, idx: int) -> Any:
        days = range(idx + 1)
        visits = pd.DataFrame({"day": days, "ward": [f"ward {day % 3}" for day in days]})
        return {"visits": visits, "born": pd.Timestamp("1980-01-01"), "scan": torch.ones(4, 4)}


dataset = CachedDataset(Patients(), "16MiB", verbose=False)
for _ in range(2):
    lengths = [len(dataset[i]["visits"]) for i in range(len(dataset))]

print(lengths, type(dataset[7]["visits"]).__name__, dataset[7]["born"].year)
print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
