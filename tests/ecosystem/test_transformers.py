"""Hugging Face: what tokenizers and processors give."""

from __future__ import annotations

import pytest
import torch
from checks import back, batches_are_those_of_torch, comes_back
from sources import Fixed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BatchFeature,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "a", "b", "c", "d"])}
    made = Tokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def test_encodings_come_back_with_their_tokens(tokenizer):
    value = tokenizer("a b c a", return_offsets_mapping=True)
    got = comes_back(value, lambda batch: dict(batch.data))
    assert type(got) is BatchEncoding and got.is_fast
    assert got.tokens() == value.tokens() == ["a", "b", "c", "a"]
    assert got.word_ids() == value.word_ids() and got.char_to_token(2) == value.char_to_token(2)
    assert got.n_sequences == value.n_sequences


def test_encodings_of_tensors(tokenizer):
    value = tokenizer(["a b", "c d"], return_tensors="pt")
    got = back(value)
    assert torch.equal(got["input_ids"], value["input_ids"]) and got.encodings is not None
    plain = BatchEncoding({"input_ids": [1, 2]})
    assert back(plain).data == plain.data and not back(plain).is_fast


def test_features_come_back():
    value = BatchFeature({"pixel_values": torch.rand(3, 4, 4), "name": "a"})
    got = back(value)
    assert type(got) is BatchFeature and got.keys() == value.keys()
    assert torch.equal(got["pixel_values"], value["pixel_values"]) and got.name == "a"


def test_outputs_of_models_come_back():
    value = BaseModelOutput(last_hidden_state=torch.rand(2, 3))
    got = back(value)
    assert type(got) is BaseModelOutput and list(got) == ["last_hidden_state"]
    assert torch.equal(got.last_hidden_state, value.last_hidden_state)


def test_a_collator_pads_what_comes_from_the_cache(cached, tokenizer):
    samples = [tokenizer("a b c d"[: 2 * (i % 4) + 1]) for i in range(8)]
    dataset = cached(Fixed(samples))
    collate = DataCollatorWithPadding(tokenizer)
    for _ in range(2):
        for got, want in zip(
            DataLoader(dataset, 4, collate_fn=collate),
            DataLoader(samples, 4, collate_fn=collate),
            strict=True,
        ):
            assert type(got) is type(want) and list(got) == list(want)
            assert all(torch.equal(got[key], want[key]) for key in want)


def test_batches_are_those_of_torch(cached, tokenizer):
    """default_collate makes tensors of its lists, or refuses, as without a cache."""
    samples = [BatchFeature({"x": torch.full((3,), i), "y": i}) for i in range(10)]
    batches_are_those_of_torch(cached, samples, native=False)
