"""What functions and classes do, as far as it decides what they return.

Code that the user wrote is looked into: instructions, constants, defaults, closures, the globals
and modules that are used (by their values), the members of classes. Code of installed packages
counts by the file it comes from (``modules.py``), or one function would lead into all of torch.

A class is met in two ways. As that of an object (``ClassOf``) it counts by what its objects do: how
they are made has been done, and left attributes behind. Wherever else code finds it, it may make
objects of it while a sample is loaded, so it counts whole, with all that making one uses.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import os
import types
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

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
        "__dataclass_fields__",  # told apart: _fields
        "__subclasshook__",
    )
)
# What they left behind in an object is looked at as its attributes.
_MAKERS = ("__init__", "__new__", "__post_init__")
# Of a field of a dataclass; its type is an annotation, which does nothing.
_OF_A_FIELD = ("_field_type", "init", "repr", "hash", "compare", "kw_only", "metadata", "default")
_HAS_DOCSTRING = 0x4000000  # a flag of code, from Python 3.13 on
_PLAIN_ACCESS: tuple[Any, ...] = (
    object.__getattribute__,
    types.ModuleType.__getattribute__,
    type.__getattribute__,
)
_COMPILED = (type(None), type(...), float, complex, str, bytes)  # constants, beside numbers
_KEY = "key "
_ANALYSED = 1 << 14  # functions whose instructions are remembered
Parts = Callable[[Any], Mapping[str, Any]]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, eq=False)
class ClassOf:
    """A class as that of objects which are there already."""

    kind: type


def parts_of(kind: type) -> Parts | None:
    """How objects of a type that holds code show their parts; None for other types."""
    if issubclass(kind, type):
        return class_parts
    return next((parts for known, parts in _PARTS.items() if issubclass(kind, known)), None)


def class_parts(kind: type, made: bool = False) -> dict[str, Any]:
    """The members of a class and of its parents, by name, as far as users wrote them. ``made``: the
    objects are there already, and what making them uses is left out."""
    parts: dict[str, Any] = {"": (kind.__module__, kind.__qualname__)}

    def add(label: str, part: Any) -> None:
        while label in parts:  # a parent may have the name of its child
            label += "'"
        parts[label] = part

    metaclass = type(kind)
    # One that does not say where it is from is Cython's, for what its modules have in common.
    if isinstance(metaclass.__module__, str) and not is_library(metaclass.__module__):
        add("(metaclass)", ClassOf(metaclass))
    for parent in kind.__mro__:
        if is_library(parent.__module__):
            add(f"({parent.__qualname__})", library_mark(parent.__module__))
            continue
        if issubclass(parent, enum.Enum):
            members = parent.__members__.items()
            add(f"{parent.__qualname__}.members", {name: each.value for name, each in members})
        for name, member in list(vars(parent).items()):
            if name == "__dataclass_fields__" and isinstance(member, dict):
                add(f"{parent.__qualname__}.fields", _fields(member, made))
            if name in _UNTOLD or isinstance(member, _DESCRIPTORS):
                continue
            if name in _MAKERS and made:
                member = _done(member)
            add(f"{parent.__qualname__}.{name}", member)
    return parts


def _fields(fields: dict[str, Any], made: bool) -> dict[str, Any]:
    """What a dataclass says of its fields."""
    found: dict[str, Any] = {}
    for name, each in fields.items():
        told = [getattr(each, told, None) for told in _OF_A_FIELD]
        factory = getattr(each, "default_factory", None)
        found[name] = (*told, _done(factory) if made else factory)
    return found


def _done(maker: Any) -> Any:
    """A function that makes objects, without the globals that it reads on the way."""
    if isinstance(maker, types.FunctionType):
        return (_shape(maker.__code__), maker.__defaults__, maker.__kwdefaults__)
    return maker


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
        "closure": list(_closure(function)),
        "attributes": vars(function),
    }


def _closure(function: types.FunctionType) -> Iterator[Any]:
    """The values from outside that a function uses. ``super()`` makes no object of its class."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not _is_set(cell):
            continue
        value = cell.cell_contents
        only_super = name == "__class__" and not _analysis(function.__code__).names_its_class
        yield ClassOf(value) if only_super and issubclass(type(value), type) else value


