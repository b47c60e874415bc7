"""The same words for the same things in all caches, and what a notebook shows of them."""

from __future__ import annotations

import contextlib
from html.parser import HTMLParser

import pytest
import stocache
import torch
from sources import Fixed


@pytest.fixture
def caches(tmp_path):
    """One of each kind."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a").write_bytes(b"x" * 1000)
    made = [
        stocache.CachedDataset(Fixed([torch.zeros(100)] * 4), memory="1MiB", verbose=False),
        stocache.SharedCache(memory="1MiB", dataset_len=4, data_dims=(100,), verbose=False),
        stocache.FileCache(tmp_path / "far", tmp_path / "near", disk="1MiB"),
    ]
    yield made
    for cache in made:
        cache.close()


def test_closed_and_with(caches):
    for cache in caches:
        assert not cache.closed
        with cache as same:
            assert same is cache and not cache.closed
        assert cache.closed
        cache.close()
        assert cache.closed and "closed" in repr(cache)


def test_with_closes_also_after_an_error(caches):
    for cache in caches:
        with contextlib.suppress(KeyError), cache:
            raise KeyError
        assert cache.closed


def test_the_limit_in_one_word(tmp_path):
    options = {"dataset_len": 100, "data_dims": (1024,), "verbose": False}
    with (
        stocache.SharedCache(1 / 1024, **options) as one,
        stocache.SharedCache(memory="1MiB", **options) as other,
        stocache.SharedCache(memory=1 << 20, **options) as third,
    ):
        assert len(one) == len(other) == len(third) == 100
        assert one.stats().capacity == other.stats().capacity
    with stocache.SharedCache(memory="64KiB", **options) as small:
        assert len(small) == 63
    (tmp_path / "far").mkdir()
    with (
        stocache.FileCache(tmp_path / "far", tmp_path / "near", limit="3MiB") as one,
        stocache.FileCache(tmp_path / "far", tmp_path / "near", disk="3MiB") as other,
    ):
        assert one.limit == other.limit == 3 << 20


def test_warm_and_checksum(caches):
    dataset, _, files = caches
    assert dataset.warm(progress=False).filled == 4
    assert files.warm(progress=False).files == 1
    options = {"memory": "1MiB", "dataset_len": 4, "data_dims": (8,), "verbose": False}
    for options_of_it, edited in (({}, False), ({"checksum": True}, True)):
        with stocache.SharedCache(**options, **options_of_it) as cache:
            cache.set_slot(0, torch.zeros(8, dtype=torch.uint8))
            cache.array[0] += 1
            assert (cache.get_slot(0) is None) == edited


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: stocache.SharedCache(1, 4, (8,), memory="1MiB"), "both given"),
        (lambda: stocache.SharedCache(dataset_len=4, data_dims=(8,)), "size_limit_gib is None"),
        (lambda: stocache.SharedCache(1, data_dims=(8,)), "dataset_len is None"),
        (lambda: stocache.SharedCache(1, 4), "data_dims is None"),
        (lambda: stocache.SharedCache(1, 4, (8,), checksum=1), "checksum is 1"),
        (lambda: stocache.FileCache("a", "b", limit=5, disk=5), "both given"),
        (
            lambda: stocache.CachedDataset([1], transform=print, transform_sample=print),
            "both given",
        ),
        (lambda: stocache.CachedDataset([1], transform_sample=5), "transform_sample is 5"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


class Bars(HTMLParser):
    """Checks that what is opened is closed; collects the widths of bars and the text."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.widths: list[float] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        style = dict(attrs).get("style") or ""
        if "%" in style:
            self.widths.append(float(style.partition("width:")[2].partition("%")[0]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(value) -> Bars:
    bars = Bars()
    bars.feed(value._repr_html_())
    assert not bars.open
    return bars


def test_a_bar_for_each_level(caches, tmp_path):
    for cache in caches:
        for value in (cache, cache.stats()):
            assert shown(value).widths == [0.0]
    dataset, cache, files = caches
    dataset.warm(progress=False)
    cache.set_slot(0, torch.zeros(100, dtype=torch.uint8))
    files.warm(progress=False)
    assert shown(cache).widths == [25.0] and "1 of 4 slots" in shown(cache).text
    assert 0 < shown(dataset).widths[0] < 1 and "4 of 4 samples" in shown(dataset).text
    assert shown(files).widths == [0.1] and "1 files" in shown(files).text
    with stocache.CachedDataset(
        Fixed([torch.zeros(1000)] * 4), "1MiB", disk="1MiB", disk_path=tmp_path, verbose=False
    ) as both:
        assert len(shown(both).widths) == 2 and "disk" in shown(both).text
    for cache in caches:
        cache.close()
        assert not shown(cache).widths and "closed" in "".join(shown(cache).text)


def test_a_bar_of_a_plan_and_names_that_look_like_tags():
    plan = stocache.plan(Fixed([torch.zeros(1 << 20)] * 8), "16MiB", disk="32MiB")
    assert shown(plan).widths[1] > 50 > shown(plan).widths[0] or len(shown(plan).widths) == 2
    assert "of the dataset" in "".join(shown(plan).text)
    kind = type("<b>", (Fixed,), {})
    with stocache.CachedDataset(kind([1]), "1MiB", verbose=False) as dataset:
        assert "CachedDataset of <b>" in shown(dataset).text
