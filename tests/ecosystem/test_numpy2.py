"""Texts of any length, which numpy has from 2 on."""

from __future__ import annotations

import numpy as np
import pytest
from checks import back
from numpy.dtypes import StringDType
from stocache import _C, UnsupportedSample
from stocache._sharing.sameness import contents

DTYPES = [
    StringDType(), StringDType(coerce=False), StringDType(na_object=None),
    StringDType(na_object=np.nan), StringDType(na_object="missing"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_texts(dtype):
    texts = ["", "a", "ü" * 100, "\U0001f600"]
    has_none = hasattr(dtype, "na_object")
    array = np.array([*texts, *([dtype.na_object] if has_none else [])], dtype)
    for value in (array, array.reshape(-1, 1), array[::2], array[:0], np.array("a", dtype)):
        got = back({"a": value})["a"]
        assert got.dtype == value.dtype and got.shape == value.shape
        assert got.dtype.coerce == value.dtype.coerce
        assert repr(got.tolist()) == repr(value.tolist())


def test_other_marks_of_missing_texts_are_not_stored():
    with pytest.raises(UnsupportedSample, match="na_object is"):
        _C.codec_encode(np.array(["a"], StringDType(na_object=object())))


def test_random_generators_can_be_looked_into():
    """Their classes are Cython's, and so is the class of these."""
    made = [contents(np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert not any(each.unseen for each in made)
    assert made[0].digest == made[1].digest != made[2].digest
