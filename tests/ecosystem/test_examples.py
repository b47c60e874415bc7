"""Each example of a library runs as it stands, and loads every sample once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "ecosystem").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    hits, loads = map(int, re.search(r"(\d+) hits, (\d+) loads", done.stdout).groups())
    assert hits >= loads > 0, done.stdout
    assert "not cached" not in done.stderr
