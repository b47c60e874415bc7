"""One training script, run with and without stocache: what it saw must be the same.

A `Case` describes the script. `difference(case, folder)` runs it over the dataset itself with
torch's DataLoader, and over a CachedDataset, and says where the two part. Spawned workers import
this module by name, so it holds no fixtures.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import enum
import gc
import hashlib
import io
import multiprocessing
import os
import random
import struct
import time
import unittest.mock
import warnings
from collections import UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import stocache
import torch
from sources import INDEX
from stand_ins import Count, Name, Opaque, Picture, Row, boxes, marked, scan
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

# What torch keeps in the attributes of a jagged tensor itself: its sizes follow from the rest, and
# are numbers that it counts.
OF_JAGGED = frozenset((
    "_dynamo_propagated_dynamic_indices", "_lengths", "_metadata_cache", "_offsets", "_ragged_idx",
    "_size", "_strides", "_values",
))  # fmt: skip

WIDTH = {"small": 5, "large": 4096, "huge": 160 << 10}
"""Numbers in a tensor. Batches of large ones cross by ticket and are gathered into kept memory,
those of huge ones by helpers, ahead of their turn."""


@dataclass(frozen=True, repr=False)
class Case:
    """A training script. The defaults are the plainest one."""

    source: str = "list"
    content: str = "image and label"
    width: str = "small"
    length: int = 8
    memory: str = "all"
    policy: str = "freeze"
    verbose: bool = False
    transform: str = "none"
    augments: str = "none"
    """How the dataset calls a random transform of its own, which is cut then."""
    steps: int = 0
    """How many steps of it run before the cache."""
    override: str = "none"
    """What a subclass of CachedDataset overrides."""
    top: str = "none"
    sampler: str = "in order"
    batch: int | None = 3
    drop_last: bool = False
    collate: str = "default"
    loader: str = "stock"
    workers: int = 0
    persistent: bool = False
    start: str = "fork"
    prefetch: int = 2
    generator: bool = False
    worker_init: str = "none"
    before: str = "nothing"
    """What is done with the dataset before the first epoch."""
    between: str = "nothing"
    """What is done with it between epochs."""
    ahead: bool = False
    """Batches of any size are gathered ahead by a thread, not only large ones."""
    draws: str = "nowhere"
    """Where the training loop itself draws random numbers."""
    stops: tuple[int | None, ...] = (None,)
    """One entry per epoch: after how many batches it is left, None at its end."""
    seed: int = 0

    def __repr__(self) -> str:
        told = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"


# Samples

Point = namedtuple("Point", "x y")


class Shade(enum.Enum):
    LIGHT = 0
    DARK = 1


@dataclass
class Sample:
    image: torch.Tensor
    label: int


def floats(idx: int, width: int) -> torch.Tensor:
    return torch.arange(width, dtype=torch.float32) * (idx + 1) + idx / 7


def octets(idx: int, width: int) -> torch.Tensor:
    return ((torch.arange(width) * (2 * idx + 1) + idx) % 251).to(torch.uint8)


def zoo(idx: int, width: int) -> tuple[torch.Tensor, ...]:
    x = floats(idx, width)
    return x.bfloat16(), x.to(torch.complex64), x > 3, torch.tensor(idx), torch.empty(0, 2)


CONTENTS = {
    "image and label": lambda i, w: (octets(i, w), i),
    "tensor": floats,
    "dict": lambda i, w: {"x": floats(i, w), "meta": {"name": f"sample {i}", "id": i}},
    "list": lambda i, w: [floats(i, w), i / 3],
    "named tuple": lambda i, w: Point(floats(i, w), i),
    "numpy": lambda i, w: (floats(i, w).numpy(), np.int32(i), np.float64(i) / 3),
    "numbers": lambda i, w: (i, i % 2 == 0, i / 3, 2**62 + i),
    "text": lambda i, w: (f"ü{i}" * (i % 3), "x"),
    "bytes": lambda i, w: bytes(octets(i, w).tolist()),
    "dtypes": zoo,
    "transposed": lambda i, w: octets(i, 6 * w).view(6, w).t(),
    "mixed shapes": lambda i, w: floats(i, w + i % 3),
    "None inside": lambda i, w: (floats(i, w), None),
    "dataclass": lambda i, w: Sample(octets(i, w), i),
    "one set": lambda i, w: (floats(i, w), {i, i + 1} if i == 2 else (i, i + 1)),
    "unknown type": lambda i, w: (floats(i, w), Opaque(i)),
    "pictures": lambda i, w: (octets(i, w).as_subclass(Picture), Count(i)),
    "boxes": lambda i, w: {"boxes": boxes(floats(i, w), (i, 5)), "label": i},
    "scans": lambda i, w: scan(floats(i, w), name=f"{i}" * i, origin=torch.tensor([i])),
    "subclass": lambda i, w: (marked(floats(i, w), note="x" * i), i),
    "values": lambda i, w: (datetime.date(2026, 1, i + 1), Path(f"{i}.jpg"), Decimal(i) / 4, {i}),
    "containers": lambda i, w: defaultdict(list, {"x": floats(i, w), "y": Row([i, Name(i)])}),
    "sparse": lambda i, w: (floats(i, 5).to_sparse(), i),
    "parameter": lambda i, w: torch.nn.Parameter(floats(i, w)),
    "nested": lambda i, w: (
        torch.nested.nested_tensor_from_jagged(floats(i, w), torch.tensor([0, i % w, w])),
        i,
    ),
    "masked": lambda i, w: np.ma.array(floats(i, w).numpy(), mask=floats(i, w).numpy() % 2 > 1),
    "noted": lambda i, w: np.full(3, i, np.dtype("i2", metadata={"enum": {"a": i}})),
    "more values": lambda i, w: (
        deque([i], i + 1),
        SimpleNamespace(x=floats(i, w)),
        range(i),
        UUID(int=i),
        frozenset({i}),
        datetime.timedelta(i),
        Shade(i % 2),
    ),
    "records": lambda i, w: np.array([(i, i / 3)], dtype=[("a", "i4"), ("b", "f8")]),
}


def make_samples(case: Case) -> list[Any]:
    make, width = CONTENTS[case.content], WIDTH[case.width]
    return [make(idx, width) for idx in range(case.length)]


# Sources


class Source(Dataset):
    """Notes in a file that a sample was loaded by the process that made it: the main process."""

    def __init__(self, samples: Any, log: str) -> None:
        self.samples = samples
        self.log = log
        self.main = os.getpid()

    def __len__(self) -> int:
        return len(self.samples)

    def note(self) -> None:
        if os.getpid() == self.main:
            Path(self.log).touch()

    def __getitem__(self, idx: int) -> Any:
        self.note()
        return self.samples[idx]


class Copying(Source):
    """Makes its samples anew, as a decoder does."""

    def __getitem__(self, idx: int) -> Any:
        return copy.deepcopy(super().__getitem__(idx))


class Together(Copying):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[idx] for idx in indices]


class Shifted(TensorDataset):
    """A subclass of torch's own."""

    def __getitem__(self, idx: int) -> Any:
        x, y = super().__getitem__(idx)
        return x + 1, y


