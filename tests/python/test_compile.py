"""The operators in graphs: torch.compile, torch.export and AOTInductor.

A compiler may drop calls whose results nobody needs, merge equal calls, move calls past each other
and write into what a call returned. The cache is state that none of them sees. What keeps them from
doing so is tested against the same function without a compiler, and against twin operators that are
not protected: a test that cannot tell these apart proves nothing."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import stocache
import torch
import torch._dynamo
import torch._inductor.config
from samples import GIB
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

ops = torch.ops.stocache
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(scope="module", autouse=True)
def inductor(tmp_path_factory):
    """Compiles into a folder of its own, in this process alone, and without vector instructions:
    finding out which there are takes longer than all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # for the processes that tests start
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
            yield


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cache(make_cache):
    """Six slots of sixteen floats for a dataset of eight."""
    return make_cache((8 + 6 * 64) / GIB, 8, (16,), torch.float32)


def row(value: float) -> torch.Tensor:
    return torch.full((16,), float(value))


def said(call) -> tuple[type, str]:
    """What a call raises: type and text. That it raises at all is the caller's claim."""
    with pytest.raises(Exception) as caught:
        call()
    # Some versions of torch add where in the graph it was.
    return caught.type, str(caught.value).split("\n\nWhile executing")[0]


def counted(cache, call):
    """The result of a call, and what it did: hits, misses, fills."""
    before = cache.stats()
    result = call()
    after = cache.stats()
    return result, tuple(
        getattr(after, key) - getattr(before, key) for key in ("hits", "misses", "fills")
    )


