"""Code of the user that runs in the middle of a call, and closes what the call is about.

Freed memory is overwritten (MALLOC_PERTURB_), so that a look at it is seen: in what comes back, or
as a crash of the script.
"""

from __future__ import annotations

import pytest

# What runs in the middle of a call: an argument's __index__ or __fspath__, the sample's own code,
# what the garbage collector finds. `looks` says which look at an argument closes the cache: the
# first mostly comes before the cache is touched.
HELPERS = """
import contextlib, gc, os, sys, threading, warnings
import torch
import stocache
from stocache import _C

gc.freeze()  # what was imported is no garbage, and looking through it takes a second each time

class Closes:
    def __init__(self, close, value, looks=1):
        self.close, self.value, self.looks = close, value, looks

    def look(self):
        self.looks -= 1
        if self.looks == 0:
            self.close()
        return self.value

    __index__ = __fspath__ = __bool__ = look

    def __del__(self):
        if self.looks > 0:
            self.close()

def slots(name=None, dims=(4,)):
    return stocache.SharedCache(0.001, 8, dims, torch.uint8, name=name, verbose=False)

def records(length=8):
    made = _C.Records()
    mark = _C.fingerprint_of("x")
    made.open(1 << 22, length, "freeze", "", "memfd", False, mark, "no", "", 0, -1)
    return made

@contextlib.contextmanager
def closed_is_told():
    try:
        yield
    except RuntimeError as error:
        assert "closed; construct a new one" in str(error), error
"""


@pytest.fixture
def run(run_script):
    def run(source):
        env = {
            "MALLOC_PERTURB_": "165",
            "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",  # its memory is not overwritten
            "PYTHONMALLOC": "malloc",
        }
        return run_script(HELPERS + source, env=env).stdout

    return run


def test_an_index_that_closes_the_cache_is_told_the_length_it_had(run):
    run("""
for looks in (1, 2, 3):
    for index in (8, -9, 10**30):
        for call in (
            lambda c, i: c.get_slot(i),
            lambda c, i: c.get_slot(i, allow_oob_idx=True),
            lambda c, i: c.set_slot(i, torch.zeros(4, dtype=torch.uint8)),
        ):
            cache = slots()
            try:
                with closed_is_told():
                    call(cache, Closes(cache.close, index, looks))
            except IndexError as error:
                said = f"Index {index} out of bounds for dataset of length 8"
                assert str(error) == said, error
            cache.close()
""")


def test_indices_that_close_the_cache_in_the_middle_of_a_batch(run):
    run("""
for at in range(4):
    for looks in (1, 2):
        cache = slots()
        cache.array.fill_(7)
        indices = [0, 1, 2, 3]
        indices[at] = Closes(cache.close, at, looks)
        with closed_is_told():
            batch, found = cache.get_many(indices)
            assert batch.shape == (4, 4) and not found.any()
        cache = slots()
        indices[at] = Closes(cache.close, at, looks)
        with closed_is_told():
            assert cache.set_many(indices, torch.zeros(4, 4, dtype=torch.uint8)).all()
        cache.close()
""")


def test_garbage_that_closes_the_cache_while_its_arguments_are_told(run):
    run("""
# Those that Python keeps for reuse are in use: making one anew is when the collector may run.
tuples = [tuple([i] * 16) for i in range(5000)]
for _ in range(200):
    cache = _C.Cache()
    cache._open(0.001, 8, (1,) * 16, torch.int16, "", "memfd", False, "never",
                _C.fingerprint_of("x"), "no", "", 0, -1)
    cycle = [Closes(cache._close, 0)]
    cycle.append(cycle)
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    del cycle
    with closed_is_told():
        arguments = cache._arguments()
        assert arguments[2] == (1,) * 16 and arguments[3] is torch.int16, arguments
    gc.set_threshold(*before)
    cache._close()
""")


