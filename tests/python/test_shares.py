"""Who loads what is missing of a batch."""

from __future__ import annotations

import random

from stocache._torch.shares import ROWS_EACH, Shares


def test_rows_are_divided_once_each_and_everybody_gets_the_same(seed):
    rng = random.Random(seed)
    for _ in range(200):
        workers = rng.randint(1, 9)
        shares, asked = Shares(workers), [0] * workers
        largest = rng.choice([3, 8, 40, 300])
        for _ in range(rng.randint(1, 60)):
            rows = sorted(rng.sample(range(1000), rng.randint(1, largest)))
            parts = shares.divide(rows, [True] * workers)
            assert [row for _, part in parts for row in part] == rows
            assert len({worker for worker, _ in parts}) == len(parts)
            assert len(parts) == 1 or all(len(part) >= ROWS_EACH for _, part in parts)
            for worker, part in parts:
                asked[worker] += len(part)
        # A batch that is not worth dividing is one worker's, and the next ones make up for it.
        assert max(asked) - min(asked) <= max(largest, workers * ROWS_EACH)


def test_batches_with_enough_rows_leave_nobody_behind():
    shares, asked = Shares(4), [0] * 4
    for size in (17, 40, 33, 18, 99, 64):
        for worker, part in shares.divide(range(size), [True] * 4):
            asked[worker] += len(part)
        assert max(asked) - min(asked) <= 1


def test_control_rounding_the_same_way_every_time_leaves_some_behind():
    asked = [0, 0]
    for _ in range(20):
        asked[0] += 13 // 2
        asked[1] += 13 - 13 // 2
    assert max(asked) - min(asked) == 20


def test_the_dead_are_asked_for_nothing():
    shares = Shares(3)
    assert [worker for worker, _ in shares.divide(range(90), [True, False, True])] == [0, 2]
    assert shares.next(8, [False, True, True]) == 1
    assert shares.next(100, [False, True, True]) == 1
    assert shares.next(8, [False, True, True]) == 2
    # torch finds out that there is none, and says so.
    assert shares.divide(range(9), [False] * 3) == [(0, range(9))]
    assert shares.next(8, [False] * 3) == 0