class Graphs:
    """A backend that counts how often it is asked for a graph."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return self.backend(graph, inputs)


# What torch itself checks of an operator


OPCHECKS = {
    "get hit": ("get", lambda name: (name, 0), {}),
    "get miss": ("get", lambda name: (name, 3), {}),
    "get beyond the cache": ("get", lambda name: (name, 7), {}),
    "set": ("set", lambda name: (name, 3, "value"), {}),
    "set refused": ("set", lambda name: (name, 0, "value"), {}),
    "set over": ("set", lambda name: (name, 0, "value", True), {}),
    "set over by name": ("set", lambda name: (name, 0, "value"), {"allow_overwrite": True}),
    "set with gradient": ("set", lambda name: (name, 3, "gradient"), {}),
    "get_many": ("get_many", lambda name: (name, torch.tensor([0, 3, 7])), {}),
    "get_many of one": ("get_many", lambda name: (name, torch.tensor([0])), {}),
    "get_many of none": ("get_many", lambda name: (name, torch.tensor([]).long()), {}),
    "get_many of int32": ("get_many", lambda name: (name, torch.tensor([0, 1]).int()), {}),
    "set_many": ("set_many", lambda name: (name, torch.tensor([0, 3, 7]), "batch"), {}),
    "set_many over": ("set_many", lambda name: (name, torch.tensor([0, 3, 7]), "batch", True), {}),
    "clear": ("clear", lambda name: (name,), {}),
    "stats": ("stats", lambda name: (name,), {}),
    "close": ("close", lambda name: (name,), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("check", OPCHECKS)
def test_opcheck_passes(make_cache, check, dtype):
    cache = make_cache((8 + 6 * 2 * dtype.itemsize) / GIB, 8, (2,), dtype)
    cache.set_slot(0, torch.ones(2, dtype=dtype))
    values = {
        "value": torch.ones(2, dtype=dtype),
        "gradient": torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point),
        "batch": torch.ones(3, 2, dtype=dtype),
    }
    op, arguments, keywords = OPCHECKS[check]
    given = tuple(values.get(a, a) if isinstance(a, str) else a for a in arguments(cache.handle))
    checked = torch.library.opcheck(getattr(ops, op).default, given, keywords)
    assert set(checked.values()) == {"SUCCESS"} and len(checked) == 4


def test_opcheck_passes_for_open(cache, unique_name):
    geometry = ((8 + 6 * 64) / GIB, 8, [16], torch.float32)
    fresh = unique_name()
    for name in (cache.handle, fresh):
        for options in ({}, {"backing": "auto", "verify": "never", "keep": False}):
            checked = torch.library.opcheck(ops.open.default, (name, *geometry), options)
            assert set(checked.values()) == {"SUCCESS"}
        ops.close(name)
    # while tracing nothing is opened
    make_fx(lambda x: (ops.open(fresh, *geometry), x)[1], tracing_mode="fake")(row(0))
    assert said(lambda: ops.stats(fresh))[0] is RuntimeError


# torch.compile: effects


def everything(name: str, i: int, x: torch.Tensor):
    """Every operator, with results that are used, unused and equal."""
    before, was = torch.ops.stocache.get(name, i)
    stored = torch.ops.stocache.set(name, i, x)
    first, _ = torch.ops.stocache.get(name, i)
    refused = torch.ops.stocache.set(name, i, x + 1)
    over = torch.ops.stocache.set(name, i, x + 2, True)
    second, _ = torch.ops.stocache.get(name, i)
    torch.ops.stocache.set(name, i, x + 3, True)
    torch.ops.stocache.get(name, i)
    torch.ops.stocache.get(name, i)
    third, _ = torch.ops.stocache.get(name, i)
    same, _ = torch.ops.stocache.get(name, i)
    two = torch.tensor([i, i + 1])
    torch.ops.stocache.set_many(name, two, torch.stack([x, x + 4]))
    batch, found = torch.ops.stocache.get_many(name, two)
    torch.ops.stocache.get_many(name, two)
    filled = torch.ops.stocache.stats(name)[8]
    torch.ops.stocache.clear(name)
    after, there = torch.ops.stocache.get(name, i)
    torch.ops.stocache.set(name, i + 2, third + same)
    return (
        *(before, was, stored, first, refused, over, second, third - same, third, batch, found),
        *(filled, after, there),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_dropped_merged_or_moved(make_cache, backend):
    def fresh():
        return make_cache((8 + 8 * 64) / GIB, 8, (16,), torch.float32)

    plain, compiled = fresh(), fresh()
    function = torch.compile(everything, backend=backend, fullgraph=True)
    for turn in range(3):
        x = row(10 * turn)
        expected, did = counted(plain, lambda x=x, turn=turn: everything(plain.handle, turn + 2, x))
        assert did == (10, 2, 4 if turn else 5), "the function is what it is taken for"
        result, same = counted(
            compiled, lambda x=x, turn=turn: function(compiled.handle, turn + 2, x)
        )
        assert same == did
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert torch.equal(compiled.array, plain.array)
        assert torch.equal(compiled.aux_array, plain.aux_array)


def reads_what_it_wrote(name: str, i: int, x: torch.Tensor):
    """Nothing but the cache ties these calls to each other, so that a scheduler that knows nothing
    of it may sort them as it likes."""
    torch.ops.stocache.set(name, i, x * 2)
    first, found = torch.ops.stocache.get(name, i)
    torch.ops.stocache.set(name, i, x * 4, True)
    second, _ = torch.ops.stocache.get_many(name, torch.tensor([i]))
    torch.ops.stocache.clear(name)
    filled = torch.ops.stocache.stats(name)[8]
    torch.ops.stocache.set(name, i, x * 8)
    return first, found, second, filled


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_scheduler_that_sorts_calls_leaves_these_in_their_order(cache, mode, wrapper, scale):
    if wrapper == "cpp" and mode not in scale(("default",), ("default", mode)):
        pytest.skip("this mode's C++ wrapper is compiled with --long only")
    options = torch._inductor.list_mode_options(mode)
    options |= {"cpp_wrapper": wrapper == "cpp", "fx_graph_cache": False}
    function = torch.compile(reads_what_it_wrote, fullgraph=True, options=options)
    for i in (2, 3):
        (first, found, second, filled), did = counted(
            cache, lambda i=i: function(cache.handle, i, row(i))
        )
        assert found and first.tolist() == [2.0 * i] * 16 and second.tolist() == [[4.0 * i] * 16]
        assert filled == 0 and did == (2, 0, 3) and cache.get_slot(i).tolist() == [8.0 * i] * 16
        cache.clear()


def test_inductors_own_lowering_sorts_them(cache, monkeypatch):
    """The control: with what inductor makes of any operator, a read comes too early. Where it does
    not, nothing of ours is needed."""
    import torch._inductor.lowering as inductor
    from torch._inductor.graph import GraphLowering

    ours = [getattr(ops, name).default for name in ("set", "get", "get_many", "clear", "stats")]
    for op in ours:
        own = inductor.fallback_handler(op, add_to_fallback_set=False)
        monkeypatch.setitem(inductor.lowerings, op, own)
    options = torch._inductor.list_mode_options("max-autotune") | {"fx_graph_cache": False}
    function = torch.compile(reads_what_it_wrote, fullgraph=True, options=options)
    first, found, *_ = function(cache.handle, 2, row(2))
    too_early = not found or first.tolist() != [4.0] * 16
    assert too_early == ("additional_star_deps" in inspect.getsource(GraphLowering))


def test_control_where_the_end_of_the_order_is_not_noted_the_last_call_is_dropped(cache):
    if "has_side_effect(_sink_tokens)" in inspect.getsource(torch._prims):
        pytest.skip("this torch notes it itself")
    noted = torch.fx.node._side_effectful_functions
    end = torch.ops.prims._sink_tokens.default

    def function(name, x):
        torch.ops.stocache.set(name, 2, x * 2, True)
        return x + 1

    def stores() -> bool:
        torch._dynamo.reset()
        cache.clear()
        options = {"fx_graph_cache": False}
        torch.compile(function, fullgraph=True, options=options)(cache.handle, row(1))
        return cache.get_slot(2) is not None

    assert stores()
    noted.discard(end)
    try:
        assert not stores()
    finally:
        noted.add(end)


@contextlib.contextmanager
def twins(cache):
    """The same operators without what protects them: they return views, and have no effects that
    torch knows of. Yields their namespace and the calls of its `get`."""
    calls = []
    with torch.library._scoped_library("stocache_control", "DEF") as library:

        def get(name: str, index: int):
            calls.append(index)
            return torch.ops.stocache.get(name, index)

        library.define("get(str cache, SymInt index) -> (Tensor sample, Tensor found)")
        library.impl("get", get, "CompositeExplicitAutograd")
        library.define("view(str cache, SymInt index) -> Tensor")
        library.impl("view", lambda _, i: cache.get_slot(i), "CompositeExplicitAutograd")

        def sample(name, index):
            return torch.empty(16), torch.empty((), dtype=torch.bool)

        torch.library.register_fake("stocache_control::get", sample, lib=library)
        torch.library.register_fake(
            "stocache_control::view", lambda _, index: torch.empty(16), lib=library
        )
        yield torch.ops.stocache_control, calls


def backwards(get, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Two equal calls, and one that nobody needs, in what will have a gradient."""
    a, _ = get(name, 2)
    get(name, 3)
    b, _ = get(name, 2)
    return (a.sin() * weight).sum() + (b.sin() * weight).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gradient_neither_merges_calls_nor_makes_more_of_them(cache, backend):
    cache.set_slot(2, row(1))
    weight = torch.ones(16, requires_grad=True)

    @torch.compile(backend=backend, fullgraph=True)
    def function(name, weight):
        value = backwards(torch.ops.stocache.get, name, weight)
        torch.ops.stocache.set(name, 4, weight * 2)
        return value

    for turn in range(2):
        weight.grad = None
        _, did = counted(cache, lambda: function(cache.handle, weight).backward())
        assert did == (2, 1, 1 if turn == 0 else 0)
        assert torch.allclose(weight.grad, 2 * row(1).sin())
    assert cache.get_slot(4).tolist() == [2.0] * 16


