"""Calls the whole API with arguments nobody should pass: python fuzz.py SEED COUNT [MISTAKE].

Prints the number of calls and of exceptions. Whatever is not an ordinary exception (an abort, a
signal, a SystemError, a panic) ends it with an error. MISTAKE is one of those, planted half-way:
for the control."""

import ctypes
import math
import os
import pickle
import random
import sys
import warnings

import numpy as np
import stocache
import torch

seed, count = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Hostile:
    """Says it is a number, a sequence or a tensor, and fails when it is believed."""

    def __init__(self, error=ZeroDivisionError):
        self.error = error

    def __index__(self):
        raise self.error("hostile index")

    __int__ = __float__ = __bool__ = __len__ = __index__

    def __getitem__(self, at):
        raise self.error("hostile item")

    def __iter__(self):
        raise self.error("hostile iteration")

    def __repr__(self):
        return "Hostile()"


class Liar(list):
    """A list whose length is a lie."""

    def __len__(self):
        return rng.choice([0, 1, 5])


def cache_of(dims=(4,), dtype=torch.uint8, **options):
    return stocache.SharedCache(0.0001, 8, dims, dtype, verbose=False, **options)


CACHES = [
    cache_of(),
    cache_of((), torch.float64, backing="memfd"),
    cache_of((2, 3), torch.complex64, verify="always"),
    stocache.SharedCache((8 + 12) / 2**30, 8, (4,), verbose=False),
]
CLOSED = cache_of()
NAMES = {cache: cache.name for cache in [*CACHES, CLOSED]}
SCRIPTED = {cache: cache.scripted() for cache in [*CACHES, CLOSED]}
CLOSED.close()
SCRIPTED[CLOSED].close()

TENSORS = [
    torch.zeros(4, dtype=torch.uint8),
    torch.zeros((), dtype=torch.float64),
    torch.zeros(2, 3, dtype=torch.complex64),
    torch.zeros(2, 4, dtype=torch.uint8),
    torch.zeros(0, dtype=torch.uint8),
    torch.zeros(0, 4, dtype=torch.uint8),
    torch.zeros(4, dtype=torch.uint8).expand(3, 4),
    torch.zeros(4),
    torch.zeros(4, requires_grad=True),
    torch.zeros(4, dtype=torch.uint8, device="meta"),
    torch.zeros(4, dtype=torch.uint8).to_sparse(),
    torch.zeros(2, 3, dtype=torch.complex64).conj(),
    torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
    torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    torch.zeros(8, dtype=torch.uint8)[::2],
    torch.tensor([0, 1]),
    torch.tensor([-1, 2**62]),
    torch.tensor([True, False, True, False]),
    torch.tensor([[0, 1]]),
    torch.tensor([0], dtype=torch.int32),
    torch.tensor([0], dtype=torch.uint64),
    torch.tensor(3),
]


def numbers():
    integers = [0, 1, 3, 7, 8, -1, -8, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40]
    others = [0.5, 1.0, math.nan, math.inf, -math.inf, 1e300, 1j, True, False]
    numpys = [np.int64(2), np.uint8(3), np.float32(1.5), np.bool_(True)]
    return rng.choice([*integers, *others, *numpys])


def weird(depth=0):
    kinds = [
        numbers,
        lambda: rng.choice(TENSORS),
        lambda: rng.choice([None, ..., "", "a", "a/b", "x" * 500, "\0", "\ud800", b"", b"abc"]),
        lambda: rng.choice([slice(None), slice(1, 3), slice(5, 1), slice(0, 8, 2), range(3)]),
        lambda: rng.choice([int, torch.uint8, torch.float32, torch.quint8, np.uint8, object()]),
        lambda: Hostile(rng.choice([ZeroDivisionError, ValueError, RuntimeError, OverflowError])),
        lambda: rng.choice(
            [np.zeros(4, np.uint8), np.arange(3), np.array(["a"]), np.zeros((2, 2))]
        ),
        lambda: rng.choice([*CACHES, CLOSED, stocache, stocache.SharedCache]),
        lambda: (n for n in range(3)),
    ]
    if depth < 2:
        kinds += [
            lambda: [weird(depth + 1) for _ in range(rng.randrange(4))],
            lambda: tuple(weird(depth + 1) for _ in range(rng.randrange(4))),
            lambda: Liar([0, 1]),
            lambda: {weird_key(): weird(depth + 1)},
        ]
    return rng.choice(kinds)()


