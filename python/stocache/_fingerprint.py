"""What a cache of a dataset depends on: its code, its configuration and its contents."""

from __future__ import annotations

import types
from typing import Any

from stocache._sameness import digest


def fingerprint(dataset: Any) -> str:
    """A text that changes when the dataset would give other samples, as far as can be seen.

    Covered are the attributes of the dataset and of everything in it (transforms, lists of files),
    and the code of its class and of the functions among them. Not covered are the files that it
    reads: for those, recomputing a few samples is what helps (``CachedDataset(probe=...)``).
    """
    return digest(list(_code(type(dataset))), len(dataset), dataset)


def _code(kind: type) -> Any:
    """The methods of the class and of its parents, up to torch's own."""
    for parent in kind.__mro__:
        if parent.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for name, member in sorted(vars(parent).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, property):
                function = function.fget
            if isinstance(function, types.FunctionType):
                cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
                yield name, _shape(function.__code__), function.__defaults__
                yield function.__kwdefaults__, cells


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, without where it stands: a line moved down changes nothing."""
    constants = [_shape(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, constants, names, code.co_flags, code.co_argcount)


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
