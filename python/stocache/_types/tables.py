"""Tables of pandas: columns, an index, and what these consist of, each stored by its own parts."""

from __future__ import annotations

import re
from typing import Any

from stocache._types.arrays import joined, separated
from stocache._types.registry import Named, register_type

# What pandas itself keeps in the attributes of a table or an index. What else somebody has put
# there is not stored, nor then is the object.
_OF_PANDAS = frozenset((
    "_attrs", "_cache", "_cacher", "_codes", "_data", "_engine", "_flags", "_freq", "_id",
    "_is_copy", "_item_cache", "_levels", "_mgr", "_name", "_names", "_no_setting_name", "_range",
    "_references", "sortorder",
))  # fmt: skip


def _pandas() -> Any:
    import pandas

    return pandas


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise TypeError("columns of Arrow are stored by pyarrow: run pip install pyarrow") from None
    return pyarrow


def _has_attributes(value: Any) -> bool:
    return not _OF_PANDAS.issuperset(vars(value))


# Values of a column or an index


def _stored(values: Any) -> Any:
    """As something that is stored: objects one by one, in a list."""
    if values.dtype.kind == "O" and _is_numpys(values.dtype):
        return _of_objects(values.to_numpy())
    return values.to_numpy() if _is_numpys(values.dtype) else values.array


def _of_objects(values: Any) -> tuple[Any, ...]:
    items = values.tolist()
    if set(map(type, items)) == {str}:  # all in one
        return joined(items)
    return (items,)


def _values(stored: Any) -> Any:
    if not isinstance(stored, tuple):
        return stored
    import numpy

    (items,) = (separated(*stored, None),) if len(stored) == 2 else stored
    made = numpy.empty(len(items), object)
    for k, item in enumerate(items):  # not at once, where a list would be taken for a row
        made[k] = item
    return made


# Tables


def _frame_parts(frame: Any) -> Any:
    if _has_attributes(frame):
        return NotImplemented
    kinds = set(frame.dtypes)
    if len(kinds) == 1 and _is_numpys(*kinds) and frame.dtypes.iloc[0].kind != "O":
        values: Any = frame.to_numpy()
    else:
        values = [_stored(frame.iloc[:, k]) for k in range(frame.shape[1])]
    return values, frame.index, frame.columns, *_said_of(frame)


def _is_numpys(dtype: Any) -> bool:
    return type(dtype).__module__.partition(".")[0] == "numpy"


def _frame(values: Any, index: Any, columns: Any, *said: Any) -> Any:
    pandas = _pandas()
    if isinstance(values, list):
        made = {k: _series_of(each, index) for k, each in enumerate(values)}
        frame = pandas.DataFrame(made, index=index, copy=False)
    else:
        frame = pandas.DataFrame(values, index=index, copy=False)
    frame.index, frame.columns = index, columns
    return _with_said(frame, *said)


def _series_of(stored: Any, index: Any) -> Any:
    values = _values(stored)
    return _pandas().Series(values, index=index, dtype=values.dtype, copy=False)


def _series_parts(series: Any) -> Any:
    if _has_attributes(series):
        return NotImplemented
    return _stored(series), series.index, series.name, *_said_of(series)


def _series(stored: Any, index: Any, name: Any, *said: Any) -> Any:
    series = _series_of(stored, index)
    series.index, series.name = index, name
    return _with_said(series, *said)


def _said_of(table: Any) -> tuple[Any, ...]:
    return dict(table.attrs), table.flags.allows_duplicate_labels


def _with_said(table: Any, attributes: dict[Any, Any], may_repeat: bool) -> Any:
    if attributes:
        table.attrs = attributes
    if not may_repeat:
        table.flags.allows_duplicate_labels = False
    return table


register_type("pandas.DataFrame", _frame_parts, _frame)
register_type("pandas.Series", _series_parts, _series)


# What rows and columns are called


def _index_parts(index: Any) -> Any:
    if _has_attributes(index):
        return NotImplemented
    return _stored(index), index.name


def _index(stored: Any, name: Any) -> Any:
    values = _values(stored)
    return _pandas().Index(values, dtype=values.dtype, name=name, tupleize_cols=False)