def weird_key():
    return rng.choice(["idx", "value", "out", "threads", "allow_overwrite", "wrong", "indices"])


def index():
    return rng.choice([lambda: rng.randrange(8), numbers, weird])()


def indices():
    few = [rng.randrange(8) for _ in range(rng.randrange(4))]
    kinds = [lambda: few, lambda: torch.tensor(few or [0]), lambda: np.array(few, int), weird]
    return rng.choice(kinds)()


def value():
    return rng.choice([lambda: rng.choice(TENSORS), weird])()


def few_keywords(*names):
    return {name: weird() for name in names if rng.random() < 0.2}


def construct():
    good = {"size_limit_gib": 0.0001, "dataset_len": 8, "data_dims": (4,), "dtype": torch.uint8}
    optional = ["name", "shared", "backing", "keep", "verify", "verbose"]
    changed = rng.sample([*good, *optional], rng.choice([1, 1, 2]))
    arguments = {**good, "verbose": False, **{name: weird() for name in changed}}
    made = stocache.SharedCache(**arguments)
    path = made.path
    try:
        made.set_slot(0, rng.choice(TENSORS))
    finally:
        made.close()
        if path is not None and os.path.exists(path):
            os.unlink(path)  # something that counts as keep=True


def resize(cache):
    view = cache.get_slot(rng.randrange(8))
    if view is not None:
        view.resize_(rng.choice([0, 1, 2**20]))


ops = torch.ops.stocache
Scripted = torch.classes.stocache.SharedCache


def name(cache):
    return rng.choice([NAMES[cache]] * 4 + [weird()])


def open_by_name():
    good = {"cache": f"fuzz-{os.getpid()}", "size_limit_gib": 0.0001, "dataset_len": 8}
    good |= {"data_dims": [4], "dtype": torch.uint8}
    optional = ["backing", "keep", "verify", "fingerprint"]
    # the sizes are tried in construct(), which ends at the same place
    changed = rng.sample(["cache", "data_dims", "dtype", *optional], rng.choice([0, 1, 1, 2]))
    arguments = {**good, **{key: weird() for key in changed}}
    ops.open(**arguments)
    opened = arguments["cache"]
    if isinstance(opened, bytes):  # torch takes them for text
        opened = opened.decode()
    path = stocache.SharedCache.join(opened).path
    try:
        ops.set(opened, 0, rng.choice(TENSORS))
    finally:
        ops.close(opened)
        if path is not None and os.path.exists(path):
            os.unlink(path)  # something that counts as keep=True


def construct_scripted():
    arguments = [0.0001, 8, [4], torch.uint8, "", "error", "auto", False, "", "never"]
    arguments[rng.randrange(2, len(arguments))] = weird()
    made = Scripted(*arguments[: rng.randrange(3, len(arguments) + 1)])
    path = stocache.SharedCache.join(made.name()).path
    made.close()
    if path is not None and os.path.exists(path):
        os.unlink(path)


def restore(cache):
    state, kind = SCRIPTED[cache].__getstate__()
    broken = [list(part) if isinstance(part, list) else part for part in state]
    at = rng.randrange(4)
    if at == 3:
        broken = weird()
    elif at == 0 or rng.random() < 0.5:
        broken[at] = weird()
    else:
        broken[at][rng.randrange(len(broken[at]))] = weird()
    made = torch.ScriptObject.__new__(torch.ScriptObject)
    made.__setstate__((tuple(broken) if isinstance(broken, list) else broken, kind))
    made.close()


