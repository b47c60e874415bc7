"""What a transform will give, handed on by a dataset that does not look into it.

While a sample is loaded to be cut, the dataset gets a ``Sealed`` thing for what its transform
gives. It can put it anywhere, take entries from it, and unpack it. Whatever else it tries is
noticed, also where it catches the error, and then the sample is not cut. So what is around a result
in a sample that was cut does not depend on it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from stocache import _C
from stocache._compare import same
from stocache._dataset import places
from stocache._dataset.copying import as_stored
from stocache._dataset.places import Path
from stocache._types.registry import register_type


class CannotBeCut(Exception):
    """What a dataset does that cannot be followed."""

    def __init__(self, does: str, never: bool = False) -> None:
        super().__init__(does)
        self.never = never
        """Not with any sample: what was cut before was cut wrongly."""


class Call:
    """A call of a transform, and what the steps that are left of it are called with."""

    __slots__ = ("arguments", "length", "load", "named", "stored", "unpacked")

    def __init__(self, load: Load, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.load = load
        self.arguments = arguments
        self.named = named
        # Who unpacks what several go into expects as many.
        alone = arguments[0] if len(arguments) == 1 and not named else arguments
        self.length = len(alone) if isinstance(alone, (tuple, list)) and alone else None
        self.unpacked: int | None = None
        self.stored = load.encoded((arguments, named))


class Load:
    """What is noted while a sample is loaded to be cut: the calls of its transform."""

    def __init__(self, allow_pickle: bool) -> None:
        self.calls: list[Call] = []
        self.found = ""
        """What the dataset did that cannot be followed, first of all."""
        self.catches = False
        """Errors of its transform may stay in the dataset."""
        self._allow_pickle = allow_pickle
        self._thread = threading.get_ident()
        self._sealed: list[weakref.ref[Sealed]] = []

    def cannot(self, does: str) -> CannotBeCut:
        self.found = self.found or does
        return CannotBeCut(does)

    def note(
        self, steps: Callable[..., Any] | None, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Sealed:
        """A call of the transform, whose first steps these are."""
        if threading.get_ident() != self._thread:
            raise self.cannot("calls its transform from another thread")
        if any(type(node) is Sealed for node, _ in places.walk((arguments, named))):
            raise self.cannot("calls its transform with what its transform gave")
        call = Call(self, *self._after(steps, arguments, named))
        self.calls.append(call)
        return self.sealed(call, ())

    def _after(
        self, steps: Callable[..., Any] | None, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the rest is called with."""
        if steps is None:
            return arguments, dict(named)
        value = steps(*arguments, **named)
        # As Compose hands on what its steps give.
        given = value if len(arguments) > 1 else (value,)
        if type(given) is not tuple:
            raise self.cannot("calls its transform in a way that cannot be followed")
        return given, {}

    def sealed(self, call: Call, path: Path) -> Sealed:
        made: Sealed = object.__new__(Sealed)
        _CALL.__set__(made, call)
        _PATH.__set__(made, path)
        self._sealed.append(weakref.ref(made))
        return made

    def encoded(self, value: Any) -> Any:
        """What would be stored of it."""
        try:
            return _C.codec_encode(value, self._allow_pickle)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise self.cannot(f"calls its transform with what cannot be stored ({why})") from None

    def is_kept(self) -> bool:
        """Whether somebody still has any of what was handed out."""
        return any(sealed() is not None for sealed in self._sealed)


class Through(Load):
    """The whole transform runs, and the rest of it gets what would come from the cache. Numbers of
    a tensor may lie in another order there, and random ones for each of them are drawn as they
    lie."""

    def __init__(self, rest: Callable[..., Any], allow_pickle: bool) -> None:
        super().__init__(allow_pickle)
        self._rest = rest
        self.lies_otherwise = False
        """Something did, and was equal."""

    def note(
        self, steps: Callable[..., Any] | None, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        given = self._after(steps, arguments, named)
        arguments, named = as_stored(given, self._allow_pickle)
        if any(_is_in_another_order(node) for node, _ in places.walk(given)):
            self.lies_otherwise |= same(given, (arguments, named)) is True
        return self._rest(*arguments, **named)


def _is_in_another_order(node: Any) -> bool:
    return (
        isinstance(node, torch.Tensor) and node.layout is torch.strided and not node.is_contiguous()
    )


LOAD: ContextVar[Load | None] = ContextVar("load")
"""Of the sample that is being loaded here; None if it is loaded with the whole transform."""


def _looks(how: str) -> Callable[..., Any]:
    def look(self: Sealed, *_arguments: Any, **_named: Any) -> Any:
        raise _CALL.__get__(self).load.cannot(f"looks at what its transform gave ({how})")

    return look


def _uses(self: Sealed, name: str, *_value: Any) -> Any:
    by = "isinstance" if name == "__class__" else f".{name}"
    raise _CALL.__get__(self).load.cannot(f"looks at what its transform gave ({by})")


class Sealed:
    """Stands for what the rest of the steps will give, or an entry of it."""

    __slots__ = ("__weakref__", "_call", "_path")

    def __getitem__(self, key: Any) -> Sealed:
        call, path = origin(self)
        if type(key) not in (int, str):
            raise call.load.cannot("looks at what its transform gave (a slice)")
        return call.load.sealed(call, (*path, key))

    def __iter__(self) -> Iterator[Sealed]:
        call, path = origin(self)
        if path or call.length is None:
            raise call.load.cannot("unpacks what its transform gave")
        call.unpacked = call.length
        return iter([call.load.sealed(call, (key,)) for key in range(call.length)])


_CALL: Any = vars(Sealed)["_call"]
_PATH: Any = vars(Sealed)["_path"]

for _name in ("getattribute", "setattr", "delattr"):
    setattr(Sealed, f"__{_name}__", _uses)
# What else there is to an object, but for being called, which a result is not: that fails anyway.
_OF_ANY = (
    "abs aenter aiter anext array array_function array_ufunc array_wrap await bool bytes ceil"
    " complex contains copy deepcopy delitem dir dlpack enter eq exit float floor format fspath"
    " ge getstate gt hash index int invert le len length_hint lt missing ne neg next pos reduce"
    " reduce_ex repr reversed round setitem sizeof str tensor_flatten torch_function trunc"
)
_OF_NUMBERS = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
for _name in _OF_ANY.split():
    setattr(Sealed, f"__{_name}__", _looks(_name))
for _name in _OF_NUMBERS.split():
    for _each in (_name, f"r{_name}", f"i{_name}"):
        setattr(Sealed, f"__{_each}__", _looks(_name))


def origin(sealed: Sealed) -> tuple[Call, Path]:
    """Of which call it is, and which entry."""
    return _CALL.__get__(sealed), _PATH.__get__(sealed)


def _not_stored(_sealed: Sealed) -> Any:
    raise _C.UnsupportedSample(
        "the dataset puts what its transform gave into an object of its own, so its random steps "
        "cannot go on after the cache; take them out of it and pass them as "
        "CachedDataset(transform=...)"
    )


register_type(Sealed, _not_stored, Sealed)
