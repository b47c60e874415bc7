"""A far folder, datasets that read it through a FileCache, and an independent count of copies.
Spawned workers import this module by name, so it holds no fixtures."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import warnings
from collections import Counter
from pathlib import Path

from kernel import LIBC
from stocache import DataCache
from torch.utils.data import DataLoader, Dataset

KIB = 1 << 10


def content(name: str, size: int, version: int = 0) -> bytes:
    """What file `name` holds: other bytes than any other file, from the first to the last."""
    return hashlib.shake_128(os.fsencode(name) + bytes([version])).digest(size)


def write(folder, name: str, size: int = 4 * KIB, version: int = 0) -> None:
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content(name, size, version))


def make_far(folder, count: int, size: int = 4 * KIB) -> str:
    """A folder with `count` files, a third of them in a sub-folder."""
    for n in range(count):
        write(folder, f"deep/er/{n:04}.bin" if n % 3 == 0 else f"{n:04}.bin", size)
    return str(folder)


def read(path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def complaint(name: str, found: bytes, version: int = 0) -> str | None:
    """None if these are the bytes of that file."""
    if found == content(name, len(found), version) and found:
        return None
    return f"{name} has {len(found)} bytes that are not its own"


def copies_below(folder) -> dict[str, Path]:
    """Every file below `folder`, by its name."""
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in found}


def parts_of(cache) -> list[str]:
    """Copies in the making."""
    return os.listdir(os.path.join(os.path.dirname(cache.folder), "parts"))


def used_bytes(cache) -> int:
    """What all copies take, whole or not, as the disk says."""
    total = 0
    for folder in (cache.folder, os.path.join(os.path.dirname(cache.folder), "parts")):
        for at, _, names in os.walk(folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(at, name)).st_size
                except FileNotFoundError:
                    continue  # removed, or renamed: then it is, or was, counted under its name
    return total


class Pictures(Dataset):
    """As the data set of cache_dataloading, with the import changed. A sample is the index, whether
    a copy was read, what is wrong with the bytes, and the warnings that came with it."""

    def __init__(self, data_path, cache_path, kind=DataCache, **options):
        self.data_path = data_path
        self.cache_path = cache_path
        self.cache = kind(self.data_path, self.cache_path, **options)

    def __len__(self):
        return len(self.cache.files)

    def __getitem__(self, idx):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            file_path_main = self.cache.get_path(idx)
        wrong = complaint(self.cache.files[idx], read(file_path_main))
        is_copy = not file_path_main.startswith(os.path.join(self.data_path, ""))
        return idx, is_copy, wrong, [str(warning.message) for warning in seen]


class Original:
    """DataCache as cache_dataloading has it: the control."""

    def __init__(self, data_path, cache_path):
        self.data_path = data_path
        self.cache_path = cache_path
        self.files = sorted(os.listdir(self.data_path))
        self.in_cache = set()
        os.makedirs(self.cache_path, exist_ok=True)

    def get_path(self, idx):
        fname = self.files[idx]
        dst = os.path.join(self.cache_path, fname)
        if fname not in self.in_cache:
            shutil.copy(os.path.join(self.data_path, fname), dst)
            self.in_cache.add(fname)
        return dst


class Loaded:
    """What an epoch brought."""

    def __init__(self, dataset, **options) -> None:
        options = {"batch_size": 4, "shuffle": True, "num_workers": 4, **options}
        if options["num_workers"]:
            options.setdefault("multiprocessing_context", "fork")
        samples = [sample for batch in DataLoader(dataset, collate_fn=list, **options)
                   for sample in batch]  # fmt: skip
        assert sorted(sample[0] for sample in samples) == list(range(len(dataset)))
        self.copies = sum(sample[1] for sample in samples)
        self.wrong = [sample[2] for sample in samples if sample[2]]
        self.warnings = [text for sample in samples for text in sample[3]]


def is_copy(cache, path) -> bool:
    return path.startswith(os.path.join(cache.folder, ""))


def all_right(cache) -> int:
    """Reads every file through the cache, and says how many came from copies."""
    count = 0
    for idx, name in enumerate(cache.files):
        path = cache.get_path(idx)
        assert complaint(name, read(path)) is None
        count += is_copy(cache, path)
    return count


IN_OPEN, IN_MOVED_TO, IN_ISDIR, IN_Q_OVERFLOW = 0x20, 0x80, 0x40000000, 0x4000


class Watch:
    """Counts, by the word of the kernel (inotify), how often files were opened, or given their
    names, below a folder."""

    def __init__(self, folder, mask: int) -> None:
        self.file = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.folders = {}
        for at, _, _ in os.walk(folder):
            watch = LIBC.inotify_add_watch(self.file, os.fsencode(at), mask)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self.folders[watch] = os.path.relpath(at, folder)
        self.seen: Counter[str] = Counter()

    def count(self) -> Counter:
        """So far, by name."""
        while True:
            try:
                events = os.read(self.file, 1 << 20)
            except BlockingIOError:
                return self.seen
            while events:
                watch, mask, _, length = struct.unpack_from("iIII", events)
                assert not mask & IN_Q_OVERFLOW, "too much happened to be counted"
                name = os.fsdecode(events[16 : 16 + length].rstrip(b"\0"))
                if not mask & IN_ISDIR and watch in self.folders:
                    self.seen[os.path.normpath(os.path.join(self.folders[watch], name))] += 1
                events = events[16 + length :]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.file)


def opened_at(folder) -> Watch:
    """Every copy opens its source once. Two at the same moment may count as one."""
    return Watch(folder, IN_OPEN)


def named_at(folder) -> Watch:
    """Every copy gets its name by a rename, which the kernel numbers: none is missed."""
    return Watch(folder, IN_MOVED_TO)
