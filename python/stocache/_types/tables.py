"""Tables of pandas, by Arrow: columns of numbers and texts."""

from __future__ import annotations

from typing import Any

from stocache._types.registry import register_type


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise TypeError("tables are stored by pyarrow: run pip install pyarrow") from None
    return pyarrow


def _frame_parts(frame: Any) -> Any:
    pyarrow = _arrow()
    import numpy

    stream = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pandas(frame)
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    octets = numpy.frombuffer(stream.getvalue(), numpy.uint8)
    if not _is_same(frame, _frame(octets)):
        raise TypeError("Arrow gives another table back; numbers and texts are stored")
    return (octets,)


def _frame(octets: Any) -> Any:
    pyarrow = _arrow()
    with pyarrow.ipc.open_stream(octets) as reader:
        table = reader.read_all()
    table.validate(full=True)  # or bytes that are damaged would be read past their end
    return table.to_pandas().copy()  # Arrow's own memory cannot be written to


def _is_same(frame: Any, other: Any) -> bool:
    """Types included, which ``equals`` alone does not look at."""
    return bool(
        frame.equals(other)
        and list(frame.dtypes) == list(other.dtypes)
        and frame.attrs == other.attrs
        and all(
            type(one) is type(two) and one.dtype == two.dtype and one.names == two.names
            for one, two in ((frame.index, other.index), (frame.columns, other.columns))
        )
    )


def _series_parts(series: Any) -> Any:
    return (*_frame_parts(series.to_frame("values")), series.name)


def _series(octets: Any, name: Any) -> Any:
    return _frame(octets)["values"].rename(name)


def _time_stamp_parts(value: Any) -> tuple[Any, Any]:
    return value.to_datetime64(), value.tz


def _time_stamp(moment: Any, zone: Any) -> Any:
    import pandas

    stamp = pandas.Timestamp(moment)
    return stamp if zone is None else stamp.tz_localize("UTC").tz_convert(zone)


def _time_delta(duration: Any) -> Any:
    import pandas

    return pandas.Timedelta(duration)


register_type("pandas.DataFrame", _frame_parts, _frame)
register_type("pandas.Series", _series_parts, _series)
register_type("pandas.Timestamp", _time_stamp_parts, _time_stamp)
register_type("pandas.Timedelta", lambda value: (value.to_timedelta64(),), _time_delta)