def test_without_effects_calls_are_dropped_and_merged(cache):
    # the control of the two tests above
    cache.set_slot(2, row(1))
    weight = torch.ones(16, requires_grad=True)
    with twins(cache) as (unprotected, calls):

        def function(name, weight):
            return backwards(unprotected.get, name, weight)

        function(cache.handle, weight)
        assert calls == [2, 3, 2]
        calls.clear()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            compiled(cache.handle, weight)
        assert calls == [2, 2], "dropped"
        calls.clear()
        compiled(cache.handle, weight).backward()
        assert calls == [2], "dropped and merged"


def chain(x: torch.Tensor) -> torch.Tensor:
    """Enough that a compiler wants to use the memory of x for something else."""
    y = (x * 2 + 1).relu()
    z = torch.mm(y.reshape(4, 4), y.reshape(4, 4))
    return z.reshape(16) * 3 - 1


def test_a_compiler_that_writes_into_results_does_not_write_into_the_cache(cache):
    for i in range(6):
        cache.set_slot(i, row(i + 1))
    before = cache.array.clone()

    @torch.compile(fullgraph=True)
    def function(name, indices):
        x, _ = torch.ops.stocache.get(name, 2)
        rows, _ = torch.ops.stocache.get_many(name, indices)
        y = chain(x)
        return y, (rows * 2 + y).sigmoid(), torch.ops.stocache.get(name, 2)[0].add_(1)

    for _ in range(3):
        y, rows, added = function(cache.handle, torch.tensor([1, 2]))
        assert torch.equal(y, chain(row(3))) and torch.equal(added, row(4))
        assert torch.allclose(rows[0], (row(2) * 2 + chain(row(3))).sigmoid())
    assert torch.equal(cache.array, before)

    with twins(cache) as (unprotected, _):
        # the control: of a view that the compiler takes for fresh memory, it makes use

        @torch.compile(fullgraph=True)
        def careless(name):
            return chain(unprotected.view(name, 2))

        careless(cache.handle)
        assert not torch.equal(cache.array, before)


