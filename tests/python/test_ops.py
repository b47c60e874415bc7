"""The operators behind the class, called from plain Python and from TorchScript."""

from __future__ import annotations

import pytest
import stocache
import torch
from samples import GIB

ops = torch.ops.stocache


def u8(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture
def cache(make_cache):
    """Six slots of four bytes for a dataset of eight."""
    return make_cache((8 + 6 * 4) / GIB, 8, (4,))


def test_the_handle_is_an_integer_that_names_one_cache(cache, make_cache):
    other = make_cache()
    assert isinstance(cache.handle, int) and cache.handle != other.handle
    ops.set(cache.handle, 0, u8(1, 2, 3, 4))
    assert ops.get(other.handle, 0) is None


def test_get_and_set_see_what_the_class_sees(cache):
    assert ops.get(cache.handle, 1) is None
    assert ops.set(cache.handle, 1, u8(1, 2, 3, 4)) is True
    assert cache.get_slot(1).tolist() == [1, 2, 3, 4]
    cache.set_slot(2, u8(5, 6, 7, 8))
    assert ops.get(cache.handle, 2).tolist() == [5, 6, 7, 8]
    assert ops.get(cache.handle, 7) is None
    assert ops.set(cache.handle, 7, u8(1, 1, 1, 1)) is False


def test_set_says_whether_it_stored(cache):
    assert ops.set(cache.handle, 1, u8(1, 2, 3, 4)) is True
    assert ops.set(cache.handle, 1, u8(9, 9, 9, 9), True) is True
    assert ops.set(cache.handle, 1, u8(8, 8, 8, 8), allow_overwrite=True) is True
    assert ops.get(cache.handle, 1).tolist() == [8, 8, 8, 8]


def test_a_second_set_never_replaces_the_value(cache):
    ops.set(cache.handle, 1, u8(1, 2, 3, 4))
    try:
        assert ops.set(cache.handle, 1, u8(9, 9, 9, 9)) is False
    except RuntimeError as error:
        assert "1" in str(error)
    assert ops.get(cache.handle, 1).tolist() == [1, 2, 3, 4]


def test_a_hit_is_a_view_that_outlives_the_cache(cache):
    ops.set(cache.handle, 1, u8(1, 2, 3, 4))
    view = ops.get(cache.handle, 1)
    assert view.data_ptr() == cache.get_slot(1).data_ptr()
    cache.close()
    assert view.tolist() == [1, 2, 3, 4]


def test_batches_go_in_and_come_out(cache):
    batch = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    stored = ops.set_many(cache.handle, torch.tensor([0, 2, 7]), batch)
    assert stored.dtype == torch.bool and stored.tolist() == [True, True, False]
    rows, found = ops.get_many(cache.handle, torch.tensor([2, 1, 0, 7]))
    assert found.tolist() == [True, False, True, False]
    assert rows.tolist() == [[4, 5, 6, 7], [0] * 4, [0, 1, 2, 3], [0] * 4]
    out = torch.full((2, 4), 99, dtype=torch.uint8)
    found = ops.get_many_out(cache.handle, torch.tensor([0, 1]), out)
    assert found.tolist() == [True, False]
    assert out.tolist() == [[0, 1, 2, 3], [0] * 4]
    stored = ops.set_many(cache.handle, torch.tensor([0, 1]), batch[1:], allow_overwrite=True)
    assert stored.tolist() == [True, True]
    assert ops.get(cache.handle, 0).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("handle", [0, -1, 1, 12345678, 2**62, -(2**63)])
def test_a_handle_that_is_none_of_ours_is_an_error(cache, handle):
    if handle == cache.handle:
        pytest.skip("this number happens to be a live handle")
    for call in (
        lambda: ops.get(handle, 0),
        lambda: ops.set(handle, 0, u8(1, 2, 3, 4)),
        lambda: ops.get_many(handle, torch.tensor([0])),
        lambda: ops.get_many_out(handle, torch.tensor([0]), torch.zeros(1, 4, dtype=torch.uint8)),
        lambda: ops.set_many(handle, torch.tensor([0]), u8(1, 2, 3, 4)[None]),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()


def test_the_handle_of_a_closed_cache_is_an_error_and_is_not_given_away(cache, make_cache):
    old = cache.handle
    cache.close()
    successors = [make_cache() for _ in range(8)]
    assert old not in [s.handle for s in successors], "a stale handle must not reach another cache"
    with pytest.raises((RuntimeError, ValueError)):
        ops.get(old, 0)


@pytest.mark.parametrize("idx", [-1, 8, 2**62])
def test_outside_the_dataset_is_an_error(cache, idx):
    for call in (
        lambda: ops.get(cache.handle, idx),
        lambda: ops.set(cache.handle, idx, u8(1, 2, 3, 4)),
        lambda: ops.get_many(cache.handle, torch.tensor([0, idx])),
        lambda: ops.set_many(cache.handle, torch.tensor([idx]), u8(1, 2, 3, 4)[None]),
    ):
        with pytest.raises((IndexError, RuntimeError), match=str(idx)):
            call()


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(5, dtype=torch.uint8),
        torch.zeros(4),
        torch.zeros(4, dtype=torch.uint8).to_sparse(),
        torch.zeros(()),
    ],
    ids=["shape", "dtype", "layout", "dims"],
)
def test_a_value_that_does_not_fit_is_an_error_and_writes_nothing(cache, value):
    with pytest.raises((ValueError, RuntimeError)):
        ops.set(cache.handle, 1, value)
    with pytest.raises((ValueError, RuntimeError)):
        ops.set_many(cache.handle, torch.tensor([1, 2]), value)
    assert cache.aux_array.tolist() == [0] * 6 + [2] * 2


def test_indices_of_the_wrong_kind_are_an_error(cache):
    for indices in (torch.tensor([0.5]), torch.tensor([[0, 1]]), torch.tensor([0]).to_sparse()):
        with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)):
            ops.get_many(cache.handle, indices)


def test_an_operator_can_be_scripted(cache):
    def load(handle: int, idx: int) -> torch.Tensor:
        x = torch.ops.stocache.get(handle, idx)
        if x is None:
            x = torch.full([4], idx, dtype=torch.uint8)
            torch.ops.stocache.set(handle, idx, x)
        return x

    scripted = torch.jit.script(load)
    assert scripted(cache.handle, 3).tolist() == [3] * 4
    assert cache.get_slot(3).tolist() == [3] * 4
    cache.set_slot(4, u8(9, 8, 7, 6))
    assert scripted(cache.handle, 4).tolist() == [9, 8, 7, 6]


def test_the_operators_are_there_after_import_alone(run_script):
    run_script(
        """
        import torch
        import stocache
        names = ["get", "set", "get_many", "get_many_out", "set_many"]
        for name in names:
            print(getattr(torch.ops.stocache, name).default._schema)
        """
    )


def test_the_class_carries_the_version():
    assert stocache.__version__.count(".") == 2
