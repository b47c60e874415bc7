"""torch.classes.stocache.SharedCache: the cache inside TorchScript, and in saved modules."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import zipfile
from pathlib import Path
from typing import List, Optional, Tuple  # noqa: UP035 (TorchScript reads these)

import pytest
import stocache
import torch
from samples import GIB, complaint, limit_gib, whole, words_cache
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

Scripted = torch.classes.stocache.SharedCache
SWEEPS = 6  # the profiling executor optimises after the second run


def u8(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def said(call) -> tuple[type, str]:
    """What a call raises: type and text. That it raises at all is the caller's claim."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


class Filler(torch.nn.Module):
    """Looks in the cache, else makes the sample and stores it."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def forward(self, idx: int) -> torch.Tensor:
        x = self.cache.get_slot(idx)
        if x is None:
            x = torch.full([4], 10 + idx, dtype=torch.uint8)
            self.cache.set_slot(idx, x)
        return x


@pytest.fixture
def cache(make_cache):
    """Six slots of four bytes for a dataset of eight."""
    return make_cache((8 + 6 * 4) / GIB, 8, (4,))


@pytest.fixture
def scripted(cache):
    made = cache.scripted()
    yield made
    made.close()  # pytest keeps what a fixture returned for longer than the test


# What the class does


def test_it_is_the_same_cache(cache, scripted):
    assert scripted.get_slot(0) is None
    assert scripted.set_slot(0, u8(1, 2, 3, 4)) is True
    assert cache.get_slot(0).tolist() == [1, 2, 3, 4]
    cache.set_slot(1, u8(5, 6, 7, 8))
    assert scripted.get_slot(1).tolist() == [5, 6, 7, 8]
    assert scripted.get_slot(7) is None and scripted.set_slot(7, u8(1, 1, 1, 1)) is False
    assert scripted.set_slot(0, u8(9, 9, 9, 9), allow_overwrite=True) is True
    batch, found = scripted.get_many(torch.tensor([0, 2]))
    assert batch.tolist() == [[9] * 4, [0] * 4] and found.tolist() == [True, False]
    out = torch.full((2, 4), 7, dtype=torch.uint8)
    batch, found = scripted.get_many(torch.tensor([1, 2]), out, threads=2)
    assert batch.data_ptr() == out.data_ptr() and out.tolist() == [[5, 6, 7, 8], [0] * 4]
    assert scripted.set_many(torch.tensor([0, 2]), out).tolist() == [False, True]
    assert scripted.stats() == {key: int(value) for key, value in vars(cache.stats()).items()}
    assert list(scripted.stats()) == list(vars(cache.stats()))
    assert scripted.fill_fraction() == cache.fill_fraction == 0.5
    assert len(scripted) == 6 and scripted.dataset_len() == 8 and scripted.data_dims() == [4]
    assert scripted.name() == cache.name
    assert torch.equal(scripted.array(), cache.array)
    assert scripted.array().data_ptr() == cache.array.data_ptr()
    scripted.clear()
    assert cache.stats().filled == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex64, torch.bool])
def test_a_dtype_goes_in_as_itself_and_comes_out_as_torchs_number(dtype):
    cache = Scripted(0.001, 4, [2], dtype)
    assert cache.set_slot(0, torch.ones(2, dtype=dtype))
    assert cache.get_slot(0).dtype == dtype

    def zeros_like_a_sample(cache: torch.classes.stocache.SharedCache) -> torch.Tensor:
        return torch.zeros(cache.data_dims(), dtype=cache.dtype())

    made = torch.jit.script(zeros_like_a_sample)(cache)
    assert made.dtype == dtype and made.shape == (2,)


def test_a_hit_is_a_view_that_outlives_close(cache, scripted):
    scripted.set_slot(1, u8(1, 2, 3, 4))
    view = scripted.get_slot(1)
    assert view.data_ptr() == cache.get_slot(1).data_ptr()
    cache.set_slot(1, u8(5, 6, 7, 8), allow_overwrite=True)
    assert view.tolist() == [5, 6, 7, 8]
    path = Path(cache.path)
    scripted.close()
    cache.close()
    assert not path.exists()
    assert view.tolist() == [5, 6, 7, 8]


def test_close_is_for_this_object_alone(cache, scripted):
    other = cache.scripted()
    name = cache.name
    assert not scripted.closed()
    scripted.close()
    scripted.close()
    assert scripted.closed() and not other.closed() and not cache.closed
    cache.close()
    assert other.set_slot(0, u8(1, 2, 3, 4)), "the other object holds the cache"
    other.close()
    assert said(lambda: Scripted.join(name))[0] is RuntimeError


CLOSED = {
    "get_slot": lambda c: c.get_slot(0),
    "set_slot": lambda c: c.set_slot(0, u8(1, 2, 3, 4)),
    "get_many": lambda c: c.get_many(torch.tensor([0])),
    "set_many": lambda c: c.set_many(torch.tensor([0]), u8(1, 2, 3, 4)[None]),
    "array": lambda c: c.array(),
    "clear": lambda c: c.clear(),
    "stats": lambda c: c.stats(),
    "fill_fraction": lambda c: c.fill_fraction(),
    "len": lambda c: len(c),
    "dataset_len": lambda c: c.dataset_len(),
    "data_dims": lambda c: c.data_dims(),
    "dtype": lambda c: c.dtype(),
    "name": lambda c: c.name(),
    "pickle": lambda c: pickle.dumps(c),
    "deepcopy": lambda c: copy.deepcopy(c),
}


@pytest.mark.parametrize("call", CLOSED)
def test_a_closed_object_says_so_whatever_is_asked(cache, scripted, call):
    CLOSED[call](scripted)
    scripted.close()
    cache.close()
    assert said(lambda: CLOSED[call](scripted)) == said(lambda: cache.get_slot(0))


def test_it_is_made_and_joined_like_the_python_class(unique_name):
    name = unique_name()
    made = Scripted(
        size_limit_gib=0.001,
        dataset_len=8,
        data_dims=[2, 3],
        dtype=torch.float32,
        name=name,
        backing="memfd",
        verify="always",
        fingerprint="v1",
    )
    assert made.name() == name
    made.set_slot(0, torch.ones(2, 3))
    joined = Scripted.join(name)
    assert joined.get_slot(0).sum() == 6
    with stocache.SharedCache(
        *(0.001, 8, (2, 3), torch.float32),
        name=name,
        verify="always",
        fingerprint="v1",
        verbose=False,
    ) as same:
        assert same.backing == "memfd" and same.get_slot(0).sum() == 6
    unnamed = Scripted(0.001, 8, [4])
    assert Scripted.join(unnamed.name()).set_slot(3, u8(1, 2, 3, 4))
    assert unnamed.get_slot(3) is not None


# Errors: the sentence is that of the Python class


SAME_WORDS = {
    "index": (lambda c: c.get_slot(8), IndexError),
    "negative index": (lambda c: c.get_slot(-1), IndexError),
    "index of a value": (lambda c: c.set_slot(2**62, u8(1, 2, 3, 4)), IndexError),
    "index in a batch": (lambda c: c.get_many(torch.tensor([0, 8])), IndexError),
    "beyond the cache": (lambda c: c.get_slot(7, False), IndexError),
    "set beyond the cache": (lambda c: c.set_slot(7, u8(1, 2, 3, 4), False), IndexError),
    "empty slot": (lambda c: c.get_slot(3, True, False), RuntimeError),
    "second set": (lambda c: c.set_slot(0, u8(1, 2, 3, 4)), RuntimeError),
    "shape": (lambda c: c.set_slot(3, u8(1, 2)), ValueError),
    "dtype": (lambda c: c.set_slot(3, torch.zeros(4)), ValueError),
    "sparse": (lambda c: c.set_slot(3, u8(1, 2, 3, 4).to_sparse()), ValueError),
    "meta": (lambda c: c.set_slot(3, u8(1, 2, 3, 4).to("meta")), ValueError),
    "batch": (lambda c: c.set_many(torch.tensor([3]), u8(1, 2, 3, 4)), ValueError),
    "float indices": (lambda c: c.get_many(torch.tensor([0.5])), TypeError),
    "two dimensions": (lambda c: c.get_many(torch.tensor([[0]])), ValueError),
    "out": (lambda c: c.get_many(torch.tensor([0]), u8(1, 2, 3, 4)), ValueError),
    "no threads": (lambda c: c.get_many(torch.tensor([0]), None, 0), ValueError),
    "join": (lambda c: type_of(c).join("-nobody-has-this-"), RuntimeError),
    "join no name": (lambda c: type_of(c).join(""), ValueError),
    "join bad name": (lambda c: type_of(c).join("a/b"), ValueError),
}


def type_of(cache):
    return stocache.SharedCache if isinstance(cache, stocache.SharedCache) else Scripted


@pytest.mark.parametrize("mistake", SAME_WORDS)
def test_a_mistake_is_what_the_python_class_says(cache, scripted, mistake):
    call, kind = SAME_WORDS[mistake]
    cache.set_slot(0, u8(1, 2, 3, 4))
    expected = said(lambda: call(cache))
    assert expected[0] is kind and "\n" not in expected[1]
    assert said(lambda: call(scripted)) == expected
    assert cache.aux_array.tolist() == [1] + [0] * 5 + [2] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"size_limit_gib": 0.0},
        {"size_limit_gib": float("nan")},
        {"dataset_len": 0},
        {"data_dims": [3, -1]},
        {"data_dims": [2**40, 2**40]},
        {"dtype": torch.quint8},
        {"name": "a/b"},
        {"backing": "disk"},
        {"verify": "sometimes"},
        {"keep": True},
    ],
    ids=str,
)
def test_a_bad_argument_is_what_the_python_class_says(change):
    asked = {"size_limit_gib": 0.001, "dataset_len": 8, "data_dims": [4], **change}
    kind, text = said(lambda: stocache.SharedCache(**asked, verbose=False))
    assert kind is ValueError
    same_kind, same_text = said(lambda: Scripted(**asked))
    # a quotation mark is all that may differ: Python's, or that of the core
    assert same_kind is kind and same_text.replace('"', "'") == text.replace('"', "'")


@pytest.mark.parametrize("change", [{"data_dims": [5]}, {"fingerprint": "other"}], ids=str)
def test_other_arguments_than_the_live_cache_has_are_what_the_python_class_says(
    make_cache, unique_name, change
):
    asked = {"size_limit_gib": 0.001, "dataset_len": 8, "data_dims": [4], "name": unique_name()}
    make_cache(**asked)
    expected = said(lambda: make_cache(**{**asked, **change}))
    assert said(lambda: Scripted(**{**asked, **change})) == expected


def test_if_gone_has_two_words(cache):
    for call in (
        lambda: cache.scripted("sometimes"),
        lambda: Scripted(0.001, 8, [4], if_gone="sometimes"),
        lambda: Scripted.join(cache.name, "sometimes"),
    ):
        kind, text = said(call)
        assert kind is ValueError and '"sometimes"' in text and '"error" or "empty"' in text


@pytest.mark.parametrize("number", [-1, 12, 1000, 2**40])
def test_a_number_that_is_no_dtype_is_an_error(number):
    kind, text = said(lambda: Scripted(0.001, 8, [4], number))
    assert kind is ValueError and text.startswith("Unsupported dtype: ")


def test_inside_a_script_the_sentence_stands_in_the_error(cache, scripted):
    # TorchScript has one type for what its functions raise, and adds where it happened
    module = torch.jit.script(Filler(scripted))
    sentence = said(lambda: cache.get_slot(8))[1]
    for _ in range(SWEEPS):
        kind, text = said(lambda: module(8))
        assert kind is RuntimeError and sentence in text.splitlines()[-1] and "get_slot" in text
    scripted.close()
    kind, text = said(lambda: module(0))
    assert kind is RuntimeError and "this SharedCache is closed" in text

    @torch.jit.script
    def join(name: str) -> int:
        return len(torch.classes.stocache.SharedCache.join(name))

    kind, text = said(lambda: join("-nobody-has-this-"))
    sentence = said(lambda: stocache.SharedCache.join("-nobody-has-this-"))[1]
    assert kind is RuntimeError and sentence in text


# In scripts


def test_a_module_fills_on_a_miss_and_reads_after(cache):
    module = torch.jit.script(Filler(cache.scripted()))
    for turn in range(SWEEPS):
        for idx in range(8):
            assert module(idx).tolist() == [10 + idx] * 4
        now = cache.stats()
        assert now.fills == 6 and now.hits == 6 * turn
    assert module(1).data_ptr() == cache.get_slot(1).data_ptr()


def test_a_function_takes_makes_and_joins_a_cache(cache, unique_name):
    @torch.jit.script
    def describe(
        cache: torch.classes.stocache.SharedCache, idx: int
    ) -> Tuple[int, int, Optional[torch.Tensor]]:  # noqa: UP006, UP045
        return len(cache), cache.stats()["misses"], cache.get_slot(idx)

    assert describe(cache.scripted(), 0) == (6, 0, None)
    assert describe(cache.scripted(), 7) == (6, 1, None)

    @torch.jit.script
    def make(name: str) -> torch.classes.stocache.SharedCache:
        return torch.classes.stocache.SharedCache(0.001, 8, [4], torch.float32, name=name)

    @torch.jit.script
    def fill(name: str) -> bool:
        cache = torch.classes.stocache.SharedCache.join(name)
        return cache.set_slot(0, torch.ones(4))

    made = make(unique_name())
    assert fill(made.name()) is True
    assert made.get_slot(0).tolist() == [1.0] * 4


def test_calls_are_neither_dropped_nor_merged_nor_reordered(make_cache):
    cache = make_cache(data_dims=(4,), dtype=torch.float32)

    @torch.jit.script
    def sequence(cache: torch.classes.stocache.SharedCache, idx: int, x: torch.Tensor):
        first = cache.get_slot(idx)
        empty = first is None
        cache.set_slot(idx, x)
        second = cache.get_slot(idx)
        assert second is not None
        before = second.sum()
        kept = second.clone()
        cache.set_slot(idx, x + 1, True, True)
        third = cache.get_slot(idx)
        assert third is not None
        after = second.sum()  # the same expression as `before`, of a view of other bytes
        rows, found = cache.get_many(torch.tensor([idx]))
        cache.get_slot(idx)
        cache.get_slot(idx)
        for _ in range(3):
            cache.get_slot(idx)
            cache.set_slot(idx, x + 2, True, True)
        cache.clear()
        cleared = second.sum()
        return empty, before, kept, after, third.sum(), rows, found, cleared

    for turn in range(SWEEPS):
        x = torch.full((4,), float(turn))
        start = cache.stats()
        empty, before, kept, after, third, rows, found, cleared = sequence(cache.scripted(), 3, x)
        assert empty
        assert before == 4 * turn and kept.tolist() == [turn] * 4
        assert after == 4 * (turn + 1) and rows.tolist() == [[turn + 1] * 4] and found.all()
        assert third == 0 and cleared == 0, "a view sees that the cache was emptied"
        now = cache.stats()
        assert now.misses - start.misses == 1
        assert now.hits - start.hits == 2 + 1 + 2 + 3
        assert now.fills - start.fills == 1 + 1 + 3 and now.filled == 0


def test_operators_in_a_script_keep_their_number_and_order(cache):
    @torch.jit.script
    def sequence(name: str, x: torch.Tensor):
        a = torch.ops.stocache.get(name, 2)
        torch.ops.stocache.set(name, 2, x, True)
        b = torch.ops.stocache.get(name, 2)
        torch.ops.stocache.set(name, 2, x + 1, True)
        c = torch.ops.stocache.get(name, 2)
        torch.ops.stocache.get(name, 2)
        torch.ops.stocache.get(name, 2)
        for _ in range(3):
            torch.ops.stocache.get_many(name, torch.tensor([2]))
        same = torch.ops.stocache.get(name, 2)[0].sum() - torch.ops.stocache.get(name, 2)[0].sum()
        torch.ops.stocache.clear(name)
        return a[1], b[0], c[0], same, torch.ops.stocache.stats(name)

    for turn in range(SWEEPS):
        was, b, c, same, stats = sequence(cache.name, u8(turn, 0, 0, 0))
        assert not was and b[0] == turn and c[0] == turn + 1 and same == 0
        now = stocache.SharedCacheStats(*stats.tolist())
        assert (now.hits, now.misses, now.fills) == (9 * (turn + 1), turn + 1, 2 * (turn + 1))


def test_an_operator_without_the_conservative_alias_analysis_is_dropped_and_merged(cache):
    # the control: what the test above would see if the schemas did not say that there is more
    calls = []
    with torch.library._scoped_library("stocache_control_script", "DEF") as library:
        library.define("get(str cache, int index) -> (Tensor, Tensor)")

        def get(name: str, index: int):
            calls.append(index)
            return torch.ops.stocache.get(name, index)

        library.impl("get", get, "CompositeExplicitAutograd")

        @torch.jit.script
        def sequence(name: str):
            a = torch.ops.stocache_control_script.get(name, 2)
            b = torch.ops.stocache_control_script.get(name, 2)
            torch.ops.stocache_control_script.get(name, 3)
            return a[0].sum() - b[0].sum()

        for _ in range(SWEEPS):
            calls.clear()
            sequence(cache.name)
    assert calls == [2]


def test_arithmetic_on_a_view_leaves_the_cache_alone(make_cache):
    cache = make_cache(0.001, 4, (256,), torch.float32)
    cache.set_slot(0, torch.arange(256.0))

    @torch.jit.script
    def chain(cache: torch.classes.stocache.SharedCache) -> torch.Tensor:
        x = cache.get_slot(0)
        assert x is not None
        return ((x * 2 + 1).relu() - 3).sigmoid() * x

    first = chain(cache.scripted())
    for _ in range(SWEEPS):
        assert torch.equal(chain(cache.scripted()), first)
    assert torch.equal(cache.get_slot(0), torch.arange(256.0))


@pytest.mark.parametrize(
    "treat",
    [
        lambda module, path: torch.jit.freeze(module.eval()),
        lambda module, path: torch.jit.optimize_for_inference(module.eval()),
        lambda module, path: copy.deepcopy(module),
        lambda module, path: copy.copy(module),
        lambda module, path: module.to(torch.float16),
        lambda module, path: load_again(torch.jit.freeze(module.eval()), path),
        lambda module, path: load_again(copy.deepcopy(module), path),
    ],
    ids=["freeze", "optimize_for_inference", "deepcopy", "copy", "to", "freeze-save", "copy-save"],
)
def test_a_treated_module_has_the_same_cache(cache, scripted, tmp_path, treat):
    module = treat(torch.jit.script(Filler(scripted)), tmp_path / "module.pt")
    for turn in range(SWEEPS):
        assert [module(idx).tolist() for idx in range(8)] == [[10 + idx] * 4 for idx in range(8)]
        now = cache.stats()
        assert now.fills == 6 and now.hits == 6 * turn and now.misses == 8 + 2 * turn
    assert module(0).data_ptr() == cache.get_slot(0).data_ptr()


class Constants(torch.nn.Module):
    """Nothing but the cache changes from call to call."""

    def __init__(self, cache):
        super().__init__()
        self.cache = cache

    def forward(self):
        empty = self.cache.get_slot(1) is None
        self.cache.set_slot(1, torch.full([4], 1, dtype=torch.uint8))
        view = self.cache.get_slot(1)
        again = self.cache.get_slot(1)
        assert view is not None and again is not None
        before = again.sum()
        view.add_(1)  # is seen by whoever has the other view
        rows, found = self.cache.get_many(torch.tensor([1]))
        after, filled = again.sum(), self.cache.stats()["filled"]
        self.cache.clear()
        return empty, before, after, rows, found, filled


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize(
    "treat",
    [lambda module: module, torch.jit.freeze, torch.jit.optimize_for_inference],
    ids=["script", "freeze", "optimize_for_inference"],
)
def test_a_cache_is_no_constant(cache, scripted, treat, optimized):
    module = treat(torch.jit.script(Constants(scripted)).eval())
    with torch.jit.optimized_execution(optimized):
        for turn in range(1, SWEEPS):
            empty, before, after, rows, found, filled = module()
            assert empty and before == 4 and after == 8 and filled == 1
            assert rows.tolist() == [[2] * 4] and found.all()
            now = cache.stats()
            assert (now.hits, now.misses, now.fills) == (3 * turn, turn, turn)


def test_several_caches_in_one_module_stay_what_they_are(make_cache, unique_name, tmp_path):
    one, other = make_cache(name=unique_name()), make_cache(name=unique_name())

    class Several(torch.nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.a, self.b = shared, shared
            self.parts = torch.nn.ModuleList([Filler(shared), Filler(other.scripted())])

        def forward(self, idx: int) -> List[torch.Tensor]:  # noqa: UP006
            rows = [part(idx) for part in self.parts]
            self.a.set_slot(idx, rows[0] + 1, allow_overwrite=True)
            seen = self.b.get_slot(idx)
            assert seen is not None
            rows.append(seen)
            return rows

    module = torch.jit.script(Several(one.scripted()))
    for loaded in (module, load_again(module, tmp_path / "module.pt")):
        rows = loaded(3)
        assert rows[2].data_ptr() == one.get_slot(3).data_ptr() and rows[2].tolist() == [14] * 4
        assert other.get_slot(3).tolist() == [13] * 4
        one.clear()
    loaded.a.close()
    assert loaded.b.closed() and not module.b.closed(), "one object before, one object after"


def test_a_trace_records_batches_and_operators_and_cannot_record_get_slot(cache, scripted):
    class Batch(torch.nn.Module):
        def __init__(self, cache, name: str):
            super().__init__()
            self.cache, self.name = cache, name

        def forward(self, indices, rows):
            before, _ = torch.ops.stocache.get_many(self.name, indices)
            self.cache.set_many(indices, rows)
            return before, self.cache.get_many(indices)[0]

    rows = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    example = (torch.tensor([0]), rows[:1])
    traced = torch.jit.trace(Batch(scripted, cache.handle), example, check_trace=False)
    cache.clear()
    for turn in range(SWEEPS):
        before, after = traced(torch.tensor([1, 2, 3]), rows)
        assert torch.equal(before, rows if turn else rows * 0) and torch.equal(after, rows)

    class Single(torch.nn.Module):
        def __init__(self, cache):
            super().__init__()
            self.cache = cache

        def forward(self, x):
            return x + self.cache.get_slot(1)

    assert said(lambda: torch.jit.trace(Single(scripted), (rows[0],)))[0] is RuntimeError


def test_a_frozen_module_holds_its_cache_until_that_is_closed(cache, scripted):
    # torch keeps the constants of frozen modules for the life of the process
    module = torch.jit.freeze(torch.jit.script(Filler(scripted)).eval())
    path = Path(cache.path)
    cache.close()
    module(0)
    del module
    gc.collect()
    assert path.exists()
    scripted.close()
    assert not path.exists()


def load_again(module, path):
    torch.jit.save(module, path)
    return torch.jit.load(path)


def test_a_copied_module_outlives_the_original(cache):
    original = torch.jit.script(Filler(cache.scripted()))
    original(1)
    twin = copy.deepcopy(original)
    original.cache.close()
    cache.close()
    assert twin(1).tolist() == [11] * 4 and twin.cache.stats()["fills"] == 1


def test_forked_tasks_read_and_fill_at_once(make_cache):
    length, words = 64, 32
    cache = make_cache(limit_gib(length, words), length, (words,), torch.int64)
    for idx in range(0, length, 2):
        cache.set_slot(idx, whole(idx, words))

    @torch.jit.script
    def read(cache: torch.classes.stocache.SharedCache, first: int, rounds: int) -> int:
        wrong = 0
        for _ in range(rounds):
            for step in range(64):
                idx = (first + step) % 64
                x = cache.get_slot(idx)
                if x is None:
                    x = torch.arange(32) + (idx << 47)
                    torch.ops.stocache.set(cache.name(), idx, x)
                if not torch.equal(x, torch.arange(32) + (idx << 47)):
                    wrong += 1
        return wrong

    @torch.jit.script
    def all_at_once(cache: torch.classes.stocache.SharedCache) -> List[int]:  # noqa: UP006
        tasks = [torch.jit.fork(read, cache, 16 * task, 8) for task in range(4)]
        return [torch.jit.wait(task) for task in tasks]

    assert all_at_once(cache.scripted()) == [0] * 4
    for idx in range(length):
        assert complaint(idx, cache.get_slot(idx)) is None
    assert cache.stats().fills == length


def test_closing_while_others_read_ends_them_with_an_error(cache):
    cache.set_slot(0, u8(1, 2, 3, 4))
    for _ in range(20):
        shared = cache.scripted()
        started, seen, errors = threading.Barrier(5), [], []

        def use(shared=shared, started=started, seen=seen, errors=errors):
            view = shared.get_slot(0)
            started.wait()
            try:
                while True:
                    view = shared.get_slot(0)
                    shared.get_many(torch.tensor([0, 1]))
                    shared.stats()
                    seen.append(view[3].item())
            except RuntimeError as error:
                errors.append(str(error))
            seen.append(view.tolist())

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        shared.close()
        for thread in threads:
            thread.join()
        assert errors == ["this SharedCache is closed; construct a new one"] * 4
        assert seen.count([1, 2, 3, 4]) == 4 and set(map(str, seen)) <= {"4", "[1, 2, 3, 4]"}


# Saved modules, in other processes


LOADER = """
    import sys
    import torch
    import stocache

    path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        module = torch.jit.load(path)
    except Exception as error:
        print("failed", type(error).__name__, repr(str(error)))
        sys.exit()
    start = module.cache.stats()
    rows = [module(idx).tolist() for idx in range(first, last)]
    end = module.cache.stats()
    counts = {key: end[key] - start[key] for key in ("hits", "misses", "fills")}
    print("loaded", [rows, counts, start["filled"]])
