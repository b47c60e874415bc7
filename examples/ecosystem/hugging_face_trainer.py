"""Hugging Face: a dataset with a slow `with_transform`, cached, in a Trainer.

python examples/ecosystem/hugging_face_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import torch
from stocache import CachedDataset
from transformers import Trainer, TrainingArguments


def prepare(rows: dict[str, list[str]]) -> dict[str, Any]:
    """Stands for a tokenizer."""
    codes = [[ord(letter) % 32 for letter in text.ljust(12)] for text in rows["text"]]
    return {"x": torch.tensor(codes), "labels": torch.tensor([len(t) % 2 for t in rows["text"]])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(32, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.embedding(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    rows = datasets.Dataset.from_dict({"text": ["word" * (1 + i % 3) for i in range(32)]})
    dataset = CachedDataset(rows.with_transform(prepare), "16MiB", verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=3, per_device_train_batch_size=8, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, dataloader_num_workers=1,
        )  # fmt: skip
        Trainer(Model(), arguments, train_dataset=dataset).train()
    print(f"{dataset.stats().hits} hits, {dataset.stats().loads} loads")
    dataset.close()


if __name__ == "__main__":
    main()