CALLS = [
    lambda c: c.get_slot(index(), **few_keywords("allow_oob_idx", "allow_empty_slot", "wrong")),
    lambda c: c.set_slot(index(), value(), **few_keywords("allow_oob_idx", "allow_overwrite")),
    lambda c: c.set_slot(index(), value(), True, True),
    lambda c: c[index()],
    lambda c: c.__setitem__(index(), value()),
    lambda c: c.get_many(indices(), **few_keywords("out", "threads")),
    lambda c: c.get_many(indices(), out=value(), threads=rng.choice([1, 2, 64])),
    lambda c: c.set_many(indices(), value(), **few_keywords("allow_overwrite")),
    lambda c: c.set_many([0, 1], rng.choice(TENSORS), True),
    lambda c: c.clear(*([weird()] if rng.random() < 0.5 else [])),
    lambda c: (len(c), repr(c), c.stats(), c.fill_fraction, c.name, c.path, c.aux_array.sum()),
    lambda c: pickle.loads(pickle.dumps(c)).close(),
    lambda c: c.__setstate__(weird()),
    lambda c: c.__exit__(*[weird() for _ in range(rng.randrange(4))]) if c is CLOSED else None,
    lambda c: construct(),
    resize,
    lambda c: ops.get(name(c), index()),
    lambda c: ops.set(name(c), index(), value(), *([weird()] if rng.random() < 0.3 else [])),
    lambda c: ops.get_many(name(c), indices()),
    lambda c: ops.set_many(name(c), indices(), value()),
    lambda c: ops.stats(name(c)),
    lambda c: rng.choice([ops.clear, ops.close])(name(c)),
    lambda c: open_by_name(),
    lambda c: SCRIPTED[c].get_slot(index(), **few_keywords("allow_oob_idx", "allow_empty_slot")),
    lambda c: SCRIPTED[c].set_slot(index(), value(), True, rng.choice([True, False, weird()])),
    lambda c: SCRIPTED[c].get_many(indices(), value(), rng.choice([1, 2, numbers()])),
    lambda c: SCRIPTED[c].set_many(indices(), value()),
    lambda c: SCRIPTED[c].set_many(torch.tensor([0, 1]), rng.choice(TENSORS), True),
    lambda c: (SCRIPTED[c].stats(), SCRIPTED[c].array(), len(SCRIPTED[c]), SCRIPTED[c].name()),
    lambda c: pickle.loads(pickle.dumps(SCRIPTED[c])).close(),
    lambda c: Scripted.join(name(c), rng.choice(["error", "empty", weird()])).close(),
    lambda c: construct_scripted(),
    restore,
]


def fail(error):
    raise error


MISTAKES = {
    "abort": lambda c: os.abort(),
    "crash": lambda c: ctypes.string_at(0),
    "SystemError": lambda c: fail(SystemError("returned a result with an exception set")),
    "panic": lambda c: fail(RuntimeError("a bug in stocache, please report it: index is 3")),
}
planted = {count // 2: MISTAKES[sys.argv[3]]} if len(sys.argv) > 3 else {}

raised = 0
for turn in range(count):
    call = rng.randrange(len(CALLS))
    cache = rng.choice([*CACHES * 3, CLOSED])
    # printed by the crash handler of the interpreter's parent: which call was the last
    sys.stderr.write(f"{turn} {'planted here' if turn in planted else call}\n")
    try:
        planted.get(turn, CALLS[call])(cache)
    except SystemError:
        raise
    except Exception as error:
        raised += 1
        if "bug in stocache" in str(error):  # what becomes of a panic
            raise
for cache in CACHES:
    cache.clear()
    cache.close()
    SCRIPTED[cache].close()
print(count, raised)