class Handle(Source):
    """A file that every process opens for itself, at its first sample: seek, then read. Two
    processes that share an offset read each other's samples."""

    def __init__(self, path: str, length: int, width: int, log: str) -> None:
        super().__init__(range(length), log)
        self.path = path
        self.width = width
        self.file: Any = None

    def __getitem__(self, idx: int) -> Any:
        self.note()
        idx = int(idx) % len(self)  # the sample is the same, whatever the type of its index
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(idx * self.width)
        time.sleep(0)  # whoever shares the offset may move it now
        return torch.frombuffer(bytearray(self.file.read(self.width)), dtype=torch.uint8), idx


class Opened(Handle):
    """Its file is opened by worker_init_fn, as the documentation of torch shows."""

    def __getitem__(self, idx: int) -> Any:
        if self.file is None:
            raise RuntimeError("nobody has opened the file in this process")
        return super().__getitem__(idx)


class Added(torch.nn.Module):
    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.amount


class Shaken(torch.nn.Module):
    """Draws from all generators, changes half of what it gets, and fails now and then."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = random.random()
        if self.fails and self.last < 0.2:
            raise ValueError("nothing is left of it")
        return x + torch.rand(1).item() if np.random.rand() < 0.5 else x


def goes_on(self: Any, x: Any, i: int) -> Any:
    try:
        return self.transform(x), i
    except ValueError:
        return self[(i + 1) % len(self)]


AUGMENTS = {
    "a pair": lambda self, x, i: (self.transform(x), i),
    "a dict": lambda self, x, i: {"x": [self.transform(x)], "more": {"x": x, "i": i}},
    "two views": lambda self, x, i: (self.transform(x), self.transform(x)),
    "two pictures": lambda self, x, i: (self.transform(x), self.transform(x * 2), x),
    "once more": lambda self, x, i: [self.transform(x)] * 2,
    "going on": goes_on,
    # Samples of these pass the cache by, or some of them.
    "looking": lambda self, x, i: (y := self.transform(x), float(y.sum())),
    "changing": lambda self, x, i: self.transform(x) * 2,
    "some": lambda self, x, i: self.transform(x) if i % 3 else x * torch.rand(1),
    "some drawing": lambda self, x, i: (self.transform(x), torch.rand(1) if i % 2 else 0),
    "asking a step": lambda self, x, i: (self.transform(x), self.transform[1].last),
    "asking it by a name": lambda self, x, i: (self.transform(x), self.shaken.last),
    "seeding": lambda self, x, i: (torch.manual_seed(i) and self.transform(x), i),
    "of a kind": lambda self, x, i: (self.transform(x), type(self.transform).__name__),
}


class Augmenting(Source):
    """Random by its own transform, as most datasets are."""

    def __init__(self, samples: Any, log: str, how: str) -> None:
        super().__init__(samples, log)
        self.how = how
        self.shaken = Shaken()
        self.shaken.fails = how == "going on"
        self.transform = torch.nn.Sequential(Added(1), self.shaken, Added(100))

    def __getitem__(self, idx: int) -> Any:
        self.note()
        idx = int(idx) % len(self)
        return AUGMENTS[self.how](self, self.samples[idx].clone(), idx)


SOURCES = ("list", "Dataset", "keeps its samples", "TensorDataset", "subclass of TensorDataset",
           "__getitems__", "handle", "opened by worker_init_fn")  # fmt: skip
FILES = ("handle", "opened by worker_init_fn")


def make_source(case: Case, folder: Path) -> Any:
    width, log = WIDTH[case.width], str(folder / "main-process-loaded")
    if case.augments != "none":
        samples = [floats(i, width) for i in range(case.length)]
        return Augmenting(samples, log, case.augments)
    if case.source in FILES:
        path = folder / "data"
        path.write_bytes(b"".join(bytes(octets(i, width).tolist()) for i in range(case.length)))
        return (Handle if case.source == "handle" else Opened)(str(path), case.length, width, log)
    if "TensorDataset" in case.source:
        columns = (torch.stack([floats(i, width) for i in range(case.length)]),
                   torch.arange(case.length))  # fmt: skip
        return (TensorDataset if case.source == "TensorDataset" else Shifted)(*columns)
    samples = make_samples(case)
    kinds = {"Dataset": Copying, "keeps its samples": Source, "__getitems__": Together}
    return samples if case.source == "list" else kinds[case.source](samples, log)


def kept(source: Any) -> Any:
    """The objects that a source keeps and hands out."""
    return getattr(source, "tensors", None) or getattr(source, "samples", source)


# Transforms: functions of one sample of any kind


def is_edited(x: Any) -> bool:
    """Not records, sparse tensors and parameters: what is done to tensors is an error there."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is None
    return x.layout is torch.strided and not x.requires_grad


