"""Who loads what is missing of a batch: workers share it, so that all have the same to do."""

from __future__ import annotations

from collections.abc import Sequence

# So many rows at least are asked of one worker, where several share what is missing of a batch: a
# message costs about as much as a fast sample.
ROWS_EACH = 4


class Shares:
    """How many rows each worker was asked for in this epoch."""

    def __init__(self, workers: int) -> None:
        self._asked = [0] * workers

    def divide(self, rows: Sequence[int], lives: Sequence[bool]) -> list[tuple[int, Sequence[int]]]:
        """A worker and its part of the rows, for each that gets some: those that were asked for
        least are filled up to the same level."""
        workers = [worker for worker, alive in enumerate(lives) if alive]
        workers.sort(key=self._asked.__getitem__)
        chosen, parts = workers[:1] or [0], [len(rows)]  # without one that lives, torch says so
        for count in range(len(workers), 1, -1):
            level, above = divmod(sum(self._asked[w] for w in workers[:count]) + len(rows), count)
            # Who was asked for least takes what does not divide evenly.
            filled = [level - self._asked[w] + (k < above) for k, w in enumerate(workers[:count])]
            if min(filled) >= ROWS_EACH:
                chosen, parts = workers[:count], filled
                break
        divided, start = [], 0
        for worker, size in zip(chosen, parts, strict=True):
            divided.append((worker, rows[start : start + size]))
            self._asked[worker] += size
            start += size
        return divided

    def next(self, rows: int, lives: Sequence[bool]) -> int:
        """The worker that gets a whole batch."""
        workers = [worker for worker, alive in enumerate(lives) if alive]
        worker = min(workers, key=self._asked.__getitem__, default=0)
        self._asked[worker] += rows
        return worker
