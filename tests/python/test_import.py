"""Importing: one clear sentence where it cannot work, nothing started where it can."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import stocache
import torch

PACKAGE = Path(stocache.__file__).parent
VERSION = torch.__version__.split("+")[0]
MINOR = ".".join(VERSION.split(".")[:2])
NATIVE = f"torch{MINOR}"


def the_error(run_script, source: str, package: Path | None = None, **options) -> str:
    """What `import stocache` says, on the last line of the traceback; of that package, if given."""
    if package is not None:
        source = f"import sys; sys.path.insert(0, {str(package.parent)!r}); {source}"
    answer = run_script(source, check=False, **options)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    return answer.stderr.strip().splitlines()[-1]


@pytest.fixture
def copied(tmp_path) -> Path:
    """The package, built for this torch alone."""
    copy = tmp_path / "elsewhere" / "stocache"
    shutil.copytree(PACKAGE, copy)
    for other in set(copy.glob("torch*.*")) - {copy / NATIVE}:
        shutil.rmtree(other)
    return copy


@pytest.mark.parametrize(
    "other", ["2.99.1+cpu", "2.99.0.dev20261101+cu130", "2.99.0a0+git12", "3.0.0"]
)
def test_another_torch_is_named_together_with_the_one_needed(run_script, copied, other):
    message = the_error(
        run_script,
        f'import torch; torch.__version__ = "{other}"; import stocache',
        copied,
    )
    assert message == (
        f"ImportError: this stocache was built for torch {MINOR} but torch {other.split('+')[0]} "
        f'is installed; run pip install "torch=={MINOR}.*", or build stocache for torch '
        + ".".join(other.split(".")[:2])
    )


@pytest.mark.parametrize("old", ["2.8.1+cpu", "2.8.0.dev20250601", "1.13.1"])
def test_a_torch_that_is_too_old_is_told_without_a_build_for_it(run_script, copied, old):
    message = the_error(
        run_script,
        f'import torch; torch.__version__ = "{old}"; import stocache',
        copied,
    )
    assert message == (
        f"ImportError: stocache needs torch 2.9 or newer but torch {old.split('+')[0]} is "
        f'installed; run pip install "torch=={MINOR}.*"'
    )


def test_all_that_it_was_built_for_are_named(run_script, copied):
    for other in ("2.7", "2.10"):
        shutil.copytree(copied / NATIVE, copied / f"torch{other}")
    message = the_error(
        run_script,
        'import torch; torch.__version__ = "2.99.0"; import stocache',
        copied,
    )
    names = sorted({"2.7", "2.10", MINOR}, key=lambda name: int(name.split(".")[1]))
    assert f"built for torch {', '.join(names[:-1])} and {names[-1]} but torch 2.99.0" in message
    assert f'pip install "torch=={names[-1]}.*"' in message


@pytest.mark.parametrize("version", [f"{VERSION}+cpu", f"{MINOR}.99", f"{MINOR}.0.dev20261101"])
def test_any_torch_of_the_minor_version_that_it_was_built_for_will_do(run_script, version):
    run_script(f'import torch; torch.__version__ = "{version}"; import stocache')


def test_a_torch_that_is_not_there_is_asked_for(run_script):
    message = the_error(
        run_script, 'import sys; sys.modules["torch"] = None; import stocache', fresh=True
    )
    assert message == "ImportError: stocache needs torch 2.9 or newer: run pip install torch"


def test_trouble_inside_torch_is_torchs(run_script, tmp_path):
    (tmp_path / "torch.py").write_text("import a_module_that_torch_needs\n")
    message = the_error(
        run_script, "import stocache", env={"PYTHONPATH": str(tmp_path)}, fresh=True
    )
    assert message == "ModuleNotFoundError: No module named 'a_module_that_torch_needs'"


def test_a_source_folder_says_that_it_is_not_an_installed_package(run_script, copied):
    shutil.rmtree(copied / NATIVE)
    message = the_error(run_script, "import stocache", copied)
    assert "not an installed package" in message and "pip install" in message


def test_a_damaged_library_is_named(run_script, copied):
    (copied / NATIVE / "lib" / "libstocache.so").write_bytes(b"not a library")
    message = the_error(run_script, "import stocache", copied)
    assert "do not load" in message and "reinstall" in message


def test_importing_starts_no_thread_and_touches_no_shared_memory(run_script):
    answer = run_script(
        """
        import os, threading, torch
        before = len(os.listdir("/proc/self/task")), set(os.listdir("/dev/shm"))
        import stocache
        after = len(os.listdir("/proc/self/task")), set(os.listdir("/dev/shm"))
        print(after[0] - before[0], [e for e in after[1] - before[1] if str(os.getpid()) in e])
        """,
        fresh=True,
    )
    assert answer.stdout.split() == ["0", "[]"]
