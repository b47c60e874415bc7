"""Random generators of torch, Python and numpy: those of a program, and those of its objects."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from stocache._sharing.natives import slots_of

# So many objects are looked at for generators, and so many items of a list: the attributes of a
# dataset may be millions of file names.
_OBJECTS = 2000
_ITEMS = 64

# What most attributes are, and no generator is: to ask torch of each takes long.
_ATOMS = frozenset((bool, int, float, str, bytes, type(None), range))
_PLAIN = _ATOMS | {list, tuple, dict}

# Their classes draw from what the whole program draws from, or from what is in their attributes.
_LIBRARIES = frozenset(("builtins", "torch", "torchvision", "monai", "numpy", "PIL", "stocache"))

_slots: WeakKeyDictionary[type, tuple[Any, ...]] = WeakKeyDictionary()

# Nobody else's seed; what programs draw from has these states then, without numpy and with.
_SECRET = int.from_bytes(os.urandom(4), "little")
_apart: dict[bool, list[Any]] = {}


def is_generator(value: Any) -> bool:
    """Whether it is a random generator, and not one that the whole program draws from. Asks the
    object nothing."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if issubclass(kind, torch.Generator):
        return value is not torch.default_generator
    if issubclass(kind, random.Random):
        if issubclass(kind, random.SystemRandom):  # which has no state
            return False
        return value is not getattr(random.random, "__self__", None)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    if issubclass(kind, numpy_random.RandomState):
        return value is not getattr(numpy_random.rand, "__self__", None)
    return issubclass(kind, numpy_random.Generator)


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generators_of(value: Any) -> list[Any]:
    """The generators that belong to an object: in its attributes, and in what these hold. Nothing
    of it is called."""
    return [each for each in objects_of(value) if is_generator(each)]


def objects_of(value: Any, without: Any = None) -> list[Any]:
    """What belongs to an object, and the object itself: in attributes, slots, items of lists and
    dicts, what a method is of and what a function encloses; generators that its class has, or that
    functions of its class know by name; ``without`` what is found by way of that alone."""
    met: dict[int, Any] = {}
    waiting = [value]
    while waiting and len(met) < _OBJECTS:
        each = waiting.pop()
        if id(each) in met or type(each) in _ATOMS or each is without:
            continue
        met[id(each)] = each
        kind = type(each)
        if is_generator(each):
            continue
        if kind in (list, tuple):
            waiting += each[:_ITEMS]
        elif kind is dict:
            waiting += islice(each.values(), _ITEMS)
        elif kind is MethodType:
            waiting.append(each.__self__)
        elif kind is FunctionType:
            waiting += [cell.cell_contents for cell in each.__closure__ or () if is_set(cell)]
            waiting += _known_to(each)
        elif not issubclass(kind, (type, torch.Tensor, ModuleType)):
            with contextlib.suppress(Exception):  # it does not want to be looked at
                waiting += [slot.__get__(each) for slot in slots_in(kind) if is_set(slot, each)]
                if kind.__dictoffset__:
                    waiting += islice(vars(each).values(), _ITEMS)
                waiting += _in_class(kind)
    return list(met.values())


def _known_to(function: FunctionType) -> list[Any]:
    """Generators that a function knows by a name of its module or as a default, and functions of
    its module that it may call."""
    names = function.__globals__
    known = [names[name] for name in function.__code__.co_names if name in names]
    found = [each for each in (*known, *(function.__defaults__ or ())) if is_generator(each)]
    return found + [
        each for each in known if type(each) is FunctionType and each.__globals__ is names
    ]


def _in_class(kind: type) -> list[Any]:
    """The same of what is in a class of a program's own, or in one that it is made from."""
    found: list[Any] = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            break
        for each in vars(base).values():
            function = getattr(each, "__func__", each)
            if type(function) is FunctionType or is_generator(function):
                found.append(function)
    return found


def slots_in(kind: type) -> tuple[Any, ...]:
    """Where objects of a class keep what has a slot."""
    found = _slots.get(kind)
    if found is None:
        found = _slots[kind] = tuple(slots_of(kind).values())
    return found


def is_set(slot: Any, owner: Any = None) -> bool:
    """Whether a slot of an object, or the cell of a closure, holds anything."""
    try:
        _ = slot.cell_contents if owner is None else slot.__get__(owner)
    except (AttributeError, ValueError):
        return False
    return True


def states(generators: list[Any]) -> list[Any]:
    """Of the generators that a program draws from, and of these. Equal ones have the same bytes."""
    numpy = sys.modules.get("numpy.random")
    return [
        random.getstate(),
        torch.get_rng_state(),
        None if numpy is None else numpy.get_state(),
        *map(state_of, generators),
    ]


@contextlib.contextmanager
def random_numbers_kept(generators: list[Any] | None = None) -> Iterator[None]:
    """What is drawn inside is drawn again outside: from the generators that a program draws from,
    and from these."""
    own = generators or []
    before = states(own)
    try:
        yield
    finally:
        set_states(own, before)


def set_states(generators: list[Any], before: list[Any]) -> None:
    """As ``states`` were."""
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    if before[2] is not None:
        sys.modules["numpy.random"].set_state(before[2])
    for generator, state in zip(generators, before[3:], strict=True):
        set_state(generator, state)


def set_apart(generators: list[Any]) -> list[Any]:
    """Gives the generators of the program, and these, states that nobody else gives them, and which
    are returned. Who draws from them then, or seeds them, is seen: also who gives them the states
    that they had."""
    numpy = sys.modules.get("numpy.random")
    random.seed(_SECRET)
    torch.default_generator.manual_seed(_SECRET)
    if numpy is not None:
        numpy.seed(_SECRET)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(_SECRET)
        elif isinstance(generator, random.Random):
            random.Random.seed(generator, _SECRET)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            bits.state = type(bits)(_SECRET).state
        else:
            generator.seed(_SECRET)
    if (numpy is not None) not in _apart:  # asking takes longer than all the rest
        _apart[numpy is not None] = states([])
    return [*_apart[numpy is not None], *map(state_of, generators)]


def have_moved(before: list[Any], after: list[Any]) -> bool:
    """Whether anything was drawn between two ``states``."""
    return not all(map(_equal, before, after))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and not isinstance(one[0], int):
        return all(map(_equal, one, other))
    same = one == other  # of arrays, each element
    return bool(same.all() if hasattr(same, "all") else same)
