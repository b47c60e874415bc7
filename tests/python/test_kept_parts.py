"""A part of a sample that somebody keeps, such as its label, keeps little more than itself."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
from stocache import _C

PICTURE = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(sample, keep, count: int = 300) -> int:
    """Bytes by which the process grows if it keeps these parts of that many samples."""
    store = _C.Records()
    store.open(1 << 24, 1, "freeze", "", "memfd", False, _C.fingerprint_of("x"), "no", "", 0, -1)
    with store.acquire([0], 0.0) as samples:
        samples.to_load()
        assert samples.put(0, sample, False) is _C.Put.STORED
    keep(store.get(0, False))
    gc.collect()
    # What earlier tests freed is not ours to fill without growing.
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    kept = [keep(store.get(0, False)) for _ in range(count)]
    after = resident()
    store.close()
    assert len(kept) == count
    return after - before


def picture():
    return torch.zeros(PICTURE, dtype=torch.uint8)


def test_a_kept_label_does_not_keep_its_picture(in_child):
    sample = (picture(), torch.tensor([3, 4]))
    assert in_child(grown, sample, lambda s: s[1]) < 30 * PICTURE
    nested = {"x": picture(), "meta": [{"box": torch.ones(4, 4)}]}
    assert in_child(grown, nested, lambda s: s["meta"][0]["box"]) < 30 * PICTURE


def test_a_kept_array_does_not_keep_its_picture(in_child):
    np = pytest.importorskip("numpy")
    for label in (np.arange(4), np.array(["a", "bc"]), np.array(7.0)):
        assert in_child(grown, (picture(), label), lambda s: s[1]) < 30 * PICTURE


def test_control_what_is_kept_is_seen(in_child):
    """The picture itself, and a part that is no small share of its record, keep it all."""
    sample = (picture(), torch.tensor([3, 4]))
    assert in_child(grown, sample, lambda s: s[0], 60) > 40 * PICTURE
    halves = (picture(), picture())
    assert in_child(grown, halves, lambda s: s[1], 60) > 100 * PICTURE


def test_kept_parts_are_at_most_an_eighth_of_what_they_keep(in_child):
    parts = tuple(torch.zeros(PICTURE // 16, dtype=torch.uint8) for _ in range(16))
    assert in_child(grown, parts, lambda s: s[5], 300) < 60 * PICTURE


def test_small_parts_are_whole_and_can_be_changed_shared_and_grown():
    np = pytest.importorskip("numpy")
    sample = (picture(), torch.arange(7), np.arange(5.0), torch.tensor(2.5), np.ones(2, "c16"))
    schema, record = _C.codec_encode(sample)
    for _ in range(3):
        memory = torch.frombuffer(bytearray(record), dtype=torch.uint8).clone()
        _, first, array, scalar, complex_ = _C.codec_decode(schema, memory)
        memory.fill_(255)
        del memory
        assert torch.equal(first, torch.arange(7)) and scalar == 2.5
        assert (array == np.arange(5.0)).all() and (complex_ == 1).all()
        assert array.flags.writeable and array.flags.aligned and complex_.flags.aligned
        assert first.data_ptr() % 16 == 0
        first += 1
        array += 1
        first.resize_(1000)
        assert torch.equal(first[:7], torch.arange(1, 8))
        first.share_memory_()
        assert torch.equal(first[:7], torch.arange(1, 8))
