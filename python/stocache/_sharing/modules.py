"""Which modules are the user's own, and what stands for the others.

A module of the user's is looked into. One of an installed package counts by its source and by the
version of the package, which are found without importing it: a fingerprint must not change because
the program has used its dataset in the meantime.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages of the dataset that is looked at: the user's own, installed or not.
_users_packages: ContextVar[frozenset[str]] = ContextVar("packages", default=frozenset())
# What names the version of a package without importing it.
_VERSION_FILES = ("__init__.py", "version.py", "_version.py")


def _library_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return tuple({f"{each}{os.sep}" for path in folders for each in (path, os.path.realpath(path))})


_LIBRARIES = _library_folders()


@dataclass(frozen=True)
class NotImported:
    """A module of the user's that a function will import: nothing of it is there to be seen."""

    name: str


@contextlib.contextmanager
def users_own(package: str) -> Iterator[None]:
    """Within, the package counts as the user's own, wherever it is installed."""
    before = _users_packages.set(_users_packages.get() | {package})
    try:
        yield
    finally:
        _users_packages.reset(before)


def is_library(module: object) -> bool:
    """Whether a module belongs to Python or to an installed package that is not the user's own."""
    if not isinstance(module, str) or module == "__main__":
        return False
    top = module.partition(".")[0]
    if top in _users_packages.get():
        return False
    # Native packages have modules without a file of their own, below one that has.
    name = module
    while name:
        if file := file_of(name):
            return _is_installed(file)
        name = name.rpartition(".")[0]
    origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    return top in sys.builtin_module_names or origin in ("built-in", "frozen")


def file_of(module: str) -> str | None:
    """Where a module is defined, whether it is imported or not; None for one without a file."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return file if isinstance(file, str) else None
    spec = _spec(module)
    return spec.origin if spec is not None and spec.has_location else None


@functools.lru_cache(maxsize=4096)
def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Found as import would find it, without running anything."""
    parent, _, _ = module.rpartition(".")
    with contextlib.suppress(Exception):  # a finder or a name of somebody's that is out of order
        if not parent:
            return importlib.util.find_spec(module)
        above = _spec(parent)
        if above is not None and above.submodule_search_locations is not None:
            folders = list(above.submodule_search_locations)
            return importlib.machinery.PathFinder.find_spec(module, folders)
    return None


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_LIBRARIES)


@functools.lru_cache(maxsize=4096)
def library_mark(module: object) -> str:
    """Changes when the module's source, or the version of its package, does."""
    mark = hashlib.blake2b(digest_size=8)
    if not isinstance(module, str):
        return mark.hexdigest()
    top = module.partition(".")[0]
    with contextlib.suppress(Exception):  # its distribution has another name
        mark.update(importlib.metadata.version(top).encode())
    package = file_of(top)
    files = [file_of(module)]
    if package is not None and package.endswith("__init__.py"):
        files += [str(Path(package).with_name(name)) for name in _VERSION_FILES]
    for file in files:
        if file is not None and file.endswith(".py"):
            with contextlib.suppress(OSError):  # not there, or in a zip file
                mark.update(Path(file).read_bytes())
    return mark.hexdigest()


def native_mark(module: object) -> str:
    """As ``library_mark``; a native module of the user's counts by its file."""
    file = file_of(module) if isinstance(module, str) else None
    if file is None or file.endswith(".py") or is_library(module):
        return library_mark(module)
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return library_mark(module)


def module_parts(module: types.ModuleType) -> dict[str, Any]:
    """All that a module of the user's defines; of others which one it is."""
    name = module.__name__
    if is_library(name):
        return {"name": name, "mark": library_mark(name)}
    parts: dict[str, Any] = {"": (name, native_mark(name))}
    for member, value in list(vars(module).items()):
        if not (member.startswith("__") and member.endswith("__")):
            parts[member] = value
    return parts


def imported(module: str, names: tuple[str, ...] | None) -> dict[str, Any]:
    """What ``import module`` in a function gives, or ``from module import names``."""
    if is_library(module):
        return {f"import {module}": library_mark(module)}
    loaded = sys.modules.get(module)
    if loaded is None:
        there = file_of(module) is not None
        return {f"import {module}": NotImported(module) if there else "no such module"}
    if names is None or "*" in names:
        return {f"import {module}": loaded}
    found: dict[str, Any] = {}
    for name in names:
        if name in vars(loaded):
            found[f"import {module}.{name}"] = vars(loaded)[name]
        else:
            found |= imported(f"{module}.{name}", None)
    return found
