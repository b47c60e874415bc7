"""Ctrl-C and the end of the interpreter, while native code runs without the GIL.

A wait is left within moments, claims end with it, and no thread that is still busy keeps the
process from ending as it should."""

from __future__ import annotations

import os
import signal

import pytest
import stocache

# A thread that is in native code whenever the interpreter ends. `{call}` is made again and again.
ENDS = """
import atexit, os, sys, threading
import torch, stocache
from stocache import _C

cache = stocache.SharedCache(0.001, 8, (4,), name=sys.argv[1], backing="shm", verbose=False)
cache.set_slot(0, torch.ones(4, dtype=torch.uint8))
dataset = stocache.CachedDataset(
    list(range(8)), "8MiB", name=sys.argv[1] + "-records", backing="shm", verbose=False
)
big = bytes(16 << 20)
many = torch.zeros(1 << 20, dtype=torch.int64)
begun = dataset._stocache.records.acquire([1], 0.0)
begun.to_load()
dataset._stocache.records.note_loads(1, 1e-4)  # so that nobody waits for long
busy = threading.Event()
kept = []

def work():
    while True:
        busy.set()
        {call}

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
busy.wait()
{end}
"""
CALLS = {
    "hashes": "_C.hash_bytes(big)",
    # Kept: torch gives up the GIL where a tensor is freed, in a function from which nothing may
    # unwind, so a thread that ends there aborts the process, with or without a cache.
    "gathers": "kept.append(cache.get_many(many))",
    "waits": "dataset._stocache.records.acquire([1], 0.002).to_load()",
    "fails": "cache.clear()",
}


def left(name):
    return [path for path in os.listdir("/dev/shm") if name in path]


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_in_native_code_does_not_keep_the_process_from_ending(
    run_script, unique_name, call
):
    name = unique_name()
    done = run_script(ENDS.format(call=CALLS[call], end=""), name, check=False)
    assert (done.returncode, done.stderr, left(name)) == (0, "", [])


def test_control_a_process_that_is_aborted_is_seen(run_script, unique_name):
    """What a thread did that was ended in the middle of a destructor."""
    name = unique_name()
    script = ENDS.format(call=CALLS["hashes"], end="atexit.register(os.abort)")
    done = run_script(script, name, check=False)
    assert done.returncode == -signal.SIGABRT and len(left(name)) == 2
    stocache.sweep()


# Waits for a sample that nobody gives back, for much longer than a test may take.
WAITS = """
import signal, sys, threading
from stocache import _C

def tell():
    while store.stats()["waits"] == 0:
        pass
    print("waits", flush=True)

store = _C.Records()
store.open(1 << 20, 100, "freeze", "", "memfd", False, "", "no", "", 0, -1)
if sys.argv[1] == "told":
    signal.signal(signal.SIGINT, lambda *_: print("told", flush=True))
try:
    with store.acquire([1], 0.0) as samples:
        samples.to_load()
        threading.Thread(target=tell).start()
        store.acquire([1], float(sys.argv[2])).to_load()
        print("waited")
except KeyboardInterrupt:
    print("interrupted")
with store.acquire([1], 0.0) as samples:
    samples.to_load()
    print(samples.put(1, 1, False).name)
"""


def interrupted(script, how, seconds):
    child = script.start(WAITS, how, seconds)
    assert child.stdout.readline() == "waits\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (0, ""), err
    return out.split()


def test_ctrl_c_ends_a_wait_for_another_loader_and_its_claims(run_script):
    assert interrupted(run_script, "raised", 100_000) == ["interrupted", "STORED"]


def test_control_a_signal_whose_handler_returns_ends_no_wait(run_script):
    """It is handled in the middle of the wait, which goes on."""
    assert interrupted(run_script, "told", 1) == ["told", "waited", "STORED"]


# Another process loads the sample and never ends; this one waits for it as a dataset does.
LOADS = """
import os, signal, sys, threading, time
import stocache

def tell():
    while dataset.stats().waits == 0:
        pass
    print("waits", flush=True)

class Source:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if os.getpid() == other:
            os.write(told, b"l")
            time.sleep(1000)
        return index

other = 0
loads, told = os.pipe()
dataset = stocache.CachedDataset(Source(), "8MiB", backing="memfd", verbose=False)
dataset._stocache.records.note_loads(1, 1000.0)  # loading takes long here
child = os.fork()
if child == 0:
    other = os.getpid()
    dataset[3]
os.read(loads, 1)
try:
    threading.Thread(target=tell).start()
    dataset[3]
    print("waited")
except KeyboardInterrupt:
    print("interrupted")
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(dataset[3], dataset.stats().filled)
"""


def test_ctrl_c_reaches_who_waits_for_a_sample(run_script):
    child = run_script.start(LOADS)
    assert child.stdout.readline() == "waits\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == (0, "interrupted\n3 1\n", "")
