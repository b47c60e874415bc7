"""Bad input is answered at once with one line: what was given, what is allowed, what to do.
A failed call changes nothing, and its exception crosses process boundaries."""

from __future__ import annotations

import gc
import json
import math
import pickle
import re

import numpy as np
import pytest
import stocache
import torch
from samples import GIB, MISTAKES, Raising, RaisingTwoWords, TwoWords
from torch.utils.data import DataLoader


def u8(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def one_line(error: BaseException) -> str:
    """The message, which must be one line that survives a trip through pickle."""
    message = str(error)
    assert message and "\n" not in message, f"not one line: {message!r}"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == message and again.args == error.args
    return message


def matching(words: str) -> re.Pattern:
    return re.compile(words, re.IGNORECASE)


# The constructor: argument, what is given, exception, what the message says is allowed

POSITIVE = "positive|greater than 0|more than 0|above 0|> 0|at least 1|>= 1"
CONSTRUCTOR = [
    ("size_limit_gib", 0, ValueError, POSITIVE),
    ("size_limit_gib", -1, ValueError, POSITIVE),
    ("size_limit_gib", -0.5, ValueError, POSITIVE),
    ("size_limit_gib", math.nan, ValueError, POSITIVE),
    ("size_limit_gib", math.inf, ValueError, "finite|" + POSITIVE),
    ("size_limit_gib", "4", TypeError, "number|float|int"),
    ("size_limit_gib", "4GiB", TypeError, "number|float|int"),
    ("size_limit_gib", None, TypeError, "number|float|int"),
    ("size_limit_gib", [1], TypeError, "number|float|int"),
    ("dataset_len", 0, ValueError, POSITIVE),
    ("dataset_len", -3, ValueError, POSITIVE),
    ("dataset_len", 2.5, TypeError, "int"),
    ("dataset_len", "10", TypeError, "int"),
    ("dataset_len", None, TypeError, "int"),
    ("dataset_len", 2**70, (ValueError, MemoryError), ""),
    ("data_dims", (0,), ValueError, POSITIVE),
    ("data_dims", (3, 0, 2), ValueError, POSITIVE),
    ("data_dims", (3, -1), ValueError, POSITIVE),
    ("data_dims", (2**40, 2**40), (ValueError, MemoryError), ""),
    ("data_dims", (2**70,), (ValueError, MemoryError), ""),
    ("data_dims", (1.5,), TypeError, "int"),
    ("data_dims", ("3",), TypeError, "int"),
    ("data_dims", ((3,),), TypeError, "int"),
    ("data_dims", None, TypeError, "tuple|sequence"),
    ("data_dims", 3, TypeError, "tuple|sequence"),
    ("data_dims", "abc", TypeError, "tuple|sequence|int"),
    ("dtype", "uint8", (TypeError, ValueError), "torch"),
    ("dtype", None, (TypeError, ValueError), "torch"),
    ("dtype", int, (TypeError, ValueError), "torch"),
    ("dtype", np.uint8, (TypeError, ValueError), "torch"),
    ("name", "", ValueError, "1|empty"),
    ("name", "a/b", ValueError, "letters|A-Z"),
    ("name", "../up", ValueError, "letters|A-Z"),
    ("name", "a b", ValueError, "letters|A-Z"),
    ("name", "größe", ValueError, "letters|A-Z"),
    ("name", "nul\0", ValueError, "letters|A-Z"),
    ("name", "new\nline", ValueError, "letters|A-Z"),
    ("name", "x" * 101, ValueError, "100"),
    ("name", 5, TypeError, "str"),
    ("name", b"bytes", TypeError, "str"),
    ("shared", "yes", TypeError, "bool|True"),
    ("shared", None, TypeError, "bool|True"),
    ("backing", "disk", ValueError, "memfd"),
    ("backing", "", ValueError, "memfd"),
    ("backing", None, (TypeError, ValueError), "memfd"),
    ("backing", 3, (TypeError, ValueError), "memfd"),
    ("keep", "yes", TypeError, "bool|True"),
    ("verify", "sometimes", ValueError, "always"),
    ("verify", True, (TypeError, ValueError), "always"),
    ("verify", None, (TypeError, ValueError), "always"),
    ("verbose", "loud", TypeError, "bool|True"),
]


def shown(given) -> list[str]:
    """How a message may show a value: as it is, quoted, shortened, by its element or its type."""
    texts = [repr(given)[:8], ascii(given)[:8], f"is a {type(given).__name__}"]
    if isinstance(given, str):
        texts.append(json.dumps(given, ensure_ascii=False)[:8])
    elif not isinstance(given, bool | type(None)):
        texts.append(str(given)[:8])
    if isinstance(given, tuple):
        texts += [repr(element)[:8] for element in given]
    return texts


@pytest.mark.parametrize(
    "argument, given, kind, allowed",
    CONSTRUCTOR,
    ids=[f"{c[0]}={str(c[1])[:20]!a}" for c in CONSTRUCTOR],
)
def test_a_bad_constructor_argument_is_named_with_its_value(argument, given, kind, allowed):
    good = {"size_limit_gib": 0.001, "dataset_len": 4, "data_dims": (4,), "verbose": False}
    with pytest.raises(kind) as caught:
        stocache.SharedCache(**{**good, argument: given})
    message = one_line(caught.value)
    assert argument in message
    assert any(text in message for text in shown(given)), f"{given!r} is not in: {message}"
    assert matching(allowed).search(message), f"no {allowed!r} in: {message}"


@pytest.mark.parametrize("missing", ["size_limit_gib", "dataset_len", "data_dims"])
def test_a_missing_constructor_argument_is_a_type_error(missing):
    arguments = {"size_limit_gib": 0.001, "dataset_len": 4, "data_dims": (4,)}
    del arguments[missing]
    with pytest.raises(TypeError, match=missing):
        stocache.SharedCache(**arguments)


def test_an_unknown_constructor_argument_is_a_type_error():
    with pytest.raises(TypeError, match="size_limit_gb"):
        stocache.SharedCache(size_limit_gb=1, dataset_len=4, data_dims=(4,))


def test_keep_needs_a_name_and_a_place_that_can_keep(unique_name):
    with pytest.raises(ValueError) as caught:
        stocache.SharedCache(0.001, 4, (4,), keep=True)
    assert "name" in one_line(caught.value)
    with pytest.raises(ValueError) as caught:
        stocache.SharedCache(0.001, 4, (4,), keep=True, name=unique_name(), backing="memfd")
    message = one_line(caught.value)
    assert "memfd" in message and "shm" in message


@pytest.mark.parametrize("backing", ["auto", "shm", "memfd"])
def test_a_cache_larger_than_the_machine_says_what_is_needed_and_what_is_free(backing):
    with pytest.raises(MemoryError) as caught:
        stocache.SharedCache(2**20, 2**20, (2**30,), backing=backing, verbose=False)
    message = one_line(caught.value)
    assert len(re.findall(r"\d+(?:\.\d+)? ?[KMGTP]i?B", message)) >= 2, message
    assert matching("lower|reduce|smaller|size_limit_gib|remount|raise").search(message), message


def test_a_sample_count_larger_than_the_machine_is_refused_too():
    # one byte of state for each sample: the metadata alone does not fit
    with pytest.raises((MemoryError, ValueError)) as caught:
        stocache.SharedCache(2**30, 2**45, (1,), verbose=False)
    one_line(caught.value)


# Methods


@pytest.fixture
def cache(make_cache):
    """Six slots of four bytes for a dataset of eight; slot 0 is set."""
    made = make_cache((8 + 6 * 4) / GIB, 8, (4,))
    made.set_slot(0, u8(1, 2, 3, 4))
    return made


def unchanged(cache) -> bool:
    rest = [cache.get_slot(idx) is None for idx in range(1, 8)]
    aux = cache.aux_array.tolist()
    return (
        all(rest) and aux == [1, 0, 0, 0, 0, 0, 2, 2] and cache.get_slot(0).tolist() == [1, 2, 3, 4]
    )


NOT_AN_INDEX = ["1", None, 1.5, [1], (1,), {}, 1j, object(), torch.tensor([1, 2]), b"1"]


@pytest.mark.parametrize("idx", NOT_AN_INDEX, ids=lambda i: ascii(i)[:12])
def test_what_is_not_an_integer_is_not_an_index(cache, idx):
    with pytest.raises((TypeError, IndexError)) as caught:
        cache.get_slot(idx)
    one_line(caught.value)
    with pytest.raises((TypeError, IndexError)) as caught:
        cache.set_slot(idx, u8(1, 1, 1, 1))
    one_line(caught.value)
    assert unchanged(cache)


@pytest.mark.parametrize("idx", [-1, 8, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30])
def test_an_index_outside_the_dataset_shows_itself_and_the_length(cache, idx):
    for call in (cache.get_slot, lambda i: cache.set_slot(i, u8(1, 1, 1, 1))):
        with pytest.raises(IndexError) as caught:
            call(idx)
        message = one_line(caught.value)
        assert str(idx) in message and "8" in message
    assert unchanged(cache)


def test_an_index_beyond_the_cache_shows_itself_and_the_capacity(cache):
    for call in (cache.get_slot, lambda i, **k: cache.set_slot(i, u8(1, 1, 1, 1), **k)):
        with pytest.raises(IndexError) as caught:
            call(7, allow_oob_idx=False)
        message = one_line(caught.value)
        assert "7" in message and "6" in message


BAD_VALUES = [
    (torch.zeros(5, dtype=torch.uint8), ValueError, ["5", "4"]),
    (torch.zeros(2, 2, dtype=torch.uint8), ValueError, ["2, 2", "4"]),
    (torch.zeros(1, 4, dtype=torch.uint8), ValueError, ["1, 4", "4"]),
    (torch.zeros((), dtype=torch.uint8), ValueError, ["4"]),
    (torch.zeros(0, dtype=torch.uint8), ValueError, ["0", "4"]),
    (torch.zeros(4), ValueError, ["float32", "uint8"]),
    (torch.zeros(4, dtype=torch.int8), ValueError, ["int8", "uint8"]),
    (torch.zeros(4, dtype=torch.bool), ValueError, ["bool", "uint8"]),
    (torch.zeros(4, dtype=torch.uint8, device="meta"), ValueError, ["meta", "cpu"]),
    (torch.zeros(4, dtype=torch.uint8).to_sparse(), ValueError, ["dense"]),
    (np.zeros(4, dtype=np.uint8), TypeError, ["ndarray", "tensor"]),
    ([1, 2, 3, 4], TypeError, ["list", "tensor"]),
    (b"1234", TypeError, ["bytes", "tensor"]),
    (7, TypeError, ["int", "tensor"]),
    (None, TypeError, ["None", "tensor"]),
]


@pytest.mark.parametrize("value, kind, words", BAD_VALUES, ids=lambda v: ascii(v)[:24])
def test_a_value_that_does_not_fit_names_both_and_writes_nothing(cache, value, kind, words):
    calls = [
        lambda: cache.set_slot(1, value),
        lambda: cache.set_slot(0, value, allow_overwrite=True),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        message = one_line(caught.value)
        for word in words:
            assert matching(re.escape(word)).search(message), f"no {word!r} in: {message}"
    assert unchanged(cache)


def test_a_value_that_does_not_fit_is_refused_beyond_the_cache_too(cache):
    # otherwise the mistake shows only on the machine with more memory
    with pytest.raises(ValueError):
        cache.set_slot(7, torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError):
        cache.set_slot(7, [1, 2, 3, 4])


def test_an_overwrite_names_the_slot_and_the_way_out(cache):
    with pytest.raises(RuntimeError) as caught:
        cache.set_slot(0, u8(9, 9, 9, 9))
    message = one_line(caught.value)
    assert "0" in message and "allow_overwrite" in message
    with pytest.raises(RuntimeError) as caught:
        cache.get_slot(3, allow_empty_slot=False)
    assert "3" in one_line(caught.value)
    assert unchanged(cache)


@pytest.mark.parametrize("value", [[1, 2, 3, 4], None, "text", torch.zeros(3, 3)], ids=str)
def test_a_failed_assignment_changes_nothing(cache, value):
    for where in (0, 1, slice(0, 2), [0, 1]):
        if isinstance(value, list) and not isinstance(where, int):
            continue  # torch itself may take a list for several rows
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            cache[where] = value
    assert cache.get_slot(0).tolist() == [1, 2, 3, 4]
    assert bool((cache.array[1:] == 0).all())


def test_wrong_arguments_to_a_method_are_type_errors(cache):
    for call in (
        lambda: cache.get_slot(),
        lambda: cache.get_slot(1, True, True, True),
        lambda: cache.get_slot(1, unknown=True),
        lambda: cache.set_slot(1),
        lambda: cache.set_slot(),
        lambda: cache.set_slot(1, u8(1, 1, 1, 1), wrong=1),
        lambda: cache.set_slot(1, u8(1, 1, 1, 1), True, True, True),
        lambda: cache.set_slot(1, u8(1, 1, 1, 1), idx=2),
        lambda: cache.get_many(),
        lambda: cache.set_many([1]),
        lambda: cache.clear(1),
    ):
        with pytest.raises(TypeError):
            call()
    assert unchanged(cache)


BAD_INDICES = [
    ([0, 8], IndexError),
    ([0, -1], IndexError),
    ([2**63], IndexError),
    (torch.tensor([0, 99]), IndexError),
    (torch.tensor([0.0, 1.0]), TypeError),
    (np.array([0.5]), TypeError),
    (["0"], TypeError),
    ([None], TypeError),
    ([0.5], TypeError),
    ("01", TypeError),
    (None, TypeError),
    (3, (TypeError, ValueError)),
    (torch.tensor([[0, 1]]), (TypeError, ValueError)),
    (np.zeros((2, 2), dtype=np.int64), (TypeError, ValueError)),
    ([[0], [1]], (TypeError, ValueError)),
    (torch.tensor([0], device="meta"), (TypeError, ValueError, RuntimeError)),
]


@pytest.mark.parametrize("indices, kind", BAD_INDICES, ids=lambda v: ascii(v)[:30])
def test_bad_indices_of_a_batch_store_nothing(cache, indices, kind):
    with pytest.raises(kind) as caught:
        cache.get_many(indices)
    one_line(caught.value)
    with pytest.raises(kind) as caught:
        rows = len(indices) if isinstance(indices, list) else 2
        cache.set_many(indices, torch.ones(rows, 4, dtype=torch.uint8), allow_overwrite=True)
    one_line(caught.value)
    assert unchanged(cache)


def test_one_bad_index_among_good_ones_stores_none_of_them(cache):
    for bad in (8, -1):
        with pytest.raises(IndexError):
            cache.set_many([1, 2, bad], torch.ones(3, 4, dtype=torch.uint8))
    assert unchanged(cache)


BAD_BATCHES = [
    (torch.ones(3, 4, dtype=torch.uint8), ValueError),
    (torch.ones(1, 4, dtype=torch.uint8), ValueError),
    (torch.ones(2, 5, dtype=torch.uint8), ValueError),
    (torch.ones(2, 2, 2, dtype=torch.uint8), ValueError),
    (torch.ones(8, dtype=torch.uint8), ValueError),
    (torch.ones(2, 4), ValueError),
    (torch.ones(2, 4, dtype=torch.uint8, device="meta"), ValueError),
    (np.ones((2, 4), dtype=np.uint8), TypeError),
    ([[1, 1, 1, 1], [1, 1, 1, 1]], TypeError),
    (None, TypeError),
]


@pytest.mark.parametrize("batch, kind", BAD_BATCHES, ids=lambda v: ascii(v)[:30])
def test_a_batch_that_does_not_fit_stores_nothing(cache, batch, kind):
    with pytest.raises(kind) as caught:
        cache.set_many([1, 2], batch)
    one_line(caught.value)
    assert unchanged(cache)


BAD_OUTS = [
    (torch.zeros(3, 4, dtype=torch.uint8), ValueError),
    (torch.zeros(2, 5, dtype=torch.uint8), ValueError),
    (torch.zeros(8, dtype=torch.uint8), ValueError),
    (torch.zeros(2, 4), ValueError),
    (torch.zeros(4, 2, dtype=torch.uint8).t(), ValueError),
    (torch.zeros(1, 4, dtype=torch.uint8).expand(2, 4), ValueError),
    (torch.zeros(2, 4, dtype=torch.uint8, device="meta"), ValueError),
    (np.zeros((2, 4), dtype=np.uint8), TypeError),
    ([0] * 8, TypeError),
]


@pytest.mark.parametrize("out, kind", BAD_OUTS, ids=lambda v: ascii(v)[:30])
def test_a_buffer_that_does_not_fit_is_refused(cache, out, kind):
    with pytest.raises(kind) as caught:
        cache.get_many([0, 1], out=out)
    assert "out" in one_line(caught.value)


@pytest.mark.parametrize("threads", [0, -1, "2", 1.5, None, 2**70])
def test_a_thread_count_that_makes_no_sense_is_refused(cache, threads):
    with pytest.raises((ValueError, TypeError, OverflowError)) as caught:
        cache.get_many([0, 1], threads=threads)
    one_line(caught.value)


# Joining by name


@pytest.mark.parametrize("backing", ["shm", "memfd"])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"dataset_len": 11}, ["11", "10"]),
        ({"data_dims": (4, 3)}, ["4, 3", "3, 4"]),
        ({"data_dims": (12,)}, ["12", "3, 4"]),
        ({"dtype": torch.int8}, ["torch.uint8|uint8", r"(?<!u)int8"]),
        ({"dtype": torch.float32}, ["uint8", "float32"]),
        ({"size_limit_gib": (10 + 12 * 7) / GIB}, ["7", "5"]),
        ({"verify": "always"}, ["verif"]),
    ],
    ids=str,
)
def test_joining_a_cache_of_another_geometry_shows_both(
    make_cache, unique_name, change, words, backing
):
    geometry = {
        "size_limit_gib": (10 + 12 * 5) / GIB,
        "dataset_len": 10,
        "data_dims": (3, 4),
        "dtype": torch.uint8,
        "name": unique_name(),
        "backing": backing,
    }
    first = make_cache(**geometry)
    first.set_slot(1, torch.full((3, 4), 7, dtype=torch.uint8))
    with pytest.raises(ValueError) as caught:
        make_cache(**{**geometry, **change})
    message = one_line(caught.value)
    for word in words:
        assert re.search(word, message), f"no {word!r} in: {message}"
    assert geometry["name"] in message
    assert bool((first.get_slot(1) == 7).all()), "a failed open leaves the other's cache alone"
    again = make_cache(**geometry)
    assert bool((again.get_slot(1) == 7).all())


