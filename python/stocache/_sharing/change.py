"""A cache that exists under a name but was made for other data: what differs, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stocache import _C
from stocache._cluster.address import safely
from stocache._sharing.changing import changes_by_itself
from stocache._sharing.fingerprint import differences

NOT_OPEN_ELSEWHERE = ("", 0, -1)  # no process is known to have it open
_NAMED = 4  # of what differs is named
_NOTES_BYTES = 3072  # a cache keeps (rust/core/src/segment/layout.rs)


def check_on_change(word: object) -> None:
    if word not in ("error", "clear"):
        raise ValueError(f'on_change {safely(word)} is not known; use "error" or "clear"')


def open_or_clear(
    open_it: Callable[[], None], name: str, on_change: str, parts: str = "", dataset: Any = None
) -> None:
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
            differing = differing_parts(parts, _notes_of(name))
            if not differing or not message.startswith("fingerprint"):
                raise
            before, _, after = message.partition("other data")
            remedy = use_a_fingerprint(dataset, differing)
            raise ValueError(f"{before}other data{in_words(differing)}{after}{remedy}") from None
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


def differing_parts(parts: str, notes: str) -> list[str]:
    """The names of what differs, as far as that is known."""
    theirs = "\n".join(notes.split("\n")[2:])
    if not parts or not theirs:
        return []
    return differences(parts, theirs, cut=len(notes.encode()) >= _NOTES_BYTES)


def in_words(names: list[str]) -> str:
    """With a space before; nothing if there are none."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" (what differs: {', '.join(names[:_NAMED])}{more})" if names else ""


def use_a_fingerprint(dataset: Any, names: list[str]) -> str:
    """What to do if one of what differs is another in every process; nothing if none is."""
    found = changes_by_itself(dataset, names)
    if not found:
        return ""
    return (
        f"; {found[0]}: if the samples do not depend on it, pass fingerprint= with a text that you "
        "change whenever the samples change"
    )


def _notes_of(name: str) -> str:
    """Of the cache of that name, if it is ours."""
    found = (cache for cache in _C.list_caches() if cache["name"] == name and cache["notes"])
    return next((str(cache["notes"]) for cache in found), "")
