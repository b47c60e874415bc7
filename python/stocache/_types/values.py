"""Values and containers of Python's own library."""

from __future__ import annotations

import collections
import datetime
import pathlib
import types
from collections.abc import Callable, Iterable
from typing import Any

from stocache._types.registry import Named, complete, register_type


def _in_order(items: Iterable[Any]) -> tuple[list[Any]]:
    """Sorted, where that can be done: equal sets are then stored as equal bytes."""
    try:
        return (sorted(items),)
    except TypeError:
        return (list(items),)


def _of(kind: type, make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a container of a plain one only. Anything that can be gone through would do for most,
    also a range that does not end."""

    def from_parts(items: Any, *more: Any) -> Any:
        if type(items) is not kind:
            raise TypeError(f"it is made of a {kind.__name__}, not of {items!r:.50}")
        return make(items, *more)

    return from_parts


register_type(set, _in_order, _of(list, set))
register_type(frozenset, _in_order, _of(list, frozenset))
register_type(range, lambda value: (value.start, value.stop, value.step), range)
register_type(slice, lambda value: (value.start, value.stop, value.step), slice)
register_type(
    collections.deque,
    lambda value: (list(value), value.maxlen),
    _of(list, collections.deque),
)
register_type(
    types.SimpleNamespace,
    lambda value: (vars(value),),
    lambda items: types.SimpleNamespace(**items),
)

# What makes a missing value. No other function is stored: it would be code from the cache.
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset,
                 collections.deque, collections.Counter, collections.OrderedDict)
}  # fmt: skip


def _default_dict_parts(value: collections.defaultdict[Any, Any]) -> tuple[Any, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise TypeError(f"default_factory is {factory!r}; {', '.join(_FACTORIES)} are stored")
    return name, dict(value)


def _default_dict(factory: str | None, items: dict[Any, Any]) -> Any:
    return collections.defaultdict(None if factory is None else _FACTORIES[factory], items)


def _counter_parts(value: collections.Counter[Any]) -> Any:
    return NotImplemented if vars(value) else (dict(value),)


def _ordered_dict_parts(value: collections.OrderedDict[Any, Any]) -> tuple[Any, ...]:
    return list(value), list(value.values()), vars(value)


def _ordered_dict(keys: list[Any], values: list[Any], attributes: dict[str, Any]) -> Any:
    made = collections.OrderedDict(zip(keys, values, strict=True))
    made.__dict__.update(attributes)
    return made


register_type(collections.defaultdict, _default_dict_parts, _default_dict)
register_type(collections.Counter, _counter_parts, _of(dict, collections.Counter))
complete("collections.OrderedDict", _ordered_dict_parts, _ordered_dict)

for _path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
    register_type(f"pathlib.{_path.__name__}", lambda path: (str(path),), _path)

register_type("decimal.Decimal", lambda value: (str(value),), Named("decimal.Decimal"))
register_type(
    "fractions.Fraction",
    lambda value: (value.numerator, value.denominator),
    Named("fractions.Fraction"),
)
register_type(
    "uuid.UUID",
    lambda value: (value.int, value.is_safe),
    lambda number, is_safe: Named("uuid.UUID").find()(int=number, is_safe=is_safe),
)


# Dates. Zones are objects of their own.


def _time_parts(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _time(*parts: Any) -> datetime.time:
    return datetime.time(*parts[:5], fold=parts[5])


def _datetime_parts(value: datetime.datetime) -> tuple[Any, ...]:
    return value.year, value.month, value.day, *_time_parts(value)


def _datetime(*parts: Any) -> datetime.datetime:
    return datetime.datetime(*parts[:8], fold=parts[8])


def _timezone_parts(value: datetime.timezone) -> tuple[Any, ...]:
    return value.__getinitargs__()  # type: ignore[attr-defined,no-any-return]


register_type(datetime.datetime, _datetime_parts, _datetime)
register_type(datetime.date, lambda day: (day.year, day.month, day.day), datetime.date)
register_type(datetime.time, _time_parts, _time)
register_type(
    datetime.timedelta,
    lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timedelta,
)
register_type(datetime.timezone, _timezone_parts, datetime.timezone)
register_type(
    "zoneinfo.ZoneInfo",
    lambda zone: NotImplemented if zone.key is None else (zone.key,),  # read from a file
    Named("zoneinfo.ZoneInfo"),
)