# torch.compile: shapes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_changing_index_is_compiled_twice_at_most(cache, backend):
    graphs = Graphs(backend)

    @torch.compile(backend=graphs, fullgraph=True)
    def function(name, i, x):
        stored = torch.ops.stocache.set(name, i, x + i)
        return torch.ops.stocache.get(name, i)[0] * 2, stored

    for i in range(2, 6):
        y, stored = function(cache.handle, i, row(1))
        assert stored and y.tolist() == [2.0 * (1 + i)] * 16
    assert graphs.count == 2, "once for the first number, once for any number"
    for i in (2, 5, 3, 4):
        assert not function(cache.handle, i, row(1))[1]
    # torch compiles again for 0 and for 1, as it always does
    for i in (0, 1, 0, 1):
        function(cache.handle, i, row(1))
    assert graphs.count <= 4
    assert [cache.get_slot(i)[0].item() for i in range(6)] == [1, 2, 3, 4, 5, 6]


def test_a_changing_batch_is_compiled_twice_at_most(cache):
    graphs = Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def function(name, indices, fresh):
        rows, found = torch.ops.stocache.get_many(name, indices)
        rows = torch.where(found[:, None], rows, fresh)
        return rows, found, torch.ops.stocache.set_many(name, indices, rows)

    for n in (2, 3, 5, 4, 6):
        rows, found, stored = function(cache.handle, torch.arange(n), torch.ones(n, 16))
        assert rows.shape == (n, 16) and rows.eq(1).all()
        assert torch.equal(found, ~stored)
    assert graphs.count == 2
    assert cache.stats().fills == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_condition_chooses_what_is_stored(cache, backend):
    @torch.compile(backend=backend, fullgraph=True)
    def function(name, i, raw):
        x, found = torch.ops.stocache.get(name, i)
        x = torch.cond(found, lambda x, raw: x.clone(), lambda x, raw: raw * 2, (x, raw))
        torch.ops.stocache.set(name, i, x)
        return x + 1

    for turn in range(2):
        for i in (2, 3, 4):
            y = function(cache.handle, i, row(0 if turn else i))
            assert y.tolist() == [2.0 * i + 1] * 16
    assert cache.stats().fills == 3


def test_a_graph_can_open_the_cache_itself(unique_name):
    name = stocache.handle(unique_name(), (16,), torch.float32)

    def function(x):
        torch.ops.stocache.open(name, 0.001, 8, [16], torch.float32)
        stored = torch.ops.stocache.set(name, 1, x)
        y, found = torch.ops.stocache.get(name, 1)
        filled = torch.ops.stocache.stats(name)[8]
        torch.ops.stocache.close(name)
        return stored, y, found, filled

    for backend in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for turn in range(2):
            stored, y, found, filled = compiled(row(turn))
            assert stored and found and filled == 1 and y.tolist() == [turn] * 16
            assert said(lambda: ops.stats(name))[0] is RuntimeError, "closed again"


