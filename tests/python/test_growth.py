"""A long epoch grows neither private nor shared memory; a cache costs few descriptors."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
from samples import whole, words_cache

FORK = multiprocessing.get_context("fork")


# P8: memory does not grow


def test_three_million_keys_grow_no_private_memory_and_no_shared_memory(run_script):
    run_script(
        """
        import os, re, sys, torch, stocache
        from torch.utils.data import BatchSampler, DataLoader, Dataset
        torch.set_num_threads(1)
        N = 3_000_000

        def private_dirty(pid="self"):
            text = open(f"/proc/{pid}/smaps_rollup").read()
            return int(re.search(r"Private_Dirty:\\s+(\\d+)", text)[1]) / 1024

        cache = stocache.SharedCache(1, N, (2,), torch.int64, backing="shm", verbose=False)
        for start in range(0, N, 100_000):
            rows = torch.arange(start, start + 100_000)[:, None].expand(-1, 2)
            assert bool(cache.set_many(range(start, start + 100_000), rows).all())
        blocks = os.stat(cache.path).st_blocks

        pids = []
        for worker in range(2):
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            code = 1
            try:
                get = cache.get_slot
                for epoch in range(2):
                    before = private_dirty()
                    for idx in range(worker, N, 1 + epoch):
                        row = get(idx)
                    assert int(row[0]) == idx
                    growth = private_dirty() - before
                    print(f"worker {worker} epoch {epoch}: {growth:.1f} MiB", flush=True)
                    assert growth <= 32, growth
                # the control: an object per sample is what this measurement must see
                before = private_dirty()
                held = [get(idx) for idx in range(300_000)]
                assert private_dirty() - before > 32
                code = 0
            finally:
                os._exit(code)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]

        class Batches(Dataset):
            def __len__(self):
                return N

            def __getitem__(self, indices):
                return cache.get_many(indices)[0]

        loader = DataLoader(
            Batches(),
            sampler=BatchSampler(range(N), 4096, drop_last=False),
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        before = None
        for epoch in range(3):
            total = sum(len(batch) for batch in loader)
            assert total == N
            after = [private_dirty(w.pid) for w in loader._iterator._workers]
            if before:
                growth = [a - b for a, b in zip(after, before)]
                print(f"loader epoch {epoch}: {growth} MiB", flush=True)
                assert max(growth) <= 32, growth
            before = after
        assert os.stat(cache.path).st_blocks == blocks, "reading made /dev/shm grow"
        """,
        timeout=600,
    )


@pytest.mark.parametrize("policy", ["freeze", "lru"])
def test_epochs_from_disk_grow_no_private_memory(run_script, tmp_path, policy):
    # Of workers and who starts them. "freeze" reads from the second epoch on; "lru" loads,
    # writes, reads and evicts in each.
    run_script(
        f"""
        import multiprocessing, os, torch, stocache
        from torch.utils.data import DataLoader, Dataset
        torch.set_num_threads(1)
        N, BYTES = 1500, 150_000

        class Source(Dataset):
            def __len__(self):
                return N

            def __getitem__(self, idx):
                return torch.full((BYTES,), idx % 251, dtype=torch.uint8)

        def private_dirty(pid="self"):
            # batches that are handed over are shared memory, also while one process maps them
            what, kib = "", 0
            for line in open(f"/proc/{{pid}}/smaps"):
                word, _, rest = line.partition(" ")
                if "-" in word:
                    what = rest
                elif word == "Private_Dirty:" and "/memfd:stocache-batch" not in what:
                    kib += int(rest.split()[0])
            return kib / 1024

        lru = {policy!r} == "lru"
        dataset = stocache.CachedDataset(
            Source(), "32MiB" if lru else "2MiB", disk="96MiB" if lru else "400MiB",
            disk_path={str(tmp_path / "below")!r}, policy={policy!r}, verbose=False,
        )
        for kind in (DataLoader, stocache.DataLoader):
            loader = kind(
                dataset, 64, shuffle=True, num_workers=2, multiprocessing_context="fork",
                persistent_workers=True,
            )
            before = None
            for epoch in range(4):
                assert sum(len(batch) for batch in loader) == N
                children = [child.pid for child in multiprocessing.active_children()]
                after = {{pid: private_dirty(pid) for pid in [os.getpid(), *children]}}
                if before:
                    growth = [after[pid] - before[pid] for pid in after]
                    print(f"{{kind.__module__}} epoch {{epoch}}: {{growth}} MiB", flush=True)
                    assert max(growth) <= 32, growth
                before = after
            del loader
        assert dataset.stats().disk.hits > N
        # the control: samples that are held are what this measurement must see
        before = private_dirty()
        held = [dataset[idx] for idx in range(300)]
        assert private_dirty() - before > 32
        dataset.delete()
        """,
        timeout=600,
    )


def test_an_unfilled_cache_takes_no_memory(make_cache):
    cache = make_cache(1, 2**18, (4096,), backing="shm")  # a GiB, nearly
    assert os.stat(cache.path).st_size > 900 << 20
    taken = os.stat(cache.path).st_blocks * 512
    assert taken < 4 << 20, "only the states are reserved"
    for idx in range(0, 2**18, 17):
        assert cache.get_slot(idx) is None
    cache.get_many(range(1000))
    assert os.stat(cache.path).st_blocks * 512 == taken, "a miss must not allocate"
    cache.set_slot(5, torch.zeros(4096, dtype=torch.uint8))
    assert 0 < os.stat(cache.path).st_blocks * 512 - taken <= 3 * 4096


def test_looking_at_holes_through_a_mapping_is_what_takes_memory(make_cache):
    # the control: in the same file, each page that is only read becomes memory, and is seen
    cache = make_cache(1, 2**18, (4096,), backing="shm")
    taken = os.stat(cache.path).st_blocks * 512
    with open(cache.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        start = len(memory) // 2
        assert not any(memory[at] for at in range(start, start + 1000 * 4096, 4096))
    assert os.stat(cache.path).st_blocks * 512 - taken >= 1000 * 4096


# P9: few descriptors and mappings


def fds_and_maps() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    # A segment that was made without a name keeps being shown by its number.
    ours = sum("/dev/shm/" in line or "/memfd:stocache" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), ours


def use_fully(cache) -> None:
    if cache.get_slot(0) is None:
        cache.set_slot(0, whole(0, 64))
    cache.get_slot(0), cache.aux_array, cache.array, cache[1]
    cache.get_many(range(8), threads=2)
    cache.set_many([1], whole(1, 64)[None], allow_overwrite=True)
    cache.stats()


def cost_of_five_caches(in_child, backing, leak=lambda cache: None) -> None:
    """Fails if they cost too much, or if something of them is left; `leak` is called with each."""

    def main():
        use_fully(first := words_cache(8, 64, backing=backing))  # pools and the like begin here
        first.close()
        del first
        gc.collect()
        fds, maps = fds_and_maps()
        caches = [words_cache(8, 64, backing=backing) for _ in range(5)]
        leaked = []
        for cache in caches:
            use_fully(cache)
            leaked.append(leak(cache))

        def child(caches, send):
            for cache in caches:
                use_fully(cache)
            send.send(fds_and_maps())

        receive, send = FORK.Pipe(duplex=False)
        process = FORK.Process(target=child, args=(caches, send))
        pipes = 2
        process.start()
        in_fork = receive.recv()
        process.join()
        process.close()
        letters = [pickle.dumps(cache) for cache in caches]
        twins = [pickle.loads(letter) for letter in letters]
        for twin in twins:
            use_fully(twin)
        used = fds_and_maps()
        for cache in (*caches, *twins):
            cache.close()
        receive.close()
        send.close()
        del cache, caches, twin, twins
        gc.collect()
        after = fds_and_maps()
        return (fds, maps), (in_fork[0] - pipes, in_fork[1]), (used[0] - pipes, used[1]), after

    (fds, maps), in_fork, used, after = in_child(main)
    for now in (in_fork, used):
        # the parent's sentinel of the child process is one descriptor more
        assert now[0] - fds <= 5 * 4 + 1 and 5 <= now[1] - maps <= 5 * 4
    assert after[1] == maps, "mappings outlive their caches"
    assert after[0] <= fds, "descriptors outlive their caches"


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_cache_costs_a_process_four_descriptors_and_four_mappings_at_most(in_child, backing):
    cost_of_five_caches(in_child, backing)


# What a cache that leaks would do, and what the checks say of it.
LEAKS = {
    "a descriptor": (lambda cache: os.dup(0), "descriptors outlive"),
    "a mapping": (lambda cache: cache.get_slot(0), "mappings outlive"),  # a view keeps it
    "more than four": (lambda cache: [os.dup(0) for _ in range(5)], "5 \\* 4"),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_cache_that_leaks_is_noticed(in_child, backing, leak):
    # the control
    act, words = LEAKS[leak]
    with pytest.raises(AssertionError, match=words):
        cost_of_five_caches(in_child, backing, act)


def change_by_opening_and_closing(in_child, name, leak=lambda cache: None) -> tuple[int, int]:
    """How many more descriptors and mappings there are in the end; `leak` is called every time."""

    def main():
        with words_cache(8, 64) as cache:
            use_fully(cache)
        gc.collect()  # what other tests left to be collected
        before, leaked = fds_and_maps(), []
        for turn in range(200):
            with words_cache(8, 64, name=name, backing=("shm", "memfd")[turn % 2]) as cache:
                use_fully(cache)
                leaked.append(leak(cache))
                letter = pickle.dumps(cache)
                with pickle.loads(letter) as twin:
                    use_fully(twin)
        del cache, twin
        gc.collect()
        return before, fds_and_maps()

    before, after = in_child(main)
    return after[0] - before[0], after[1] - before[1]


def test_opening_and_closing_leaks_nothing(in_child, unique_name):
    more_fds, more_maps = change_by_opening_and_closing(in_child, unique_name())
    assert more_fds <= 0 and more_maps <= 0, (more_fds, more_maps)


def test_what_is_not_closed_or_held_is_noticed(in_child, unique_name):
    # the control
    a_descriptor, a_mapping = LEAKS["a descriptor"][0], LEAKS["a mapping"][0]
    assert change_by_opening_and_closing(in_child, unique_name(), a_descriptor)[0] >= 200
    assert change_by_opening_and_closing(in_child, unique_name(), a_mapping)[1] >= 200
