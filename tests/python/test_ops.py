"""torch.ops.stocache: the operators take a cache by its name, in whichever process they run."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from pathlib import Path

import pytest
import stocache
import torch
from kernel import hog_the_mount, mount_shm, root_only
from samples import GIB, complaint, limit_gib, whole, words_cache
from torch.utils.data import DataLoader, Dataset

ops = torch.ops.stocache
DOCS = Path(__file__).resolve().parents[2] / "docs" / "scripts.md"


def u8(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def said(call) -> tuple[type, str]:
    """What a call raises: type and text. That it raises at all is the caller's claim."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


def file_of(name: str) -> Path:
    """Where the cache of that name lies if it lies in /dev/shm."""
    found = list(Path("/dev/shm").glob(f"stocache-*-{name}"))
    return found[0] if found else Path("/dev/shm") / f"stocache-?-{name}"


@pytest.fixture
def cache(make_cache):
    """Six slots of four bytes for a dataset of eight."""
    return make_cache((8 + 6 * 4) / GIB, 8, (4,))


@pytest.fixture
def name(cache):
    return cache.name


@pytest.fixture
def opened(unique_name):
    """opened(...) is the name of a cache that only operators hold; closed after the test."""
    names = []

    def make(size_limit_gib=0.001, dataset_len=8, data_dims=(4,), dtype=torch.uint8, **options):
        names.append(unique_name())
        ops.open(names[-1], size_limit_gib, dataset_len, list(data_dims), dtype, **options)
        return names[-1]

    yield make
    for made in names:
        ops.close(made)


# What they do


def test_a_name_means_one_cache(cache, make_cache):
    other = make_cache()
    ops.set(cache.name, 0, u8(1, 2, 3, 4))
    assert ops.get(cache.name, 0)[1]
    assert not ops.get(other.name, 0)[1]


def test_get_and_set_see_what_the_class_sees(cache, name):
    assert not ops.get(name, 1)[1]
    assert ops.set(name, 1, u8(1, 2, 3, 4))
    assert cache.get_slot(1).tolist() == [1, 2, 3, 4]
    cache.set_slot(2, u8(5, 6, 7, 8))
    sample, found = ops.get(name, 2)
    assert found and sample.tolist() == [5, 6, 7, 8]
    sample, found = ops.get(name, 7)
    assert not found and sample.tolist() == [0] * 4, "beyond the cache"
    assert not ops.set(name, 7, u8(1, 1, 1, 1))


def test_set_says_whether_it_stored(name):
    assert ops.set(name, 1, u8(1, 2, 3, 4))
    assert ops.set(name, 1, u8(9, 9, 9, 9), True)
    assert ops.set(name, 1, u8(8, 8, 8, 8), allow_overwrite=True)
    assert ops.get(name, 1)[0].tolist() == [8, 8, 8, 8]


def test_a_second_set_never_replaces_the_value_and_is_no_error(name):
    assert ops.set(name, 1, u8(1, 2, 3, 4))
    assert not ops.set(name, 1, u8(9, 9, 9, 9))
    assert ops.get(name, 1)[0].tolist() == [1, 2, 3, 4]
    assert ops.set_many(name, torch.tensor([1, 2]), u8(9, 9, 9, 9).expand(2, 4)).tolist() == [
        False,
        True,
    ]
    assert ops.get(name, 1)[0].tolist() == [1, 2, 3, 4]


def test_batches_go_in_and_come_out(name):
    batch = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    stored = ops.set_many(name, torch.tensor([0, 2, 7]), batch)
    assert stored.dtype == torch.bool and stored.tolist() == [True, True, False]
    rows, found = ops.get_many(name, torch.tensor([2, 1, 0, 7]))
    assert found.tolist() == [True, False, True, False]
    assert rows.tolist() == [[4, 5, 6, 7], [0] * 4, [0, 1, 2, 3], [0] * 4]
    stored = ops.set_many(name, torch.tensor([0, 1]), batch[1:], allow_overwrite=True)
    assert stored.tolist() == [True, True]
    assert ops.get(name, 0)[0].tolist() == [4, 5, 6, 7]
    rows, found = ops.get_many(name, torch.tensor([], dtype=torch.int64))
    assert rows.shape == (0, 4) and found.shape == (0,)


