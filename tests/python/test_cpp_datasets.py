"""stocache::cached: the samples of a torch::data dataset, kept in shared memory."""

from __future__ import annotations

import pytest
import stocache
import torch
from building import TORCH, compiler, run


def test_each_sample_is_loaded_once(probe_answer):
    result = probe_answer("dataset_twice")["ok"]
    assert result["right"] is True
    assert result["loads"] == [1] * 16
    for cache in ("data", "target"):
        assert result[cache]["filled"] == result[cache]["fills"] == 16


def test_a_dataset_without_targets(probe_answer):
    result = probe_answer("dataset_plain")["ok"]
    assert result["right"] is True
    assert result["loads"] == [1] * 16
    assert result["data"]["filled"] == 16


@pytest.mark.parametrize("hits", ["copies", "views"])
def test_what_a_map_makes_of_a_dataset_is_cached(probe_answer, hits):
    result = probe_answer("dataset_mapped", hits)["ok"]
    assert result["right"] is True
    assert result["loads"] == [1] * 16
    assert result["mapped"] == 16


@pytest.mark.parametrize("hits", ["copies", "views", "stacked"])
def test_what_a_batch_lacks_is_asked_for_at_once(probe_answer, hits):
    result = probe_answer("dataset_batches", hits, 0)["ok"]
    assert result["right"] is True
    # Sample 0 says what all of them look like.
    assert result["asked"] == [[0], [3, 1, 2], [7, 9, 7], [4], [15, 15]]
    for cache in ("data", "target"):
        assert result[cache]["filled"] == result[cache]["fills"] == 8
        assert result[cache]["hits"] == 6
        assert result[cache]["misses"] == 9


def test_a_source_that_gives_fewer_samples_than_it_was_asked_for_is_refused(probe_answer):
    result = probe_answer("dataset_batches", "copies", 3)
    assert result == {
        "error": "ValueError",
        "text": "the dataset behind stocache::cached gave 2 samples for 3 indices",
    }


def test_the_compiler_says_which_datasets_cannot_be_cached(tmp_path):
    def said(expressions: list[str], check: list[str]) -> str:
        source = tmp_path / "wrong.cpp"
        calls = [f"stocache::cached({each}, stocache::Options(1));" for each in expressions]
        source.write_text(WRONG_DATASETS.replace("CALLS", " ".join(calls)))
        done = run(*check, source)
        return "" if done.returncode == 0 else done.stdout

    include = TORCH / "include"
    check = [
        compiler(), "-std=c++20", "-fsyntax-only", "-I", stocache.include_path(),
        "-isystem", include, "-isystem", include / "torch/csrc/api/include",
    ]  # fmt: skip
    assert said(["Pictures()"], check) == ""
    both = said(["Pictures().map(torch::data::transforms::Stack<>())", "Stream()"], check)
    assert "what makes a batch of them, as Stack does, comes after it" in both
    assert "a dataset that is asked by index, not a stream" in both


