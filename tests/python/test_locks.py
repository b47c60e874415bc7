"""P26: a process's locks end with it, whatever its children and its views do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import stocache
import torch
from samples import limit_gib

MAIN = """
import os, sys, time, torch, stocache

class Source:
    def __len__(self):
        return 8

    def __getitem__(self, idx):
        if idx == 1 and os.getpid() == main:
            say("loading")
            time.sleep(1000)
        return torch.full((64,), idx)

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once: print() may write a line and its end apart

main = os.getpid()
dataset = stocache.CachedDataset(
    Source(), "8MiB", name=sys.argv[1], fingerprint="x", probe=0, verbose=False
)
dataset[0]
if os.fork() == 0:  # a worker, which lives on
    dataset[2]
    say(f"worker {os.getpid()}")
    time.sleep(1000)
dataset[1]
"""


def test_the_sample_of_a_dead_main_process_is_loaded_once_though_its_worker_lives(tmp_path):
    loads = []

    class Source:
        def __len__(self):
            return 8

        def __getitem__(self, idx):
            loads.append(idx)
            return torch.full((64,), idx)

    name = f"dead-main-{os.getpid()}"
    arguments = [sys.executable, "-c", MAIN, name]
    main = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    worker = None
    try:
        said = sorted(main.stdout.readline() for _ in range(2))
        assert said[0] == "loading\n", said
        worker = int(said[1].split()[1])
        dataset = stocache.CachedDataset(
            Source(), "8MiB", name=name, fingerprint="x", probe=0, verbose=False
        )
        main.kill()
        main.wait()
        for _ in range(3):
            assert dataset[1].tolist() == [1] * 64
        assert loads == [1], "its claim ended with the main process"
        assert dataset.stats().filled == 3
    finally:
        main.kill()
        main.wait()
        main.stdout.close()
        if worker:
            ended = os.pidfd_open(worker)
            os.kill(worker, signal.SIGKILL)
            select.select([ended], [], [])
            os.close(ended)
    dataset.close()  # the last one


def test_views_kept_past_close_hold_no_lease_and_no_lock():
    rounds = 600
    name = f"kept-views-{os.getpid()}"
    views = []
    for number in range(rounds):
        cache = stocache.SharedCache(
            limit_gib(4, 16), 4, (16,), torch.int64, name=name, keep=True, verbose=False
        )
        cache.set_slot(0, torch.full((16,), number), allow_overwrite=True)
        view = cache.get_slot(0)
        assert view is not None and view[0] == number
        assert cache.stats().dropped == 0
        views.append(view)
        path = cache.path
        cache.close()
    os.unlink(path)
    assert all(int(view[0]) == rounds - 1 for view in views), "one memory under all of them"


CLOSED = """
import os, torch, stocache
from stocache._C import Put

dataset = stocache.CachedDataset(list(range(8)), "8MiB", backing="memfd", verbose=False)
dataset[0]
for fd in os.listdir("/proc/self/fd"):
    path = f"/proc/self/fd/{fd}"
    if os.path.islink(path) and "stocache" in os.readlink(path):
        os.close(int(fd))
with dataset._stocache.records.acquire([5], 0.0) as samples:
    samples.to_load()
    print(samples.put(5, 5, False) is Put.REFUSED, dataset[0], dataset[5])
"""


def test_who_lost_its_descriptor_claims_nothing_and_reads_on(tmp_path):
    """Its locks went with the descriptor, so that nobody could take a claim of it over."""
    command = [sys.executable, "-c", CLOSED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "True 0 5\n", done.stderr


def test_control_who_has_its_descriptor_claims(tmp_path):
    kept = CLOSED.replace("os.close(int(fd))", "pass")
    command = [sys.executable, "-c", kept]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.startswith("False 0 "), done.stderr