def test_clear_empties_every_slot(cache, name):
    ops.set_many(name, torch.tensor([0, 3]), u8(1, 2, 3, 4).expand(2, 4))
    assert ops.clear(name) is None
    assert not ops.get_many(name, torch.arange(6))[1].any()
    assert cache.stats().filled == 0
    assert ops.set(name, 0, u8(5, 5, 5, 5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex64, torch.bool])
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_a_result_has_one_type_whether_it_is_a_hit_or_a_miss(opened, dtype, dims):
    name = opened(data_dims=dims, dtype=dtype)
    value = torch.ones(dims, dtype=dtype)
    for turn in range(2):
        sample, found = ops.get(name, 0)
        assert sample.shape == dims and sample.dtype == dtype
        assert found.shape == () and found.dtype == torch.bool and bool(found) is bool(turn)
        batch, which = ops.get_many(name, torch.tensor([0, 1, 0]))
        assert batch.shape == (3, *dims) and batch.dtype == dtype
        assert which.tolist() == [bool(turn), False, bool(turn)]
        stored = ops.set(name, 0, value)
        assert stored.shape == () and stored.dtype == torch.bool and bool(stored) is not bool(turn)
        many = ops.set_many(name, torch.tensor([0]), value[None])
        assert many.tolist() == [False]
    assert torch.equal(ops.get(name, 0)[0], value)


@pytest.mark.parametrize("words", [1, 512, 40_000])
def test_a_miss_is_zeros_also_in_memory_that_was_used_before(opened, words):
    name = opened(limit_gib(4, words), 4, (words,), torch.int64)
    for _ in range(8):
        used = torch.full((words,), -1), torch.full((3, words), -1)  # freed dirty at once
        del used
        sample, found = ops.get(name, 1)
        assert not found and not sample.any()
        batch, found = ops.get_many(name, torch.tensor([1, 2, 3]))
        assert not found.any() and not batch.any()
        sample.fill_(-1)
        batch.fill_(-1)


def test_what_comes_out_is_never_the_cache_itself(cache, name):
    for i in range(6):
        ops.set(name, i, u8(i, 2, 3, 4))
    memory = cache.array
    inside = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    view = cache.get_slot(1)
    assert view.data_ptr() in inside  # this test knows a view when it sees one
    sample, found = ops.get(name, 1)
    batch, which = ops.get_many(name, torch.arange(6))
    stored = ops.set(name, 1, view)
    again, _ = ops.get(name, 1)
    results = [sample, found, batch, which, stored, again, ops.stats(name)]
    assert not any(result.data_ptr() in inside for result in results)
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)
    before = memory.clone()
    for result in results:
        result.zero_()
    assert torch.equal(memory, before), "writing into a result changed the cache"
    assert ops.get(name, 1)[0].tolist() == [1, 2, 3, 4]
    batch.fill_(7)
    ops.close(name)
    cache.close()
    assert batch.eq(7).all() and again.eq(0).all()


def test_what_goes_in_is_copied(name):
    value = u8(1, 2, 3, 4)
    ops.set(name, 0, value)
    ops.set_many(name, torch.tensor([1]), value[None])
    value.zero_()
    assert ops.get_many(name, torch.tensor([0, 1]))[0].tolist() == [[1, 2, 3, 4]] * 2


