"""A cache that exists under a name but was made for other data: what differs, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from stocache import _C
from stocache._sharing.fingerprint import differences

NOT_OPEN_ELSEWHERE = ("", 0, -1)  # no process is known to have it open
_NAMED = 4  # of what differs is named
_NOTES_BYTES = 3072  # a cache keeps (rust/core/src/segment/layout.rs)


def check_on_change(word: object) -> None:
    if word not in ("error", "clear"):
        raise ValueError(f'on_change {word!r} is not known; use "error" or "clear"')


def open_or_clear(open_it: Callable[[], None], name: str, on_change: str, parts: str = "") -> None:
    """Calls ``open_it``. If the cache of that name is of other data, removes it first where that is
    asked for and nobody uses it; else says what differs from ``parts``, as far as that is known."""
    try:
        open_it()
        return
    except ValueError as error:
        message = str(error)
        if not name or message.partition(":")[0] not in ("fingerprint", "geometry"):
            raise
        if on_change != "clear":
            differing = what_differs(parts, _notes_of(name))
            if not differing or not message.startswith("fingerprint"):
                raise
            before, _, after = message.partition("other data")
            raise ValueError(f"{before}other data{differing}{after}") from None
    with contextlib.suppress(RuntimeError, OSError, ValueError):
        _C.remove_cache(name, False)  # not if it is in use: then opening says so
    open_it()


def note(name: str, what: str, site: str, parts: str) -> None:
    """Leaves word in a cache of ours of what it was made for."""
    with contextlib.suppress(OSError, RuntimeError):  # it helps people, and nothing else
        _C.describe_cache(name, f"{what}\n{site}\n{parts}")


def others_at(site: str, fingerprint: str) -> list[str]:
    """The notes of caches that living processes made at the same site for other data."""
    return [
        cache["notes"]
        for cache in _C.list_caches()
        if cache["in_use"]
        and cache["fingerprint"] != fingerprint
        and cache["notes"].split("\n")[1:2] == [site]
    ]


def what_differs(parts: str, notes: str) -> str:
    """In words, with a space before; nothing if that is not known."""
    theirs = "\n".join(notes.split("\n")[2:])
    if not parts or not theirs:
        return ""
    names = differences(parts, theirs, cut=len(notes.encode()) >= _NOTES_BYTES)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" (what differs: {', '.join(names[:_NAMED])}{more})" if names else ""


def _notes_of(name: str) -> str:
    """Of the cache of that name, if it is ours."""
    found = (cache for cache in _C.list_caches() if cache["name"] == name and cache["notes"])
    return next((str(cache["notes"]) for cache in found), "")
