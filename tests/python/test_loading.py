"""Claims on samples end with the object that holds them, whatever interrupts its user."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")
from stocache import _C  # noqa: E402

Put = _C.Put


@pytest.fixture
def records():
    store = _C.Records()
    store.open(1 << 20, 100, "freeze", "", "auto", False, "", "no", "", 0, -1)
    yield store
    store.close()


def acquired(records, *indices):
    return records.acquire(indices, 0.0)


def is_free(records, index):
    """Whether a sample that is not there can be claimed, by somebody who gives it back."""
    with acquired(records, index) as other:
        if not other.to_load():
            return False
        try:
            other.put(index, object(), False)  # which is not stored
        except TypeError:
            return True
        return False


def test_a_sample_is_claimed_stored_and_present(records):
    with acquired(records, 3, 5, 3) as samples:
        assert samples.to_load() == [3, 5]
        assert samples.put(3, torch.arange(4), False) is Put.STORED
        assert samples.put(5, "five", False) is Put.STORED
        assert samples.to_load() == []
    assert acquired(records, 3, 5).to_load() == []
    assert torch.equal(records.get(3, False), torch.arange(4))


def test_what_others_are_to_load_is_waited_for_and_then_loaded_too(records):
    with acquired(records, 1, 2) as first, acquired(records, 2, 3) as second:
        assert first.to_load() == [1, 2]
        assert second.to_load() == [3]
        assert second.put(3, "three", False) is Put.STORED
        assert second.to_load() == [2], "waited for in vain"
        assert second.put(2, "two", False) is Put.STORED_ELSEWHERE
        assert not records.contains(2)
        assert first.put(2, "two", False) is Put.STORED


def test_what_comes_while_it_is_waited_for_is_not_loaded(records):
    with acquired(records, 1) as first, records.acquire([1], 1e6) as second:
        assert first.to_load() == [1]
        found = []
        waiter = threading.Thread(target=lambda: found.append(second.to_load()))
        waiter.start()
        while not records.stats()["waits"]:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="by another thread"):
            second.to_load()
        assert first.put(1, "one", False) is Put.STORED
        waiter.join()
        assert found == [[]]


def test_an_index_outside_of_the_dataset_is_an_error(records):
    for outside in (100, -1, 2**70):
        with pytest.raises(IndexError, match="outside of a dataset of 100"):
            acquired(records, 3, outside)


def test_what_was_not_put_is_given_back_at_the_end_of_the_block(records):
    with acquired(records, *range(10)) as samples:
        assert samples.to_load() == list(range(10))
        samples.put(4, 4, False)
        assert not is_free(records, 6)
    assert [i for i in range(10) if not is_free(records, i)] == [4]


def test_who_comes_back_without_a_sample_gives_it_back(records):
    samples = acquired(records, 1, 2)
    samples.to_load()
    samples.put(1, 1, False)
    assert samples.to_load() == []
    assert is_free(records, 2)


def test_what_was_not_put_is_given_back_when_the_object_goes(records):
    samples = acquired(records, 7)
    samples.to_load()
    assert not is_free(records, 7)
    del samples
    assert is_free(records, 7)


@pytest.mark.parametrize("how", ["with", "dealloc"])
def test_an_interrupt_at_any_line_gives_everything_back(records, how):
    """The interrupt comes before every line and every call in turn."""

    def load(store):
        if how == "with":
            with store.acquire([1, 2], 0.0) as samples:
                assert samples.to_load() == [1, 2]
                samples.put(1, "one", False)
                samples.put(2, "two", False)
            return
        samples = store.acquire([1, 2], 0.0)
        assert samples.to_load() == [1, 2]
        samples.put(1, "one", False)
        samples.put(2, "two", False)

    interrupted = 0
    for step in range(1_000):
        records.clear()
        steps = iter(range(step, -1, -1))

        def trace(frame, event, arg, steps=steps):
            if frame.f_code is not load.__code__:
                return None
            frame.f_trace_opcodes = True
            if next(steps, 1) == 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            load(records)
            done = True
        except KeyboardInterrupt:
            done = False
        finally:
            sys.settrace(None)
        stored = [i for i in (1, 2) if records.contains(i)]
        assert [i for i in (1, 2) if is_free(records, i)] == [i for i in (1, 2) if i not in stored]
        if done:
            break
        interrupted += 1
    assert done and interrupted > 20


def test_without_the_object_an_interrupt_would_leak(records):
    """The control: a claim that nothing ends is seen to be kept."""
    kept = acquired(records, 1)
    with pytest.raises(KeyboardInterrupt):
        kept.to_load()
        raise KeyboardInterrupt
    assert not is_free(records, 1)
    kept.__exit__(None, None, None)
    assert is_free(records, 1)


def test_a_sample_that_cannot_be_stored_is_given_back(records):
    with acquired(records, 1, 2) as samples:
        samples.to_load()
        with pytest.raises(TypeError):
            samples.put(1, object(), False)
        assert is_free(records, 1)
        assert samples.put(2, torch.zeros(2 << 20), False) is Put.TOO_LARGE
        assert is_free(records, 2)


def test_only_what_was_to_be_loaded_here_can_be_put(records):
    with acquired(records, 2) as samples, acquired(records, 1) as other:
        samples.to_load()
        with pytest.raises(ValueError, match="sample 1 was not to be loaded here"):
            other.put(1, 1, False)
        other.to_load()
        with pytest.raises(ValueError, match="sample 1 was not to be loaded here"):
            samples.put(1, 1, False)
        assert other.put(1, 1, False) is Put.STORED
        with pytest.raises(ValueError, match="sample 1 was not to be loaded here"):
            other.put(1, 1, False)


def test_a_full_store_says_so(records):
    with acquired(records, *range(100)) as samples:
        put = [samples.put(i, torch.zeros(10_000), False) for i in samples.to_load()]
    assert put[0] is Put.STORED and put[-1] is Put.NO_ROOM


def test_a_forked_child_gives_nothing_back(records):
    samples = acquired(records, 1)
    samples.to_load()
    child = os.fork()
    if child == 0:
        good = False
        try:
            with pytest.raises(ValueError, match="not to be loaded here"):
                samples.put(1, 1, False)
            samples.__exit__(None, None, None)
            del samples
            good = not is_free(records, 1)
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert samples.put(1, 1, False) is Put.STORED


def test_it_keeps_the_store_open(records):
    samples = acquired(records, 1, 2)
    assert samples.to_load() == [1, 2]
    records.close()
    assert samples.put(1, 1, False) is Put.STORED


def test_words_can_be_pickled_and_objects_cannot_be_made_up():
    assert pickle.loads(pickle.dumps(Put.STORED)) is Put.STORED
    with pytest.raises(TypeError):
        _C.Acquiring()


# Makes one allocation of C++ fail: the one after `n` others.
FAILS = """
#include <cstdlib>
#include <new>

