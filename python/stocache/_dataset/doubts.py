"""Whether a dataset is random is found while its samples are stored for the first time.

A sample that was just stored is loaded once more, by the process that loaded it, and compared. That
is done for one of a thousand, for a thousandth of the time that loading takes; and for the first
few where a random number was drawn to load them, from the program's generators or from the
dataset's own: that is no proof, for a dataset may seed them for each sample, but a reason to look.
"""

from __future__ import annotations

from typing import Any

from stocache import _C
from stocache._torch.generators import generators_of, have_moved, states

_EVERY = 1000
_SHARE = 1 / _EVERY
# So many of the first loads of a process are watched for random numbers, and so many samples are
# looked at because of that, by all processes of the node.
_WATCHED = 4
MOST_LOOKS = 8
Watched = tuple[list[Any], list[Any]]


class Doubts:
    """When to look at a sample once more."""

    def __init__(self, looks: int, first_bit: int) -> None:
        self._every = looks > 0
        # Taken by whoever is first, of all processes: bits of what was told.
        self._bits = list(range(first_bit, first_bit + min(looks, MOST_LOOKS)))
        self._watched = 0
        self._drew = False
        self._stored = 0  # since one of them was looked at
        self._last = self._loading = self._looking = 0.0  # seconds

    def before_load(self, source: Any) -> Watched | None:
        """What to tell ``after_load``."""
        if not self._bits or self._watched >= _WATCHED:
            return None
        self._watched += 1
        own = generators_of(source)
        return own, states(own)

    def after_load(self, watched: Watched | None, seconds: float, samples: int = 1) -> None:
        self._last = seconds / max(1, samples)
        self._loading += seconds
        self._drew = watched is not None and have_moved(watched[1], states(watched[0]))

    def are_due(self, records: _C.Records) -> bool:
        """Whether the sample that was just stored is to be looked at."""
        self._stored += 1
        if self._drew:
            self._drew = False
            while self._bits:
                if records.is_first_to_tell(self._bits.pop(0)):
                    return True
        may_take = self._loading * _SHARE - self._looking
        return self._every and self._stored >= _EVERY and self._last <= may_take

    def looked(self, seconds: float, is_random: bool) -> None:
        self._stored = 0
        self._looking += seconds
        if is_random:  # and told: there is nothing more to find
            self._every, self._bits = False, []