def test_records_closed_by_an_argument_or_by_the_sample_itself(run):
    run("""
import dataclasses, pickle

@dataclasses.dataclass
class Sample:
    x: object

    def __getattribute__(self, name):
        if name == "x" and ACT:
            ACT.pop()()
        return object.__getattribute__(self, name)

class Pickled:
    def __reduce__(self):
        if ACT:
            ACT.pop()()
        return (Unpickled, ())

def Unpickled():
    if ACT:
        ACT.pop()()
    return 5

ACT = []
payload = torch.arange(100_000)

def begun(store, index):
    samples = store.acquire([index], 0.0)
    assert samples.to_load() == ([] if store.contains(index) else [index])
    return samples

for round in range(50):
    for call in (
        lambda r, i: r.get(i, True),
        lambda r, i: (r.clear(), begun(r, 1).put(i, payload, False)),
        lambda r, i: r.missing([0, i, 2]),
        lambda r, i: r.gather([0, i], 2, False),
        lambda r, i: r.acquire([i], 0.0),
        lambda r, i: r.contains(i),
        lambda r, i: r.differs(i, payload, False),
    ):
        store = records()
        for i in range(3):
            assert begun(store, i).put(i, payload, False) is _C.Put.STORED
        with closed_is_told():
            call(store, Closes(store.close, 1))
    for sample in (Sample(payload), (payload, Pickled(), payload)):
        for act in ("put", "differs", "get"):
            store = records()
            loading = begun(store, 0)
            if act != "put":
                loading.put(0, sample, True)
            ACT[:] = [store.close]
            with closed_is_told():
                if act == "get":
                    store.get(0, True)
                elif act == "put":
                    loading.put(0, sample, True)
                else:
                    store.differs(0, sample, True)
            ACT.clear()
            store.close()
""")


def test_files_closed_by_a_path_object(run, far, tmp_path):
    run(f"""
name = next(entry.name for entry in os.scandir({str(far)!r}) if entry.is_file())
for round in range(30):
    for call in ("fetch", "contains", "verify", "path"):
        files = _C.Files()
        files.open(os.fsencode({str(far)!r}), os.fsencode({str(tmp_path / "near")!r}), 1 << 20,
                   "lru", "never", False, 64)
        argument = Closes(files.close, name)
        with closed_is_told():
            files.path(argument, False) if call == "path" else getattr(files, call)(argument)
        files.close()
""")


def test_a_thread_that_closes_while_others_use_the_cache(run):
    run("""
stop = False
made = [slots(), records()]
failed = []

def use():
    try:
        while not stop:
            used()
    except BaseException as error:
        failed.append(error)
        raise

def used():
    cache, store = made
    with closed_is_told():
        cache.get_many([0, 1, 2, 3])
        cache.set_many([0, 1], torch.zeros(2, 4, dtype=torch.uint8))
        cache.get_slot(0)
        cache.stats()
    with closed_is_told():
        with store.acquire([0], 0.0) as samples:
            for i in samples.to_load():
                samples.put(i, torch.zeros(200_000), False)
        store.get(0, False)
        store.gather([0, 0], 2, False).finish(0)
        store.clear()

threads = [threading.Thread(target=use) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(300):
    old = list(made)
    made[:] = [slots(), records()]
    for cache in old:
        cache.close()
stop = True
for thread in threads:
    thread.join()
for cache in made:
    cache.close()
assert not failed, failed
""")


def test_a_tensor_that_a_later_part_of_the_sample_takes_apart(run):
    # The record is gathered from where the parts lie: what is gone by then must not be read.
    out = run("""
class Takes:
    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        self.act()
        return (int, ())

def spoil(first, how):
    if how == "set":
        first.set_(torch.zeros(3))
    elif how == "data":
        first.data = torch.zeros(3)
    elif how == "free":
        first.untyped_storage().resize_(0)
    else:
        first.resize_(10_000_000)

for how in ("set", "data", "free", "grow"):
    for _ in range(20):
        first = torch.full((100_000,), 3.0)
        try:
            schema, record = _C.codec_encode((first, Takes(lambda: spoil(first, how))), True)
        except RuntimeError as error:
            assert "changed while it was being stored" in str(error), error
            print(how, "told")
        else:
            assert _C.codec_decode(schema, record, True)[0].eq(3).all(), how
            print(how, "whole")
""")
    assert set(out.split("\n")) >= {"set whole", "data whole", "free told"}


