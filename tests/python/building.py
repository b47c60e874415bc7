"""Builds C++ programs against the installed package, as a user's project does."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import stocache
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).resolve().parent
# The project's own environment, which has every tool. Elsewhere some may be missing.
COMPLETE = ROOT in Path(sys.prefix).resolve().parents


def tool(name: str, remedy: str) -> str:
    """Where a program is. One installed by pip stands next to the interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found:
        return found
    missing(f"{name} is missing ({remedy}): what a C++ program sees of stocache is not covered")


def missing(message: str) -> NoReturn:
    """A gap in the project's own environment is a failure, elsewhere a reason to skip."""
    if COMPLETE:
        pytest.fail(message)
    pytest.skip(message)


def needs(*modules: str) -> None:
    """For examples that use other packages."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            continue
        message = f"{name} is not installed: the example that uses it is not covered"
        if name in os.environ.get("STOCACHE_TESTS_WITHOUT", "").split():  # there is none to install
            pytest.skip(message)
        missing(message)


def compiler() -> str:
    return tool("c++", "apt-get install g++")


def run(*command, **options) -> subprocess.CompletedProcess:
    """A finished command with all it said, stdout and stderr together."""
    return subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        **options,
    )


def must(*command, **options) -> str:
    done = run(*command, **options)
    if done.returncode != 0:
        pytest.fail(f"{shlex.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def configure(source: Path, build: Path, *definitions: str) -> list[str]:
    cmake = tool("cmake", "pip install cmake")
    ninja = tool("ninja", "pip install ninja")
    return [
        cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DCMAKE_CXX_COMPILER={compiler()}",
        # A kept build folder may remember another place.
        "-Ustocache_DIR",
        f"-DCMAKE_PREFIX_PATH={stocache.cmake_prefix_path}",
        *definitions,
    ]  # fmt: skip


def build_with_cmake(source: Path, name: str, tmp_path_factory) -> Path:
    """Configures and builds; a folder that is kept makes the next time quick. Of several processes
    that test at the same time one builds, and the others wait for it."""
    kept = ROOT / "build"
    if not COMPLETE:
        kept = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            kept = kept.parent  # that of the whole run
    kept.mkdir(exist_ok=True)
    build = kept / name
    with open(kept / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        must(*configure(source, build))
        must(tool("cmake", "pip install cmake"), "--build", build)
    return build
