"""Tables of pandas: what comes back is what went in, or it is not stored."""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow
import pytest
import stocache
from checks import back
from stocache import _C, UnsupportedSample
from stocache._types import tables

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


def shown(value):
    """All of a table, an index, a column or a value, with types, as plain texts and lists."""
    if isinstance(value, pd.DataFrame):
        columns = [shown(value.iloc[:, k].array) for k in range(value.shape[1])]
        return "frame", columns, shown(value.index), shown(value.columns), said(value)
    if isinstance(value, pd.Series):
        return "series", shown(value.array), shown(value.index), repr(value.name), said(value)
    if isinstance(value, pd.MultiIndex):
        levels = [shown(level) for level in value.levels]
        codes = [code.tolist() for code in value.codes]
        return "multi", levels, codes, list(map(repr, value.names)), value.sortorder
    if isinstance(value, pd.Index):
        freq = repr(getattr(value, "freq", None))
        return type(value).__name__, shown(value.array), list(map(repr, value.names)), freq
    if isinstance(value, pd.api.extensions.ExtensionArray):
        more = []
        if isinstance(value, pd.Categorical):
            more = [shown(value.categories), value.codes.tolist(), value.codes.dtype]
        if isinstance(value, pd.arrays.SparseArray):
            more = [value.npoints, value.kind]
        zone = repr(getattr(value, "tz", None))
        return type(value).__name__, repr(value.dtype), zone, more, list(map(shown, value))
    if isinstance(value, (list, tuple, dict, set)):
        inside = value.items() if isinstance(value, dict) else value
        return type(value).__name__, list(map(shown, inside))
    return type(value).__name__, repr(value), getattr(value, "fold", None)


def said(table):
    return shown(table.attrs), table.flags.allows_duplicate_labels


def test_moments():
    for value in (
        pd.Timestamp("2026-01-01T01:02:03.000000004"), pd.Timestamp("2026-07-01", tz="UTC"),
        pd.Timestamp("2026-07-01", tz="Europe/Berlin"), pd.Timedelta("1 days 00:00:00.000000007"),
        pd.Timestamp(2026, 1, 1).replace(fold=1), pd.Timestamp("2026-07-01").as_unit("s"),
        pd.Timestamp("2026-10-25 02:30", tz="UTC").tz_convert("Europe/Berlin"),
        pd.Timestamp("2026-10-25 00:30", tz="UTC").tz_convert("Europe/Berlin"),
        pd.Timestamp("2026-10-25 01:30", tz="UTC").tz_convert("Europe/Berlin"),
        pd.Timestamp("2026-07-01", tz=THERE), pd.Period("2026-05", "M"),
        pd.Interval(1, 2.5, "both"),
    ):  # fmt: skip
        got = back(value)
        assert type(got) is type(value) and got == value and shown(got) == shown(value)
        assert getattr(got, "unit", None) == getattr(value, "unit", None)
        assert repr(getattr(got, "tz", None)) == repr(getattr(value, "tz", None))
    assert back(pd.NaT) is pd.NaT and back(pd.NA) is pd.NA


THERE = datetime.timezone(datetime.timedelta(hours=2), "there")
DAYS = pd.date_range("2026-01-01", periods=3, freq="D", name="day")


def flagged():
    frame = pd.DataFrame({"a": [1, 2]}).set_flags(allows_duplicate_labels=False)
    frame.attrs = {"unit": "mm", 5: [1]}
    return frame


def gaps(values, fill_value):
    return pd.DataFrame({"s": pd.arrays.SparseArray(values, fill_value=fill_value)})


EXACT = {
    "objects": pd.DataFrame({"o": pd.Series(
        [None, float("nan"), 1, True, 2.5, "x", b"y", bytearray(b"z"), decimal.Decimal("1.10"),
         {"a": [1]}, [1, 2], (3,), {4}, pd.NaT, pd.NA, datetime.date(2026, 1, 1), np.float32(1)],
        dtype=object)}),
    "decimals": pd.DataFrame({"d": [decimal.Decimal("1.10"), decimal.Decimal("1.1")]}),
    "lists": pd.DataFrame({"l": [[1], [2, 3], []]}),
    "mixed": pd.DataFrame({"a": [1, "x"]}),
    "texts as objects": pd.DataFrame({"t": pd.Series(["a", "üb"], dtype=object)}),
    "texts of python": pd.DataFrame({"t": pd.array(["a", None], pd.StringDtype("python"))}),
    "texts with NA": pd.DataFrame({"t": pd.array(["a", None], "string")}),
    "two columns of one name": pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"]),
    "several levels": pd.DataFrame(
        {("a", 1): [1], ("b", 2): [2.5]},
        index=pd.MultiIndex.from_tuples([("x", 1)], names=["n", None]),
    ),
    "unused levels": pd.DataFrame(
        {"v": range(4)}, index=pd.MultiIndex.from_product([[1, 2], ["a", "b"]])
    )[:1],
    "tuples as labels": pd.DataFrame({"a": [1]}, index=pd.Index([(1, 2)], tupleize_cols=False)),
    "days": pd.DataFrame({"a": [1, 2, 3]}, index=DAYS),
    "months": pd.DataFrame({"a": [1, 2]}, index=pd.date_range("2026-01-31", periods=2, freq="ME")),
    "durations": pd.DataFrame({"d": pd.timedelta_range("1h", periods=2)},
                              index=pd.timedelta_range("1D", periods=2, freq="12h")),
    "zone": pd.DataFrame({"t": DAYS.tz_localize("Europe/Berlin")}, index=DAYS.tz_localize(THERE)),
    "seconds": pd.DataFrame({"t": np.array(["2026-01-01", "NaT"], "M8[s]")}),
    "unused categories": pd.DataFrame({"c": pd.Categorical(["a"], ["c", "a", "b"], ordered=True)}),
    "categories of numbers": pd.DataFrame({"c": pd.Categorical([5, None, 7])}),
    "category index": pd.DataFrame({"a": [1]}, index=pd.CategoricalIndex(["x"], ["x", "y"])),
    "periods": pd.DataFrame({"p": pd.period_range("2026-01", periods=2, freq="M")},
                            index=pd.period_range("2026-01-01", periods=2, freq="D")),
    "intervals": pd.DataFrame({"i": pd.interval_range(0, 2, closed="left")},
                              index=pd.interval_range(0, 2)),
    "masked": pd.DataFrame({
        "i": pd.array([1, None], "UInt8"), "f": pd.array([1.5, None], "Float32"),
        "b": pd.array([True, None], "boolean")}),
    "arrow": pd.DataFrame({
        "a": pd.Series([[1], None], dtype=pd.ArrowDtype(pyarrow.list_(pyarrow.int8()))),
        "b": pd.Series([1.5, None], dtype="double[pyarrow]")}),
    "sparse": gaps([0, 0, 3], 0), "sparse nan": gaps([np.nan, 2.0], np.nan),
    "flags and attributes": flagged(), "no columns": pd.DataFrame(index=[1, 2]),
    "no rows": pd.DataFrame({"a": pd.Series([], dtype=object), "b": pd.Series([], dtype="i2")}),
    "half": pd.DataFrame({"h": np.array([1, 2], "f2"), "c": np.array([1j, 2], "c8")}),
    "all of one kind": pd.DataFrame(np.arange(6, dtype="u1").reshape(2, 3), columns=list("abc")),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXACT)