static thread_local long left = -1;
extern "C" void fail_after(long n) { left = n; }
void* operator new(std::size_t bytes) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""
SHORT_OF_MEMORY = """
import ctypes, sys
import torch
from stocache import _C

fails = ctypes.PyDLL(sys.argv[1])
store = _C.Records()
store.open(1 << 20, 100, "freeze", "", "memfd", False, "", "no", "", 0, -1)
sample = (torch.arange(3), "text", [1, 2])
kept = []  # or they would give back what they hold as they go
for n in range(10_000):
    samples = store.acquire([1], 0.0)
    kept.append(samples)
    assert samples.to_load() == [1]
    try:
        fails.fail_after(ctypes.c_long(n))
        outcome = samples.put(1, sample, False)
        assert outcome is _C.Put.STORED, "it was given back, whatever failed"
        break
    except (MemoryError, RuntimeError):
        pass
    finally:
        fails.fail_after(ctypes.c_long(-1))
print(n, outcome.name)
"""


def test_a_claim_ends_wherever_memory_runs_out(run_script, tmp_path):
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler: allocations that fail are not covered")
    source, library = tmp_path / "fails.cpp", tmp_path / "fails.so"
    source.write_text(FAILS)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    answer = run_script(SHORT_OF_MEMORY, library, env={"LD_PRELOAD": str(library)}).stdout
    failed, outcome = answer.split()
    assert int(failed) > 5 and outcome == "STORED"
