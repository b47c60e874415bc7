"""What the Python benchmarks share: interleaved timing, a table of targets, the main program.

A single time on a shared machine says little: the clock rate and the neighbours change from
second to second. So the sides of a comparison take turns inside one run, and what is reported is
the median of the ratios, one per round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

Side: TypeAlias = Callable[[], float]
"""Does its work once and returns the seconds that count; what it prepares outside them is free."""


def timed(work: Callable[[], object]) -> Side:
    """A side all of whose work counts."""

    def side() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return side


@dataclass(frozen=True)
class Timings:
    """Seconds per side, one entry per round; entry k of every side belongs to the same round."""

    seconds: Mapping[str, list[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, other: str) -> float:
        """Median over the rounds of the time of `side` over the time of `other`."""
        pairs = zip(self.seconds[side], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleave(
    sides: Mapping[str, Side],
    rounds: int,
    progress: tqdm[None],
    warmup: int = 1,
    at_least: float = 0.0,
) -> Timings:
    """Run the sides in turn, `rounds` times after `warmup` rounds that are not counted.

    A side that takes less than `at_least` seconds is run until it has taken them, and the median of
    its times is its entry: a neighbour who takes some milliseconds is else a third of it.
    """
    progress.reset(rounds)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shuffled = random.Random(0)
    order = list(sides)
    collecting = gc.isenabled()
    for turn in range(-warmup, rounds):
        # Nobody may profit from always running after the same neighbour (caches, freed pages).
        shuffled.shuffle(order)
        for name in order:
            gc.collect()
            gc.disable()
            try:
                times = [sides[name]()]
                while sum(times) < at_least:
                    times.append(sides[name]())
            finally:
                if collecting:
                    gc.enable()
            if turn >= 0:
                seconds[name].append(statistics.median(times))
        if turn >= 0:
            progress.update()
    return Timings(seconds)


def progress_bar(what: str) -> tqdm[None]:
    """A bar on stderr, gone when done; in a log file it writes a line every few seconds only."""
    every = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(desc=what, file=sys.stderr, leave=False, mininterval=every)


def machine() -> dict[str, object]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def machine_line() -> str:
    m = machine()
    return (
        f"{m['cpus']} cpus (load {m['load']}), {m['memory_gib']} GiB, linux {m['kernel']}, "
        f"python {m['python']}, torch {m['torch']} ({m['torch_threads']} threads)"
    )


def caption(figure: Any, what: str) -> None:
    """Above a plot: what was measured, and on which machine."""
    # At a size of 7 points some 19 letters are an inch.
    text = textwrap.fill(f"{what} {machine_line()}", int(19 * figure.get_figwidth()))
    figure.suptitle(text, fontsize=7, color="#777777")


def show_seconds(seconds: float) -> str:
    """Three digits and the unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def show_grid(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, separated by bars."""
    widths = [max(len(line[k]) for line in [header, *lines]) for k in range(len(header))]

    def show(cells: tuple[str, ...]) -> str:
        return " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    rule = "-|-".join("-" * w for w in widths)
    return "\n".join([show(header), rule, *map(show, lines)])


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    target: str = ""
    holds: bool | None = None  # None: for information, there is no target
    value: float | None = None  # the number that was held against the target


@dataclass
class Table:
    """Results against their targets, in the order they were measured."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at_most(self, what: str, value: float, limit: float, measured: str, unit: str = "") -> None:
        self.rows.append(Row(what, measured, f"<= {limit:g}{unit}", value <= limit, value))

    def less_than(self, what: str, value: float, end: float, measured: str, unit: str = "") -> None:
        self.rows.append(Row(what, measured, f"< {end:g}{unit}", value < end, value))

    def at_least(
        self, what: str, value: float, limit: float, measured: str, unit: str = ""
    ) -> None:
        self.rows.append(Row(what, measured, f">= {limit:g}{unit}", value >= limit, value))

    def info(self, what: str, value: float, measured: str) -> None:
        self.rows.append(Row(f"  {what}", measured, value=value))

    def not_run(self, what: str, reason: BaseException) -> None:
        """What could not be measured has not been reached: it counts as missed."""
        # The start of it, or the table gets as wide as the message; all of it is on stderr.
        words = f"not run: {type(reason).__name__}: {reason}".splitlines()[0]
        self.rows.append(Row(what, textwrap.shorten(words, 72), "to run", False))

    @property
    def holds(self) -> bool:
        return all(row.holds is not False for row in self.rows)

    def show(self) -> str:
        words = {True: "yes", False: "NO", None: ""}
        lines = [(r.what, r.measured, r.target, words[r.holds]) for r in self.rows]
        grid = show_grid(("what", "measured", "target", "holds"), lines)
        return "\n".join([grid, *(f"note: {note}" for note in self.notes)])

    def save(self, path: Path) -> None:
        rows = [asdict(row) | {"what": row.what.strip()} for row in self.rows]
        result = {"machine": machine(), "holds": self.holds, "rows": rows, "notes": self.notes}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


Section: TypeAlias = Callable[[Table, "tqdm[None]", int], None]
"""Measures something in so many rounds and adds its rows to the table."""


def run(
    description: str,
    sections: Mapping[str, Section],
    paths_made: Iterable[str],
    extra: Mapping[str, str] | None = None,
) -> int:
    """The main program of a benchmark: measures what the command line asks for, prints the table,
    and returns the exit status. `extra` are sections that run only if their option is given, with
    what the option says of itself; of `paths_made`, none may exist in the end."""
    extra = extra or {}
    usual = [name for name in sections if name not in extra]
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=usual, help="these parts only")
    parser.add_argument("--rounds", type=int, default=15, help="how often the sides take turns")
    for name, words in extra.items():
        parser.add_argument(f"--with-{name}", dest=name, action="store_true", help=words)
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the table here as well")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, must be 1 or more")

    chosen = list(options.only or usual) + [name for name in extra if getattr(options, name)]
    # As in a DataLoader worker. With more, torch splits a copy of 150 KB over threads, and a row
    # holds or not by whether another processor happens to be idle.
    torch.set_num_threads(1)
    print(machine_line(), flush=True)
    random.seed(0)
    torch.manual_seed(0)
    table = Table()
    for name in chosen:
        with progress_bar(name) as progress:
            try:
                sections[name](table, progress, options.rounds)
            except Exception as error:  # the other parts are still worth running
                progress.clear()
                traceback.print_exc()
                table.not_run(name, error)
        gc.collect()
    left_out = [name for name in sections if name not in chosen]
    if left_out:
        ways = ", ".join(["--only", *(f"--with-{name}" for name in extra)])
        table.notes.append(f"not asked for: {', '.join(left_out)} ({ways})")
    for path in filter(os.path.exists, paths_made):
        table.not_run("clean-up", RuntimeError(f"{path} was left behind"))
    print(table.show())
    if options.json:
        table.save(options.json)
    return 0 if table.holds else 1
