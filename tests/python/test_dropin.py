"""Programs written for stocaching 0.2.1 run with one changed import.

Where stocaching is installed, the tests that take `original` also run against it: that shows that
they describe the original and not only us."""

from __future__ import annotations

import importlib
import os

import numpy as np
import pytest
import stocache
import torch
from samples import GIB
from torch.utils.data import DataLoader, Dataset


@pytest.fixture(params=["stocache", "stocaching"])
def original(request):
    """The module under its old and its new name."""
    if request.param == "stocaching":
        return pytest.importorskip(
            "stocaching", reason="stocaching is absent: not compared with the original itself"
        )
    return importlib.import_module(request.param)


def ramp(idx: int, dims=(3, 4, 5)) -> torch.Tensor:
    return ((torch.arange(int(np.prod(dims))) + 7 * idx) % 251).to(torch.uint8).reshape(dims)


# The published example

README = """
import torch
from {module} import SharedCache
from torch.utils.data import Dataset

class MyDataset(Dataset):
    def __init__(self):
        super().__init__()
        dataset_len = N
        data_dims = (C, H, W)

        # initialize the cache
        self.cache = SharedCache(
            size_limit_gib=32,
            dataset_len=dataset_len,
            data_dims=data_dims,
            dtype=torch.uint8,
        )

    def __getitem__(self, idx):
        # retrieve data from cache if it's there
        x = self.cache.get_slot(idx)
        # x will be None if the cache slot was empty or OOB
        if x is None:
            x = load(idx)
            self.cache.set_slot(idx, x) # try to cache x
        return x

    def __len__(self):
        return N
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_readme_example_runs_with_only_its_import_changed(original, workers, tmp_path):
    log = tmp_path / "loads"
    log.touch()

    def load(idx):
        with log.open("ab") as file:  # counts loads in every process
            file.write(b".")
        return ramp(idx)

    world = {"N": 20, "C": 3, "H": 4, "W": 5, "load": load}
    exec(README.format(module=original.__name__), world)
    dataset = world["MyDataset"]()
    for epoch in range(3):
        loader = DataLoader(
            dataset,
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        seen = torch.cat(list(loader))
        assert sorted(int(x[0, 0, 0]) for x in seen) == sorted(
            int(ramp(i)[0, 0, 0]) for i in range(20)
        )
        assert log.stat().st_size == 20, f"epoch {epoch} loaded again"
    for idx in range(20):
        assert torch.equal(dataset[idx], ramp(idx))


def test_only_what_the_dataset_needs_counts_against_the_machine(original, capfd):
    # The example asks for 32 GiB on machines that have less: the dataset is what is allocated.
    cache = original.SharedCache(32, 10, (3,))
    assert len(cache) == 10
    assert "fits in cache limit (32 GiB)" in capfd.readouterr().out


# Capacity

CAPACITIES = [
    (1, 10, (4,), torch.uint8),
    (100 / GIB, 10, (9,), torch.uint8),
    (99 / GIB, 10, (9,), torch.uint8),
    (101 / GIB, 10, (9,), torch.uint8),
    (64 / GIB, 4, (5, 3), torch.uint8),
    (4096 / GIB, 100, (8,), torch.float32),
    (4096 / GIB, 100, (3, 5), torch.float64),
    (4096 / GIB, 100, (), torch.int64),
    (4096 / GIB, 4095, (1,), torch.uint8),
    (4096 / GIB, 4096, (1,), torch.uint8),
    (11 / GIB, 10, (2,), torch.uint8),
    (12 / GIB, 10, (2,), torch.uint8),
    (0.001, 1000, (1024,), torch.uint8),
    (0.001, 2000, (3, 11, 17), torch.int16),
    (0.0005, 777, (333,), torch.int32),
]


@pytest.mark.parametrize("limit, length, dims, dtype", CAPACITIES)
def test_the_capacity_is_what_the_limit_leaves_after_a_byte_per_sample(
    original, limit, length, dims, dtype
):
    cache = original.SharedCache(limit, length, dims, dtype)
    slot = int(np.prod(dims)) * dtype.itemsize
    assert len(cache) == min(length, int(limit * GIB - length) // slot)
    assert cache.array.shape == (len(cache), *dims)
    assert cache.aux_array.tolist() == [0] * len(cache) + [2] * (length - len(cache))


@pytest.mark.parametrize("limit", [1e-9, 10 / GIB, 5 / GIB])
def test_a_limit_below_one_slot_caches_nothing_and_still_works(original, limit):
    cache = original.SharedCache(limit, 4, (16,))
    assert len(cache) == 0
    for idx in range(4):
        cache.set_slot(idx, ramp(idx, (16,)))
        assert cache.get_slot(idx) is None
    assert cache.aux_array.tolist() == [2] * 4


def test_random_geometries_have_the_original_capacity(seed):
    stocaching = pytest.importorskip(
        "stocaching", reason="stocaching is absent: capacities are not compared with it"
    )
    rng = np.random.default_rng(seed)
    for _ in range(100):
        dims = tuple(int(d) for d in rng.integers(1, 12, rng.integers(0, 4)))
        length = int(rng.integers(1, 400))
        # a limit of whole bytes keeps the original's float division away from rounding
        limit = int(rng.integers(length, 40_000)) / GIB
        dtype = [torch.uint8, torch.int16, torch.float32, torch.float64][rng.integers(4)]
        theirs = stocaching.SharedCache(limit, length, dims, dtype)
        with stocache.SharedCache(limit, length, dims, dtype) as ours:
            assert len(ours) == len(theirs), (limit, length, dims, dtype)


# The start message


def test_the_start_message_says_that_everything_fits(original, capfd):
    original.SharedCache(size_limit_gib=1, dataset_len=10, data_dims=(3,))
    out = capfd.readouterr().out
    assert out.startswith("Dataset size (0.0 GiB) fits in cache limit (1 GiB).")
    assert "10 samples" in out
    assert out.count("\n") == 1 and out.endswith("\n")


def test_the_start_message_says_how_many_samples_fit(original, capfd):
    original.SharedCache(size_limit_gib=0.001, dataset_len=2000, data_dims=(1024,))
    out = capfd.readouterr().out
    assert out.startswith("Dataset size (0.0 GiB) exceeds cache limit (0.001 GiB).")
    assert f"{(int(0.001 * GIB) - 2000) // 1024} / 2000 samples" in out
    assert out.count("\n") == 1


def test_the_start_message_can_be_silenced(capfd):
    stocache.SharedCache(1, 10, (3,), verbose=False)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# get_slot and set_slot


@pytest.fixture
def half(original):
    """A cache with room for 5 samples of a dataset of 10."""
    cache = original.SharedCache((10 + 5 * 60) / GIB, 10, (3, 4, 5))
    yield cache
    if original is stocache:  # the original has no close
        cache.close()


def test_an_empty_slot_is_none_and_a_set_slot_comes_back(half):
    assert len(half) == 5
    assert half.get_slot(2) is None
    assert half.set_slot(2, ramp(2)) is None
    back = half.get_slot(2)
    assert back.shape == (3, 4, 5) and back.dtype == torch.uint8
    assert torch.equal(back, ramp(2))
    assert half.get_slot(3) is None


def test_beyond_the_cache_get_is_none_and_set_does_nothing(half):
    assert half.get_slot(7) is None
    assert half.set_slot(7, ramp(7)) is None
    assert half.get_slot(7) is None
    assert half.aux_array[7] == 2


def test_beyond_the_cache_is_an_index_error_when_asked_for(half):
    with pytest.raises(IndexError):
        half.get_slot(7, allow_oob_idx=False)
    with pytest.raises(IndexError):
        half.set_slot(7, ramp(7), allow_oob_idx=False)
    with pytest.raises(IndexError):
        half.get_slot(7, False)
    with pytest.raises(IndexError):
        half.set_slot(7, ramp(7), False)


@pytest.mark.parametrize("idx", [-1, -10, 10, 11, 10**6, 2**62])
def test_outside_the_dataset_is_an_index_error(half, idx):
    with pytest.raises(IndexError, match=str(idx)):
        half.get_slot(idx)
    with pytest.raises(IndexError, match=str(idx)):
        half.set_slot(idx, ramp(0))


def test_an_empty_slot_is_a_runtime_error_when_asked_for(half):
    with pytest.raises(RuntimeError):
        half.get_slot(1, allow_empty_slot=False)
    with pytest.raises(RuntimeError):
        half.get_slot(1, True, False)
    half.set_slot(1, ramp(1))
    assert torch.equal(half.get_slot(1, allow_empty_slot=False), ramp(1))


def test_a_second_set_is_a_runtime_error_and_keeps_the_old_value(half):
    half.set_slot(1, ramp(1))
    with pytest.raises(RuntimeError):
        half.set_slot(1, ramp(100))
    assert torch.equal(half.get_slot(1), ramp(1))


def test_an_overwrite_that_is_allowed_replaces_the_value(half):
    half.set_slot(1, ramp(1))
    half.set_slot(1, ramp(100), allow_overwrite=True)
    assert torch.equal(half.get_slot(1), ramp(100))
    half.set_slot(1, ramp(50), True, True)
    assert torch.equal(half.get_slot(1), ramp(50))
    half.set_slot(2, ramp(2), allow_overwrite=True)  # also where nothing was
    assert torch.equal(half.get_slot(2), ramp(2))


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint8, torch.tensor])
def test_any_kind_of_integer_is_an_index(half, kind):
    half.set_slot(kind(3), ramp(3))
    assert torch.equal(half.get_slot(kind(3)), ramp(3))
    assert torch.equal(half[kind(3)], ramp(3))
    assert half.get_slot(kind(8)) is None
    with pytest.raises(IndexError):
        half.get_slot(kind(10))


def test_a_value_may_have_any_strides(half):
    value = ramp(0, (5, 4, 3)).permute(2, 1, 0)
    assert not value.is_contiguous()
    half.set_slot(0, value)
    half.set_slot(1, torch.tensor(9, dtype=torch.uint8).expand(3, 4, 5))
    half.set_slot(2, ramp(2, (6, 8, 10))[::2, ::2, ::2])
    half.set_slot(3, ramp(3).unsqueeze(0).contiguous(memory_format=torch.channels_last)[0])
    assert torch.equal(half.get_slot(0), value)
    assert torch.equal(half.get_slot(1), torch.full((3, 4, 5), 9, dtype=torch.uint8))
    assert torch.equal(half.get_slot(2), ramp(2, (6, 8, 10))[::2, ::2, ::2])
    assert torch.equal(half.get_slot(3), ramp(3))


def test_a_slot_can_be_copied_to_another_slot(half):
    half.set_slot(0, ramp(0))
    half.set_slot(1, half.get_slot(0))
    half.set_slot(0, half.get_slot(0), allow_overwrite=True)
    assert torch.equal(half.get_slot(1), ramp(0))
    assert torch.equal(half.get_slot(0), ramp(0))


def test_changing_the_value_after_it_was_set_does_not_change_the_cache(half):
    value = ramp(0)
    half.set_slot(0, value)
    value += 1
    assert torch.equal(half.get_slot(0), ramp(0))


# The array underneath


def test_a_hit_is_a_view_of_shared_memory(half):
    half.set_slot(0, ramp(0))
    first, second = half.get_slot(0), half.get_slot(0)
    assert first.data_ptr() == second.data_ptr()
    assert first.is_contiguous()
    second[0, 0, 0] = 77
    assert first[0, 0, 0] == 77


def test_indexing_goes_to_the_array(half):
    half[0] = ramp(0)
    assert torch.equal(half[0], ramp(0))
    assert torch.equal(half.array[0], ramp(0))
    half[-1] = ramp(4)
    assert torch.equal(half[4], ramp(4)) and torch.equal(half[-1], ramp(4))
    for idx in (5, -6, 10**9):
        with pytest.raises(IndexError):
            half[idx]
        with pytest.raises(IndexError):
            half[idx] = ramp(0)


def test_slices_lists_and_masks_index_the_whole_array(half):
    half[1:3] = torch.stack([ramp(1), ramp(2)])
    assert torch.equal(half[1:3], torch.stack([ramp(1), ramp(2)]))
    assert torch.equal(half[[2, 1]], torch.stack([ramp(2), ramp(1)]))
    mask = torch.tensor([False, True, False, False, False])
    assert torch.equal(half[mask], ramp(1)[None])
    assert half[1, 0, 0, 3] == ramp(1)[0, 0, 3]
    half[...] = 3
    assert bool((half.array == 3).all())


def test_the_array_is_the_cache_itself(half):
    half.set_slot(2, ramp(2))
    assert half.array.shape == (5, 3, 4, 5) and half.array.dtype == torch.uint8
    assert torch.equal(half.array[2], ramp(2))
    half.array[2] = ramp(60)
    assert torch.equal(half.get_slot(2), ramp(60))
    assert bool((half.array[0] == 0).all()), "an empty slot reads as zero"


def test_underlying_array_is_the_array(make_cache):
    # The original's README promises this name; its 0.2.1 release only has `array`.
    cache = make_cache(1, 4, (4,))
    cache.underlying_array[1] = 5
    assert torch.equal(cache.array[1], torch.full((4,), 5, dtype=torch.uint8))


def test_an_assigned_slot_is_set(make_cache):
    # Unlike the original, where get_slot does not see what `cache[i] = x` stored.
    cache = make_cache(1, 4, (4,))
    cache[1] = torch.full((4,), 9, dtype=torch.uint8)
    assert torch.equal(cache.get_slot(1), torch.full((4,), 9, dtype=torch.uint8))
    assert cache.aux_array.tolist() == [0, 1, 0, 0]
    cache[1] = torch.full((4,), 8, dtype=torch.uint8)
    assert torch.equal(cache.get_slot(1), torch.full((4,), 8, dtype=torch.uint8))
    cache[-1] = torch.full((4,), 7, dtype=torch.uint8)
    assert torch.equal(cache.get_slot(3), torch.full((4,), 7, dtype=torch.uint8))


def test_the_aux_array_follows_every_slot(half):
    aux = half.aux_array
    assert aux.dtype == torch.uint8 and aux.shape == (10,)
    assert aux.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    half.set_slot(3, ramp(3))
    half.set_slot(8, ramp(8))
    assert aux.tolist() == [0, 0, 0, 1, 0, 2, 2, 2, 2, 2], "aux_array is live"


def test_clear_empties_every_slot(half):
    for idx in range(10):
        half.set_slot(idx, ramp(idx))
    assert half.clear() is None
    assert half.aux_array.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert [half.get_slot(idx) for idx in range(10)] == [None] * 10
    assert bool((half.array == 0).all())
    half.set_slot(3, ramp(33))  # an empty slot again: no overwrite
    assert torch.equal(half.get_slot(3), ramp(33))


def test_two_caches_of_one_process_are_two_caches(original):
    caches = [original.SharedCache(1, 4, (4,)) for _ in range(3)]
    for number, cache in enumerate(caches):
        assert cache.get_slot(0) is None
        cache.set_slot(0, torch.full((4,), number, dtype=torch.uint8))
    assert [int(cache.get_slot(0)[0]) for cache in caches] == [0, 1, 2]


def test_the_truth_of_a_cache_is_its_length(original):
    assert original.SharedCache(1, 4, (4,))
    assert not original.SharedCache(1e-9, 4, (4,))


def test_iteration_ends_at_the_capacity(half):
    half.array.fill_(3)
    assert len(list(half)) == 5


# dtypes and dims

DTYPES = [
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64",
    "complex32 complex64 complex128",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
]
DTYPES = [getattr(torch, name) for line in DTYPES for name in line.split()]


def random_value(dtype, dims, generator) -> torch.Tensor:
    """Any bytes that are a value of `dtype`: not-a-number and negative zero included."""
    count = int(np.prod(dims)) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(dims)


def raw_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dims", [(2, 3), ()], ids=["matrix", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, dims, make_cache, seed):
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(0.001, 4, dims, dtype)
    assert len(cache) == 4
    values = [random_value(dtype, dims, generator) for _ in range(4)]
    for idx in (0, 1):
        cache.set_slot(idx, values[idx])
    cache[2] = values[2]
    stored = cache.set_many([3], values[3][None])
    assert stored.tolist() == [True]
    for idx, value in enumerate(values):
        back = cache.get_slot(idx)
        assert back.dtype == dtype and back.shape == dims
        assert raw_bytes(back) == raw_bytes(value)
        assert raw_bytes(cache[idx]) == raw_bytes(value)
    batch, found = cache.get_many(range(4))
    assert batch.dtype == dtype and batch.shape == (4, *dims) and bool(found.all())
    assert raw_bytes(batch) == b"".join(map(raw_bytes, values))
    assert cache.array.dtype == dtype
    assert raw_bytes(cache.array) == raw_bytes(batch)


OTHER_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - set(DTYPES), key=str
)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_an_exotic_dtype_works_or_is_a_value_error(dtype, make_cache):
    try:
        cache = make_cache(0.001, 2, (4,), dtype)
    except ValueError as error:
        assert str(dtype) in str(error) and "\n" not in str(error)
        return
    value = torch.empty((4,), dtype=dtype)
    cache.set_slot(0, value)
    assert cache.get_slot(0).dtype == dtype


def test_a_pending_conjugation_or_negation_is_stored_as_its_value(make_cache):
    # torch keeps these as a bit on the tensor; the bytes underneath are not the value.
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    cache = make_cache(0.001, 2, (2,), torch.complex64)
    cache.set_slot(0, x.conj())
    assert cache.get_slot(0).tolist() == [1 - 2j, 3 + 4j]
    cache.set_many([1], x.conj()[None])
    assert cache.get_slot(1).tolist() == [1 - 2j, 3 + 4j]
    cache[1] = x
    cache[1] = x.conj()
    assert cache.get_slot(1).tolist() == [1 - 2j, 3 + 4j]
    negated = x.conj().imag
    assert negated.is_neg()
    floats = make_cache(0.001, 2, (2,), torch.float32)
    floats.set_slot(0, negated)
    assert floats.get_slot(0).tolist() == [-2.0, 4.0]


def test_a_parameter_is_stored_by_its_value(make_cache):
    cache = make_cache(0.001, 2, (3,), torch.float32)
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    cache.set_slot(0, parameter)
    back = cache.get_slot(0)
    assert back.tolist() == [1.0, 2.0, 3.0]
    assert not back.requires_grad and type(back) is torch.Tensor
    assert (back * parameter).sum().requires_grad


def test_values_set_under_inference_mode_are_usable_outside_it(make_cache):
    cache = make_cache(0.001, 2, (3,), torch.float32)
    with torch.inference_mode():
        cache.set_slot(0, torch.ones(3) * 2)
        assert cache.get_slot(0).tolist() == [2.0] * 3
    weight = torch.ones(3, requires_grad=True)
    (cache.get_slot(0) * weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("dims", [[3, 4], torch.Size([3, 4]), (np.int64(3), np.int32(4))])
def test_dims_may_be_any_sequence_of_integers(original, dims):
    cache = original.SharedCache(1, 2, dims)
    assert cache.array.shape == (2, 3, 4)


def test_sizes_may_be_numpy_numbers(make_cache):
    assert len(make_cache(1, np.int64(4), (2,))) == 4
    assert len(make_cache(np.float64(0.5), 4, (2,))) == 4


def test_positional_and_keyword_arguments_are_the_originals(original):
    a = original.SharedCache(1, 4, (2,), torch.float32)
    b = original.SharedCache(size_limit_gib=1, dataset_len=4, data_dims=(2,), dtype=torch.float32)
    assert a.array.dtype == b.array.dtype == torch.float32
    assert original.SharedCache(1, 4, (2,)).array.dtype == torch.uint8
    value = torch.ones(2)
    a.set_slot(idx=0, value=value, allow_oob_idx=True, allow_overwrite=False)
    assert torch.equal(a.get_slot(idx=0, allow_oob_idx=True, allow_empty_slot=True), value)


def test_get_shm_size_is_the_size_of_the_mount_in_whole_gib(original):
    stats = os.statvfs("/dev/shm")
    size = original.get_shm_size()
    assert isinstance(size, int)
    assert size == stats.f_bsize * stats.f_blocks // GIB


def test_the_public_names_of_the_original_are_public(original):
    for name in ("SharedCache", "get_shm_size"):
        assert name in original.__all__
    for name in ("array", "aux_array", "get_slot", "set_slot", "clear"):
        assert getattr(original.SharedCache, name).__doc__


def test_a_subclass_is_a_cache_too(original):
    class Mine(original.SharedCache):
        def __init__(self, n):
            super().__init__(1, n, (2,))
            self.extra = "kept"

        def load(self, idx):
            x = self.get_slot(idx)
            return x if x is not None else torch.zeros(2, dtype=torch.uint8)

    mine = Mine(3)
    mine.set_slot(1, torch.tensor([5, 6], dtype=torch.uint8))
    assert mine.load(1).tolist() == [5, 6] and mine.load(0).tolist() == [0, 0]
    assert mine.extra == "kept"


class TwoCaches(Dataset):
    """Images and masks, as a segmentation dataset keeps them."""

    def __init__(self, module):
        self.images = module.SharedCache(1, 6, (3, 2), torch.uint8)
        self.masks = module.SharedCache(1, 6, (2,), torch.int64)

    def __len__(self):
        return 6

    def __getitem__(self, idx):
        image, mask = self.images.get_slot(idx), self.masks.get_slot(idx)
        if image is None or mask is None:
            image, mask = ramp(idx, (3, 2)), torch.tensor([idx, -idx])
            self.images.set_slot(idx, image, allow_overwrite=True)
            self.masks.set_slot(idx, mask, allow_overwrite=True)
        return image, mask


def test_a_dataset_may_keep_several_caches(original):
    dataset = TwoCaches(original)
    for _ in range(2):
        loader = DataLoader(dataset, batch_size=3, num_workers=2, multiprocessing_context="fork")
        images, masks = (torch.cat(part) for part in zip(*loader, strict=True))
        assert torch.equal(images, torch.stack([ramp(i, (3, 2)) for i in range(6)]))
        assert masks.tolist() == [[i, -i] for i in range(6)]
    assert bool((dataset.images.aux_array == 1).all())


# Beyond the original: what describes a cache


def test_a_cache_describes_itself(make_cache, unique_name):
    name = unique_name()
    cache = make_cache((10 + 5 * 8) / GIB, 10, (8,), name=name, backing="shm")
    assert cache.name == name and cache.backing == "shm" and cache.closed is False
    assert cache.path.startswith(f"/dev/shm/stocache-{os.getuid()}-")
    assert cache.path.endswith(f"-{name}") and os.path.exists(cache.path)
    assert name in repr(cache) and "\n" not in repr(cache)
    assert cache.fill_fraction == 0.0
    cache.set_slot(0, torch.zeros(8, dtype=torch.uint8))
    assert cache.fill_fraction == pytest.approx(0.2)


def test_a_memfd_cache_has_no_path(make_cache):
    cache = make_cache(1, 10, (8,), backing="memfd")
    assert cache.backing == "memfd" and cache.path is None
    cache.set_slot(0, ramp(0, (8,)))
    assert torch.equal(cache.get_slot(0), ramp(0, (8,)))


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_stats_count_what_happened(make_cache, backing):
    cache = make_cache((10 + 5 * 8) / GIB, 10, (8,), backing=backing)
    zero = cache.stats()
    assert isinstance(zero, stocache.SharedCacheStats)
    assert (zero.hits, zero.misses, zero.fills, zero.bytes, zero.filled) == (0, 0, 0, 0, 0)
    assert (zero.capacity, zero.dataset_len, zero.slot_bytes) == (5, 10, 8)
    assert zero.frozen is False and zero.damaged == zero.dropped == zero.lost == 0
    for idx in range(10):
        assert cache.get_slot(idx) is None
        cache.set_slot(idx, ramp(idx, (8,)))
    for idx in range(10):
        cache.get_slot(idx)
    cache.get_many(range(10))
    stats = cache.stats()
    assert stats.fills == 5 and stats.bytes == 40 and stats.filled == 5
    assert stats.hits == 10
    assert stats.misses == 20  # ten empty, five beyond, five beyond in the batch
    cache.clear()
    assert cache.stats().filled == 0 and cache.fill_fraction == 0.0
    with pytest.raises(AttributeError):
        stats.hits = 0