"""


def loaded(answer) -> tuple[list, dict, int]:
    word, _, rest = answer.stdout.partition(" ")
    assert word == "loaded", answer.stdout
    return eval(rest)


def failed(answer) -> tuple[str, str]:
    word, kind, text = answer.stdout.split(" ", 2)
    assert word == "failed", answer.stdout
    return kind, eval(text)


@pytest.mark.parametrize("backing, named", [("shm", True), ("memfd", False), ("memfd", True)])
def test_a_saved_module_joins_the_live_cache(
    make_cache, unique_name, run_script, tmp_path, backing, named
):
    options = {"name": unique_name()} if named else {}
    cache = make_cache(backing=backing, **options)
    module = torch.jit.script(Filler(cache.scripted()))
    for idx in range(4):
        # not what the module would compute: to read it is the only way to know it
        cache.set_slot(idx, u8(idx, 1, 2, 3))
    path = tmp_path / "module.pt"
    module.save(path)
    rows, counts, filled = loaded(run_script(LOADER, path, 0, 6))
    assert filled == 4
    assert rows == [[idx, 1, 2, 3] for idx in range(4)] + [[14] * 4, [15] * 4]
    assert counts == {"hits": 4, "misses": 2, "fills": 2}
    assert module(4).tolist() == [14] * 4 and cache.stats().fills == 6, "filled for the first too"


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_module_whose_cache_is_gone_does_as_it_was_told(
    make_cache, unique_name, run_script, tmp_path, backing
):
    cache = make_cache(name=unique_name(), backing=backing)
    cache.set_slot(0, u8(1, 2, 3, 4))
    for if_gone in ("error", "empty"):
        torch.jit.script(Filler(cache.scripted(if_gone))).save(tmp_path / if_gone)
    name = cache.name
    cache.close()
    kind, text = failed(run_script(LOADER, tmp_path / "error", 0, 2))
    assert kind == "RuntimeError" and f'"{name}"' in text and "\n" not in text
    assert (RuntimeError, text) == said(lambda: stocache.SharedCache.join(name))
    rows, counts, filled = loaded(run_script(LOADER, tmp_path / "empty", 0, 2))
    assert filled == 0 and rows == [[10] * 4, [11] * 4]
    assert counts == {"hits": 0, "misses": 2, "fills": 2}
    assert said(lambda: stocache.SharedCache.join(name))[0] is RuntimeError, "gone with its user"


def test_those_who_load_a_gone_cache_share_the_new_one(make_cache, unique_name, tmp_path):
    cache = make_cache(name=unique_name(), fingerprint="v1", verify="always", backing="memfd")
    torch.jit.script(Filler(cache.scripted("empty"))).save(tmp_path / "module.pt")
    cache.close()
    first, second = (torch.jit.load(tmp_path / "module.pt") for _ in range(2))
    first(3)
    assert second.cache.stats()["filled"] == 1
    # and it is what it was
    with stocache.SharedCache(
        *(0.01, 8, (4,)),
        name=first.cache.name(),
        fingerprint="v1",
        verify="always",
        backing="memfd",
        verbose=False,
    ) as same:
        assert same.backing == "memfd" and same.get_slot(3).tolist() == [13] * 4


@pytest.mark.parametrize("if_gone", ["error", "empty"])
def test_a_kept_cache_is_found_again(make_cache, unique_name, run_script, tmp_path, if_gone):
    cache = make_cache(name=unique_name(), keep=True)
    cache.set_slot(0, u8(1, 2, 3, 4))
    torch.jit.script(Filler(cache.scripted(if_gone))).save(tmp_path / "module.pt")
    path = Path(cache.path)
    cache.close()
    try:
        rows, _, filled = loaded(run_script(LOADER, tmp_path / "module.pt", 0, 2))
        assert filled == 1 and rows == [[1, 2, 3, 4], [11] * 4]
        assert path.exists(), "kept by the second process too"
    finally:
        path.unlink()
    if if_gone == "error":
        assert said(lambda: torch.jit.load(tmp_path / "module.pt"))[0] is RuntimeError


@pytest.mark.parametrize("if_gone", ["error", "empty"])
@pytest.mark.parametrize(
    "change",
    [
        {"data_dims": (5,)},
        {"dataset_len": 9},
        {"dtype": torch.int8},
        {"verify": "always"},
        {"fingerprint": "v2"},
    ],
    ids=str,
)
def test_another_cache_of_that_name_is_refused(make_cache, unique_name, tmp_path, change, if_gone):
    asked = {"name": unique_name(), "fingerprint": "v1"}
    cache = make_cache(**asked)
    torch.jit.script(Filler(cache.scripted(if_gone))).save(tmp_path / "module.pt")
    cache.close()
    other = make_cache(**{**asked, **change})
    expected = said(lambda: make_cache(**asked))
    assert expected[0] is ValueError and asked["name"] in expected[1]
    assert said(lambda: torch.jit.load(tmp_path / "module.pt")) == expected
    other.close()
    make_cache(**asked)
    torch.jit.load(tmp_path / "module.pt")


def test_a_loaded_module_is_saved_with_what_it_was_told(make_cache, unique_name, tmp_path):
    cache = make_cache(name=unique_name(), fingerprint="v1")
    module = torch.jit.script(Filler(cache.scripted("empty")))
    for turn in range(3):
        module.save(tmp_path / f"{turn}")
        module = torch.jit.load(tmp_path / f"{turn}")
    cache.close()
    del module
    again = torch.jit.load(tmp_path / "2")  # "empty" and "v1" went through all of them
    assert again.cache.stats()["filled"] == 0
    make_cache(name=again.cache.name(), fingerprint="v1")


def test_a_module_without_its_cache_is_not_saved(scripted, tmp_path):
    module = torch.jit.script(Filler(scripted))
    scripted.close()
    assert said(lambda: module.save(tmp_path / "module.pt")) == said(lambda: scripted.name())


# A file that is not what we wrote


@pytest.fixture
def state(scripted):
    return scripted.__getstate__()[0]


def restored(state, kind="__torch__.torch.classes.stocache.SharedCache"):
    made = torch.ScriptObject.__new__(torch.ScriptObject)
    made.__setstate__((state, kind))
    return made


DAMAGED = {
    "no words": lambda limit, numbers, words: (limit, numbers, []),
    "a word less": lambda limit, numbers, words: (limit, numbers, words[:-1]),
    "a word more": lambda limit, numbers, words: (limit, numbers, [*words, "more"]),
    "no numbers": lambda limit, numbers, words: (limit, [], words),
    "two numbers": lambda limit, numbers, words: (limit, numbers[:2], words),
    "limit": lambda limit, numbers, words: (-limit, numbers, words),
    "nan": lambda limit, numbers, words: (float("nan"), numbers, words),
    "dtype": lambda limit, numbers, words: (limit, [1000, *numbers[1:]], words),
    "negative dtype": lambda limit, numbers, words: (limit, [-1, *numbers[1:]], words),
    "quantized": lambda limit, numbers, words: (limit, [12, *numbers[1:]], words),
    "keep": lambda limit, numbers, words: (limit, [numbers[0], 1, *numbers[2:]], words),
    "length": lambda limit, numbers, words: (limit, [*numbers[:2], -8, 4], words),
    "dims": lambda limit, numbers, words: (limit, [*numbers, 0], words),
    "huge dims": lambda limit, numbers, words: (limit, [*numbers, 2**62, 2**62], words),
    "many dims": lambda limit, numbers, words: (limit, [*numbers, *[1] * 300], words),
    "name": lambda limit, numbers, words: (limit, numbers, ["a/b", *words[1:]]),
    "other name": lambda limit, numbers, words: (limit, numbers, ["-nobody-", *words[1:]]),
    "empty name": lambda limit, numbers, words: (limit, numbers, ["", *words[1:]]),
    "backing": lambda limit, numbers, words: (limit, numbers, [words[0], "disk", *words[2:]]),
    "verify": lambda limit, numbers, words: (limit, numbers, [*words[:2], "x", *words[3:]]),
    "fingerprint": lambda limit, numbers, words: (
        limit,
        numbers,
        [*words[:3], "f" * 32, words[4]],
    ),
    "no fingerprint": lambda limit, numbers, words: (limit, numbers, [*words[:3], "?", words[4]]),
    "if_gone": lambda limit, numbers, words: (limit, numbers, [*words[:4], "sometimes"]),
    "a number": lambda limit, numbers, words: 3,
    "none": lambda limit, numbers, words: None,
    "other types": lambda limit, numbers, words: ("a", "b", "c"),
    "a pair": lambda limit, numbers, words: (limit, numbers),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_state_that_is_not_ours_is_an_error(cache, state, damage):
    assert restored(state).name() == cache.name  # this is how it is done
    assert said(lambda: restored(DAMAGED[damage](*state)))[0] in (
        ValueError,
        RuntimeError,
        TypeError,
    )
    assert restored(state).set_slot(0, u8(1, 2, 3, 4))


def test_a_state_of_another_class_is_an_error(state):
    for kind in ("__torch__.torch.classes.stocache.Other", "", "SharedCache"):
        assert said(lambda kind=kind: restored(state, kind))[0] is RuntimeError


def edit(source: Path, target: Path, old: bytes, new: bytes) -> None:
    """The saved module with `new` for `old` in its pickle."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as edited:
        for entry in archive.namelist():
            data = archive.read(entry)
            if entry.endswith("/data.pkl"):
                assert data.count(old) == 1, data
                data = data.replace(old, new)
            edited.writestr(entry, data)