def test_what_comes_back_is_exactly_what_went_in(kind):
    frame = EXACT[kind]
    before = shown(frame)
    got = back(frame)
    assert type(got) is type(frame) and shown(got) == before == shown(frame)
    for part in (*(frame.iloc[:, k] for k in range(frame.shape[1])), frame.index, frame.columns):
        assert type(back(part)) is type(part) and shown(back(part)) == shown(part)


def test_control_arrow_gives_other_tables_back():
    changed = [
        kind for kind, frame in EXACT.items()
        if shown(frame) != shown(through_arrow(frame))
    ]  # fmt: skip
    assert {"objects", "days", "flags and attributes"} <= set(changed)


def through_arrow(frame):
    try:
        return pyarrow.Table.from_pandas(frame).to_pandas()
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        return str(error)


class Own(pd.DataFrame):
    pass


def noted(table):
    table.note = "x"
    return table


def hidden(table):
    vars(table)["_hidden"] = 1
    return table


def test_what_cannot_be_given_back_is_not_stored():
    holidays = pd.offsets.CustomBusinessDay(holidays=["2026-01-02"])
    for frame in (
        pd.DataFrame({"a": [object()]}), Own({"a": [1]}), noted(pd.DataFrame({"a": [1]})),
        hidden(pd.Series([1])), noted(pd.Index([1])),
        pd.DataFrame({"a": [1, 2]}, index=pd.date_range("2026-01-01", periods=2, freq=holidays)),
        pd.DataFrame({"s": pd.arrays.SparseArray([0, 1], sparse_index=FULL, fill_value=0)}),
    ):  # fmt: skip
        with pytest.raises(UnsupportedSample):
            _C.codec_encode(frame)


# Stores both values, though one is the fill value.
FULL = pd.arrays.SparseArray([1, 2], fill_value=0).sp_index


class Marks:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_column_that_pyarrow_would_unpickle_is_not_opened(tmp_path):
    """As versions up to 14.0.0 do, wherever they meet one."""
    marker = tmp_path / "unpickled"
    field = pyarrow.field("", pyarrow.int8(), metadata={
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Marks(marker)),
    })  # fmt: skip
    stream = pyarrow.BufferOutputStream()
    table = pyarrow.table([pyarrow.array([1, 2], pyarrow.int8())], pyarrow.schema([field]))
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    octets = np.frombuffer(stream.getvalue(), "u1")
    with pytest.raises(ValueError, match="stored as a pickle"):
        tables._arrow_array(octets)
    column = pd.array(table.column(0), dtype=pd.ArrowDtype(pyarrow.int8()))
    assert tables._arrow_array(*tables._arrow_parts(column)).tolist() == [1, 2]
    assert not marker.exists()


def test_samples_that_are_not_stored_pass_by(cached):
    source = [(i, pd.DataFrame({"a": [object()]})) for i in range(3)]
    dataset = stocache.CachedDataset(source, "16MiB", verbose=False)
    with pytest.warns(RuntimeWarning, match="is not cached") as caught:
        for _ in range(2):
            for i in range(3):
                assert dataset[i] is source[i]
    assert len(caught) == 1 and dataset.stats().unsupported == 6
    dataset.close()


def test_tables_without_arrow(run_script_without_arrow):
    run_script_without_arrow("pd.DataFrame({'a': [1, 2], 'b': [0.5, 1], 'c': ['x', 'y']})")


@pytest.fixture
def run_script_without_arrow():
    def run(made):
        script = (
            "import sys; sys.modules['pyarrow'] = None\n"
            "import pandas as pd\nfrom stocache import _C\n"
            f"frame = {made}\n"
            "got = _C.codec_decode(*_C.codec_encode(frame))\n"
            "pd.testing.assert_frame_equal(got, frame)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    return run


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
