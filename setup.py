"""Builds the native libraries: cargo for the Rust core, then CMake for csrc.

Metadata lives in pyproject.toml. They are built for the torch that is installed where this runs,
``pip install --no-build-isolation .``, or for those whose folders STOCACHE_TORCH_DIRS names: the
core once, and over it a thin library for each minor version, of which ``import stocache`` takes
the one for the torch that it finds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST = (2, 9)  # torch


@dataclass(frozen=True)
class Torch:
    folder: Path  # of the package
    major: int
    minor: int
    is_early: bool = False  # a nightly build or a release candidate

    @classmethod
    def of(cls, folder: Path) -> Torch:
        """Without importing it: what it is built for need not run here."""
        named = folder / "version.py"
        if not named.is_file():
            raise SystemExit(
                f"{folder} holds no torch for Python, and a libtorch alone is not enough to build "
                "stocache: pip install torch"
            )
        found = re.search(r"^__version__ = '(\d+)\.(\d+)([^+']*)", named.read_text(), re.MULTILINE)
        if not found:
            raise SystemExit(f"{named} does not say which torch it is: pip install torch")
        return cls(folder, int(found[1]), int(found[2]), not re.fullmatch(r"[\d.]*", found[3]))

    @property
    def name(self) -> str:
        return f"{self.major}.{self.minor}"


def torches() -> list[Torch]:
    """Those that it is built for."""
    if named := os.environ.get("STOCACHE_TORCH_DIRS"):
        folders = [Path(folder).resolve() for folder in named.split(os.pathsep)]
    else:
        found = importlib.util.find_spec("torch")
        folders = [Path(found.origin).parent] if found and found.origin else []
    return sorted(map(Torch.of, folders), key=lambda torch: (torch.major, torch.minor))


def requirement() -> str:
    """Which torch the package needs: of the minor versions that it was built for."""
    built_for = torches()
    if not built_for:
        return f"torch>={OLDEST[0]}.{OLDEST[1]}"
    first, last = built_for[0], built_for[-1]
    names = {torch.name for torch in built_for}
    between = (f"{last.major}.{minor}" for minor in range(first.minor, last.minor))
    missing = "".join(f",!={name}.*" for name in between if name not in names)
    # A release candidate comes before the release; who names one allows such.
    least = f"{first.name}.dev0" if first.is_early else first.name
    return f"torch>={least},<{last.major}.{last.minor + 1}{missing}"


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


def cargo(command: str, target: Path, *more: str) -> None:
    """Runs a cargo command on rust/torch."""
    program = tool("cargo", "install Rust 1.90 or newer")
    env = os.environ | {"CARGO_TARGET_DIR": str(target)}
    run(program, command, "--locked", "-p", "stocache-torch", *more, env=env)


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
        # As it is built: so there is nothing to compile for it but what is linted.
        cargo("clippy", target_dir(), "--release", "--", "-D", "warnings")


class BuildNative(build_ext):
    """One command for the extension: the core, then the two libraries over it, for each torch in a
    folder of its own."""

    def build_extension(self, ext: Extension) -> None:
        built_for = torches()
        if not built_for:
            raise SystemExit(
                "stocache builds against the torch it will run with: "
                "pip install torch, then pip install --no-build-isolation ."
            )
        for torch in built_for:
            if (torch.major, torch.minor) < OLDEST:
                raise SystemExit(
                    f"stocache needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and {torch.name} is "
                    f"in {torch.folder}: pip install --upgrade torch"
                )
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        for old in package.glob("torch*"):  # of an earlier build in the same folder
            shutil.rmtree(old)
        target = target_dir()
        cargo("build", target, "--release")
        self.cmake(
            "core", "csrc/core", package,
            RUST_LIBRARY=target / "release/libstocache_torch.a",
        )  # fmt: skip
        bridge = without_news(target / "cxxbridge", ROOT / "build/bridge")
        for torch in built_for:
            self.cmake(
                f"{sys.implementation.cache_tag}-torch{torch.name}", "csrc",
                package / f"torch{torch.name}",
                Python_EXECUTABLE=sys.executable,
                TORCH_DIR=torch.folder,
                TORCH_VERSION=torch.name,
                STOCACHE_VERSION=self.distribution.get_version(),
                CORE_LIBRARY=package / "lib/libstocache_core.so",
                RUST_INCLUDE=bridge,
            )  # fmt: skip

    def cmake(self, name: str, source: str, prefix: Path, **definitions: object) -> None:
        """Builds a folder and installs what comes of it."""
        cmake = tool("cmake", "pip install cmake")
        build = ROOT / "build" / f"cmake-{name}"
        run(
            cmake, "-S", str(ROOT / source), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'pip install ninja')}",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
            *(f"-D{key}={value}" for key, value in definitions.items()),
        )  # fmt: skip
        run(cmake, "--build", str(build))
        run(cmake, "--install", str(build), "--strip")


# The folders of python/stocache.
PRIVATE = (
    "_augment",
    "_cluster",
    "_dataset",
    "_loading",
    "_sharding",
    "_sharing",
    "_torch",
    "_types",
)

setup(
    packages=["stocache", *(f"stocache.{part}" for part in PRIVATE)],
    package_dir={"": "python"},
    package_data={"stocache": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("stocache._C", sources=[])],
    install_requires=[
        requirement(),
        "tqdm>=4.60",  # progress bars: CachedDataset.warm, FileCache.prefetch, the command
    ],
    cmdclass={"build_ext": BuildNative, "clippy": Clippy},
)
