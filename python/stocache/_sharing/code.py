"""What functions and classes do, as far as it decides what they return.

Code that the user wrote is looked into: instructions, constants, defaults, closures, the globals
that are used (by their values), the members of classes. Code of installed packages counts by the
file it comes from, or one function would lead into all of torch.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Says nothing of what the class does.
_UNTOLD = frozenset(
    (
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__annotations__",
        "__hash__",
        "__firstlineno__",
        "__static_attributes__",
        "__parameters__",
        "__orig_bases__",
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__match_args__",
        "_abc_impl",
        "__dataclass_params__",
        "__dataclass_fields__",
        "__subclasshook__",
        "__getstate__",
        "__setstate__",
        "__reduce__",
        "__repr__",
        "__str__",
    )
)
# What they leave behind is looked at as attributes; the globals they read on the way need not be.
_MAKERS = ("__init__", "__new__", "__post_init__")
_Parts = Callable[[Any], Mapping[str, Any]]
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")
)


def parts_of(kind: type) -> _Parts | None:
    """How objects of a type that holds code show their parts; None for other types."""
    if issubclass(kind, type):
        return class_parts
    return next((parts for known, parts in _PARTS.items() if issubclass(kind, known)), None)


def class_parts(kind: type, label: Callable[[type, str], str] | None = None) -> dict[str, Any]:
    """The members of a class and of its parents, by name, as far as users wrote them."""
    label = label or (lambda parent, name: f"{parent.__qualname__}.{name}")
    parts: dict[str, Any] = {"": (kind.__module__, kind.__qualname__)}
    for parent in kind.__mro__:
        if is_library(parent.__module__):
            parts[f"({parent.__qualname__})"] = library_mark(parent.__module__)
            continue
        if issubclass(parent, enum.Enum):
            members = parent.__members__.items()
            parts[label(parent, "members")] = {name: member.value for name, member in members}
        for name, member in vars(parent).items():
            if name in _UNTOLD or isinstance(member, _DESCRIPTORS):
                continue
            if name in _MAKERS and isinstance(member, types.FunctionType):
                member = (_shape(member.__code__), member.__defaults__, member.__kwdefaults__)
            parts[label(parent, name)] = member
    return parts


def function_in(member: Any) -> types.FunctionType | None:
    """The function of a method, a static or class method or a property of the user's."""
    if isinstance(member, property):
        member = member.fget
    function = getattr(member, "__func__", member)
    users = isinstance(function, types.FunctionType) and not is_library(function.__module__ or "")
    return function if users else None


def _function_parts(function: types.FunctionType) -> dict[str, Any]:
    if is_library(function.__module__ or ""):
        return own_parts(function)
    return {**own_parts(function), **globals_of(function)}


def own_parts(function: types.FunctionType) -> dict[str, Any]:
    """A function without the globals that it uses."""
    where = function.__module__ or ""
    shape: Any = library_mark(where) if is_library(where) else _shape(function.__code__)
    return {
        "code": (where, function.__qualname__, shape),
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "closure": [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)],
    }


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function uses, by the names that lead to them: ``config.SIZE``."""
    found: dict[str, Any] = {}
    for name, *attributes in sorted(set(_used(function.__code__))):
        if name not in function.__globals__:
            continue  # a builtin, or not there
        value = function.__globals__[name]
        for attribute in attributes:
            inside = getattr(value, "__dict__", {})
            if isinstance(value, type) or attribute not in inside:
                break  # a method, a property: all of the object matters
            value = inside[attribute]
            name += f".{attribute}"
        found[name] = value
    return found


def _used(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Names of globals, each with the attributes that are read from it right away."""
    names: list[str] = []
    for step in dis.get_instructions(code):
        if names and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            continue
        if names:
            yield tuple(names)
        names = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant)


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, without where it stands: a line moved down changes nothing."""
    constants = [_shape(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return (code.co_code, constants, names, code.co_flags, code.co_argcount)


def _module_parts(module: types.ModuleType) -> dict[str, Any]:
    return {"name": module.__name__}


def _builtin_parts(function: Any) -> dict[str, Any]:
    bound = getattr(function, "__self__", None)
    owner = None if isinstance(bound, types.ModuleType) else bound
    return {"name": (getattr(function, "__module__", None), function.__qualname__), "self": owner}


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_library(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package that is not the user's own."""
    return module.partition(".")[0] not in users_packages and _is_installed(module)


# Packages of datasets that were asked about: the user's own, installed or not.
users_packages: set[str] = {"__main__"}


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names or module.partition(".")[0] in sys.modules
    parts = Path(file).parts
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_LIBRARIES)


@functools.lru_cache(maxsize=4096)
def library_mark(module: str) -> str:
    """Changes when the module's source, or the version of its package, does."""
    loaded = sys.modules.get(module)
    top = sys.modules.get(module.partition(".")[0])
    mark = hashlib.blake2b(str(getattr(top, "__version__", "")).encode(), digest_size=8)
    file = getattr(loaded, "__file__", None)
    if file is not None and file.endswith(".py"):
        with contextlib.suppress(OSError):  # in a zip file: the version is what is known
            mark.update(Path(file).read_bytes())
    return mark.hexdigest()


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_PARTS: dict[Any, _Parts] = {
    types.FunctionType: _function_parts,
    types.MethodType: lambda bound: {"function": bound.__func__, "self": bound.__self__},
    (types.BuiltinFunctionType, types.MethodWrapperType): _builtin_parts,
    (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType): (
        lambda method: {"name": (method.__objclass__.__qualname__, method.__name__)}
    ),
    types.ModuleType: _module_parts,
    types.CodeType: lambda code: {"code": _shape(code)},
    functools.partial: lambda made: {
        "function": made.func, "arguments": made.args, "keywords": made.keywords,
    },
    functools.partialmethod: lambda made: {
        "function": made.func, "arguments": made.args, "keywords": made.keywords,
    },
    functools.cached_property: lambda made: {"function": made.func},
    functools._lru_cache_wrapper: lambda made: {"function": made.__wrapped__},
    (staticmethod, classmethod): lambda made: {"function": made.__func__},
    property: lambda made: {"get": made.fget, "set": made.fset},
}  # fmt: skip
