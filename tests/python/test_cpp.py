"""The C++ API: the same cache, the same answers and the same errors as in Python."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import kernel
import pytest
import stocache
import torch
from probe import Probe, text
from samples import GIB, complaint, whole, words_cache


@pytest.fixture(scope="module")
def server(probe_program):
    """The probe that most tests talk to: starting one takes longer than a test."""
    probe = Probe(probe_program, "serve", stderr=subprocess.DEVNULL)
    yield probe
    if probe.child.poll() is None:
        probe.end()


@pytest.fixture
def cpp(server, start_probe):
    """A C++ process for this test: cpp.ask(command), cpp.result(command)."""
    # A crash is the failure of one test, not of all that follow.
    probe = (
        server if server.child.poll() is None else start_probe("serve", stderr=subprocess.DEVNULL)
    )
    yield probe
    if probe.child.poll() is None:
        probe.ask("reset")


# The same commands in Python


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def from_raw(data: bytes, dims, dtype) -> torch.Tensor:
    tensor = torch.empty(dims, dtype=dtype)
    assert len(data) == tensor.numel() * tensor.element_size()
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def shown(tensor: torch.Tensor) -> dict:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "bytes": raw(tensor).hex()}


def untext(word: str) -> str:
    return bytes.fromhex(word[1:]).decode()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


ODD_VALUES = {
    "zeros": lambda dims, dtype: torch.zeros(dims, dtype=dtype),
    "longer": lambda dims, dtype: torch.zeros((*dims[:-1], dims[-1] + 1), dtype=dtype),
    "deeper": lambda dims, dtype: torch.zeros((1, *dims), dtype=dtype),
    "float64": lambda dims, dtype: torch.zeros(dims, dtype=torch.float64),
    "meta": lambda dims, dtype: torch.empty(dims, dtype=dtype, device="meta"),
    "sparse": lambda dims, dtype: torch.zeros(dims, dtype=dtype).to_sparse(),
    "quantized": lambda dims, dtype: torch.quantize_per_tensor(
        torch.zeros(dims), 1.0, 0, torch.quint8
    ),
    "freed": lambda dims, dtype: freed(torch.zeros(dims, dtype=dtype)),
    "strided": lambda dims, dtype: torch.ones((*dims[:-1], dims[-1] * 2), dtype=dtype)[..., ::2],
}
ODD_INDICES = {
    "float": lambda: torch.zeros(2),
    "bool": lambda: torch.zeros(2, dtype=torch.bool),
    "matrix": lambda: torch.zeros(2, 2, dtype=torch.int64),
    "meta": lambda: torch.empty(2, dtype=torch.int64, device="meta"),
    "sparse": lambda: torch.zeros(2, dtype=torch.int64).to_sparse(),
    "freed": lambda: freed(torch.zeros(2, dtype=torch.int64)),
    "int32": lambda: torch.arange(2, dtype=torch.int32),
}


class Mirror:
    """Does what `probe serve` does, with the Python class."""

    def __init__(self) -> None:
        self.caches: dict[str, stocache.SharedCache] = {}
        self.dims: tuple[int, ...] = ()
        self.dtype = torch.uint8

    def ask(self, command: str) -> dict:
        what, *words = command.split()
        try:
            return {"ok": getattr(self, what)(*words)}
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error)}

    def put(self, key: str, cache: stocache.SharedCache) -> None:
        _, _, self.dims, self.dtype, *_ = cache._arguments()
        self.caches[key] = cache

    def open(self, key, gib, length, dims, dtype, *options) -> None:
        pairs = (option.split("=") for option in options)
        given = {k: True if k == "keep" else untext(v) for k, v in pairs}
        shape = tuple(map(int, dims.split("x"))) if dims != "-" else ()
        kind = getattr(torch, dtype)
        self.put(
            key,
            stocache.SharedCache(float(gib), int(length), shape, kind, verbose=False, **given),
        )

    def join(self, key, name) -> None:
        self.put(key, stocache.SharedCache.join(untext(name)))

    def value(self, word: str, *rows: int) -> torch.Tensor:
        dims = (*rows, *self.dims)
        if word in ODD_VALUES:
            return ODD_VALUES[word](dims, self.dtype)
        return from_raw(bytes.fromhex(word[1:]), dims, self.dtype)

    def indices(self, word: str) -> torch.Tensor:
        if word in ODD_INDICES:
            return ODD_INDICES[word]()
        return torch.tensor(list(map(int, word.split(","))))

    def close(self, key) -> None:
        self.caches[key].close()

    def closed(self, key) -> bool:
        return self.caches[key].closed

    def get(self, key, idx, beyond, empty) -> dict | None:
        hit = self.caches[key].get_slot(int(idx), beyond == "1", empty == "1")
        return None if hit is None else shown(hit)

    def set(self, key, idx, value, beyond, overwrite) -> bool:
        cache = self.caches[key]
        before = cache.stats().fills
        cache.set_slot(int(idx), self.value(value), beyond == "1", overwrite == "1")
        return cache.stats().fills > before

    def offer(self, key, idx, value) -> bool:
        cache = self.caches[key]
        return bool(torch.ops.stocache.set(cache.name, int(idx), self.value(value)))

    def get_many(self, key, indices, out, threads) -> dict:
        at, cache = self.indices(indices), self.caches[key]
        if out == "itself":
            into = cache.array[: at.numel()]
        else:
            into = None if out == "-" else self.value(out, at.numel())
        batch, found = cache.get_many(at, into, int(threads))
        assert into is None or batch is into
        return {"batch": shown(batch), "found": shown(found)}

    def set_many(self, key, indices, batch, overwrite) -> dict:
        at = self.indices(indices)
        rows = self.value(batch, at.numel())
        return shown(self.caches[key].set_many(at, rows, overwrite == "1"))

    def array(self, key) -> dict:
        return shown(self.caches[key].array)

    def clear(self, key) -> None:
        self.caches[key].clear()

    def stats(self, key) -> dict:
        return dict(vars(self.caches[key].stats()))

    def line(self, key) -> str:
        return str(self.caches[key].stats())

    def facts(self, key) -> dict:
        cache = self.caches[key]
        _, length, dims, dtype, *_ = cache._arguments()
        return {
            "size": len(cache),
            "dataset_len": length,
            "data_dims": list(dims),
            "dtype": str(dtype).removeprefix("torch."),
            "name": cache.name,
            "path": cache.path or "",
            "backing": cache.backing,
            "fill_fraction": cache.fill_fraction,
        }


@pytest.fixture
def mirror():
    mirror = Mirror()
    yield mirror
    for cache in mirror.caches.values():
        cache.close()


# The same cache

SMALL = f"{(8 + 6 * 4) / GIB!r} 8 4 uint8"  # six slots of four bytes for a dataset of eight
DTYPES = [
    torch.uint8, torch.int8, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
]  # fmt: skip


def random_bytes(dims, dtype, random_: random.Random) -> bytes:
    size = torch.empty(dims, dtype=dtype).numel() * dtype.itemsize
    if dtype == torch.bool:
        return bytes(random_.choices((0, 1), k=size))
    return random_.randbytes(size)


@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_one_writes_the_other_reads(cpp, make_cache, unique_name, seed, dtype, dims):
    values = [random_bytes(dims, dtype, random.Random(seed + i)) for i in range(4)]
    cache = make_cache(0.001, 8, dims, dtype, name=unique_name())
    cpp.result(f"join a {text(cache.name)}")
    # Python writes, C++ reads
    cache.set_slot(0, from_raw(values[0], dims, dtype))
    cache.set_many([1], from_raw(values[1], (1, *dims), dtype))
    for i in (0, 1):
        got = cpp.result(f"get a {i} 1 1")
        assert got == {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(dims),
            "bytes": values[i].hex(),
        }
    many = cpp.result("get_many a 0,1,2 - 1")
    assert many["batch"]["bytes"] == (values[0] + values[1] + bytes(len(values[0]))).hex()
    assert many["found"] == {"dtype": "bool", "shape": [3], "bytes": "010100"}
    # C++ writes, Python reads
    assert cpp.result(f"set a 4 x{values[2].hex()} 1 0") is True
    assert cpp.result(f"set_many a 5 x{values[3].hex()} 0")["bytes"] == "01"
    for i in (2, 3):
        view = cache.get_slot(i + 2)
        assert view.dtype == dtype and view.shape == dims and raw(view) == values[i]
    assert cpp.result("array a") == shown(cache.array)


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_cache_made_in_cpp_is_what_python_joins(cpp, mirror, unique_name, backing):
    name = unique_name()
    options = f"{SMALL} name={text(name)} backing={text(backing)} verify={text('always')}"
    cpp.result(f"open a {options}")
    cpp.result("set a 1 x01020304 1 0")
    for command in (f"open b {options}", f"join b {text(name)}"):
        mirror.ask(command)
        assert mirror.ask("get b 1 1 1")["ok"]["bytes"] == "01020304"
        facts = mirror.ask("facts b")["ok"]
        assert facts == cpp.result("facts a")
        assert facts["name"] == name and facts["backing"] == backing
        assert Path(facts["path"]).exists() if backing == "shm" else facts["path"] == ""
        assert mirror.ask("stats b")["ok"] == cpp.result("stats a")
        mirror.ask("close b")
    cpp.result("close a")
    assert mirror.ask(f"join b {text(name)}")["error"] == "RuntimeError", "nobody has it any more"


def test_a_cache_without_a_name_is_found_by_the_name_it_got(cpp, mirror):
    cpp.result(f"open a {SMALL}")
    cpp.result("offer a 2 x01010101")
    name = cpp.result("facts a")["name"]
    mirror.ask(f"join b {text(name)}")
    assert mirror.ask("get b 2 1 1")["ok"]["bytes"] == "01010101"


def test_a_kept_cache_made_in_cpp_is_there_for_the_next_run(start_probe, make_cache, unique_name):
    name = unique_name()
    first = start_probe("serve")
    first.result(f"open a {SMALL} name={text(name)} keep=x fingerprint={text('v1')}")
    first.result("set a 1 x01020304 1 0")
    path = Path(first.result("facts a")["path"])
    first.end()
    try:
        limit = (8 + 6 * 4) / GIB
        cache = make_cache(limit, 8, (4,), name=name, keep=True, fingerprint="v1")
        assert cache.get_slot(1).tolist() == [1, 2, 3, 4]
    finally:
        path.unlink()


def random_commands(random_: random.Random, count: int):
    """Calls with good and bad arguments; two caches of one geometry must answer them equally."""

    def sample(rows=1):
        return random_.choice(["strided", *["x" + random_.randbytes(4 * rows).hex()] * 3])

    def flag():
        return random_.choice("01")

    def index():
        return random_.choice([-1, 8, 9, *range(8), *range(8)])

    calls = [
        "get", "get", "set", "set", "offer", "get_many", "set_many", "clear", "stats", "line",
        "facts",
    ]  # fmt: skip
    for _ in range(count):
        match random_.choice(calls):
            case "get":
                yield f"get a {index()} {flag()} {flag()}"
            case "set":
                yield f"set a {index()} {sample()} {flag()} {flag()}"
            case "offer":
                yield f"offer a {index()} {sample()}"
            case "get_many":
                out = random_.choice(["-", "zeros", "longer"])
                at = random_.choice(["int32", *[f"{index()},{index()},{index()}"] * 3])
                yield f"get_many a {at} {out} {random_.randint(0, 3)}"
            case "set_many":
                yield f"set_many a {index()},{index()} {sample(2)} {flag()}"
            case "clear" if random_.random() > 0.2:
                yield "array a"
            case word:
                yield f"{word} a"


@pytest.mark.parametrize("verify", ["never", "always"])
def test_the_same_calls_get_the_same_answers(cpp, mirror, unique_name, seed, scale, verify):
    names = unique_name(), unique_name()
    options = f"backing={text('shm')} verify={text(verify)}"
    cpp.result(f"open a {SMALL} name={text(names[0])} {options}")
    assert "ok" in mirror.ask(f"open a {SMALL} name={text(names[1])} {options}")
    errors = 0
    for command in random_commands(random.Random(seed), scale(600, 20_000)):
        in_cpp = json.loads(json.dumps(cpp.ask(command)).replace(*names))
        in_python = mirror.ask(command)
        assert in_cpp == in_python, command
        errors += "error" in in_cpp
    assert errors > 20, "the calls were all good ones"
    assert mirror.ask("stats a")["ok"]["hits"] > 0


# The same errors

ON_A_CACHE = {
    "get outside": "get a 8 1 1",
    "get negative": "get a -1 1 1",
    "get far outside": f"get a {2**63 - 1} 1 1",
    "get far below": f"get a {-(2**63)} 1 1",
    "get beyond": "get a 7 0 1",
    "get empty": "get a 3 1 0",
    "set outside": "set a 8 x01010101 1 0",
    "set negative": "set a -1 x01010101 1 1",
    "set beyond": "set a 7 x01010101 0 0",
    "set known": "set a 0 x01010101 1 0",
    "offer outside": "offer a 8 x01010101",
    **{
        f"{call} {value}": f"{call} {value}{end}"
        for call, end in (("set a 1", " 1 0"), ("set a 0", " 1 1"), ("set a 7", " 1 0"))
        for value in ("longer", "deeper", "float64", "meta", "sparse", "quantized", "freed")
    },
    # Python's offer is the operator. A meta tensor asks it for its shape only, so it is not here.
    **{
        f"offer {value}": f"offer a 1 {value}"
        for value in ("longer", "deeper", "float64", "sparse", "quantized", "freed")
    },
    **{
        f"get_many {indices}": f"get_many a {indices} - 1"
        for indices in ("0,8", "0,-1", "float", "bool", "matrix", "meta", "sparse", "freed")
    },
    **{f"get_many threads {n}": f"get_many a 0,1 - {n}" for n in (0, -1, 1025, 2**40)},
    **{
        f"get_many out {out}": f"get_many a 0,1 {out} 1"
        for out in ("longer", "deeper", "float64", "meta", "sparse", "freed", "strided", "itself")
    },
    **{
        f"set_many {indices}": f"set_many a {indices} zeros 0"
        for indices in ("1,8", "1,-1", "float", "bool", "meta", "sparse", "freed")
    },
    "set_many matrix": "set_many a matrix deeper 0",
    **{
        f"set_many batch {batch}": f"set_many a 1,2 {batch} 0"
        for batch in ("longer", "deeper", "float64", "meta", "sparse", "quantized", "freed")
    },
    "join of nobody's": f"join b {text('nobody-has-this-name')}",
    "join of no name": f"join b {text('')}",
    "join of a bad name": f"join b {text('a/b')}",
    "join of a long name": f"join b {text('x' * 101)}",
}

LIMIT = 32 / GIB
CONSTRUCTOR = {
    **{
        f"size_limit_gib {limit}": f"open b {limit} 8 4 uint8"
        for limit in ("0", "-0.0", "-1", "-0.5", "nan", "inf", "-inf", "1e300", str(2**33))
    },
    **{f"dataset_len {n}": f"open b 0.001 {n} 4 uint8" for n in (0, -3, -(2**61))},
    "dataset_len huge": f"open b 0.001 {2**62 - 1} 4 uint8",
    **{f"data_dims {dims}": f"open b 0.001 8 {dims} uint8" for dims in ("0", "3x0x2", "3x-1")},
    "data_dims many": f"open b 0.001 8 {'x'.join('1' * 17)} uint8",
    "data_dims huge": f"open b 0.001 8 {2**40}x{2**40} uint8",
    "dtype quantized": "open b 0.001 8 4 quint8",
    **{
        f"name {name!a:.12}": f"open b 0.001 8 4 uint8 name={text(name)}"
        for name in ("a/b", "../up", "a b", "größe", "x" * 101)
    },
    **{f"backing {w!r}": f"open b 0.001 8 4 uint8 backing={text(w)}" for w in ("disk", "", "SHM")},
    **{f"verify {w!r}": f"open b 0.001 8 4 uint8 verify={text(w)}" for w in ("sometimes", "")},
    "keep without name": "open b 0.001 8 4 uint8 keep=x",
    "keep of a memfd": f"open b 0.001 8 4 uint8 keep=x name={text('k')} backing={text('memfd')}",
    "larger than the machine": f"open b {2**20} {2**20} {2**30} uint8",
    "larger than the machine, shm": f"open b {2**20} {2**20} {2**30} uint8 backing={text('shm')}",
    # Against the cache of that name: 6 of 8 samples of 4 bytes, fingerprint "v1"
    **{
        f"other geometry: {change}": f"open b {change} name=NAME fingerprint={text('v1')}"
        for change in (
            f"{LIMIT!r} 9 4 uint8",
            f"{LIMIT!r} 8 2x2 uint8",
            f"{LIMIT!r} 8 - uint8",
            f"{LIMIT!r} 8 4 int8",
            f"{LIMIT!r} 8 4 float8_e4m3fn",
            f"{LIMIT!r} 8 2 bfloat16",
            f"{28 / GIB!r} 8 4 uint8",
            f"{LIMIT!r} 8 4 uint8 verify={text('always')}",
        )
    },
    "other fingerprint": f"open b {LIMIT!r} 8 4 uint8 name=NAME fingerprint={text('v2')}",
    "no fingerprint": f"open b {LIMIT!r} 8 4 uint8 name=NAME",
    "not kept": f"open b {LIMIT!r} 8 4 uint8 name=NAME keep=x fingerprint={text('v1')}",
}


@pytest.fixture
def subject(cpp, mirror, make_cache, unique_name):
    """A cache with slot 0 set, which both have open as `a`."""
    cache = make_cache(LIMIT, 8, (4,), name=unique_name(), fingerprint="v1")
    cache.set_slot(0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    cpp.result(f"join a {text(cache.name)}")
    mirror.ask(f"join a {text(cache.name)}")
    return cache


def steady(answer: dict) -> dict:
    """Without how much memory happens to be free at the moment."""
    free = r"((?:but only|/dev/shm has|to at most) )[\d.]+( [KMGTP]iB)?"
    return {key: re.sub(free, r"\1…", value) for key, value in answer.items()}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, still there
@pytest.mark.parametrize("mistake", [*ON_A_CACHE, *CONSTRUCTOR], ids=str)
def test_a_mistake_is_told_in_the_same_words(cpp, mirror, subject, mistake):
    command = {**ON_A_CACHE, **CONSTRUCTOR}[mistake].replace("NAME", text(subject.name))
    in_cpp, in_python = cpp.ask(command), mirror.ask(command)
    assert "error" in in_python, f"Python takes it: {in_python}"
    assert steady(in_cpp) == steady(in_python)
    assert in_cpp["text"] and "\n" not in in_cpp["text"]
    assert subject.aux_array.tolist() == [1, 0, 0, 0, 0, 0, 2, 2], "a failed call changed something"
    assert subject.get_slot(0).tolist() == [1, 2, 3, 4]


def test_what_only_cpp_can_get_wrong(cpp, subject):
    def error(command):
        answer = cpp.ask(command)
        assert "\n" not in answer["text"]
        return answer["error"], answer["text"]

    undefined = "is an undefined tensor; use an ordinary tensor"
    assert error("set a 1 undefined 1 0") == ("ValueError", f"value {undefined}")
    assert error("offer a 1 meta") == error("set a 1 meta 1 0")
    assert error("offer a 1 undefined") == ("ValueError", f"value {undefined}")
    assert error("set_many a 1,2 undefined 0") == ("ValueError", f"batch {undefined}")
    assert error("get_many a 0,1 undefined 1") == ("ValueError", f"out {undefined}")
    for call in ("get_many a undefined - 1", "set_many a undefined zeros 0"):
        assert error(call) == ("ValueError", f"indices {undefined}")
    allowed = "is not allowed: use 1 to 100 letters, digits, dots, dashes and underscores"
    for name in (b"caf\xe9", b"\xff\xfe", b"new\nline", b"nul\0", "größe".encode()):
        for command in (
            f"open b 0.001 8 4 uint8 name={text(name)}",
            f"join b {text(name)}",
        ):
            kind, words = error(command)
            assert kind == "ValueError" and words.startswith('name "') and words.endswith(allowed)
    assert error(f"open b 0.001 8 4 uint8 backing={text(bytes([255]))}")[0] == "ValueError"
    for dtype, words in (("undefined", "undefined"), ("none", "99")):
        assert error(f"open b 0.001 8 4 {dtype}") == (
            "ValueError",
            f"Unsupported dtype: {words}; use a torch.dtype such as torch.uint8",
        )
    assert subject.aux_array.tolist() == [1, 0, 0, 0, 0, 0, 2, 2]


CALLS = [
    "get a 0 1 1", "set a 1 x01010101 1 0", "offer a 1 x01010101", "get_many a 0 - 1",
    "set_many a 1 zeros 0", "array a", "clear a", "stats a", "line a", "facts a",
]  # fmt: skip


def test_a_closed_handle_says_so_whatever_is_asked(cpp, mirror, subject):
    for asked in (cpp, mirror):
        asked.ask("close a")
        assert asked.ask("closed a") == {"ok": True}
        assert asked.ask("close a") == {"ok": None}, "closing twice is no mistake"
    closed = {"error": "RuntimeError", "text": "this SharedCache is closed; construct a new one"}
    for call in CALLS:
        assert cpp.ask(call) == closed, call
        assert mirror.ask(call) == closed, call


def test_a_handle_that_was_moved_away_is_closed(cpp, subject):
    cpp.result("move b a")
    assert cpp.result("closed a") is True
    for call in CALLS:
        assert cpp.ask(call)["text"] == "this SharedCache is closed; construct a new one"
    assert cpp.result("get b 0 1 1")["bytes"] == "01020304"
    cpp.result("move a b")
    assert cpp.result("get a 0 1 1")["bytes"] == "01020304"


@pytest.fixture
def start_with_mount(start_probe):
    """A probe with a /dev/shm of its own."""

    def start_it(options: str, flags: int = 0) -> Probe:
        try:
            return start_probe("serve", preexec_fn=lambda: kernel.mount_shm(options, flags))
        except subprocess.SubprocessError:
            pytest.skip("mounting is not permitted: a /dev/shm without room is not covered")

    return start_it


@kernel.root_only
def test_a_mount_that_cannot_be_written_is_an_oserror(start_with_mount, run_script):
    probe = start_with_mount("size=1m", kernel.MS_RDONLY)
    in_cpp = probe.ask(f"open a {SMALL} backing={text('shm')}")
    in_python = run_script(
        """
        import kernel
        kernel.mount_shm("size=1m", kernel.MS_RDONLY)
        import stocache
        try:
            stocache.SharedCache(32 / 2**30, 8, (4,), backing="shm")
        except OSError as error:
            print(error)
        """
    )
    assert in_cpp == {"error": "OSError", "text": in_python.stdout.strip()}
    assert "/dev/shm" in in_cpp["text"]
    assert probe.ask(f"open a {SMALL} backing={text('memfd')}") == {"ok": None}


@kernel.root_only
def test_a_mount_that_is_full_freezes_the_cache_with_one_warning(start_with_mount, unique_name):
    probe = start_with_mount("size=1m")
    small = probe.ask(f"open b 0.002 4 {2**19} uint8 backing={text('shm')}")
    assert small["error"] == "MemoryError" and "/dev/shm has" in small["text"]
    name = unique_name()
    probe.result(f"open a 0.001 100 4096 uint8 name={text(name)} backing={text('shm')}")
    assert probe.result("offer a 0 strided") is True
    # As another program would fill that mount of 1 MiB, which only the probe's namespace has.
    hog = Path(f"/proc/{probe.child.pid}/root/dev/shm/hog")
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    assert probe.result("set a 50 zeros 1 0") is False
    assert probe.result("offer a 51 zeros") is False
    assert "01" not in probe.result("set_many a 52,53 zeros 0")["bytes"]
    assert probe.result("stats a")["frozen"] is True
    assert probe.result("line a").endswith(" hit rate), frozen")
    assert probe.result("get a 0 1 1")["bytes"] == "01" * 4096
    assert probe.ask("array a")["error"] == "MemoryError"
    hog.unlink()
    probe.result("clear a")
    assert probe.result("set a 50 zeros 1 0") is True
    said = probe.end()
    assert said.count(f'the cache "{name}" is frozen with 1 of 100 slots filled') == 1, said
    assert said.count("Warning") == 1, said


# Handles and views


def test_copies_of_a_handle_share_and_the_last_one_detaches(cpp, unique_name):
    cpp.result(f"open a {SMALL} name={text(unique_name())} backing={text('shm')}")
    path = Path(cpp.result("facts a")["path"])
    cpp.result("copy b a")
    cpp.result("set a 1 x01020304 1 0")
    assert cpp.result("get b 1 1 1")["bytes"] == "01020304"
    cpp.result("close a")
    assert cpp.result("get b 1 1 1")["bytes"] == "01020304" and path.exists()
    cpp.result("forget b")
    assert not path.exists()


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_view_outlives_the_handle_and_the_last_process(cpp, make_cache, unique_name, backing):
    cache = make_cache(LIMIT, 8, (4,), name=unique_name(), backing=backing)
    cache.set_slot(0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    cpp.result(f"join a {text(cache.name)}")
    cpp.result("hold a 0 view")
    cpp.result("hold a array array")
    cache.clear()
    cache.set_slot(0, torch.tensor([5, 6, 7, 8], dtype=torch.uint8))
    assert cpp.result("view view")["bytes"] == "05060708", "a view shows what is there now"
    cpp.result("edit view 9")
    assert cache.get_slot(0).tolist() == [9, 9, 9, 9], "and an edit edits the cache"
    path = cache.path
    cpp.result("close a")
    cache.close()
    if backing == "shm":
        assert not Path(path).exists()
    cpp.result("edit view 7")
    assert cpp.result("view view") == {"dtype": "uint8", "shape": [4], "bytes": "07070707"}
    assert cpp.result("view array")["bytes"] == "07070707" + "00" * 20


def test_a_static_handle_ends_with_the_program(start_probe, unique_name):
    probe = start_probe("fill", unique_name(), "shm")
    path = Path(probe.result())
    assert path.exists()
    assert probe.end() == ""
    assert not path.exists()


# Threads


def test_threads_fill_and_read_one_cache(probe_answer, unique_name):
    result = probe_answer("threads", unique_name())["ok"]
    assert result["wrong"] == 0
    assert result["stored"] == 48, "each sample is stored once, by whichever thread"
    assert result["hits"] > 48 and result["copies"] > 48
    assert result["control"] == [True, False], "the check does not see a foreign word"


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_threads_open_and_close_caches_at_once(probe_answer, unique_name, scale, backing):
    rounds = scale(60, 5000)
    result = probe_answer("churn", unique_name(), backing, rounds)
    assert result == {"ok": {"wrong": 0, "used": 4 * 8 * rounds}}


def test_of_two_threads_that_fill_a_slot_the_second_offers_in_vain(probe_answer, unique_name):
    result = probe_answer("second_thread", unique_name())["ok"]
    assert result["missed"] is True
    assert result["offered"] is False
    # The threads of a process know together what is filled.
    assert result["set"]["error"] == "RuntimeError"
    assert "overwrite" in result["set"]["text"]


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_child_forked_beside_busy_threads_uses_the_cache(probe_answer, unique_name, backing):
    result = probe_answer("forks", unique_name(), backing)["ok"]
    assert result["statuses"] == [0] * result["children"]
    assert result["written"] == result["children"]
    assert result["wrong"] == 0


# Deaths


def test_killed_writers_leave_no_torn_samples(start_probe, unique_name, seed, scale):
    length, words = 6, 1 << 16
    random_ = random.Random(seed)
    cache = words_cache(length, words, name=unique_name(), backing="shm")
    herd = start_probe("herd", cache.name, length, words)
    herd.result()
    read = interrupted = 0
    for _ in range(scale(100, 5000)):
        writer = herd.result("another")
        # Until some sample was written, then a moment that differs from round to round.
        fills = cache.stats().fills
        deadline = time.monotonic() + 60
        while cache.stats().fills == fills:
            assert time.monotonic() < deadline, "the writer writes nothing"
        until = time.monotonic() + random_.uniform(0, 0.004)
        while True:
            batch, found = cache.get_many(range(length))
            for i in found.nonzero().flatten().tolist():
                assert complaint(i, batch[i]) is None
                read += 1
            if time.monotonic() >= until:
                break
        os.kill(writer, signal.SIGKILL)
        assert os.WTERMSIG(herd.result()) == signal.SIGKILL
        interrupted += int((cache.aux_array > 2).any())
        for i in range(length):
            view = cache.get_slot(i)
            assert view is None or complaint(i, view) is None
    assert read > 0
    assert interrupted > 0, "no writer was killed while it wrote"
    # The check itself: the first half of one version, the second half of another.
    cache.set_slot(0, whole(0, words, 1), allow_overwrite=True)
    view = cache.get_slot(0)
    view[words // 2 :] = whole(0, words, 2)[words // 2 :]
    assert complaint(0, view) is not None
    # The slots of the dead are used again.
    for i in range(length):
        cache.set_slot(i, whole(i, words, 3), allow_overwrite=True)
        assert torch.equal(cache.get_slot(i), whole(i, words, 3))
    path = Path(cache.path)
    cache.close()
    assert path.exists(), "the C++ process still has it"
    herd.end()
    assert not path.exists()


def test_what_the_last_process_left_when_it_was_killed_goes_at_the_next_start(
    start_probe, make_cache, unique_name
):
    probe = start_probe("fill", unique_name(), "shm")
    path = Path(probe.result())
    probe.kill()
    assert path.exists(), "a killed process removes nothing"
    make_cache()
    assert not path.exists()


def test_a_writer_that_was_killed_does_not_take_the_cache_with_it(
    start_probe, make_cache, unique_name
):
    name = unique_name()
    probe = start_probe("fill", name, "memfd")
    probe.result()
    cache = stocache.SharedCache.join(name)
    probe.kill()
    for i in range(8):
        assert complaint(i, cache.get_slot(i)) is None
    cache.close()