def used_by(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function uses, by the names that lead to them (``global config.SIZE``),
    and what it imports when it runs."""
    found: dict[str, Any] = {}
    analysis = _analysis(function.__code__)
    for (name, *attributes), use in analysis.globals:
        if name not in function.__globals__:
            continue  # a builtin, or not there
        value = function.__globals__[name]
        if use == "counter" and type(value) is int:
            continue  # of what was done so far, for others to read
        only_read = use == "super" and "super" not in function.__globals__
        for attribute in attributes:
            if not _holds(value, attribute):
                only_read = _is_only_read(value, attribute)
                break  # a method, a property: all of the object matters
            value = vars(value)[attribute]
            name += f".{attribute}"
        if use.startswith(_KEY) and (value is os.environ or value is os.getenv):
            key = use.removeprefix(_KEY)
            found[f"global {name}[{key}]"] = os.environ.get(key)
        elif only_read and issubclass(type(value), type):
            found.setdefault(f"global {name}", ClassOf(value))
        else:
            found[f"global {name}"] = value
    package = function.__globals__.get("__package__")
    if package is None:
        package = str(function.__globals__.get("__name__", "")).rpartition(".")[0]
    for level, module, names in analysis.imports:
        try:
            full = importlib.util.resolve_name("." * level + module, package)
        except ImportError:  # will be raised there, too
            continue
        found |= imported(full, names)
    return found


def _is_only_read(kind: Any, attribute: str) -> bool:
    """Whether ``Kind.attribute`` gives what the class holds, so that no object can come of it: a
    class method could make one."""
    if not issubclass(type(kind), type) or attribute in _MAKERS:
        return False
    meta = type(kind)
    if meta.__getattribute__ not in _PLAIN_ACCESS or any(
        attribute in vars(each) for each in meta.__mro__ if not is_library(each.__module__)
    ):
        return False
    held = [vars(parent)[attribute] for parent in kind.__mro__ if attribute in vars(parent)]
    return bool(held) and (
        isinstance(held[0], (types.FunctionType, staticmethod))
        or not hasattr(type(held[0]), "__get__")
    )


def _holds(value: Any, attribute: str) -> bool:
    """Whether reading the attribute gives what the object itself holds under that name."""
    kind = type(value)
    plain = kind.__getattribute__ in _PLAIN_ACCESS
    if isinstance(value, type) or not plain or not kind.__dictoffset__:
        return False
    of_class = [vars(parent)[attribute] for parent in kind.__mro__ if attribute in vars(parent)]
    return attribute in vars(value) and not any(hasattr(type(each), "__set__") for each in of_class)


def _remembered(analyse: Callable[[types.CodeType], _T]) -> Callable[[types.CodeType], _T]:
    """Of each code once. By its address: comparing two takes long, and not all can be hashed."""
    known: dict[int, tuple[types.CodeType, _T]] = {}

    @functools.wraps(analyse)
    def remember(code: types.CodeType) -> _T:
        found = known.get(id(code))
        if found is None:
            if len(known) >= _ANALYSED:
                known.clear()
            found = known[id(code)] = (code, analyse(code))
        return found[1]

    return remember


@dataclasses.dataclass(frozen=True)
class _Analysis:
    """What the instructions of a function say, with those of the functions inside it."""

    globals: list[tuple[tuple[str, ...], str]]
    """Names of globals, each with the attributes that are read from it right away, and what for:
    "super" if it stands in ``super(...)``, "counter" if it goes up by a constant, "key X" if that
    entry of it is read."""
    imports: list[tuple[int, str, tuple[str, ...] | None]]
    """What import statements name: how many packages up, the module, and what is taken from it."""
    names_its_class: bool
    """Whether it reads ``__class__``, other than for ``super()``."""


@_remembered
def _analysis(code: types.CodeType) -> _Analysis:
    return _Analysis(
        sorted(set(_globals(code))), sorted(set(_imports(code)), key=repr), _names_its_class(code)
    )


def _globals(code: types.CodeType) -> Iterator[tuple[tuple[str, ...], str]]:
    names: list[str] = []
    use = ""
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        if names and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            continue
        if names:
            yield tuple(names), use or _key(names[-1], steps[at : at + 4])
        use = "super" if names == ["super"] else ""
        names = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
        if names and _goes_up(steps[at : at + 4]):
            use = "counter"
    for inner in _inside(code):
        yield from _globals(inner)


def _goes_up(steps: list[dis.Instruction]) -> bool:
    """Whether this is ``COUNT += 1``, and nothing else comes of it."""
    if len(steps) < 4 or not isinstance(steps[1].argval, int):
        return False
    loads, adds, stores = (step.opname for step in steps[1:])
    return (
        loads in ("LOAD_CONST", "LOAD_SMALL_INT")
        and (adds == "INPLACE_ADD" or (adds == "BINARY_OP" and steps[2].argrepr == "+="))
        and (stores, steps[3].argval) == ("STORE_GLOBAL", steps[0].argval)
    )


def _key(name: str, steps: list[dis.Instruction]) -> str:
    """The use of what is read by ``[X]``, ``get(X)`` or ``getenv(X)``; these may have a default."""
    loads = [step for step in steps[:2] if step.opname == "LOAD_CONST"]
    after = steps[len(loads)] if len(steps) > len(loads) else None
    if not loads or after is None or not isinstance(loads[0].argval, str):
        return ""
    calls = after.opname in (
        "PRECALL",
        "CALL",
        "CALL_METHOD",
        "CALL_FUNCTION",
    ) and after.arg == len(loads)
    entry = after.opname == "BINARY_SUBSCR" or after.argrepr == "[]"
    by_name = calls if name in ("get", "getenv") else entry and len(loads) == 1
    return f"{_KEY}{loads[0].argval}" if by_name else ""


def _imports(code: types.CodeType) -> Iterator[tuple[int, str, tuple[str, ...] | None]]:
    last: tuple[Any, Any] = (0, None)  # the level and the names are loaded right before
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield (last[0] or 0, step.argval, last[1])
        elif step.opname != "EXTENDED_ARG":
            last = (last[1], step.argval)
    for inner in _inside(code):
        yield from _imports(inner)


def _names_its_class(code: types.CodeType) -> bool:
    before = None  # super().x loads the class right after the global
    for step in dis.get_instructions(code):
        loads = step.opname.startswith("LOAD_") and step.opname.endswith("DEREF")
        if loads and step.argval == "__class__" and before != "super":
            return True
        before = step.argval if step.opname == "LOAD_GLOBAL" else None
    return any(map(_names_its_class, _inside(code)))


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What the code does, without where it stands and what it says of itself: a line moved down
    changes nothing, nor does another docstring, which no instruction loads."""
    text, odd = _text(code)
    return (text, *odd)  # a new one each time, for what was met before counts as that


@_remembered
def _text(code: types.CodeType) -> tuple[str, list[Any]]:
    """A digest, and the constants that no compiler made."""
    steps, constants, odd = array("Q"), [], []

    def known(value: Any) -> tuple[Any, ...]:
        if isinstance(value, types.CodeType):
            text, inner = _text(value)
            odd.extend(inner)
            return ("code", text)
        kind = type(value)
        if kind in (int, bool):  # which cannot always be printed in decimal digits
            return (kind.__name__, hex(value))
        if kind in (tuple, frozenset):
            parts = list(map(known, value))
            return (kind.__name__, *(parts if kind is tuple else sorted(parts)))
        if kind not in _COMPILED:
            odd.append(value)
        return (kind.__name__, repr(value) if kind in _COMPILED else "")

    for step in dis.get_instructions(code):
        if step.opcode in dis.hasconst:
            steps.extend((step.opcode, 0))
            constants.append(known(step.argval))
        else:
            steps.extend((step.opcode, 0 if step.arg is None else step.arg + 1))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    handlers = getattr(code, "co_exceptiontable", b"")
    told = (constants, names, counts, code.co_flags & ~_HAS_DOCSTRING, handlers)
    mark = hashlib.blake2b(steps.tobytes(), digest_size=16)
    mark.update(repr(told).encode("utf-8", "surrogatepass"))
    return mark.hexdigest(), odd


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
_PARTS: dict[Any, Parts] = {
    ClassOf: lambda of: class_parts(of.kind, made=True),
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