def word(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


@pytest.mark.parametrize(
    "old, new, kind",
    [
        (word("error"), word("sometimes"), ValueError),
        (word("never"), word("always"), ValueError),
        (word("shm"), word("disk"), ValueError),
        (b"K\x00K\x00K\x08K\x04e", b"K\x00K\x00K\x09K\x04e", ValueError),  # dataset_len
        (b"K\x00K\x00K\x08K\x04e", b"K\x63K\x00K\x08K\x04e", ValueError),  # dtype
        (b"K\x00K\x00K\x08K\x04e", b"K\x00K\x00e", ValueError),
        (word("shm") + b"q\x08", b"", ValueError),
    ],
    ids=["if_gone", "verify", "backing", "length", "dtype", "fewer numbers", "fewer words"],
)
def test_a_damaged_file_is_an_error(make_cache, unique_name, tmp_path, old, new, kind):
    cache = make_cache(name=unique_name(), backing="shm")
    saved, damaged = tmp_path / "module.pt", tmp_path / "damaged.pt"
    torch.jit.script(Filler(cache.scripted())).save(saved)
    edit(saved, damaged, old, old)
    assert torch.jit.load(damaged)(1).tolist() == [11] * 4  # editing alone does no harm
    edit(saved, damaged, old, new)
    assert said(lambda: torch.jit.load(damaged))[0] is kind


# In datasets


class ScriptedSamples(Dataset):
    """Holds a scripted object, or a module with one, as an attribute like any other."""

    def __init__(self, module, length: int) -> None:
        self.module, self.length = module, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int):
        return idx, self.module(idx)