def mapped(function: Any, x: Any) -> Any:
    """The sample with the function applied to its arrays."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return function(x) if is_edited(x) else x
    if isinstance(x, Point):
        return Point(*(mapped(function, y) for y in x))
    if isinstance(x, (tuple, list)):
        return type(x)(mapped(function, y) for y in x)
    return {k: mapped(function, y) for k, y in x.items()} if isinstance(x, dict) else x


def pure(sample: Any) -> Any:
    return "transformed", mapped(lambda x: x + 1, sample)


def in_place(sample: Any) -> Any:
    """Doubles what can be doubled, and lengthens what can be lengthened."""
    if isinstance(sample, Sample):
        sample.label += 1
        return sample

    def double(x: Any) -> Any:
        x *= 2 if x.dtype not in (torch.bool,) else True
        return x

    mapped(double, sample)
    if isinstance(sample, list):
        sample.append(len(sample))
    if isinstance(sample, dict):
        sample["more"] = len(sample)
    return sample


def torch_random(sample: Any) -> Any:
    return torch.rand(2), sample


def numpy_random(sample: Any) -> Any:
    return np.random.rand(2), sample


def python_random(sample: Any) -> Any:
    return random.random(), sample


TRANSFORMS = {
    "none": None,
    "pure": pure,
    "in place": in_place,
    "torch random": torch_random,
    "numpy random": numpy_random,
    "python random": python_random,
}


class Bare(Dataset):
    """What CachedDataset is without a cache: the samples, and a transform of a copy of each."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        sample = self.dataset[idx]
        return sample if self.transform is None else self.transform(copy.deepcopy(sample))


