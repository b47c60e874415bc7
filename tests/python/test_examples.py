"""The examples in C++: built with the real compiler against the installed package, and run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from building import ROOT, build_with_cmake, must, run

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """All examples, built as `make demo-cpp` builds them."""
    return build_with_cmake(EXAMPLES, "examples", tmp_path_factory)


def test_the_trainer_gets_the_same_losses_with_the_cache(programs):
    trainer = programs / "cpp_trainer" / "cpp_trainer"
    said = must(trainer, "--samples", "200", "--epochs", "2", "--delay-ms", "2")
    rows = re.findall(r"epoch (\d+) +[\d.]+ s +[\d.]+ s +[\d.]+ x +([\d.]+) %", said)
    assert [row[0] for row in rows] == ["1", "2"], said
    # Sample 0 is loaded when the cache is made; the first epoch finds nothing else.
    assert float(rows[0][1]) <= 0.5 and float(rows[1][1]) == 100, said
    assert "check: 200 cached samples equal the source's; losses of both runs identical" in said
    assert "\033" not in said and "\r" not in said, "control characters outside a terminal"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--samples", "0"), "--samples is 0, not a whole number from 1 to 1000000"),
        (("--speed", "9"), "--speed is not an option; --help lists them"),
        (("--cache",), "--cache needs a value"),
    ],
)
def test_the_trainer_says_what_is_wrong_with_its_arguments(programs, arguments, sentence):
    done = run(programs / "cpp_trainer" / "cpp_trainer", *arguments)
    assert (done.returncode, done.stdout.strip()) == (2, sentence)


def test_the_trainer_shows_the_sentence_of_an_error(programs):
    done = run(programs / "cpp_trainer" / "cpp_trainer", "--samples", "8", "--cache", "a/b")
    assert done.returncode == 1
    assert done.stdout.strip() == (
        'name "a/b" is not allowed: use 1 to 100 letters, digits, dots, dashes and underscores'
    )


def test_python_fills_what_the_trainer_reads(programs):
    trainer = programs / "cpp_trainer" / "cpp_trainer"
    said = must(sys.executable, EXAMPLES / "mixed" / "run.py", "--trainer", trainer)
    found = re.search(r"found (\d+) of (\d+) samples that Python had stored", said)
    assert found and 0 < int(found[1]) <= int(found[2]), said
    assert re.search(r"check: (\d+) samples equal the source in C\+\+, \1 in Python", said), said


def test_a_saved_module_finds_in_cpp_what_python_prepared(programs, tmp_path):
    said = must(
        sys.executable,
        EXAMPLES / "torchscript" / "preprocess.py",
        "--module", tmp_path / "preprocess.pt",
        "--runner", programs / "torchscript" / "run_module",
    )  # fmt: skip
    assert "Python prepared 128 of 256 samples" in said
    assert "check: 256 of 256 samples in the cache equal a fresh preparation" in said
    assert re.search(r"\b128\b.*already|found 128", said), said
