"""Datasets with open files, as people write them. Spawned workers import this module by name, so it
holds no fixtures."""

from __future__ import annotations

import os
import time
import zipfile

import torch
from torch.utils.data import Dataset

BYTES = 100  # of a sample


def expected(idx: int) -> bytes:
    return f"{idx:08}".encode().ljust(BYTES, b"%d" % (idx % 10))


def write_samples(path, length: int) -> str:
    path.write_bytes(b"".join(map(expected, range(length))))
    return str(path)


def write_zip(path, length: int) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for idx in range(length):
            archive.writestr(f"{idx}", expected(idx))
    return str(path)


class InFile(Dataset):
    """Opens its file at the first sample, so that every worker has its own."""

    def __init__(self, path: str, length: int, nap: float = 0) -> None:
        self.path = path
        self.length = length
        self.nap = nap
        self.file = None

    def open(self):
        return open(self.path, "rb", buffering=4096)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int) -> bytes:
        if self.file is None:
            self.file = self.open()
        return self.read(idx)

    def read(self, idx: int) -> bytes:
        self.file.seek(idx * BYTES)
        if self.nap:
            time.sleep(self.nap)
        return self.file.read(BYTES)


class Eager(InFile):
    """Has its file open from the start."""

    def __init__(self, path: str, length: int) -> None:
        super().__init__(path, length)
        self.file = self.open()


class Zipped(InFile):
    """The samples of an archive."""

    def open(self):
        return zipfile.ZipFile(self.path)

    def read(self, idx: int) -> bytes:
        return self.file.read(f"{idx}")


class Handle:
    """A file of a library that does not let it be pickled."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115

    def __reduce__(self):
        raise TypeError("h5py objects cannot be pickled")


class Unpicklable(InFile):
    def open(self):
        return Handle(self.path)

    def read(self, idx: int) -> bytes:
        self.file.file.seek(idx * BYTES)
        return self.file.file.read(BYTES)


class NotHere(Dataset):
    """Must not be asked in the process that made it. Draws random numbers for every sample."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.maker = os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int) -> torch.Tensor:
        assert os.getpid() != self.maker, "a sample was loaded where nobody asked for it"
        torch.rand(3)
        return torch.full((4,), idx)


def plain(samples):
    """A collate_fn that can be pickled."""
    return samples