# After close


def test_a_closed_cache_says_so_whatever_is_asked(make_cache):
    cache = make_cache(0.001, 8, (4,))
    cache.set_slot(0, u8(1, 2, 3, 4))
    view = cache.get_slot(0)
    cache.close()
    cache.close()  # closing twice is no mistake
    assert cache.closed is True
    calls = {
        "get_slot": lambda: cache.get_slot(0),
        "set_slot": lambda: cache.set_slot(1, u8(1, 1, 1, 1)),
        "getitem": lambda: cache[0],
        "setitem": lambda: cache.__setitem__(0, u8(1, 1, 1, 1)),
        "array": lambda: cache.array,
        "underlying_array": lambda: cache.underlying_array,
        "aux_array": lambda: cache.aux_array,
        "clear": lambda: cache.clear(),
        "get_many": lambda: cache.get_many([0]),
        "set_many": lambda: cache.set_many([1], u8(1, 1, 1, 1)[None]),
        "stats": lambda: cache.stats(),
        "fill_fraction": lambda: cache.fill_fraction,
        "pickle": lambda: pickle.dumps(cache),
        "with": lambda: cache.__enter__(),
    }
    answered = []
    for name, call in calls.items():
        try:
            call()
            answered.append(name)
        except RuntimeError as error:
            assert "closed" in one_line(error)
    assert not answered, "a closed cache was used"
    assert "closed" in repr(cache)
    assert view.tolist() == [1, 2, 3, 4]


