"""Parts of a Zarr array: a chunk, or what is stored together, is read by one rank only."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
import stocache
import zarr
from stocache import LazyShardDataset
from torch.utils.data import DataLoader

ROWS, CHUNK = 103, 8


class Noted(zarr.storage.LocalStore):
    """Notes which files are read by whom."""

    async def get(self, key, *args, **options):
        with open(self.root / "reads", "a") as reads:
            reads.write(f"{os.environ.get('SHARD', '-')} {key}\n")
        return await super().get(key, *args, **options)


KINDS = {
    "format 2": {"zarr_format": 2, "chunks": (CHUNK, 4)},
    "format 3": {"zarr_format": 3, "chunks": (CHUNK, 4)},
    "shards of format 3": {"zarr_format": 3, "chunks": (2, 4), "shards": (CHUNK, 4)},
}


@pytest.fixture(params=KINDS)
def array(request, tmp_path):
    made = zarr.create_array(
        zarr.storage.LocalStore(tmp_path), shape=(ROWS, 4), dtype="float32", **KINDS[request.param]
    )
    made[:] = np.arange(ROWS, dtype="float32")[:, None]
    return zarr.open_array(Noted(tmp_path), mode="r")


def part_of(array, rank, **options):
    return LazyShardDataset(
        array, memory_size="16MiB", disk_size=None, rank=rank, num_replicas=3, verbose=False,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_reads_chunks_of_its_own(array, tmp_path, monkeypatch, workers):
    seen = []
    for rank in range(3):
        dataset = part_of(array, rank)
        monkeypatch.setenv("SHARD", str(rank))  # not what was read to measure it
        for loader in (DataLoader, stocache.DataLoader):
            got = [
                int(row[0])
                for rows in loader(dataset, 10, num_workers=workers)
                for row in rows
            ]  # fmt: skip
            assert got == dataset.indices().tolist()
        monkeypatch.delenv("SHARD")
        seen.append(got)
        dataset.close()
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(ROWS))
    assert readers_of_chunks(tmp_path) == {1}


def test_control_without_chunks_each_is_read_by_many(array, tmp_path, monkeypatch):
    for rank in range(3):
        dataset = part_of(array, rank, chunk=1)
        monkeypatch.setenv("SHARD", str(rank))
        for i in range(len(dataset)):
            dataset[i]
        monkeypatch.delenv("SHARD")
        dataset.close()
    assert max(readers_of_chunks(tmp_path)) > 1


def readers_of_chunks(folder):
    """By how many ranks the files with data were read."""
    readers: dict[str, set[str]] = {}
    for line in (folder / "reads").read_text().splitlines():
        rank, key = line.split()
        if rank != "-" and re.search(r"\d+[./]\d+$", key):
            readers.setdefault(key, set()).add(rank)
    assert len(readers) == -(-ROWS // CHUNK)
    return set(map(len, readers.values()))