# What a subclass of CachedDataset may override, over Bare and over CachedDataset alike


class OneByOne:
    def __getitem__(self, idx: int) -> Any:
        return "augmented", super().__getitem__(idx)


class ManyAtOnce:
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [("together", self[idx]) for idx in indices]


class Both(OneByOne, ManyAtOnce):
    pass


OVERRIDES = {"none": None, "__getitem__": OneByOne, "__getitems__": ManyAtOnce, "both": Both}


def subclass(override: str, base: type) -> type:
    """A subclass that can be pickled: its name is in this module."""
    over = OVERRIDES[override]
    if over is None:
        return base
    name = f"{over.__name__}{base.__name__}"
    made = globals().setdefault(name, type(name, (over, base), {"__module__": __name__}))
    assert made.__bases__[1] is base
    return made


for _override in OVERRIDES:
    subclass(_override, Bare)
    subclass(_override, stocache.CachedDataset)


# On top


class Doubled(Subset):
    """A user's subclass of Subset, which does something to the samples."""

    def __getitem__(self, idx: int) -> Any:
        return super().__getitem__(idx), idx

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[idx] for idx in indices]


def every_second(dataset: Any) -> range:
    return range(len(dataset) - 1, -1, -2)


TOPS = {
    "none": lambda ds: ds,
    "Subset": lambda ds: Subset(ds, every_second(ds)),
    "Subset of Subset": lambda ds: Subset(Subset(ds, every_second(ds)), [0, 1, 0]),
    "subclass of Subset": lambda ds: Doubled(ds, list(every_second(ds))),
    "ConcatDataset": lambda ds: ConcatDataset([ds, Subset(ds, [0, 1])]),
    "StackDataset": lambda ds: StackDataset(ds, ds),
    "random_split": lambda ds: random_split(ds, [len(ds) - 2, 2])[0],
}


# Samplers