class Whole(torch.nn.Module):
    """The samples of samples.py."""

    def __init__(self, cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, idx: int) -> torch.Tensor:
        x = self.cache.get_slot(idx)
        if x is None:
            x = torch.arange(self.cache.data_dims()[0]) + (idx << 47)
            self.cache.set_slot(idx, x)
        return x


def epoch(dataset, context) -> None:
    loader = DataLoader(dataset, 8, num_workers=2, multiprocessing_context=context)
    for indices, rows in loader:
        for idx, row in zip(indices.tolist(), rows, strict=True):
            assert complaint(idx, row) is None


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_forked_workers_use_a_scripted_module(backing):
    with words_cache(32, 16, backing=backing) as cache:
        dataset = ScriptedSamples(torch.jit.script(Whole(cache.scripted())), 32)
        for _ in range(2):
            epoch(dataset, "fork")
        now = cache.stats()
        assert (now.fills, now.misses, now.hits) == (32, 32, 32)
        del dataset


def test_spawned_workers_get_a_plain_module_that_holds_the_object():
    with words_cache(32, 16, backing="memfd") as cache:
        dataset = ScriptedSamples(Whole(cache.scripted()), 32)
        epoch(dataset, "spawn")
        assert cache.stats().fills == 32
        del dataset


def test_a_pickled_object_joins_the_live_cache_and_does_as_it_was_told_if_it_is_gone(cache):
    cache.set_slot(0, u8(1, 2, 3, 4))
    strict, empty = (pickle.dumps(Filler(cache.scripted(word))) for word in ("error", "empty"))
    for pickled in (strict, empty):
        again = pickle.loads(pickled)
        assert again(0).data_ptr() == cache.get_slot(0).data_ptr()
        del again
    name = cache.name
    cache.close()
    assert said(lambda: pickle.loads(strict)) == said(lambda: stocache.SharedCache.join(name))
    assert pickle.loads(empty)(0).tolist() == [10] * 4


def test_torch_save_of_a_plain_module_works_and_of_a_scripted_one_is_torchs_error(cache, tmp_path):
    plain = Filler(cache.scripted())
    torch.save(plain, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", weights_only=False)(2).tolist() == [12] * 4
    assert cache.get_slot(2) is not None
    for call in (
        lambda: torch.save(torch.jit.script(plain), tmp_path / "scripted.pt"),
        lambda: pickle.dumps(torch.jit.script(plain)),
    ):
        kind, text = said(call)
        assert kind is RuntimeError and "serialize" in text
    assert os.path.exists(cache.path)


def test_the_python_class_itself_is_no_attribute_of_a_script(cache):
    kind, text = said(lambda: torch.jit.script(Filler(cache)))
    assert kind is RuntimeError and "SharedCache" in text
