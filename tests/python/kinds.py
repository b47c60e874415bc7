"""Samples of every kind that default_collate knows, and some that it refuses."""

from __future__ import annotations

import warnings
from collections import defaultdict

import numpy as np
import torch
from samples import whole
from sources import Point
from stand_ins import Picture, Row, boxes, marked, scan

# Large enough to be sent as a ticket (16 KiB) and to be gathered into kept memory (64 KiB).
WORDS = 4096


def of_dtype(dtype):
    return [torch.arange(4).to(dtype) + idx for idx in range(6)]


DTYPES = (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
SAMPLES = {
    "tensors": [torch.full((3, 2), float(idx)) for idx in range(6)],
    "large tensors": [whole(idx, WORDS) for idx in range(6)],
    "scalar tensors": [torch.tensor(idx) for idx in range(6)],
    "bool tensors": [torch.tensor([idx % 2 == 0, True]) for idx in range(6)],
    **{f"{dtype}": of_dtype(dtype) for dtype in DTYPES},
    "empty tensors": [torch.empty(0, 3)] * 6,
    "ints": list(range(6)),
    "large ints": [2**62 + idx for idx in range(6)],
    "floats": [idx / 3 for idx in range(6)],
    "bools": [idx % 2 == 0 for idx in range(6)],
    "strings": [f"sample {'x' * idx} ü" for idx in range(6)],
    "bytes": [b"x" * idx for idx in range(6)],
    "image and label": [(torch.full((3, 8, 8), idx, dtype=torch.uint8), idx) for idx in range(6)],
    "lists": [[idx, idx + 0.5] for idx in range(6)],
    "dicts": [{"a": torch.ones(2) * idx, "b": {"c": idx, "d": "x"}} for idx in range(6)],
    "named tuples": [Point(torch.ones(2) * idx, idx) for idx in range(6)],
    "numpy": [np.full((2, 3), idx, dtype=np.float32) for idx in range(6)],
    "numpy scalars": [np.float64(idx) for idx in range(6)],
    "numpy ints": [np.int32(idx) for idx in range(6)],
    "numpy zero-d": [np.array(idx) for idx in range(6)],
    "deep": [[{"a": ([torch.ones(1) * idx], (idx, "x"))}] for idx in range(6)],
    "empty dicts": [{}] * 6,
    "pictures": [torch.full((3, 2), float(idx)).as_subclass(Picture) for idx in range(6)],
    "large pictures": [whole(idx, WORDS).as_subclass(Picture) for idx in range(6)],
    "boxes": [{"boxes": boxes(torch.ones(2, 4) * idx, (idx, 5)), "id": idx} for idx in range(6)],
    "scans": [(scan(torch.ones(2) * idx, name="x" * idx), idx) for idx in range(6)],
    "large scans": [scan(whole(idx, WORDS), name="x" * idx) for idx in range(6)],
    "subclass": [marked(torch.ones(2) * idx, note=idx) for idx in range(6)],
}
# default_collate refuses or does something of its own
MIXED = {
    "mixed shapes": [torch.ones(idx + 1) for idx in range(6)],
    "mixed dtypes": [torch.ones(2), torch.ones(2).long()] * 3,
    "mixed kinds": [1, "x", 2.5, None, torch.ones(1), (1, 2)],
    "ints and floats": [1, 2.5, 3, 4, 5.5, 6],
    "floats and ints": [1.5, 2, 3, 4, 5.5, 6],
    "ints too large": [2**70] * 6,
    "None": [None] * 6,
    "None inside": [(torch.ones(2), None)] * 6,
    "mixed keys": [{"a": 1}, {"b": 1}] * 3,
    "other order of keys": [{"a": 1, "b": 2}, {"b": 3, "a": 4}] * 3,
    "mixed lengths": [[1], [1, 2]] * 3,
    "text arrays": [np.array(["a", "b"])] * 6,
    "empty tuples": [()] * 6,
    "sets": [{idx} for idx in range(6)],
    "subclasses of list": [Row([idx, idx / 2]) for idx in range(6)],
    "default dicts": [defaultdict(list, {"a": torch.ones(2) * idx}) for idx in range(6)],
    "sparse tensors": [torch.eye(2).to_sparse()] * 6,
    "mixed attributes": [marked(torch.ones(2), a=1), marked(torch.ones(2))] * 3,
    "boxes of mixed shapes": [boxes(torch.ones(idx + 1, 4), (5, 5)) for idx in range(6)],
}


def outcome(make):
    """What comes of it: batches, or the type of the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except Exception as error:
            return type(error)