def test_a_graph_outlives_the_cache_and_uses_the_next_of_that_name(make_cache, unique_name):
    geometry = {"dataset_len": 8, "data_dims": (16,), "dtype": torch.float32}
    name, graphs = unique_name(), Graphs()
    first = make_cache(name=name, **geometry)
    handle = first.handle
    function = torch.compile(lambda: ops.get(handle, 3), backend=graphs, fullgraph=True)
    assert not function()[1]
    first.close()
    assert said(function) == said(lambda: stocache.SharedCache.join(name))
    second = make_cache(name=name, **geometry)
    second.set_slot(3, row(5))
    assert function()[0].tolist() == [5.0] * 16
    assert graphs.count == 1


def test_a_cache_of_another_kind_under_a_compiled_graph_is_an_error(run_script, unique_name):
    # in a process of its own: it may not live to tell
    done = run_script(
        """
        import sys
        import torch
        import stocache

        name = sys.argv[1]

        def make(dims, dtype):
            return stocache.SharedCache(0.001, 8, dims, dtype, name=name, verbose=False)

        handle = stocache.handle(name, (4096,), torch.float32)
        function = torch.compile(
            lambda i: torch.ops.stocache.get(handle, i)[0] * 2 + 1, fullgraph=True
        )
        with make((4096,), torch.float32):
            assert function(2).eq(1).all()
        for other in (((4,), torch.float32), ((4096,), torch.uint8)):
            with make(*other):
                try:
                    function(2)
                except (RuntimeError, ValueError) as error:
                    print("refused", name in str(error))
        """,
        unique_name(),
        check=False,
    )
    stocache.sweep()  # in case it did not
    assert done.stdout == "refused True\nrefused True\n" and done.returncode == 0, done.stderr


# torch.compile: errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_at_run_time_is_what_the_class_says(cache, backend):
    @torch.compile(backend=backend, fullgraph=True)
    def function(name, i, x, indices):
        y, _ = torch.ops.stocache.get(name, i)
        torch.ops.stocache.set(name, i, x)
        return y * 2 + torch.ops.stocache.get_many(name, indices)[0].sum()

    good = torch.tensor([0, 1])
    for i in (2, 3):
        function(cache.handle, i, row(i), good)
    outside = said(lambda: cache.get_slot(9))
    assert outside[0] is IndexError
    for _ in range(2):
        assert said(lambda: function(cache.handle, 9, row(0), good)) == outside
    assert said(lambda: function(cache.handle, 3, row(0), torch.tensor([0, 9]))) == outside
    # what does not fit is traced anew, and refused when it runs
    for x in (torch.zeros(5), torch.zeros(16, dtype=torch.uint8)):
        expected = said(lambda x=x: cache.set_slot(4, x))
        assert expected[0] is ValueError
        assert said(lambda x=x: function(cache.handle, 4, x, good)) == expected
    assert cache.aux_array.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
    function(cache.handle, 5, row(5), good)  # an error does no harm to the graph
    assert cache.get_slot(5).tolist() == [5.0] * 16


def test_a_bare_name_is_an_error_of_tracing(cache):
    """A graph could not be told from one for samples of another shape."""
    for name in (cache.name, f"{cache.name}:float7[4]", f"{cache.name}:uint8", ""):
        function = torch.compile(lambda name: ops.get(name, 2), backend="eager", fullgraph=True)
        kind, text = said(lambda name=name: function(name))  # noqa: B023
        assert issubclass(kind, RuntimeError) and "cache.handle" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_are_constants_of_the_graph_are_no_reason_to_call_while_tracing(
    make_cache, backend
):
    # torch computes what follows from constants; of one element each, the results too
    cache = make_cache(0.001, 8, (), torch.float32)

    @torch.compile(backend=backend, fullgraph=True)
    def function(name):
        batch, found = torch.ops.stocache.get_many(name, torch.tensor([2]))
        stored = torch.ops.stocache.set(name, 2, torch.tensor(5.0))
        many = torch.ops.stocache.set_many(name, torch.tensor([3]), torch.tensor([6.0]))
        return batch, found, stored, many

    for turn in range(3):
        (batch, found, stored, many), did = counted(cache, lambda: function(cache.handle))
        assert did == (bool(turn), not turn, 0 if turn else 2)
        assert batch.tolist() == [5.0 if turn else 0.0] and found.tolist() == [turn > 0]
        assert bool(stored) is (turn == 0) and many.tolist() == [turn == 0]


