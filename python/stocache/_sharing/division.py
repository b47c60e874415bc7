"""Who of a job's ranks loads which samples ahead of training, so that each is loaded by one node.

Ranks take parts of the work from a common count, each as many as it has time for. Nobody waits for
a rank that does not take any, so one that warms alone does all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from stocache._sharing import ranks
from stocache._torch.groups import common_store

_PARTS = 16  # for each rank: the others wait for the last part of a slow one, and no longer
_PATIENCE = 60.0  # seconds in which nobody has finished a part, until its samples are loaded here
_EVERY = 0.02

# How often this process divided each work: as often as the others have, if they do the same.
_turns: dict[str, int] = {}


class Division:
    """Positions of a list that all ranks have alike."""

    def __init__(self, store: Any, length: int, number: int, count: int) -> None:
        self._store, self._length = store, length
        self._parts = min(length, _PARTS * count)
        self._first_of_rest = number * length // count
        self._mine = 0

    def mine(self) -> Iterator[int]:
        """Those that nobody else gets. They count as done by `finish`."""
        while (part := self._store.add("taken", 1) - 1) < self._parts:
            self._mine += 1
            yield from range(*(at * self._length // self._parts for at in (part, part + 1)))

    def finish(self) -> None:
        """Says that this rank's are done, and waits for the others'; not for one that hangs."""
        done = self._store.add("done", self._mine)
        since = time.monotonic()
        while done < self._parts and time.monotonic() - since < _PATIENCE:
            time.sleep(_EVERY)
            now = self._store.add("done", 0)
            if now != done:
                done, since = now, time.monotonic()

    def all(self) -> Iterator[int]:
        """All positions; each rank begins with others, so that those of a node do not meet."""
        first = self._first_of_rest
        yield from range(first, self._length)
        yield from range(first)


def divided(name: str, length: int) -> Division | None:
    """None where this process is alone, or nobody can be asked."""
    number, count = ranks.rank_and_ranks(None, None)
    if count < 2 or length < 1 or not ranks.can_ask(count):
        return None
    turn = _turns[name] = _turns.get(name, 0) + 1
    store = common_store(f"stocache {name} {turn}")
    return None if store is None else Division(store, length, number, count)
