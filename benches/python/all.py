"""Every benchmark, one after the other, and one closing table; exit status 1 if a target is missed.

python benches/python/all.py [--rounds N] [--to FOLDER] [--before FOLDER] [--only disk ...]

Each prints its own table and saves it in a folder; of an earlier folder the closing table shows
what was measured then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import Table, machine_line, show_grid

Rows = list[dict[str, Any]]

HERE = Path(__file__).resolve().parent
BENCHES: dict[str, list[str]] = {
    "shared_cache": ["--with-demo"], "cached_dataset": [], "partly_cached": [], "augmentation": [],
    "sharding": [], "file_cache": [], "disk": ["--with-many"], "cluster": [],
}  # fmt: skip
"""And what each is asked for beside its usual parts."""


def measure(name: str, to: Path, options: list[str]) -> None:
    """Runs one, which saves its table; in its place a table that says that there is none."""
    path = to / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path)]
    print(f"\n{name}", flush=True)
    status = subprocess.run([*command, *BENCHES[name], *options]).returncode
    if not path.exists():
        table = Table()
        table.not_run(name, RuntimeError(f"it ended with exit status {status} and no table"))
        table.save(path)


def rows_of(folder: Path, name: str) -> Rows:
    path = folder / f"{name}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def close(names: list[str], to: Path, before: dict[str, Rows] | None) -> int:
    """Prints what was held against a target, of all; how many targets were missed."""
    lines: list[tuple[str, ...]] = []
    held = missed = 0
    for name in names:
        then = {row["what"]: row["measured"] for row in before[name]} if before else {}
        for row in rows_of(to, name):
            if row["holds"] is None:
                continue
            held += row["holds"]
            missed += not row["holds"]
            cells = (name, row["what"], row["measured"], row["target"])
            cells += ("yes" if row["holds"] else "NO",)
            lines.append((*cells, then.get(row["what"], "")) if before else cells)
    header = ("benchmark", "what", "measured", "target", "holds")
    print(f"\n{machine_line()}\n{show_grid((*header, 'before') if before else header, lines)}")
    print(f"targets: {held + missed}, of which {missed} missed")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="these alone")
    parser.add_argument("--rounds", type=int, help="how often the sides take turns")
    parser.add_argument(
        "--to", type=Path, default=Path("build/bench"), help="where tables are saved"
    )
    parser.add_argument("--before", type=Path, help="a folder of tables to show beside these")
    options = parser.parse_args()
    names = options.only or list(BENCHES)
    rounds = ["--rounds", str(options.rounds)] if options.rounds else []
    before = {name: rows_of(options.before, name) for name in names} if options.before else None
    for name in names:
        measure(name, options.to, rounds)
    return 1 if close(names, options.to, before) else 0


if __name__ == "__main__":
    sys.exit(main())