def test_gradients_end_at_the_cache(opened):
    name = opened(dtype=torch.float32)
    weight = torch.ones(4, requires_grad=True)
    assert ops.set(name, 0, weight * 2)
    assert ops.set_many(name, torch.tensor([1]), (weight * 3)[None]).all()
    sample, found = ops.get(name, 0)
    assert not sample.requires_grad and not found.requires_grad
    assert not ops.get_many(name, torch.tensor([0, 1]))[0].requires_grad
    (sample * weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 4
    with torch.inference_mode():
        assert ops.get(name, 1)[0].tolist() == [3.0] * 4
        assert ops.set(name, 2, weight + 1)
    assert ops.get(name, 2)[0].tolist() == [2.0] * 4


def test_stats_are_the_fields_of_the_class_in_their_order(cache, name):
    # every field another number, as far as one process can make them differ
    for i in range(5):
        ops.set(name, i, u8(1, 2, 3, 4))
    for _ in range(3):
        ops.get_many(name, torch.arange(5))
    ops.get(name, 7)
    numbers = ops.stats(name)
    assert numbers.dtype == torch.int64 and numbers.shape == (13,)
    now = stocache.SharedCacheStats(*numbers.tolist())
    assert now == cache.stats()
    assert (now.hits, now.misses, now.fills, now.bytes) == (15, 1, 5, 20)
    assert (now.filled, now.capacity, now.dataset_len, now.slot_bytes) == (5, 6, 8, 4)


def test_a_checksum_is_checked_by_copies_too(opened):
    name = opened(verify="always")
    ops.set(name, 0, u8(1, 2, 3, 4))
    assert ops.get(name, 0)[1]
    with stocache.SharedCache.join(name) as cache:
        cache.get_slot(0).zero_()  # somebody edits a view
    sample, found = ops.get(name, 0)
    assert not found and sample.tolist() == [0] * 4
    assert stocache.SharedCacheStats(*ops.stats(name).tolist()).damaged == 1


# Names and lifetimes


def test_open_makes_the_cache_and_close_lets_it_go(unique_name):
    name = unique_name()
    ops.open(name, 0.001, 8, [4], torch.uint8, backing="shm")
    ops.open(name, 0.001, 8, [4], torch.uint8)  # twice is once
    assert file_of(name).exists()
    assert ops.set(name, 0, u8(1, 2, 3, 4))
    ops.close(name)
    assert not file_of(name).exists(), "nobody holds it any more"
    kind, text = said(lambda: ops.get(name, 0))
    assert kind is RuntimeError and name in text
    ops.close(name)  # no mistake
    ops.close(unique_name())


def test_close_is_about_the_name_not_about_objects(cache, make_cache, unique_name):
    ops.close(cache.name)
    assert not cache.closed and cache.get_slot(0) is None
    named = make_cache(name=unique_name(), backing="shm")
    ops.open(named.name, 0.01, 8, [4], torch.uint8)
    name, path = named.name, Path(named.path)
    named.set_slot(0, u8(1, 2, 3, 4))
    named.close()
    assert path.exists() and ops.get(name, 0)[0].tolist() == [1, 2, 3, 4], "still held by name"
    ops.close(name)
    assert not path.exists()


def test_a_closed_cache_that_nobody_else_has_is_an_error(cache, name):
    ops.set(name, 0, u8(1, 2, 3, 4))
    cache.close()
    kind, text = said(lambda: ops.get(name, 0))
    assert kind is RuntimeError and name in text and "\n" not in text


def test_a_name_that_is_used_again_means_the_new_cache(make_cache, unique_name):
    name = unique_name()
    old = make_cache(name=name, backing="shm")
    ops.set(name, 0, u8(1, 1, 1, 1))
    os.unlink(old.path)  # somebody tidies up
    new = make_cache(name=name, backing="shm", data_dims=(2,))
    assert ops.get(name, 0)[0].tolist() == [0, 0]
    ops.set(name, 0, u8(2, 2))
    assert old.get_slot(0).tolist() == [1] * 4 and new.get_slot(0).tolist() == [2, 2]


USER = """
    import sys
    import torch
    import stocache  # for its operators

    ops, name = torch.ops.stocache, sys.argv[1]
    sample, found = ops.get(name, 0)
    assert found and sample.tolist() == [1, 2, 3, 4], (sample, found)
    assert not ops.get(name, 1)[1]
    assert ops.set(name, 1, torch.tensor([5, 6, 7, 8], dtype=torch.uint8))
    assert not ops.set(name, 0, sample), "set when this process came"
    batch, which = ops.get_many(name, torch.tensor([1, 0, 2]))
    assert which.tolist() == [True, True, False]
    print(ops.stats(name).tolist())
"""


@pytest.mark.parametrize("backing, named", [("shm", True), ("memfd", False), ("memfd", True)])
def test_another_process_joins_by_the_name_alone(
    make_cache, unique_name, run_script, backing, named
):
    cache = make_cache(backing=backing, **({"name": unique_name()} if named else {}))
    cache.set_slot(0, u8(1, 2, 3, 4))
    seen = run_script(USER, cache.name).stdout
    now = cache.stats()
    assert eval(seen) == [int(field) for field in vars(now).values()], "one set of counters"
    assert now.fills == 2 and cache.get_slot(1).tolist() == [5, 6, 7, 8]
    assert cache.path is None or os.path.exists(cache.path), "the guest left; the host stays"


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_who_joined_by_name_holds_the_cache_until_close(run_script, unique_name, backing):
    name = unique_name()
    host = run_script.start(
        """
        import sys
        import torch
        import stocache

        name, backing = sys.argv[1:]
        torch.ops.stocache.open(name, 0.001, 8, [4], torch.uint8, backing=backing)
        torch.ops.stocache.set(name, 0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
        print("ready", flush=True)
        sys.stdin.readline()
        """,
        name,
        backing,
    )
    assert host.stdout.readline() == "ready\n", host.stderr.read()
    assert ops.get(name, 0)[1]
    host.communicate("end\n")
    assert host.returncode == 0
    assert ops.get(name, 0)[0].tolist() == [1, 2, 3, 4], "the host is gone, the guest is not"
    assert file_of(name).exists() is (backing == "shm")
    ops.close(name)
    assert not file_of(name).exists()
    assert said(lambda: ops.get(name, 0))[0] is RuntimeError


def test_the_end_of_a_process_closes_what_it_opened(run_script, unique_name):
    name = unique_name()
    run_script(
        """
        import sys
        import torch
        import stocache

        name = sys.argv[1]
        torch.ops.stocache.open(name, 0.001, 8, [4], torch.uint8, backing="shm")
        assert torch.ops.stocache.set(name, 0, torch.ones(4, dtype=torch.uint8))
        """,
        name,
    )
    assert not file_of(name).exists()


def test_a_fingerprint_is_the_same_for_operators_and_class(make_cache, unique_name):
    geometry = {"size_limit_gib": 0.001, "dataset_len": 8, "data_dims": [4], "dtype": torch.uint8}
    for mark, other in (("v1", "v2"), ("größe", "groesse"), ("a\0b", "a\0c"), ("", "v1")):
        cache = make_cache(**geometry, name=unique_name(), fingerprint=mark)
        ops.open(cache.name, **geometry, fingerprint=mark)
        ops.close(cache.name)
        kind, text = said(
            lambda cache=cache, other=other: ops.open(cache.name, **geometry, fingerprint=other)
        )
        assert kind is ValueError and "fingerprint" in text


def test_a_kept_cache_outlives_close_and_is_found_again(unique_name):
    name = unique_name()
    ops.open(name, 0.001, 8, [4], torch.uint8, backing="shm", keep=True, fingerprint="v1")
    ops.set(name, 3, u8(1, 2, 3, 4))
    ops.close(name)
    path = file_of(name)
    try:
        assert path.exists()
        kind, text = said(
            lambda: ops.open(name, 0.001, 8, [4], torch.uint8, keep=True, fingerprint="v2")
        )
        assert kind is ValueError and "fingerprint" in text and name in text
        assert ops.get(name, 3)[0].tolist() == [1, 2, 3, 4], "joined as it was left"
        ops.close(name)
    finally:
        path.unlink()


def test_a_forked_child_has_what_its_parent_holds(in_child, opened):
    name = opened(backing="shm")
    ops.set(name, 0, u8(1, 2, 3, 4))

    def child():
        assert ops.get(name, 0)[0].tolist() == [1, 2, 3, 4]
        assert ops.set(name, 1, u8(5, 6, 7, 8))
        ops.close(name)  # the child's own hold
        return bool(ops.get(name, 1)[1])  # and joined anew

    assert in_child(child) is True
    assert ops.get(name, 1)[0].tolist() == [5, 6, 7, 8]


def test_threads_that_join_at_once_join_once(in_child, make_cache):
    cache = make_cache(backing="shm")
    cache.set_slot(0, u8(1, 2, 3, 4))

    def child(name):
        cache.close()  # only the name is left
        gate = threading.Barrier(8)
        seen = []

        def use():
            gate.wait()
            for _ in range(200):
                seen.append(ops.get(name, 0)[0].tolist())
                ops.close(name)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return len(seen), all(row == [1, 2, 3, 4] for row in seen), links

    count, same, links = in_child(child, cache.name)
    assert count == 1600 and same
    assert not [link for link in links if cache.name in link], "a descriptor was left open"


class Named(Dataset):
    """Knows the cache by name only, so there is nothing to pickle but a str."""

    def __init__(self, name: str, length: int, words: int) -> None:
        self.name, self.length, self.words = name, length, words

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int):
        sample, found = torch.ops.stocache.get(self.name, idx)
        if not found:
            sample = whole(idx, self.words)
            torch.ops.stocache.set(self.name, idx, sample)
        return idx, bool(found), sample