class DrawsInIter:
    """A batch sampler that draws when `iter` is called, before the first batch is asked for."""

    def __init__(self, length: int, batch: int) -> None:
        self.length = length
        self.batch = batch

    def __len__(self) -> int:
        return -(-self.length // self.batch)

    def __iter__(self) -> Any:
        order = torch.randperm(self.length).tolist()
        return iter([order[n : n + self.batch] for n in range(0, self.length, self.batch)])


class DrawsPerBatch(DrawsInIter):
    """A batch sampler that draws each batch when it is asked for it."""

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            size = random.randint(1, self.batch)
            yield torch.randint(self.length, (size,)).tolist()


def order_options(case: Case, dataset: Any) -> dict[str, Any]:
    length, generator = len(dataset), torch.Generator().manual_seed(case.seed + 1)
    if case.sampler in ("draws in iter", "draws per batch"):
        kind = DrawsInIter if case.sampler == "draws in iter" else DrawsPerBatch
        return {"batch_sampler": kind(length, case.batch)}
    options: dict[str, Any] = {"batch_size": case.batch}
    if case.batch is not None:
        options["drop_last"] = case.drop_last
    if case.sampler == "shuffle":
        return {**options, "shuffle": True}
    weights = torch.arange(1, length + 1).double()
    make = {
        "in order": lambda: None,
        "random": lambda: RandomSampler(dataset, generator=generator),
        "random, twice": lambda: RandomSampler(
            dataset, num_samples=2 * length, generator=generator
        ),
        "replacement": lambda: RandomSampler(dataset, replacement=True),
        "weighted": lambda: WeightedRandomSampler(weights, length),
        "subset random": lambda: SubsetRandomSampler(range(0, length, 2), generator=generator),
        "distributed": lambda: DistributedSampler(dataset, 2, 1, shuffle=True, seed=case.seed),
        "from the end": lambda: list(range(-1, -length - 1, -1)),
        "numpy": lambda: list(np.random.RandomState(case.seed).permutation(length)),
    }
    return {**options, "sampler": make[case.sampler]()}


SAMPLERS = ("in order", "shuffle", "random", "random, twice", "replacement", "weighted",
            "subset random", "distributed", "from the end", "numpy",
            "draws in iter", "draws per batch")  # fmt: skip


# Collate functions


def listed(samples: Any) -> Any:
    """Keeps the samples as they are, and says what it was given."""
    return type(samples).__name__, samples


def shaken(samples: Any) -> Any:
    return torch.rand(1), np.random.rand(), random.random(), samples


COLLATES = {"default": None, "list": listed, "random": shaken, "stocache": stocache.collate}


# worker_init_fn


def draws_at_start(worker: int) -> None:
    torch.rand(worker + 1)
    random.random()


def opens_at_start(worker: int) -> None:
    dataset = get_worker_info().dataset
    dataset.file = open(dataset.path, "rb", buffering=0)  # noqa: SIM115


WORKER_INITS = {"none": None, "draws": draws_at_start, "opens": opens_at_start}


# The script

END = object()


def random_states(*generators: torch.Generator | None) -> bytes:
    state = hashlib.blake2b(digest_size=8)
    state.update(torch.get_rng_state().numpy().tobytes())
    for generator in filter(None, generators):
        state.update(generator.get_state().numpy().tobytes())
    state.update(np.random.get_state()[1].tobytes())
    state.update(repr((np.random.get_state()[2:], random.getstate())).encode())
    return state.digest()


def picture(x: Any) -> Any:
    """Everything that is to be equal about a value: its type, dtype, shape and bytes."""
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    if isinstance(x, torch.Tensor) and x.layout is torch.jagged:
        own = {name: each for name, each in vars(x).items() if name not in OF_JAGGED}
        return kind, picture([x.values(), x.offsets(), x.lengths(), x._ragged_idx, own])
    if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
        return kind, x.layout, picture(x.to_dense())
    if isinstance(x, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            plain = x.detach().as_subclass(torch.Tensor).contiguous()
        octets = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return kind, x.dtype, tuple(x.shape), x.requires_grad, octets, picture(vars(x))
    if isinstance(x, np.ma.MaskedArray):  # also what is under the mask
        mask, fill = picture(np.ma.getmaskarray(x)), vars(x).get("_fill_value")
        # What was not set follows from the type; numpy sets it when it pickles, and its dtype is
        # another with each time.
        fill = np.ma.default_fill_value(x) if fill is None else fill
        return kind, picture(x.data), mask, str(fill), x.hardmask
    if isinstance(x, (np.ndarray, np.generic)):
        return kind, x.dtype.str, str(x.dtype.metadata), x.shape, x.tobytes()
    if is_dataclass(x):
        return kind, [(f.name, picture(getattr(x, f.name))) for f in fields(x)]
    if isinstance(x, dict):
        return kind, [(picture(k), picture(v)) for k, v in x.items()]
    if isinstance(x, (tuple, list)):
        return kind, [picture(y) for y in x]
    if isinstance(x, SimpleNamespace):
        return kind, picture(vars(x))
    if isinstance(x, UserDict):
        return kind, picture(dict(sorted(vars(x).items())))
    if kind.startswith("torch_geometric.data."):
        return kind, picture(x.to_dict())
    if kind == "pandas.DataFrame":
        columns = [picture(x.iloc[:, k]) for k in range(x.shape[1])]
        return kind, columns, picture(x.columns), picture(x.index), picture(x.attrs)
    if kind == "pandas.Series":
        own = [x.name, x.index, x.attrs]
        return kind, str(x.dtype), [picture(each) for each in x.tolist()], picture(own)
    if kind.startswith("pandas.") and hasattr(x, "tolist") and hasattr(x, "names"):  # an index
        return kind, str(x.dtype), [picture(each) for each in x.tolist()], repr(list(x.names))
    return kind, struct.pack("d", x) if type(x) is float else repr(x)


def train(case: Case, dataset: Any, kind: type, collate: Any) -> list[Any]:
    """What the script saw: an entry for each step, with the state of all random generators."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(case.seed) if case.generator else None
    top = TOPS[case.top](dataset)
    options = order_options(case, top)
    sampler = options.get("sampler")
    own = getattr(sampler, "generator", None)
    if case.workers:
        options.update(
            prefetch_factor=case.prefetch,
            persistent_workers=case.persistent,
            multiprocessing_context=case.start,
            worker_init_fn=WORKER_INITS[case.worker_init],
        )
    loader = kind(top, num_workers=case.workers, collate_fn=collate, generator=generator, **options)

    def note(what: Any, value: Any = None) -> None:
        seen.append((what, picture(value), random_states(generator, own)))

    note("a loader", len(loader))
    for epoch, stop in enumerate(case.stops):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        if epoch and case.between == "clear" and isinstance(dataset, stocache.CachedDataset):
            dataset.clear()
        failed = False
        try:
            batches = iter(loader)
            note(f"epoch {epoch} begins", len(batches))
            if case.draws == "after iter":
                torch.rand(1)
            count = 0
            while stop is None or count < stop:
                batch = next(batches, END)
                if batch is END:
                    break
                note(f"epoch {epoch}, batch {count}", batch)
                count += 1
                if case.draws == "every batch":
                    torch.rand(1), random.random(), np.random.rand()
        except Exception as error:
            note(f"epoch {epoch} fails", type(error).__name__)
            failed = True
        if failed and case.workers:
            # After an error torch waits this long for each worker, and ends it then.
            with unittest.mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1):
                batches = None
                gc.collect()  # a traceback keeps it; a worker forked later must not end it
        batches = None
        note(f"epoch {epoch} ends")
    return seen


def seeded(case: Case) -> None:
    torch.manual_seed(case.seed)
    np.random.seed(case.seed)
    random.seed(case.seed)


def without_cache(case: Case, folder: Path) -> list[Any]:
    source = make_source(case, folder)
    collate = COLLATES[case.collate]
    if collate is stocache.collate:
        collate = None if case.batch is not None else default_collate
    plain = case.transform == "none" and case.override == "none"
    seeded(case)
    plain = plain or case.augments != "none"
    dataset = source if plain else subclass(case.override, Bare)(source, TRANSFORMS[case.transform])
    if case.before == "read":
        dataset[0], dataset[1]
    return train(case, dataset, DataLoader, collate)


@dataclass
class Product:
    """What is compared: stocache, or a twin that does some harm."""

    cached: type = stocache.CachedDataset
    loader: type = stocache.DataLoader


def with_cache(case: Case, folder: Path, product: Product) -> tuple[list[Any], str | None]:
    """What the script saw, and what was done that a script cannot see."""
    log = folder / "main-process-loaded"
    log.unlink(missing_ok=True)
    source = make_source(case, folder)
    before = picture(kept(source))
    seeded(case)
    index = INDEX + (4096 if case.policy == "lru" else 0)
    memory = {"all": "8MiB", "half": index + room(case) // 2 + 2048, "none": index + 2048}
    if case.augments == "none":
        make: Any = subclass(case.override, product.cached)
        options: Any = {"transform": TRANSFORMS[case.transform]}
    else:
        make, options = product.cached.until_random, {"steps": case.steps}
    dataset = make(source, memory[case.memory], policy=case.policy, verbose=case.verbose, **options)
    try:
        if case.before == "read":
            dataset[0], dataset[1]
        elif case.before == "warm":
            dataset.warm(num_workers=0, progress=False)
        elif case.before == "warm by workers":
            dataset.warm(num_workers=2, progress=False, multiprocessing_context=case.start)
        elif case.before == "verify":
            dataset.verify()
        kind = product.loader if case.loader == "ours" else DataLoader
        worth = 0 if case.ahead else 1 << 20
        with unittest.mock.patch("stocache._loading.gatherer.WORTH_A_THREAD", worth):
            seen = train(case, dataset, kind, COLLATES[case.collate])
    finally:
        for worker in multiprocessing.active_children():
            worker.join(60)  # one that torch has ended may still be ending, and keep the file
        dataset.close()
    if case.workers and case.before != "read" and log.exists():
        return seen, "a sample was loaded in the main process, where only workers load"
    if picture(kept(source)) != before:
        return seen, "the source's own samples were edited"
    return seen, None


def room(case: Case) -> int:
    """About what the samples take."""
    return case.length * (WIDTH[case.width] + 64)


def difference(case: Case, folder: Path, product: Product | None = None) -> str | None:
    """Where the script with stocache parts from the one without; None if it does not."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            expected = without_cache(case, folder)
            got, harm = with_cache(case, folder, product or Product())
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
    for (what, value, state), (what_else, other, other_state) in zip(expected, got, strict=False):
        if what != what_else:
            return f"{what_else} where {what}"
        if value != other:
            return f"{what}: {short(other)} instead of {short(value)}"
        if state != other_state:
            return f"{what}: random numbers were drawn that torch does not draw, or the reverse"
    if len(expected) != len(got):
        return f"{len(got)} steps instead of {len(expected)}"
    return harm


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else text[:400] + "…"
