"""Importing: one clear sentence where it cannot work, nothing started where it can."""

from __future__ import annotations

import shutil
from pathlib import Path

import stocache

PACKAGE = Path(stocache.__file__).parent


def the_error(run_script, source: str, **options) -> str:
    """What `import stocache` says, on the last line of the traceback."""
    answer = run_script(source, check=False, **options)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    return answer.stderr.strip().splitlines()[-1]


def test_another_torch_is_named_together_with_the_one_needed(run_script):
    message = the_error(
        run_script, 'import torch; torch.__version__ = "2.12.1+cpu"; import stocache'
    )
    assert message.startswith("ImportError: this stocache was built for torch 2.13.0")
    assert "torch 2.12.1 is installed" in message and "pip install torch==2.13.0" in message


def test_the_torch_it_was_built_for_may_carry_a_local_version(run_script):
    run_script('import torch; torch.__version__ = "2.13.0+cpu"; import stocache')


def test_a_source_folder_says_that_it_is_not_an_installed_package(run_script, tmp_path):
    copy = tmp_path / "elsewhere" / "stocache"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_built_for*", "*.so"))
    message = the_error(run_script, "import stocache", env={"PYTHONPATH": str(copy.parent)})
    assert "not an installed package" in message and "pip install" in message


def test_a_damaged_library_is_named(run_script, tmp_path):
    copy = tmp_path / "elsewhere" / "stocache"
    shutil.copytree(PACKAGE, copy)
    (copy / "lib" / "libstocache.so").write_bytes(b"not a library")
    message = the_error(run_script, "import stocache", env={"PYTHONPATH": str(copy.parent)})
    assert "do not load" in message and "reinstall" in message


def test_importing_starts_no_thread_and_touches_no_shared_memory(run_script):
    answer = run_script(
        """
        import os, threading, torch
        before = len(os.listdir("/proc/self/task")), set(os.listdir("/dev/shm"))
        import stocache
        after = len(os.listdir("/proc/self/task")), set(os.listdir("/dev/shm"))
        print(after[0] - before[0], [e for e in after[1] - before[1] if str(os.getpid()) in e])
        """
    )
    assert answer.stdout.split() == ["0", "[]"]