def test_tracing_needs_no_cache_and_running_does(unique_name):
    handle = stocache.handle(unique_name(), (16,), torch.float32)
    sentence = said(lambda: stocache.SharedCache.join(handle.partition(":")[0]))
    function = torch.compile(lambda: ops.get(handle, 2), backend="aot_eager", fullgraph=True)
    assert said(function) == sentence


# torch.export


class Filler(torch.nn.Module):
    """Looks in the cache, else takes the fresh rows and stores them."""

    def __init__(self, name: str, opens: bool = False) -> None:
        super().__init__()
        self.name, self.opens = name, opens

    def forward(self, indices: torch.Tensor, fresh: torch.Tensor):
        if self.opens:
            torch.ops.stocache.open(self.name, (8 + 6 * 64) / GIB, 8, [16], torch.float32)
        rows, found = torch.ops.stocache.get_many(self.name, indices)
        rows = torch.where(found[:, None], rows, fresh)
        torch.ops.stocache.set_many(self.name, indices, rows)
        return rows * 2, found


BATCH = Dim("batch", min=1, max=64)
DYNAMIC = {"indices": {0: BATCH}, "fresh": {0: BATCH}}


def exported(name: str, strict: bool, opens: bool = False) -> torch.export.ExportedProgram:
    example = (torch.tensor([0, 1]), torch.zeros(2, 16))
    return export(Filler(name, opens), example, dynamic_shapes=DYNAMIC, strict=strict)


def calls_of(graph_module) -> list[str]:
    """The operators of ours in a graph, also those wrapped for their effects, in their order."""
    called = []
    for node in graph_module.graph.nodes:
        for target in (node.target, *node.args[1:2]):
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "stocache":
                called.append(target._opname)
    return called


LOADER = """
    import sys
    import torch
    import stocache

    for at, path in enumerate(sys.argv[1:]):
        if "package" in path:
            run = torch._inductor.aoti_load_package(path)
        else:
            run = torch.export.load(path).module()
        for indices in ([0, 2 + at], [0, 2 + at, 4 + at]):
            rows, found = run(torch.tensor(indices), torch.full((len(indices), 16), 7.0))
            print(rows[:, 3].tolist(), found.tolist())
        try:
            run(torch.tensor([0, 9]), torch.zeros(2, 16))
        except (IndexError, RuntimeError) as error:
            print(str(error).splitlines()[0])
"""
LOADED = """\
[6.0, 14.0] [True, False]
[6.0, 14.0, 14.0] [True, True, False]
Index 9 out of bounds for dataset of length 8
"""


def test_an_exported_program_runs_in_another_process(cache, run_script, tmp_path):
    files = []
    for strict in (True, False):
        program, did = counted(cache, lambda strict=strict: exported(cache.handle, strict))
        assert did == (0, 0, 0), "tracing leaves the cache alone"
        assert calls_of(program.graph_module) == ["get_many", "set_many"]
        files.append(tmp_path / f"strict-{strict}.pt2")
        torch.export.save(program, files[-1])
    cache.set_slot(0, row(3))
    assert run_script(LOADER, *files).stdout == 2 * LOADED
    assert cache.stats().fills == 5 and cache.get_slot(4).tolist() == [7.0] * 16
    rows, found = program.module()(torch.tensor([4]), torch.zeros(1, 16))
    assert found.all() and rows.eq(14).all(), "filled for the first process too"