def test_the_end_of_a_with_block_closes():
    with stocache.SharedCache(0.001, 8, (4,), verbose=False) as cache:
        cache.set_slot(0, u8(1, 2, 3, 4))
        assert not cache.closed
    assert cache.closed
    with pytest.raises(ZeroDivisionError), stocache.SharedCache(0.001, 8, (4,), verbose=False) as c:
        _ = 1 / 0
    assert c.closed


def test_a_cache_whose_constructor_failed_goes_quietly(capfd):
    def use(broken):
        for call in (lambda: broken.get_slot(0), lambda: len(broken), lambda: broken.array):
            with pytest.raises((RuntimeError, AttributeError)):
                call()

    use(stocache.SharedCache.__new__(stocache.SharedCache))
    gc.collect()
    assert capfd.readouterr().err == ""


# Across processes


# One mistake shows that spawn carries them as well; it takes seconds each.
@pytest.mark.parametrize(
    "mistake, context", [*((mistake, "fork") for mistake in MISTAKES), ("second set", "spawn")]
)
def test_an_exception_in_a_worker_reaches_the_main_process_as_itself(mistake, context):
    kind = MISTAKES[mistake][0]
    iterator = iter(DataLoader(Raising(mistake), num_workers=1, multiprocessing_context=context))
    with pytest.raises(kind) as caught:
        list(iterator)
    iterator._shutdown_workers()  # else its destructor waits for seconds
    assert type(caught.value) is kind
    assert "Caught" in str(caught.value) and kind.__name__ in str(caught.value)


def test_an_exception_that_cannot_be_made_again_arrives_as_another():
    # the control: what the test above would see of an exception of ours that does not pickle
    dataset = RaisingTwoWords("second set")
    iterator = iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(RuntimeError) as caught:
        list(iterator)
    iterator._shutdown_workers()
    assert "Caught TwoWords" in str(caught.value)
    with pytest.raises(TypeError):
        one_line(TwoWords("one", "two"))
