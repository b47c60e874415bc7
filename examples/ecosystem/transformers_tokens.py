"""Texts that were tokenized once; a collator pads them in every batch.

python examples/ecosystem/transformers_tokens.py
"""

from __future__ import annotations

from typing import Any

from stocache import CachedDataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

# Stands for AutoTokenizer.from_pretrained(...), which would need the network.
words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "the": 2, "cat": 3}, "[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, idx: int) -> Any:
        return tokenizer("the cat " * (1 + idx % 5))


dataset = CachedDataset(Texts(), "16MiB", verbose=False)
for _ in range(2):
    for batch in DataLoader(dataset, 8, collate_fn=DataCollatorWithPadding(tokenizer)):
        assert batch["input_ids"].shape == batch["attention_mask"].shape

print(type(dataset[1]).__name__, dataset[1].tokens())
print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
dataset.close()
