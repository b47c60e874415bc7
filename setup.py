"""Builds the native libraries: cargo for the Rust core, then CMake for csrc.

Metadata lives in pyproject.toml. Needs torch in the environment that builds:
``pip install --no-build-isolation .``
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_FOR_TCH = "2.13.0"  # what tch 0.26 is made for


def run(*command: str, env: dict[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=env)


def tool(name: str, remedy: str) -> str:
    # A tool installed by pip stands next to the interpreter, which need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if not found:
        raise SystemExit(f"stocache needs {name} to build: {remedy}")
    return found


def cargo(command: str, torch_dir: Path, target: Path, *more: str) -> None:
    """Runs a cargo command on rust/torch, which needs to know torch."""
    include = [torch_dir / "include", torch_dir / "include/torch/csrc/api/include"]
    env = os.environ | {
        "CARGO_TARGET_DIR": str(target),
        "STOCACHE_TORCH_INCLUDE": ":".join(map(str, include)),
    }
    program = tool("cargo", "install Rust 1.90 or newer")
    run(program, command, "--release", "--locked", "-p", "stocache-torch", *more, env=env)


def without_news(made: Path, kept: Path) -> Path:
    """A copy of the bridge's headers that is touched only where they differ: cargo makes them anew
    for every command, and ninja would compile everything again."""
    for file in filter(Path.is_file, made.rglob("*")):
        copy = kept / file.relative_to(made)
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return kept


def target_dir() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()


class Clippy(Command):
    """Lints rust/torch with the environment that it is built in."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        import torch

        cargo("clippy", Path(torch.__file__).parent, target_dir(), "--", "-D", "warnings")


class BuildNative(build_ext):
    """One command for the extension: Rust static library, then the two shared libraries."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import torch
        except ImportError:
            raise SystemExit(
                "stocache builds against the torch it will run with: "
                f"pip install torch=={TORCH_FOR_TCH}, then pip install --no-build-isolation ."
            ) from None
        version = torch.__version__.split("+")[0]
        if version != TORCH_FOR_TCH:
            raise SystemExit(
                f"stocache needs torch {TORCH_FOR_TCH} to build, found {version}: "
                f"pip install torch=={TORCH_FOR_TCH}"
            )
        torch_dir = Path(torch.__file__).parent
        target = target_dir()
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cargo("build", torch_dir, target)
        self.build_cpp(torch_dir, target, package)
        (package / "_built_for.py").write_text(f'# Written by setup.py.\nTORCH = "{version}"\n')

    def build_cpp(self, torch_dir: Path, target: Path, package: Path) -> None:
        cmake = tool("cmake", "pip install cmake")
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        run(
            cmake,
            "-S", str(ROOT / "csrc"),
            "-B", str(build),
            "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'pip install ninja')}",
            f"-DCMAKE_INSTALL_PREFIX={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTORCH_DIR={torch_dir}",
            f"-DTORCH_VERSION={TORCH_FOR_TCH}",
            f"-DSTOCACHE_VERSION={self.distribution.get_version()}",
            f"-DRUST_LIBRARY={target / 'release/libstocache_torch.a'}",
            f"-DRUST_INCLUDE={without_news(target / 'cxxbridge', build / 'bridge')}",
        )  # fmt: skip
        run(cmake, "--build", str(build))
        run(cmake, "--install", str(build), "--strip")


# The folders of python/stocache.
PRIVATE = ("_dataset", "_loading", "_sharing", "_torch")

setup(
    packages=["stocache", *(f"stocache.{part}" for part in PRIVATE)],
    package_dir={"": "python"},
    package_data={"stocache": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("stocache._C", sources=[])],
    cmdclass={"build_ext": BuildNative, "clippy": Clippy},
)
