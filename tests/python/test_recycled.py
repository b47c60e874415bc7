"""Memory of samples that were handed out is used for the next ones, when nobody holds it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from stocache import CachedDataset

MIB = 1 << 20
# Below what is used again, within it and above it; some have the same room, others do not.
SIZES = [1000, 32_767, 32_768, 40_000, 40_001, 150_528, 150_000, MIB, 3 * MIB + 7, 17 * MIB]


@pytest.fixture
def pictures():
    sizes = SIZES * 2
    made = [torch.full((size,), idx % 251, dtype=torch.uint8) for idx, size in enumerate(sizes)]
    dataset = CachedDataset(made, "128MiB", verbose=False)
    assert len(dataset[:]) == len(made)
    yield dataset
    dataset.close()


def is_right(sample, idx) -> bool:
    return len(sample) == (SIZES * 2)[idx] and bool((sample == idx % 251).all())


def address(sample) -> int:
    return sample.untyped_storage().data_ptr()


def test_what_was_let_go_is_used_again_and_what_is_held_is_not(pictures):
    first = pictures[5]
    place = address(first)
    other = pictures[6]  # held as well: not there
    assert address(other) != place
    del first
    assert address(pictures[6]) == place, "control: memory is used again at all"
    assert is_right(other, 6)


@pytest.mark.parametrize("hold", ["tensor", "view", "array", "storage"])
def test_whatever_holds_a_sample_keeps_its_memory(pictures, hold):
    held = {
        "tensor": lambda sample: sample,
        "view": lambda sample: sample[1:],
        "array": lambda sample: sample.numpy(),
        "storage": lambda sample: sample.untyped_storage(),
    }[hold]
    kept = [held(pictures[idx]) for idx in range(len(pictures))]
    for _ in range(3):
        for idx in range(len(pictures)):
            assert is_right(pictures[idx], idx)
    for idx, each in enumerate(kept):
        if hold == "storage":
            each = torch.empty(0, dtype=torch.uint8).set_(each)
        assert (np.asarray(each) == idx % 251).all()


def test_threads_that_take_and_give_back_at_once_get_their_own(pictures):
    wrong = []

    def work(seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        held = {}
        for _ in range(300):
            idx, slot = torch.randint(16, (2,), generator=order).tolist()
            held[slot % 4] = (idx, pictures[idx])
            wrong.extend(i for i, sample in held.values() if not is_right(sample, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_uses_what_its_parent_had_and_changes_nothing_of_it(pictures, in_child):
    held = [pictures[idx] for idx in range(4, 9)]
    free = [pictures[idx] for idx in range(4, 9)]
    del free

    def child() -> bool:
        again = [pictures[idx] for idx in range(len(pictures))]
        return all(is_right(sample, idx) for idx, sample in enumerate(again))

    assert in_child(child)
    assert all(is_right(sample, idx) for idx, sample in enumerate(held, 4))


def grown_after(count: int) -> int:
    """Bytes by which a process has grown after it held so many samples of 1 MiB and let them go."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    dataset = CachedDataset([torch.zeros(MIB, dtype=torch.uint8)] * count, "512MiB", verbose=False)
    dataset[0]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    samples = [dataset[0] for _ in range(count)]
    del samples
    gc.collect()
    return resident() - before


def test_what_is_kept_for_the_next_has_a_bound(in_child):
    assert 32 * MIB < in_child(grown_after, 40) < 48 * MIB, "control: it is kept"
    assert in_child(grown_after, 300) < 80 * MIB


def page_faults() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


def faults_after_others(held: int) -> float:
    """Page faults per sample of 600 KB, after so many of 150 KB were held and let go."""
    others = CachedDataset([torch.zeros(150_000, dtype=torch.uint8)] * 8, "16MiB", verbose=False)
    dataset = CachedDataset([torch.zeros(600_000, dtype=torch.uint8)] * 8, "16MiB", verbose=False)
    del [others[idx % 8] for idx in range(held)][:]
    for idx in range(100):
        dataset[idx % 8]
    before = page_faults()
    for idx in range(200):
        dataset[idx % 8]
    return (page_faults() - before) / 200


def test_memory_of_other_sizes_makes_room(in_child):
    # 147 pages each, where fresh memory is taken for every one
    assert in_child(faults_after_others, 600) < 20


def mappings_of(count: int, size: int) -> int:
    dataset = CachedDataset([torch.zeros(size, dtype=torch.uint8)] * 8, "16MiB", verbose=False)
    samples = [dataset[idx % 8] for idx in range(count)]
    del samples[::2]  # mappings side by side count as one
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_process_that_holds_many_samples_has_mappings_left(in_child):
    few = in_child(mappings_of, 10, 100_000)
    assert in_child(mappings_of, 3000, 100_000) > few + 500, "control: these are mappings"
    assert in_child(mappings_of, 16_000, 33_000) < few + 2500