def test_a_record_that_changes_while_it_is_decoded(run):
    out = run("""
import collections, enum, random

class Color(enum.Enum):
    RED = 1

Point = collections.namedtuple("Point", "x y")

class Changes:
    def __reduce__(self):
        return (changed, ())

ACT = []

def changed():
    if ACT:
        ACT[0]()
    return 5

rng = random.Random(1)
sample = [Changes(), torch.ones(1000), [1, 2, 3], "te\\u00fct" * 9, b"bytes" * 9, 10**40, Color.RED]
sample += [Point(1.5, {"k": torch.arange(9)}), 1 + 2j, bytearray(9), torch.Size((1, 2)), [0.5] * 9]
schema, record = _C.codec_encode(sample, True)
good = bad = 0
for round in range(600):
    memory = torch.frombuffer(bytearray(record), dtype=torch.uint8).clone()
    fill = rng.choice([0, 255, None])
    noise = torch.tensor([rng.randrange(256) for _ in range(64)], dtype=torch.uint8)
    if fill is not None:
        ACT[:] = [lambda: memory.fill_(fill)]
    else:
        at = rng.randrange(memory.numel() - 64)
        ACT[:] = [lambda: memory[at:at + 64].copy_(noise)]
    try:
        found = _C.codec_decode(schema, memory, True)
        assert len(found) == len(sample) and found[1].shape == (1000,)
        repr(found)
        good += 1
    except ValueError as error:
        bad += 1
print(good, bad)
""")
    good, bad = map(int, out.split())
    assert good > 50 and bad > 50


def test_control_freed_memory_is_overwritten_in_these_scripts(run):
    """Else a look at it would find what was there, and the tests above could not fail."""
    out = run("""
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
for size in (40, 200, 2000):
    memory = libc.malloc(size)
    ctypes.memset(memory, 8, size)
    libc.free(memory)
    # The allocator's own notes lie at the beginning.
    print(8 in ctypes.string_at(memory + 32, size - 40))
""")
    assert out.split() == ["False"] * 3


# A function in torch's map of collate functions that says it is equal to the one before, and
# meanwhile collates: that finds the next one to differ, and replaces what the outer comparison
# looks at.
COMPARES = """
from torch.utils.data._utils.collate import default_collate_fn_map as functions

class Function:
    def __init__(self, looks):
        self.looks = looks

    def __call__(self, batch, *, collate_fn_map=None):
        return batch

    def __eq__(self, other):
        if self.looks == 0:
            return self is other
        self.looks = 0
        store.gather([0, 1], 1, False).finish(0)
        gc.collect()
        return True

    __hash__ = object.__hash__

store = records()
with store.acquire([0, 1], 0.0) as samples:
    for i in samples.to_load():
        samples.put(i, torch.zeros(4), False)
kinds = [type(f"Own{i}", (), {}) for i in range(20)]
for round in range(20):
    # Other objects under the same keys: compared, and not the same.
    functions.update({kind: Function({looks}) for kind in kinds})
    batch = store.gather([0, 1], 1, False).finish(0)
    assert batch.shape == (2, 4), batch
print("done")
"""


def test_a_comparison_that_replaces_what_is_compared(run):
    assert run(COMPARES.replace("{looks}", "1")) == "done\n"


def test_control_a_comparison_that_replaces_nothing(run):
    assert run(COMPARES.replace("{looks}", "0")) == "done\n"
