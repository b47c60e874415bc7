"""What functions and classes do, as far as it decides what they return.

Code that the user wrote is looked into: instructions, constants, defaults, closures, the globals
and modules that are used (by their values), the members of classes. Code of installed packages
counts by the file it comes from (``modules.py``), or one function would lead into all of torch.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stocache._sharing.modules import (
    imported,
    is_library,
    library_mark,
    module_parts,
    native_mark,
)

# Says nothing of what the class does.
_UNTOLD = frozenset(
    (
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__slotnames__",  # which copyreg leaves in a class when an object of it is pickled
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
    )
)
# What they leave behind is looked at as attributes; the globals they read on the way need not be.
_MAKERS = ("__init__", "__new__", "__post_init__")
_HAS_DOCSTRING = 0x4000000  # a flag of code, from Python 3.13 on
_PLAIN_ACCESS: tuple[Any, ...] = (object.__getattribute__, types.ModuleType.__getattribute__)
_Parts = Callable[[Any], Mapping[str, Any]]


def parts_of(kind: type) -> _Parts | None:
    """How objects of a type that holds code show their parts; None for other types."""
    if issubclass(kind, type):
        return class_parts
    return next((parts for known, parts in _PARTS.items() if issubclass(kind, known)), None)


def class_parts(kind: type) -> dict[str, Any]:
    """The members of a class and of its parents, by name, as far as users wrote them."""
    parts: dict[str, Any] = {"": (kind.__module__, kind.__qualname__)}

    def add(label: str, part: Any) -> None:
        while label in parts:  # a parent may have the name of its child
            label += "'"
        parts[label] = part

    if not is_library(type(kind).__module__):
        add("(metaclass)", type(kind))
    for parent in kind.__mro__:
        if is_library(parent.__module__):
            add(f"({parent.__qualname__})", library_mark(parent.__module__))
            continue
        if issubclass(parent, enum.Enum):
            members = parent.__members__.items()
            add(f"{parent.__qualname__}.members", {name: each.value for name, each in members})
        for name, member in list(vars(parent).items()):
            if name in _UNTOLD or isinstance(member, _DESCRIPTORS):
                continue
            if name in _MAKERS and isinstance(member, types.FunctionType):
                member = (_shape(member.__code__), member.__defaults__, member.__kwdefaults__)
            add(f"{parent.__qualname__}.{name}", member)
    return parts


def function_in(member: Any) -> types.FunctionType | None:
    """The function of a method or of a static or class method of the user's."""
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    if isinstance(function, types.FunctionType) and not is_library(function.__module__):
        return function
    return None


def _function_parts(function: types.FunctionType) -> dict[str, Any]:
    if is_library(function.__module__):
        return own_parts(function)
    return {**own_parts(function), **used_by(function)}


def own_parts(function: types.FunctionType) -> dict[str, Any]:
    """A function without the globals and modules that it uses."""
    where = function.__module__
    shape: Any = library_mark(where) if is_library(where) else _shape(function.__code__)
    return {
        "code": (where, function.__qualname__, shape),
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "closure": [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)],
        "attributes": vars(function),
    }


def used_by(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function uses, by the names that lead to them (``global config.SIZE``),
    and what it imports when it runs."""
    found: dict[str, Any] = {}
    for name, *attributes in sorted(set(_globals(function.__code__))):
        if name not in function.__globals__:
            continue  # a builtin, or not there
        value = function.__globals__[name]
        for attribute in attributes:
            if not _holds(value, attribute):
                break  # a method, a property: all of the object matters
            value = vars(value)[attribute]
            name += f".{attribute}"
        found[f"global {name}"] = value
    package = function.__globals__.get("__package__")
    if package is None:
        package = str(function.__globals__.get("__name__", "")).rpartition(".")[0]
    for level, module, names in sorted(set(_imports(function.__code__)), key=repr):
        try:
            full = importlib.util.resolve_name("." * level + module, package)
        except ImportError:  # will be raised there, too
            continue
        found |= imported(full, names)
    return found


def _holds(value: Any, attribute: str) -> bool:
    """Whether reading the attribute gives what the object itself holds under that name."""
    kind = type(value)
    plain = kind.__getattribute__ in _PLAIN_ACCESS
    if isinstance(value, type) or not plain or not kind.__dictoffset__:
        return False
    of_class = [vars(parent)[attribute] for parent in kind.__mro__ if attribute in vars(parent)]
    return attribute in vars(value) and not any(hasattr(type(each), "__set__") for each in of_class)


def _globals(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Names of globals, each with the attributes that are read from it right away."""
    names: list[str] = []
    for step in dis.get_instructions(code):
        if names and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            continue
        if names:
            yield tuple(names)
        names = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for inner in _inside(code):
        yield from _globals(inner)


def _imports(code: types.CodeType) -> Iterator[tuple[int, str, tuple[str, ...] | None]]:
    """What import statements name: how many packages up, the module, and what is taken from it."""
    last: tuple[Any, Any] = (0, None)  # the level and the names are loaded right before
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield (last[0] or 0, step.argval, last[1])
        elif step.opname != "EXTENDED_ARG":
            last = (last[1], step.argval)
    for inner in _inside(code):
        yield from _imports(inner)


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, without where it stands and what it says of itself: a line moved down
    changes nothing, nor does another docstring, which no instruction loads."""
    steps = [
        (step.opcode, _constant(step.argval) if step.opcode in dis.hasconst else step.arg)
        for step in dis.get_instructions(code)
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    handlers = getattr(code, "co_exceptiontable", b"")
    return (steps, names, counts, code.co_flags & ~_HAS_DOCSTRING, handlers)


def _constant(value: Any) -> Any:
    return _shape(value) if isinstance(value, types.CodeType) else value


def _builtin_parts(function: Any) -> dict[str, Any]:
    bound = getattr(function, "__self__", None)
    # Functions of native modules are bound to the module, or to a pointer into it.
    of_module = isinstance(bound, types.ModuleType) or type(bound).__name__ == "PyCapsule"
    where = getattr(function, "__module__", None)
    return {
        "name": (where, function.__qualname__, native_mark(where)),
        "self": None if of_module else bound,
    }


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _partial_parts(made: Any) -> dict[str, Any]:
    parts = {"function": made.func, "arguments": made.args, "keywords": made.keywords}
    return {**parts, "attributes": vars(made)}


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_PARTS: dict[Any, _Parts] = {
    types.FunctionType: _function_parts,
    types.MethodType: lambda bound: {"function": bound.__func__, "self": bound.__self__},
    (types.BuiltinFunctionType, types.MethodWrapperType): _builtin_parts,
    (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType): (
        lambda method: {"name": (method.__objclass__.__qualname__, method.__name__)}
    ),
    types.ModuleType: module_parts,
    types.CodeType: lambda code: {"code": _shape(code)},
    (functools.partial, functools.partialmethod): _partial_parts,
    functools.cached_property: lambda made: {"function": made.func},
    functools._lru_cache_wrapper: lambda made: {"function": made.__wrapped__},
    (staticmethod, classmethod): lambda made: {"function": made.__func__},
    property: lambda made: {"get": made.fget, "set": made.fset},
}  # fmt: skip
