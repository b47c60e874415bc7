"""Fingerprints that change by themselves: what it is, and what to do."""

from __future__ import annotations

import datetime
import random
import time
import uuid
import warnings

import numpy as np
import pytest
import stocache
import torch
from stocache._sharing.changing import changes_by_itself


class Steps:
    def __init__(self, **parts):
        vars(self).update(parts)


class Numbers:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(i)


CHANGING = {
    "x": lambda: random.Random(),
    "rng": lambda: np.random.RandomState(),
    "new": lambda: np.random.default_rng(),
    "torch": lambda: torch.Generator(),
    "time": lambda: time.time(),
    "nanoseconds": lambda: time.time_ns(),
    "date": lambda: datetime.datetime.now(),
    "utc": lambda: datetime.datetime.now(datetime.timezone.utc),
    "id": lambda: uuid.uuid4(),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_by_itself_is_found_wherever_it_is(name):
    made = CHANGING[name]()
    for value, place in (
        (made, "it"),
        ([1, {"a": made}], "it[1]['a']"),
        (Steps(transforms=(Steps(own=made),)), "it.transforms[0].own"),
    ):
        (found,) = changes_by_itself(Numbers(it=value, other=made), ["it"])
        assert found.startswith(f"{place} is ")


def test_other_values_are_not_suspected():
    plain = {
        "numbers": [1, 2.5, 2**40, 1e9, -1],
        "text": "now",
        "old": datetime.datetime(2001, 1, 1),
        "by name": uuid.uuid5(uuid.NAMESPACE_DNS, "a"),
        "programs": [torch.default_generator, np.random.mtrand._rand, random._inst],
        "tensor": torch.tensor(time.time()),
        "kind": Steps,
    }
    itself: list = []
    itself.append(itself)
    numbers = Numbers(it=plain, again=itself)
    assert changes_by_itself(numbers, ["it", "again", "gone", "Numbers.__getitem__"]) == []


@pytest.fixture
def noted():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def test_a_refused_name_says_so(cached, unique_name):
    name = unique_name()
    cached(Numbers(augment=Steps(rng=random.Random())), name=name, keep=True).close()
    with pytest.raises(ValueError, match=r"what differs: augment\)") as caught:
        cached(Numbers(augment=Steps(rng=random.Random())), name=name, keep=True)
    text = str(caught.value)
    assert "augment.rng is a random generator (Random)" in text and "\n" not in text
    assert "pass fingerprint= with a text" in text
    stocache.node.remove(name)


class Items(list):
    def __init__(self, items, **attributes):
        super().__init__(items)
        vars(self).update(attributes)


class Pairs(dict):
    pass


class Slots:
    __slots__ = ("made", "paths")
    __len__, __getitem__ = Numbers.__len__, Numbers.__getitem__

    def __init__(self, made, paths=()):
        self.made, self.paths = made, paths


OTHERS = {
    "an attribute of a list": (lambda n: Items([1, 2], made=n, kept=1), "made"),
    "an item of a list": (lambda n: Items([1, n], made=1), "its items"),
    "an item of a dict": (lambda n: Pairs({0: n, 1: 5}), "its items"),
    "a slot": (lambda n: Slots(n), "made"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_differs_is_named_whatever_a_dataset_derives_from(cached, unique_name, kind):
    make, what = OTHERS[kind]
    name = unique_name()
    cached(make(3), name=name, keep=True).close()
    cached(make(3), name=name, keep=True).close()
    with pytest.raises(ValueError, match=rf"what differs: {what}\)"):
        cached(make(4), name=name, keep=True)
    stocache.node.remove(name)
    cached(make(time.time()), name=name, keep=True).close()
    with pytest.raises(ValueError, match=rf"{what}\S* is the time at which it was set"):
        cached(make(time.time()), name=name, keep=True)
    stocache.node.remove(name)


def test_a_disk_that_is_not_known_again_is_told(cached, tmp_path, noted):
    options = {"disk": "4MiB", "disk_path": tmp_path}
    for told in (False, True):
        dataset = cached(Numbers(made=time.time()), **options)
        dataset[0]
        dataset.close()
        assert bool(noted) == told
    (warning,) = noted
    text = str(warning.message)
    assert "of an earlier run" in text and "made is the time at which it was set" in text
    assert warning.filename.endswith("conftest.py"), "where the cache is made"
    # the remedy
    for filled in (0, 1):
        dataset = cached(Numbers(made=time.time()), fingerprint="v1", **options)
        assert dataset.stats().disk.filled == filled
        dataset[0]
        dataset.close()
    assert len(noted) == 1


def test_a_disk_of_other_data_is_nobodys_concern(cached, tmp_path, noted):
    for made in (1, 2):  # the control: it does not change by itself
        cached(Numbers(made=made), disk="4MiB", disk_path=tmp_path).close()
    for made in (1, 2):
        cached(Numbers(made=time.time(), kind=made), disk="4MiB", disk_path=tmp_path).close()
    assert not noted
