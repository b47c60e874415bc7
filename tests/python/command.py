"""The command `stocache`: in this process, which has torch already, or as people run it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

from stocache import cli

COMMAND = [sys.executable, "-m", "stocache"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command prints and returns."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cli.main(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())
