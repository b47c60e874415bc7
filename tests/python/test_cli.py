"""The command `stocache`, run as people run it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command import COMMAND
from command import run as stocache
from stocache import FileCache


@pytest.fixture
def far(tmp_path) -> Path:
    for i in range(30):
        file = tmp_path / "far" / f"part-{i % 3}" / f"{i:02}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([i]) * (1000 + i))
    return tmp_path / "far"


def test_the_installed_command_is_the_module(far, tmp_path):
    installed = Path(sys.executable).with_name("stocache")
    if not installed.exists():
        pytest.skip("the package is not installed with its command: only the module is covered")
    said = subprocess.run([installed, "--help"], capture_output=True, text=True, check=True).stdout
    assert "warm-files" in said


def test_a_job_finds_what_was_copied_ahead(far, tmp_path):
    near = tmp_path / "near"
    done = stocache("warm-files", far, near, "--verify")
    assert done.returncode == 0, done.stderr
    assert re.match(r"30 files copied \(\S+ KiB in [\d.]+ s\), 0 were there already; ", done.stdout)
    assert "all copies are what their sources are" in done.stdout
    assert "100%" in done.stderr and "30/30" in done.stderr
    with FileCache(far, near) as files:
        assert all(Path(files.get_path(i)).read_bytes()[0] == int(Path(n).stem)
                   for i, n in enumerate(files.files))  # fmt: skip
        assert (files.stats().copies, files.stats().from_source) == (0, 0)
    again = stocache("warm-files", far, near, "--quiet")
    assert again.stdout.startswith("0 files copied (0 bytes in ")
    assert ", 30 were there already; " in again.stdout
    assert again.stderr == ""


def test_an_interrupted_command_goes_on_where_it_was(tmp_path):
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    for i in range(400):
        (far / f"{i}.bin").write_bytes(bytes(1_000_000))
    command = [*COMMAND, "warm-files", str(far), str(near), "--workers", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        while job.poll() is None and len(list(near.glob("*/files/*"))) < 5:
            time.sleep(0.001)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    if job.returncode == 0:
        pytest.skip("everything was copied before the interrupt arrived: resuming is not covered")
    assert job.returncode == 130
    assert "interrupted; run the same command again to go on" in errors
    assert "Traceback" not in errors
    copied = re.match(r"(\d+) files copied .*, (\d+) were there", stocache(*command[3:]).stdout)
    assert copied and int(copied[1]) < 400 and int(copied[1]) + int(copied[2]) == 400


def test_what_does_not_fit_is_said_and_is_no_success(far, tmp_path):
    done = stocache("warm-files", far, tmp_path / "near", "--limit", "10KB", "--quiet")
    assert done.returncode == 1
    assert re.search(r"stocache: 2\d files have no copy, the first is part-", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_list_of_files(far, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("part-1/01.bin\npart-2/02.bin\n")
    done = stocache("warm-files", far, tmp_path / "near", "--files-from", names, "--quiet")
    assert done.returncode == 0 and done.stdout.startswith("2 files copied")
    names.write_text("part-1/01.bin\nnot-there.bin\n")
    done = stocache("warm-files", far, tmp_path / "near", "--files-from", names, "--quiet")
    assert done.returncode == 1
    assert "1 of 2 files could not be read from their source, the first: [Errno 2]" in done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{far}", "{far}/near"], "lies in data_path"),
        (["{far}/gone", "{near}"], "No such file or directory"),
        (["{far}", "{near}", "--limit", "much"], "limit is 'much'; it must be at least 1 byte"),
        (["{far}", "{near}", "--workers", "0"], "num_workers is 0; it must be at least 1"),
        (["{far}", "{near}", "--files-from", "{near}"], "No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(far, tmp_path, arguments, sentence):
    fill = {"far": str(far), "near": str(tmp_path / "near")}
    done = stocache("warm-files", *(argument.format(**fill) for argument in arguments))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stocache: ") and sentence in last
    assert "Traceback" not in done.stderr


def test_a_terminal_shows_a_bar(far, tmp_path):
    """On a real terminal: the bar is drawn in one line, and the summary follows it."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [*COMMAND, "warm-files", str(far), str(tmp_path / "near")]
    with subprocess.Popen(command, stdout=other, stderr=other) as job:
        os.close(other)
        shown = b""
        try:
            while piece := os.read(main, 65536):
                shown += piece
        except OSError:
            pass  # the other side is gone
    os.close(main)
    assert job.returncode == 0
    lines = re.split(r"[\r\n]+", shown.decode().strip())
    assert any("100%" in line and "30/30" in line for line in lines), lines
    assert lines[-1].startswith("30 files copied"), lines
