"""Data-parallel training where all ranks of the node share one cache.

    torchrun --standalone --nproc-per-node 2 examples/ddp_train.py

Every rank builds the same dataset with the same `SharedCache(...)` line, and gets the same memory:
no name, no rank arithmetic. A sample is prepared once per node, whichever rank and worker meets it
first. The shuffle gives each rank other samples every epoch, so in the second epoch half of what a
rank reads was prepared by the other one. With a cache per rank these would be misses.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from stocache import SharedCache
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES = 1024
SHAPE = (3, 32, 32)
EPOCHS = 3


class Samples(Dataset[tuple[Tensor, int]]):
    """Noise images whose brightness depends on the class; slow to prepare."""

    def __init__(self) -> None:
        self.cache = SharedCache(
            size_limit_gib=0.1,
            dataset_len=SAMPLES,
            data_dims=SHAPE,
            dtype=torch.uint8,
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        label = idx % 2
        x = self.cache.get_slot(idx)
        if x is None:
            x = self.prepare(idx, label)
            self.cache.set_slot(idx, x)
        return x, label

    @staticmethod
    def prepare(idx: int, label: int) -> Tensor:
        time.sleep(0.005)  # a network disk
        generator = torch.Generator().manual_seed(idx)
        return torch.randint(0, 160 + 60 * label, SHAPE, dtype=torch.uint8, generator=generator)


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this with: torchrun --standalone --nproc-per-node 2 examples/ddp_train.py"
        )
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    dataset = Samples()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=32, sampler=sampler, num_workers=2, persistent_workers=True
    )
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 2)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    before = dataset.cache.stats()
    dist.barrier()  # nobody trains before everybody has looked
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        for images, labels in loader:
            loss = criterion(model(images.float() / 255 - 0.5), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()  # all ranks are done with the epoch
        seconds = time.perf_counter() - start
        after = dataset.cache.stats()  # summed over all ranks and their workers
        dist.barrier()  # all ranks have read the counters
        if rank == 0:
            hits, misses = after.hits - before.hits, after.misses - before.misses
            print(
                f"epoch {epoch + 1}: {seconds:5.2f} s, last loss {loss.item():.3f}, "
                f"all ranks together {hits} hits, {misses} misses"
            )
        before = after

    if rank == 0:
        copies = after.fills / len(dataset)
        print(
            f"{ranks} ranks with 2 workers each: {after.fills} samples stored for a dataset of "
            f"{len(dataset)}, {after.bytes / 2**20:.1f} MiB, that is {copies:g} copy in memory"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
