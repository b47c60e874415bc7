"""Accelerate: `prepare` makes a loader of its own; the cache behind it stays, one for all ranks.

python examples/ecosystem/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/ecosystem/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import stocache
import torch
from accelerate import Accelerator
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[Any]):
    """Stands for samples that take long to load."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, idx: int) -> Any:
        return torch.full((8,), float(idx)), idx % 2


def main() -> None:
    accelerator = Accelerator(cpu=True)
    dataset = CachedDataset(Slow(), "16MiB", verbose=False)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    # Whatever `prepare` makes of it, batches are gathered natively.
    loader = DataLoader(dataset, 8, shuffle=True, collate_fn=stocache.collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(3):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x / 64), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    accelerator.wait_for_everyone()
    stats = dataset.stats()
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} ranks, {stats.hits} hits, {stats.loads} loads")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
