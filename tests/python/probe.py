"""The C++ program of the tests, tests/cpp/probe.cpp: built as a user's is, and how to talk to it.

It runs in processes of its own. A line in is a command, a line out is the answer as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from building import ROOT, build_with_cmake


@pytest.fixture(scope="session")
def probe_program(tmp_path_factory) -> Path:
    """The probe. Its build folder is kept, so that only a change is compiled again."""
    return build_with_cmake(ROOT / "tests" / "cpp", "tests-cpp", tmp_path_factory) / "probe"


def without_python() -> dict[str, str]:
    """What a program that knows nothing of Python finds in its environment."""
    unwanted = ("PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD")
    return {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}


class Probe:
    """A running probe: a line in, a line of JSON out."""

    def __init__(self, program: Path, *args, stderr=subprocess.PIPE, **options) -> None:
        options.setdefault("env", without_python())
        self.child = subprocess.Popen(
            [str(program), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            **options,
        )

    def hear(self) -> dict:
        line = self.child.stdout.readline()
        if line:
            return json.loads(line)
        _, err = self.child.communicate()
        pytest.fail(f"the C++ program died with {self.child.returncode}\n{err}")

    def ask(self, command: str = "") -> dict:
        self.child.stdin.write(command + "\n")
        self.child.stdin.flush()
        return self.hear()

    def result(self, command: str = ""):
        answer = self.ask(command) if command else self.hear()
        assert "ok" in answer, f"{command or self.child.args}: {answer}"
        return answer["ok"]

    def end(self) -> str:
        """Lets it end by itself; returns what it said on stderr."""
        _, err = self.child.communicate(timeout=120)
        assert self.child.returncode == 0, f"ended with {self.child.returncode}\n{err}"
        return err

    def kill(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.communicate()


@pytest.fixture
def start_probe(probe_program):
    """start_probe(case, *args) is a probe that is gone after the test, whatever happens."""
    started = []

    def start(*args, **options) -> Probe:
        started.append(Probe(probe_program, *args, **options))
        return started[-1]

    yield start
    for probe in started:
        if probe.child.returncode is None:
            probe.kill()


@pytest.fixture
def probe_answer(start_probe):
    """probe_answer(case, *args) is the one answer of a case that runs to its end."""

    def ask(*args, **options):
        probe = start_probe(*args, **options)
        result = probe.hear()
        assert probe.end() == ""
        return result

    return ask


def text(words: str | bytes) -> str:
    """How a command writes a text."""
    return "x" + (words.encode() if isinstance(words, str) else words).hex()
