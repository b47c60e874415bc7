"""Samples that cannot be stored: told with the place and the remedy, as one kind of exception."""

from __future__ import annotations

import collections
import pickle

import numpy as np
import pytest
import torch
from stocache import _C, UnsupportedSample


class Plain:
    pass


def refused(sample, allow_pickle=False) -> UnsupportedSample:
    with pytest.raises(UnsupportedSample) as caught:
        _C.codec_encode(sample, allow_pickle)
    assert "\n" not in str(caught.value)
    return caught.value


def stored(sample, allow_pickle=False):
    return _C.codec_decode(*_C.codec_encode(sample, allow_pickle), allow_pickle)


@pytest.mark.parametrize(
    "sample, place, words",
    [
        (Plain(), "sample", "Plain; "),
        ((torch.ones(3), {"boxes": Plain()}), "sample[1]['boxes']", "Plain; "),
        ([1, [Plain()]], "sample[1][0]", "Plain; "),
        ({"x": torch.ones(3, device="meta")}, "sample['x']", "without data"),
        ([{Plain: 1}], "sample[0].keys[0]", "is a type; "),
        ([[0]] * 3 + [np.array([{}])], "sample[3]", "of dtype object"),
    ],
)
def test_the_place_and_the_remedy_are_told(sample, place, words):
    error = refused(sample)
    assert error.place == place
    assert str(error).startswith(place + " ") and words in str(error)
    assert isinstance(error, TypeError) and isinstance(error, ValueError)
    assert error.__cause__ is None


def test_attributes_of_tensors_and_dicts_are_not_lost():
    tensor, ordered = torch.ones(3), collections.OrderedDict(a=1)
    assert vars(stored(tensor)) == {} == vars(stored(ordered))
    tensor.path = ordered.path = "1.jpg"
    for sample in (tensor, ordered):
        assert vars(stored([sample])[0]) == {"path": "1.jpg"}
    tensor.path = ordered.path = Plain()
    for sample in (tensor, ordered):
        assert "['path'] is a test_unsupported.Plain; " in str(refused([sample]))
        assert type(stored([sample], allow_pickle=True)[0].path) is Plain


def test_control_without_a_look_at_attributes_they_are_lost():
    tensor = torch.ones(3)
    tensor.path = "1.jpg"
    assert not hasattr(stored(tensor.detach()), "path"), "the same elements, as they were stored"


def test_code_without_a_name_is_warned(cached):
    dataset = cached([Plain()])
    with pytest.warns(RuntimeWarning, match=r"is a test_unsupported\.Plain"):
        exec("dataset[0]", {"dataset": dataset})
    with pytest.raises(KeyError):  # control: there is none
        exec("import sys; sys._getframe().f_globals['__name__']", {})


def test_what_pickle_refuses_is_told_with_its_reason():
    error = refused((1, {"f": (i for i in range(3))}), allow_pickle=True)
    assert error.place == "sample[1]['f']"
    assert "which pickle cannot store (TypeError: cannot pickle 'generator' object)" in str(error)
    assert isinstance(error.__cause__, TypeError)


def test_it_reaches_the_main_process_as_itself():
    error = refused([Plain()])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UnsupportedSample
    assert again.place == "sample[0]" and str(again) == str(error)


def test_a_store_goes_on_after_a_refused_sample():
    store = _C.Records()
    store.open(1 << 22, 8, "freeze", "", "memfd", False, _C.fingerprint_of("x"), "no", "", 0, -1)
    kept = []  # or they would give back what they hold as they go
    for _ in range(3):  # the claim ended each time
        samples = store.acquire([2], 0.0)
        kept.append(samples)
        assert samples.to_load() == [2]
        with pytest.raises(UnsupportedSample, match=r"sample\[1\] is a .*Plain"):
            samples.put(2, (1, Plain()), False)
    with store.acquire([2], 0.0) as samples:
        assert samples.to_load() == [2]
        assert samples.put(2, (1, 2), False) is _C.Put.STORED
    with pytest.raises(UnsupportedSample):
        store.differs(2, Plain(), False)
    store.close()


def test_interrupts_and_lack_of_memory_are_no_refusals():
    class Stops:
        def __init__(self, error):
            self.error = error

        def __reduce__(self):
            raise self.error

    for error in (KeyboardInterrupt(), MemoryError(), SystemExit()):
        with pytest.raises(type(error)):
            _C.codec_encode(Stops(error), True)
