"""Claims on samples end with the object that holds them, whatever interrupts its user."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
from stocache import _C  # noqa: E402

Claim, Put = _C.Claim, _C.Put


@pytest.fixture
def records():
    store = _C.Records()
    store.open(1 << 20, 100, "freeze", "", "auto", False, "", "no", "", 0, -1)
    yield store
    store.close()


def is_free(records, index):
    """Whether a sample can be claimed, by somebody who gives it back."""
    with records.loading() as other:
        return other.begin(index) is Claim.LOAD_AND_STORE


def test_a_sample_is_claimed_stored_and_present(records):
    with records.loading() as loading:
        assert loading.begin(3) is Claim.LOAD_AND_STORE
        assert loading.begin(3) is Claim.LOADING_ELSEWHERE
        assert loading.put(3, torch.arange(4), False) is Put.STORED
        assert loading.begin(3) is Claim.PRESENT
        assert loading.begin(1_000) is Claim.LOAD_ONLY  # outside the dataset
    assert torch.equal(records.get(3, False), torch.arange(4))


def test_what_was_not_put_is_given_back_at_the_end_of_the_block(records):
    with records.loading() as loading:
        claims = [loading.begin(i) for i in range(10)]
        loading.put(4, 4, False)
        loading.abandon(5)
        loading.abandon(5)  # and once more, which is nothing
        assert is_free(records, 5) and not is_free(records, 6)
    assert claims == [Claim.LOAD_AND_STORE] * 10
    assert [i for i in range(10) if not is_free(records, i)] == [4]


def test_what_was_not_put_is_given_back_when_the_object_goes(records):
    loading = records.loading()
    loading.begin(7)
    assert not is_free(records, 7)
    del loading
    assert is_free(records, 7)


@pytest.mark.parametrize("how", ["with", "dealloc"])
def test_an_interrupt_at_any_line_gives_everything_back(records, how):
    """The interrupt comes before every line and every call in turn."""

    def load(store):
        if how == "with":
            with store.loading() as loading:
                one, two = loading.begin(1), loading.begin(2)
                assert one is two is Claim.LOAD_AND_STORE
                loading.put(1, "one", False)
                loading.put(2, "two", False)
            return
        loading = store.loading()
        one, two = loading.begin(1), loading.begin(2)
        assert one is two is Claim.LOAD_AND_STORE
        loading.put(1, "one", False)
        loading.put(2, "two", False)

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
    kept = records.loading()
    with pytest.raises(KeyboardInterrupt):
        kept.begin(1)
        raise KeyboardInterrupt
    assert not is_free(records, 1)
    kept.abandon(1)
    assert is_free(records, 1)


def test_a_sample_that_cannot_be_stored_is_given_back(records):
    with records.loading() as loading:
        loading.begin(1)
        with pytest.raises(TypeError):
            loading.put(1, {1, 2}, False)
        assert is_free(records, 1)
        loading.begin(2)
        assert loading.put(2, torch.zeros(2 << 20), False) is Put.TOO_LARGE
        assert is_free(records, 2)


def test_only_what_was_begun_here_can_be_put(records):
    with records.loading() as loading, records.loading() as other:
        other.begin(1)
        with pytest.raises(ValueError, match="sample 1 was not begun here"):
            loading.put(1, 1, False)
        assert other.put(1, 1, False) is Put.STORED
        with pytest.raises(ValueError, match="sample 1 was not begun here"):
            other.put(1, 1, False)


def test_a_full_store_says_so(records):
    put = []
    with records.loading() as loading:
        for i in range(100):
            loading.begin(i)
            put.append(loading.put(i, torch.zeros(10_000), False))
    assert put[0] is Put.STORED and put[-1] is Put.NO_ROOM


def test_a_forked_child_gives_nothing_back(records):
    loading = records.loading()
    loading.begin(1)
    child = os.fork()
    if child == 0:
        good = False
        try:
            with pytest.raises(ValueError, match="not begun here"):
                loading.put(1, 1, False)
            loading.abandon(1)
            loading.__exit__(None, None, None)
            del loading
            good = not is_free(records, 1)
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert loading.put(1, 1, False) is Put.STORED


def test_it_keeps_the_store_open(records):
    loading = records.loading()
    loading.begin(1)
    records.close()
    assert loading.put(1, 1, False) is Put.STORED
    assert loading.begin(2) is Claim.LOAD_AND_STORE


def test_threads_share_one_object(records):
    loading = records.loading()
    won = []

    def work():
        won.extend(i for i in range(100) if loading.begin(i) is Claim.LOAD_AND_STORE)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(100))


def test_words_can_be_pickled_and_objects_cannot_be_made_up():
    assert pickle.loads(pickle.dumps(Claim.PRESENT)) is Claim.PRESENT
    assert [claim.name for claim in Claim] == [
        "LOAD_AND_STORE", "PRESENT", "LOADING_ELSEWHERE", "LOAD_ONLY",
    ]  # fmt: skip
    with pytest.raises(TypeError):
        _C.Loading()


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
loading, sample = store.loading(), (torch.arange(3), "text", [1, 2])
for n in range(10_000):
    # It was given back, whatever failed.
    assert loading.begin(1) is _C.Claim.LOAD_AND_STORE, n
    try:
        fails.fail_after(ctypes.c_long(n))
        outcome = loading.put(1, sample, False)
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