WRONG_DATASETS = """
#include <stocache/stocache.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>

using Example = torch::data::Example<>;
struct Pictures : torch::data::datasets::Dataset<Pictures> {
  Example get(size_t) override { return {}; }
  std::optional<size_t> size() const override { return 1; }
};
struct Stream : torch::data::datasets::StreamDataset<Stream> {
  std::vector<Example> get_batch(size_t) override { return {}; }
  std::optional<size_t> size() const override { return 1; }
};
int main() { CALLS }
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hits", ["copies", "views", "stacked"])
def test_a_loader_with_threads_sees_every_sample(probe_answer, hits, workers):
    result = probe_answer("dataset_loader", hits, workers)["ok"]
    assert result["right"] is True
    assert result["seen"] == [list(range(50))] * 3
    assert result["loads"] == [1] * 50
    assert result["data"]["filled"] == 50


def test_an_edit_of_a_copy_stays_out_of_the_cache_and_one_of_a_view_does_not(probe_answer):
    assert probe_answer("dataset_edited", "copies")["ok"] == {
        "after_miss": True,
        "after_hit": True,
        "data": 5,
        "target": 105,
    }
    assert probe_answer("dataset_edited", "views")["ok"] == {
        "after_miss": True,
        "after_hit": False,
        "data": -1,
        "target": -1,
    }


def test_a_sample_has_no_history_whether_it_was_cached_or_just_loaded(probe_answer):
    assert probe_answer("dataset_history")["ok"] == [True, False, False, False, False]


# A sample is 48 bytes and its target 8; each has a byte of state in its cache.
@pytest.mark.parametrize("slots", [0, 1, 7, 15, 16])
def test_the_budget_holds_samples_and_targets(probe_answer, slots):
    budget = 16 * (8 + 1) + 16 + 48 * slots
    result = probe_answer("dataset_small", budget)["ok"]
    assert result["right"] is True
    assert result["data"]["capacity"] == slots
    assert result["target"]["capacity"] == 16
    used = sum(c["capacity"] * c["slot_bytes"] + 16 for c in (result["data"], result["target"]))
    assert used <= budget
    # The constructor looks at sample 0; beyond the cache every look is a load.
    expected = [1 if i < slots else 2 for i in range(16)]
    assert result["loads"][1:] == expected[1:]
    assert result["loads"][0] == (1 if slots else 3)


def test_an_exception_of_the_source_comes_through_and_caches_nothing(probe_answer):
    result = probe_answer("dataset_broken", "throws")["ok"]
    assert result["type"] == "SourceError"
    assert result["first"] == result["second"]
    assert result["second"]["text"] == "sample 3 cannot be read"
    assert result["good"] is True
    assert result["data"]["filled"] == result["target"]["filled"] == 2  # samples 0 and 4


def test_a_sample_of_another_shape_is_a_value_error_that_shows_both(probe_answer):
    result = probe_answer("dataset_broken", "odd")["ok"]
    assert result["first"] == result["second"]
    assert result["first"]["error"] == "ValueError"
    assert "(3, 5)" in result["first"]["text"] and "(3, 4)" in result["first"]["text"]
    assert result["first"]["text"].endswith("; convert it first (sample 3 of the dataset)")
    assert result["data"]["filled"] == 2


@pytest.mark.parametrize(
    "mistake, kind, words",
    [
        ("empty", "ValueError", "not empty"),
        ("unsized", "ValueError", "knows its size"),
        ("name", "ValueError", "not allowed"),
        ("index", "IndexError", "Index 4 out of bounds for dataset of length 4"),
        ("0", "ValueError", "size_limit_gib is 0"),
        ("-1", "ValueError", "size_limit_gib is -1"),
        ("nan", "ValueError", "size_limit_gib is nan"),
        ("1e-9", "ValueError", "size_limit_gib is 1e-09"),
    ],
)
def test_a_dataset_that_cannot_be_cached_is_refused(probe_answer, mistake, kind, words):
    result = probe_answer("dataset_wrong", mistake)
    assert result["error"] == kind
    assert words in result["text"] and "\n" not in result["text"]


def test_two_programs_share_a_dataset_by_name(start_probe, unique_name):
    name = unique_name()
    first = start_probe("dataset_named", name)
    result = first.result()
    assert result["right"] is True and result["loads"] == [1] * 16
    second = start_probe("dataset_named", name)
    result = second.result()
    # One look at sample 0, which says what all of them look like.
    assert result["right"] is True and result["loads"] == [1] + [0] * 15
    with (
        stocache.SharedCache.join(name) as data,
        stocache.SharedCache.join(f"{name}-target") as target,
    ):
        for i in range(16):
            assert torch.equal(data.get_slot(i), torch.full((3, 4), i, dtype=torch.int32))
            assert target.get_slot(i).item() == i + 100
    for probe in (first, second):
        assert probe.result("end") == {"data": name, "target": f"{name}-target"}
        probe.end()