@pytest.mark.parametrize("context, backing", [("fork", "shm"), ("spawn", "memfd")])
def test_workers_share_by_name(context, backing):
    with words_cache(32, 16, backing=backing) as cache:
        for idx in range(0, 32, 2):
            cache.set_slot(idx, whole(idx, 16))
        dataset = Named(cache.name, 32, 16)
        hits = []
        for indices, hit, rows in DataLoader(
            dataset, 4, num_workers=2, multiprocessing_context=context
        ):
            hits += hit.tolist()
            for idx, row in zip(indices.tolist(), rows, strict=True):
                assert complaint(idx, row) is None
        assert hits == [idx % 2 == 0 for idx in range(32)]
        now = cache.stats()
        assert now.fills == now.filled == 32 and now.hits == now.misses == 16


# Bad input: the sentence is that of the class


GOOD = {
    "get": lambda name: ops.get(name, 0),
    "set": lambda name: ops.set(name, 0, u8(1, 2, 3, 4)),
    "get_many": lambda name: ops.get_many(name, torch.tensor([0])),
    "set_many": lambda name: ops.set_many(name, torch.tensor([0]), u8(1, 2, 3, 4)[None]),
    "clear": lambda name: ops.clear(name),
    "stats": lambda name: ops.stats(name),
}


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize(
    "name", ["", "a/b", "../up", "two words", "größe", "nul\0", "x" * 101, "-nobody-has-this-"]
)
def test_a_name_that_cannot_be_joined_is_what_join_says(op, name):
    kind, text = said(lambda: GOOD[op](name))
    assert (kind, text) == said(lambda: stocache.SharedCache.join(name))
    assert kind is (RuntimeError if name == "-nobody-has-this-" else ValueError)
    assert "\n" not in text and name.strip("\0") in text