def test_decompositions_keep_the_calls_and_their_order(cache, tmp_path):
    class Several(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x):
            torch.ops.stocache.set(self.name, 2, x)
            torch.ops.stocache.get(self.name, 2)  # unused
            first, _ = torch.ops.stocache.get(self.name, 2)
            torch.ops.stocache.set(self.name, 2, x + 1, True)
            second, _ = torch.ops.stocache.get(self.name, 2)
            torch.ops.stocache.clear(self.name)
            return first, second

    order = ["set", "get", "get", "set", "get", "clear"]
    program = export(Several(cache.handle), (row(1),))
    assert calls_of(program.graph_module) == order
    decomposed = program.run_decompositions()
    assert calls_of(decomposed.graph_module) == order
    torch.export.save(decomposed, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    versions = [program, decomposed, again]
    if VERSION < (2, 11):  # torch cannot run what was decomposed, saved and returns nothing
        with pytest.raises(AssertionError):
            versions.pop().module()
    for version in versions:
        (first, second), did = counted(cache, lambda version=version: version.module()(row(4)))
        assert first.tolist() == [4.0] * 16 and second.tolist() == [5.0] * 16
        assert did == (3, 0, 2) and cache.stats().filled == 0


def test_an_index_from_a_tensor_is_exported_as_a_number(cache):
    class One(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, index, fresh):
            i = index.item()
            x, found = torch.ops.stocache.get(self.name, i)
            x = torch.where(found, x, fresh)
            torch.ops.stocache.set(self.name, i, x)
            return x

    module = export(One(cache.handle), (torch.tensor(3), row(0))).module()
    for i in range(6):
        assert module(torch.tensor(i), row(i)).tolist() == [i] * 16
        assert module(torch.tensor(i), row(99)).tolist() == [i] * 16
    assert said(lambda: module(torch.tensor(8), row(0))) == said(lambda: cache.get_slot(8))


SAFE_PACKAGES = VERSION >= (2, 13)


@pytest.mark.skipif(
    SAFE_PACKAGES,
    reason="torch 2.13 or newer: that packages are refused before 2.13 is not covered",
)
def test_a_torch_whose_packages_go_on_after_an_error_makes_none(cache, tmp_path):
    program = exported(cache.handle, False)
    kind, text = said(
        lambda: torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "package.pt2")
        )
    )
    assert issubclass(kind, RuntimeError)
    assert f"torch {VERSION[0]}.{VERSION[1]} makes AOTInductor packages that go on after" in text
    assert "use torch 2.13 or newer, or torch.export.save" in text


@pytest.mark.skipif(
    not SAFE_PACKAGES,
    reason="torch before 2.13, which gets no packages: AOTInductor's packages are not covered",
)
def test_an_aotinductor_package_runs_in_another_process(
    make_cache, run_script, tmp_path, unique_name
):
    name, package = unique_name(), str(tmp_path / "package.pt2")
    handle = stocache.handle(name, (16,), torch.float32)
    torch._inductor.aoti_compile_and_package(exported(handle, False, True), package_path=package)
    assert said(lambda: ops.stats(name))[0] is RuntimeError, "compiling opens nothing"
    geometry = ((8 + 6 * 64) / GIB, 8, (16,), torch.float32)
    with make_cache(*geometry, name=name) as cache:
        cache.set_slot(0, row(3))
        assert run_script(LOADER, package).stdout == LOADED
        assert cache.stats().fills == 3 and cache.get_slot(4).tolist() == [7.0] * 16
    # it trusts what it was compiled for, so another cache of that name must be refused
    make_cache(0.001, 8, (4,), torch.uint8, name=name)
    refused = run_script(LOADER, package, check=False)
    sentence = said(lambda: make_cache(*geometry, name=name))[1]
    assert refused.returncode == 1 and sentence in refused.stderr


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_every_call(cache, mode):
    def function(x):
        stored = torch.ops.stocache.set(cache.handle, 2, x, True)
        torch.ops.stocache.get(cache.handle, 2)
        return torch.ops.stocache.get(cache.handle, 2)[0] * 2, stored

    graph, did = counted(cache, lambda: make_fx(function, tracing_mode=mode)(row(1)))
    assert did == ((2, 0, 1) if mode == "real" else (0, 0, 0))
    recorded = calls_of(graph)
    assert recorded[0] == "set" and recorded[-1] == "get"
    y, stored = graph(row(4))
    assert stored and y.tolist() == [8.0] * 16 and cache.get_slot(2).tolist() == [4.0] * 16
