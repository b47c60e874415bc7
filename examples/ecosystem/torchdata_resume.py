"""torchdata: a StatefulDataLoader goes on in the middle of an epoch, over a cache.

python examples/ecosystem/torchdata_resume.py
"""

from __future__ import annotations

from typing import Any

import stocache
import torch
from stocache import CachedDataset
from torchdata.stateful_dataloader import StatefulDataLoader


def make_loader(dataset: Any) -> Any:
    # With stocache.collate its batches are gathered natively.
    return StatefulDataLoader(dataset, 4, shuffle=True, num_workers=1, collate_fn=stocache.collate)


def main() -> None:
    dataset = CachedDataset([torch.full((8,), i) for i in range(32)], "16MiB", verbose=False)
    torch.manual_seed(0)
    loader = make_loader(dataset)
    batches = []
    for number, batch in enumerate(loader, 1):
        batches.append(batch)
        if number == 3:
            state = loader.state_dict()

    again = make_loader(dataset)
    again.load_state_dict(state)
    rest = list(again)
    assert all(torch.equal(a, b) for a, b in zip(rest, batches[3:], strict=True))
    for batch in make_loader(dataset):
        assert batch.shape == (4, 8)
    print(f"{len(rest)} batches were left")
    print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
    dataset.close()


if __name__ == "__main__":
    main()