@pytest.mark.parametrize("op", [*GOOD, "open", "close"])
@pytest.mark.parametrize("name", [None, 5, 0.5, ["a"], torch.tensor(1), "\ud800"], ids=ascii)
def test_a_name_that_is_no_string_is_torchs_own_error(op, name):
    calls = {
        **GOOD,
        "open": lambda name: ops.open(name, 0.001, 8, [4], torch.uint8),
        "close": lambda name: ops.close(name),
    }
    kind, text = said(lambda: calls[op](name))
    assert kind is RuntimeError and f"stocache::{op}()" in text and "'str'" in text


@pytest.mark.parametrize("idx", [-1, 8, 2**62, -(2**63), 2**63 - 1])
def test_outside_the_dataset_is_what_the_class_says(cache, name, idx):
    expected = said(lambda: cache.get_slot(idx))
    assert expected[0] is IndexError and str(idx) in expected[1]
    for call in (
        lambda: ops.get(name, idx),
        lambda: ops.set(name, idx, u8(1, 2, 3, 4)),
        lambda: ops.get_many(name, torch.tensor([0, idx])),
        lambda: ops.set_many(name, torch.tensor([0, idx]), u8(1, 2, 3, 4).expand(2, 4)),
    ):
        assert said(call) == expected
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


BAD_VALUES = {
    "shape": torch.zeros(5, dtype=torch.uint8),
    "dims": torch.zeros((), dtype=torch.uint8),
    "dtype": torch.zeros(4),
    "sparse": torch.zeros(4, dtype=torch.uint8).to_sparse(),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_a_value_that_does_not_fit_is_what_the_class_says(cache, name, kind):
    value = BAD_VALUES[kind]
    expected = said(lambda: cache.set_slot(1, value))
    assert expected[0] is ValueError and "\n" not in expected[1]
    for idx in (1, 7):
        assert said(lambda idx=idx: ops.set(name, idx, value)) == expected
    rows = torch.tensor([1, 2])
    expected = said(lambda: cache.set_many(rows, value))
    assert said(lambda: ops.set_many(name, rows, value)) == expected
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


BAD_INDICES = {
    "float": torch.tensor([0.5]),
    "mask": torch.tensor([True]),
    "dims": torch.tensor([[0, 1]]),
    "scalar": torch.tensor(1),
    "sparse": torch.tensor([0]).to_sparse(),
}


@pytest.mark.parametrize("kind", BAD_INDICES)
def test_indices_of_the_wrong_kind_are_what_the_class_says(cache, name, kind):
    indices, batch = BAD_INDICES[kind], torch.ones(1, 4, dtype=torch.uint8)
    expected = said(lambda: cache.get_many(indices))
    assert said(lambda: ops.get_many(name, indices)) == expected
    expected = said(lambda: cache.set_many(indices, batch))
    assert said(lambda: ops.set_many(name, indices, batch)) == expected
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


def test_of_meta_tensors_there_is_only_the_shape(cache, name):
    value, rows = u8(1, 2, 3, 4).to("meta"), torch.tensor([1, 2]).to("meta")
    stored = ops.set(name, 1, value)
    many = ops.set_many(name, rows, value.expand(2, 4))
    batch, found = ops.get_many(cache.handle, rows)
    for result, shape in ((stored, ()), (many, (2,)), (batch, (2, 4)), (found, (2,))):
        assert result.is_meta and result.shape == shape
    assert cache.stats().misses == 0 and cache.aux_array.tolist() == [0] * 6 + [2] * 2


def test_a_meta_batch_for_real_indices_is_an_error_or_has_a_meta_result(name):
    batch = torch.zeros(2, 4, dtype=torch.uint8, device="meta")
    try:
        stored = ops.set_many(name, torch.tensor([1, 2]), batch)
    except (ValueError, RuntimeError):
        return
    assert stored.is_meta


def test_a_handle_is_held_against_the_cache(cache, name):
    """A graph relies on the shape and dtype in its handle."""
    ops.set(cache.handle, 1, u8(1, 2, 3, 4))
    assert cache.handle == f"{name}:uint8[4]"
    assert ops.get(cache.handle, 1)[0].tolist() == [1, 2, 3, 4]
    for other in (f"{name}:uint8[5]", f"{name}:int8[4]", f"{name}:uint8[4,1]", f"{name}:"):
        for call in (
            lambda other=other: ops.get(other, 1),
            lambda other=other: ops.set(other, 2, u8(1, 2, 3, 4)),
            lambda other=other: ops.get_many(other, torch.tensor([1])),
            lambda other=other: ops.stats(other),
        ):
            kind, text = said(call)
            assert kind is ValueError and "uint8[4]" in text and name in text
    ops.close(cache.handle)


BAD_OPENS = [
    {"size_limit_gib": 0.0},
    {"size_limit_gib": -0.5},
    {"size_limit_gib": float("nan")},
    {"size_limit_gib": float("inf")},
    {"size_limit_gib": 2.0**40},
    {"dataset_len": 0},
    {"dataset_len": -3},
    {"data_dims": [0]},
    {"data_dims": [3, -1]},
    {"data_dims": [2**40, 2**40]},
    {"data_dims": [1] * 17},
    {"dtype": torch.quint8},
    {"name": ""},
    {"name": "a/b"},
    {"name": "x" * 101},
    {"backing": "disk"},
    {"backing": ""},
    {"verify": "sometimes"},
    {"keep": True, "backing": "memfd"},
]


@pytest.mark.parametrize("change", BAD_OPENS, ids=lambda change: ascii(change)[:40])
def test_a_bad_option_of_open_is_what_the_constructor_says(unique_name, change):
    good = {
        "size_limit_gib": 0.001,
        "dataset_len": 8,
        "data_dims": [4],
        "dtype": torch.uint8,
        "name": unique_name(),
    }
    asked = {**good, **change}
    kind, text = said(lambda: stocache.SharedCache(**asked, verbose=False))
    asked["cache"] = asked.pop("name")
    same_kind, same_text = said(lambda: ops.open(**asked))
    assert same_kind is kind is ValueError
    # a quotation mark is all that may differ: Python's, or that of the core
    assert same_text.replace('"', "'") == text.replace('"', "'") and "\n" not in same_text
    assert not file_of(good["name"]).exists()


def test_too_large_for_the_machine_is_the_same_sentence_as_a_runtime_error(unique_name):
    # torch knows no MemoryError, so only the sentence can be the same
    without_numbers = re.compile(r"[\d.]+ \w?i?B|[\d.]+")
    kind, text = said(lambda: stocache.SharedCache(2.0**20, 2**40, [1024], verbose=False))
    assert kind is MemoryError
    same_kind, same_text = said(
        lambda: ops.open(unique_name(), 2.0**20, 2**40, [1024], torch.uint8)
    )
    assert same_kind is RuntimeError and "\n" not in same_text
    assert without_numbers.sub("#", same_text) == without_numbers.sub("#", text)


OTHER = [
    {"dataset_len": 9},
    {"data_dims": [5]},
    {"data_dims": [2, 2]},
    {"dtype": torch.int8},
    {"size_limit_gib": (8 + 3 * 4) / GIB},
    {"verify": "always"},
    {"fingerprint": "other"},
]


@pytest.mark.parametrize(
    "change, backing",
    # a memfd cannot be kept, so of that something else is said
    [*((c, b) for c in OTHER for b in ("shm", "memfd")), ({"keep": True}, "shm")],
    ids=str,
)
def test_open_with_other_arguments_is_what_the_constructor_says(
    make_cache, unique_name, change, backing
):
    asked = {
        "size_limit_gib": (8 + 6 * 4) / GIB,
        "dataset_len": 8,
        "data_dims": [4],
        "dtype": torch.uint8,
        "backing": backing,
    }
    cache = make_cache(**asked, name=unique_name())
    cache.set_slot(0, u8(1, 2, 3, 4))
    expected = said(lambda: make_cache(**{**asked, **change}, name=cache.name))
    assert expected[0] is ValueError and cache.name in expected[1] and "\n" not in expected[1]
    assert said(lambda: ops.open(cache.name, **{**asked, **change})) == expected
    assert ops.get(cache.name, 0)[0].tolist() == [1, 2, 3, 4]
    ops.open(cache.name, **asked)
    ops.close(cache.name)


@pytest.mark.parametrize(
    "call",
    [
        lambda name: ops.get(name),
        lambda name: ops.get(name, "0"),
        lambda name: ops.get(name, 0.5),
        lambda name: ops.get(name, 2**63),
        lambda name: ops.get(name, 0, 0),
        lambda name: ops.set(name, 0, [1, 2, 3, 4]),
        lambda name: ops.get_many(name, [0, 1]),
        lambda name: ops.open(name, 0.001, 8, [4], "uint8"),
        lambda name: ops.open(name, 0.001, 8, 4.5, torch.uint8),
        lambda name: ops.open(name, "1", 8, [4], torch.uint8),
        lambda name: ops.open(name, 0.001, 8, [4], torch.uint8, unknown=1),
    ],
)
def test_a_call_that_does_not_match_the_schema_is_torchs_own_error(cache, name, call):
    kind, text = said(lambda: call(name))
    assert kind is RuntimeError and "stocache::" in text
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


def test_none_instead_of_a_tensor_is_an_error(cache, name):
    # torch passes None on as a tensor that is not there
    for call in (
        lambda: ops.set(name, 0, None),
        lambda: ops.get_many(name, None),
        lambda: ops.set_many(name, None, u8(1, 2, 3, 4)[None]),
        lambda: ops.set_many(name, torch.tensor([0]), None),
    ):
        assert said(call)[0] in (RuntimeError, ValueError, TypeError)
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


@root_only
def test_the_write_that_freezes_the_cache_says_so_once(in_child, capfd):
    def scenario():
        # Up to torch 2.14 it prints the warnings of operators itself.
        warnings.showwarning = lambda text, *_, **__: print(f"Warning: {text}", file=sys.stderr)
        warnings.simplefilter("default")
        mount_shm("size=8m")
        name, words = "freezing", 1 << 15
        ops.open(name, limit_gib(16, words), 16, [words], torch.int64, backing="shm")
        assert ops.set(name, 0, whole(0, words))
        hog_the_mount()
        assert not ops.set(name, 1, whole(1, words))
        rows = torch.stack([whole(i, words) for i in (2, 3)])
        assert ops.set_many(name, torch.tensor([2, 3]), rows).tolist() == [False, False]
        assert not ops.set(name, 4, whole(4, words))
        assert complaint(0, ops.get(name, 0)[0]) is None, "reads go on"
        now = stocache.SharedCacheStats(*ops.stats(name).tolist())
        return bool(now.frozen), now.dropped

    assert in_child(scenario) == (True, 4)
    said = [line for line in capfd.readouterr().err.splitlines() if "frozen" in line]
    assert len(said) == 1 and "Warning: " in said[0] and '"freezing"' in said[0], said


# How they are found


def test_the_operators_are_there_after_import_alone(run_script):
    shown = run_script(
        """
        import torch
        import stocache

        for name in ("open", "close", "get", "set", "get_many", "set_many", "clear", "stats"):
            print(getattr(torch.ops.stocache, name).default._schema)
        """
    ).stdout
    documented = re.findall(r"^stocache::.*(?:\n +.*)*", DOCS.read_text(), re.MULTILINE)
    assert shown.splitlines() == [re.sub(r"\n +", " ", schema) for schema in documented]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_an_operator_can_be_scripted(cache):
    def load(name: str, idx: int) -> torch.Tensor:
        x, found = torch.ops.stocache.get(name, idx)
        if not bool(found):
            x = torch.full([4], idx, dtype=torch.uint8)
            torch.ops.stocache.set(name, idx, x)
        return x

    scripted = torch.jit.script(load)
    assert scripted(cache.name, 3).tolist() == [3] * 4
    assert cache.get_slot(3).tolist() == [3] * 4
    cache.set_slot(4, u8(9, 8, 7, 6))
    assert scripted(cache.name, 4).tolist() == [9, 8, 7, 6]


def test_the_package_carries_the_version():
    assert stocache.__version__.count(".") == 2
