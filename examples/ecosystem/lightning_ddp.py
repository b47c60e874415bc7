"""Lightning: two ranks train from one cache. Make datasets in `setup` or `train_dataloader`.

python examples/ecosystem/lightning_ddp.py [ddp or ddp_spawn]
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning
import stocache
import torch
from stocache import CachedDataset
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[Any]):
    """Stands for samples that take long to load."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, idx: int) -> Any:
        return torch.full((8,), float(idx)), float(idx % 2)


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.dataset = CachedDataset(Slow(), "16MiB", verbose=False)

    def train_dataloader(self) -> Any:
        # Lightning makes it anew with a DistributedSampler for each rank.
        return DataLoader(
            self.dataset, 8, shuffle=True, num_workers=1, persistent_workers=True,
            collate_fn=stocache.collate,
        )  # fmt: skip


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, _index: int) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x / 64)[:, 0], y.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_end(self) -> None:
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero:
            stats = self.trainer.datamodule.dataset.stats()
            print(f"{self.trainer.world_size} ranks, {stats.hits} hits, {stats.loads} loads")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=(sys.argv[1:] or ["ddp"])[0], max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), datamodule=Data())
