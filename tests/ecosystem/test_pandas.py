"""Tables of pandas, by Arrow."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from checks import back
from stocache import _C, UnsupportedSample

FRAMES = {
    "numbers": pd.DataFrame({"a": [1, 2, 3], "b": [0.5, np.nan, -0.0]}),
    "shorter": pd.DataFrame({"a": np.array([1, 2], "i2"), "b": np.array([1, 2], "f4")}),
    "texts": pd.DataFrame({"name": ["a", "ü", ""], "n": [1, 2, 3]}),
    "texts and none": pd.DataFrame({"name": ["a", None, "c"]}),
    "truths": pd.DataFrame({"t": [True, False]}),
    "index": pd.DataFrame({"a": [1, 2]}, index=["x", "y"]),
    "named index": pd.DataFrame({"a": [1, 2]}, index=pd.Index([5, 7], name="id")),
    "part": pd.DataFrame({"a": range(9)})[2:7:2],
    "empty": pd.DataFrame({"a": np.array([], "f8")}),
    "dates": pd.DataFrame({"t": pd.to_datetime(["2026-01-01", "2026-02-01"])}),
    "categories": pd.DataFrame({"c": pd.Categorical(["a", "b", "a"])}),
    "nullable": pd.DataFrame({"n": pd.array([1, None], dtype="Int64")}),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames(kind):
    frame = FRAMES[kind]
    got = back(frame)
    pd.testing.assert_frame_equal(got, frame, check_exact=True)
    got.iloc[:, 0] = got.iloc[::-1, 0].to_numpy()  # it is ours
    pd.testing.assert_frame_equal(back(frame), frame, check_exact=True)


@pytest.mark.parametrize("kind", FRAMES)
def test_series(kind):
    for name in (None, "s", 5):
        series = FRAMES[kind].iloc[:, 0].rename(name)
        pd.testing.assert_series_equal(back({"s": series})["s"], series, check_exact=True)


def test_moments():
    for value in (
        pd.Timestamp("2026-01-01T01:02:03.000000004"), pd.Timestamp("2026-07-01", tz="UTC"),
        pd.Timestamp("2026-07-01", tz="Europe/Berlin"), pd.Timedelta("1 days 00:00:00.000000007"),
    ):  # fmt: skip
        got = back(value)
        assert type(got) is type(value) and got == value and got.unit == value.unit
        assert str(got) == str(value)


def test_tables_that_arrow_changes_are_not_stored():
    for frame in (
        pd.DataFrame({"a": [{1}, {2}]}),
        pd.DataFrame({"a": [1, "x"]}),
        pd.DataFrame([[1, 2]], columns=["a", "a"]),
    ):
        with pytest.raises(UnsupportedSample, match="could not be taken apart"):
            _C.codec_encode(frame)


def test_damaged_tables_are_told():
    schema, record = _C.codec_encode(FRAMES["texts"])
    told = 0
    for at in range(0, len(record), 7):
        try:
            back_again = _C.codec_decode(schema, record[:at] + b"\xff" + record[at + 1 :])
        except ValueError as error:
            told += "\n" not in str(error)
            continue
        str(back_again)
    assert told > 10
