"""Prepares a dataset in parallel on all ranks; each node keeps what its ranks will train on.

    torchrun --standalone --nproc-per-node 4 examples/preprocess.py

Every rank prepares its own part and leaves it in the memory of the node and on its disk. Run it
again: what is on disk is found, and nothing is prepared. Kill a rank: the others of its node
prepare what it left, or the next run does.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from stocache import DataLoader, LazyShardDataset
from torch import Tensor
from torch.utils.data import Dataset

SAMPLES = int(os.environ.get("SAMPLES", "2000"))
FOLDER = os.environ.get("FOLDER", "build/preprocessed")


class Spectrograms(Dataset[tuple[Tensor, int]]):
    """Stands for anything that takes a while to prepare."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.005)
        wave = torch.sin(torch.arange(16_384) * (0.001 + index * 1e-6))
        spectrum = torch.stft(wave, 256, window=torch.hann_window(256), return_complex=True)
        return spectrum.abs().half(), index % 10


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = LazyShardDataset(
        Spectrograms(), memory_size="256MiB", disk_size="1GiB", disk_cache_path=FOLDER, equal=True
    )
    began = time.perf_counter()
    before = dataset.stats().loads
    dataset.warm(num_workers=1)
    dist.barrier()
    if dataset.rank.number == 0:
        prepared, took = dataset.stats().loads - before, time.perf_counter() - began
        print(f"{prepared} samples were prepared on this node in {took:.1f} s")
    for epoch in range(2):
        dataset.set_epoch(epoch)
        seen = sum(len(labels) for _, labels in DataLoader(dataset, 50))
        total = torch.tensor(seen)
        dist.all_reduce(total)
        if dataset.rank.number == 0:
            print(f"epoch {epoch}: {total} samples visited, {seen} of them by each rank")
    dataset.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