def _range_parts(index: Any) -> Any:
    if _has_attributes(index):
        return NotImplemented
    return index.start, index.stop, index.step, index.name


def _range(start: int, stop: int, step: int, name: Any) -> Any:
    return _pandas().RangeIndex(start, stop, step, name=name)


def _levels_parts(index: Any) -> Any:
    if _has_attributes(index):
        return NotImplemented
    codes = [level.copy() for level in index.codes]  # which may be frozen ones, of their own type
    return list(index.levels), codes, list(index.names), index.sortorder


def _levels(levels: list[Any], codes: list[Any], names: list[Any], sorted_to: int | None) -> Any:
    return _pandas().MultiIndex(levels, codes, sorted_to, names)


for _name in ("Index", "CategoricalIndex", "IntervalIndex", "PeriodIndex"):
    register_type(f"pandas.{_name}", _index_parts, _index)
register_type("pandas.RangeIndex", _range_parts, _range)
register_type("pandas.MultiIndex", _levels_parts, _levels)


# Dates and durations: whole numbers, their unit, a zone, and the step between them if it is one


def _name_of(freq: Any) -> str | None:
    if freq is None:
        return None
    again = _offset(freq.freqstr)
    if again != freq or type(again) is not type(freq):
        raise TypeError(f"freq is {freq!r}, which its name {freq.freqstr!r} does not tell")
    return str(freq.freqstr)


def _offset(name: str) -> Any:
    return Named("pandas.tseries.frequencies.to_offset")(name)


def _with_freq(values: Any, freq: str | None) -> Any:
    if freq is not None:
        values.freq = _offset(freq)  # which looks whether the values are such
    return values


def _dates_parts(values: Any) -> Any:
    kind = "m8" if values.dtype.kind == "m" else "M8"
    numbers = values.asi8.view(f"{kind}[{values.unit}]")
    return numbers, getattr(values, "tz", None), _name_of(getattr(values, "freq", None))


def _dates_index_parts(index: Any) -> Any:
    return NotImplemented if _has_attributes(index) else (*_dates_parts(index), index.name)


def _dates(numbers: Any, zone: Any, freq: str | None, name: Any = None) -> Any:
    pandas = _pandas()
    if numbers.dtype.kind == "m":
        made = pandas.TimedeltaIndex(numbers, name=name, copy=False)
    else:
        made = pandas.DatetimeIndex(numbers, name=name, copy=False)
    if zone is not None:
        made = made.tz_localize("UTC").tz_convert(zone)
    return _with_freq(made, freq)


def _dates_array(numbers: Any, zone: Any, freq: str | None) -> Any:
    return _with_freq(_dates(numbers, zone, None).array, freq)


for _name in ("Datetime", "Timedelta"):
    register_type(f"pandas.{_name}Index", _dates_index_parts, _dates)
    register_type(f"pandas.arrays.{_name}Array", _dates_parts, _dates_array)


# Other columns


def _texts_parts(values: Any) -> Any:
    options = _options(values.dtype)
    if _pandas().StringDtype(**options) != values.dtype:
        return NotImplemented
    missing = values.isna()
    found = values.to_numpy(object)
    texts = [None if gone else text for text, gone in zip(found, missing, strict=True)]
    return options, *joined(texts)


def _options(dtype: Any) -> dict[str, Any]:
    """Of pandas' type of texts. What stands for a missing one is NaN or pandas' own."""
    missing = {"na_value": dtype.na_value} if isinstance(dtype.na_value, float) else {}
    return {"storage": dtype.storage, **missing}


def _texts(options: dict[str, Any], lengths: Any, together: str) -> Any:
    pandas = _pandas()
    return pandas.array(separated(lengths, together, None), dtype=pandas.StringDtype(**options))


# A type that pyarrow up to 14.0.0 unpickles where it meets it.
_PICKLED = re.compile(rb"arrow\.py_extension_type")


def _arrow_parts(values: Any) -> Any:
    pyarrow = _arrow()
    import numpy

    stream = pyarrow.BufferOutputStream()
    table = pyarrow.table({"": values.__arrow_array__()})
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    octets: Any = numpy.frombuffer(stream.getvalue(), numpy.uint8)
    return NotImplemented if _PICKLED.search(octets) else (octets,)


def _arrow_array(octets: Any) -> Any:
    if _PICKLED.search(octets):
        raise ValueError("a column of a type that is stored as a pickle")
    with _arrow().ipc.open_stream(octets) as reader:
        table = reader.read_all()
    table.validate(full=True)  # or bytes that are damaged would be read past their end
    return _pandas().arrays.ArrowExtensionArray(table.column(0))


def _categories_parts(values: Any) -> tuple[Any, ...]:
    return values.codes.copy(), values.categories, values.ordered


def _categories(codes: Any, categories: Any, ordered: bool) -> Any:
    pandas = _pandas()
    dtype = pandas.CategoricalDtype(categories, ordered)
    return pandas.Categorical.from_codes(codes, dtype=dtype)


def _periods_parts(values: Any) -> Any:
    if _pandas().PeriodDtype(values.freqstr) != values.dtype:
        return NotImplemented
    return values.asi8, values.freqstr


def _periods(numbers: Any, freq: str) -> Any:
    return _pandas().PeriodIndex.from_ordinals(numbers, freq=freq).array


def _intervals_parts(values: Any) -> tuple[Any, ...]:
    return values.left, values.right, values.closed


def _intervals(left: Any, right: Any, closed: str) -> Any:
    return _pandas().arrays.IntervalArray.from_arrays(left, right, closed)


def _sparse_parts(values: Any) -> Any:
    import numpy

    parts = numpy.asarray(values), values.fill_value, values.kind
    again = _sparse(*parts) if parts[0].dtype.kind != "O" else None
    # What is stored though it is the value of the others would be lost.
    if again is None or again.dtype != values.dtype or again.npoints != values.npoints:
        return NotImplemented
    return parts


def _sparse(values: Any, fill_value: Any, kind: str) -> Any:
    pandas = _pandas()
    dtype = pandas.SparseDtype(values.dtype, fill_value)
    return pandas.arrays.SparseArray(values, fill_value=fill_value, kind=kind, dtype=dtype)


register_type("pandas.Categorical", _categories_parts, _categories)
for _name in ("StringArray", "ArrowStringArray"):
    register_type(f"pandas.arrays.{_name}", _texts_parts, _texts)
for _name in ("IntegerArray", "FloatingArray", "BooleanArray"):
    register_type(
        f"pandas.arrays.{_name}",
        lambda values: (values._data, values._mask),
        Named(f"pandas.arrays.{_name}"),
    )
register_type("pandas.arrays.ArrowExtensionArray", _arrow_parts, _arrow_array)
register_type("pandas.arrays.PeriodArray", _periods_parts, _periods)
register_type("pandas.arrays.IntervalArray", _intervals_parts, _intervals)
register_type("pandas.arrays.SparseArray", _sparse_parts, _sparse)


# Single values


def _time_stamp_parts(value: Any) -> tuple[Any, ...]:
    return value.to_datetime64(), value.tz, value.fold


def _time_stamp(moment: Any, zone: Any, fold: int) -> Any:
    stamp = _pandas().Timestamp(moment)
    if zone is not None:
        stamp = stamp.tz_localize("UTC").tz_convert(zone)
    return stamp if stamp.fold == fold else stamp.replace(fold=fold)


def _time_delta(duration: Any) -> Any:
    return _pandas().Timedelta(duration)


def _period_parts(value: Any) -> Any:
    parts = value.ordinal, value.freqstr
    return parts if _period(*parts) == value else NotImplemented


def _period(ordinal: int, freq: str) -> Any:
    return _pandas().Period(ordinal=ordinal, freq=freq)


def _interval(left: Any, right: Any, closed: str) -> Any:
    return _pandas().Interval(left, right, closed)


register_type("pandas.Timestamp", _time_stamp_parts, _time_stamp)
register_type("pandas.Timedelta", lambda value: (value.to_timedelta64(),), _time_delta)
register_type("pandas.Period", _period_parts, _period)
register_type("pandas.Interval", _intervals_parts, _interval)
register_type("pandas.api.typing.NAType", lambda _value: (), lambda: _pandas().NA)
register_type("pandas.api.typing.NaTType", lambda _value: (), lambda: _pandas().NaT)
