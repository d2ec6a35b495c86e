"""A small training with PyTorch Lightning and Holdfast. Kill it at any moment and start the same command again: it prints
what it would have printed without that.

    python examples/train_lightning.py               # one process
    python examples/train_lightning.py --devices 2   # DistributedDataParallel

It needs lightning and torchdata.
"""

import argparse
import sys

import lightning.pytorch as L
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.integrations.lightning import HoldfastCallback  # [holdfast]


class Sums(torch.utils.data.Dataset):
    """Eight numbers and their sum, with noise that is drawn again in each epoch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.01 * torch.randn(8), x.sum().reshape(1)


class Adder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def loss(self, batch):
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.tell("loss", loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.tell("val", float(self.trainer.callback_metrics["val"]))

    def tell(self, name, value):
        # (One write each: the ranks share the output.)
        sys.stdout.write(f"rank {self.global_rank} step {self.global_step} {name} {value:.9g}\n")
        sys.stdout.flush()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val"},
        }


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--job", default="adder")
options = parser.parse_args()

L.seed_everything(1)
trainer = L.Trainer(
    max_epochs=options.epochs,
    accelerator="cpu",
    devices=options.devices,
    callbacks=[HoldfastCallback(options.job)],  # [holdfast]
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(
    Adder(),
    StatefulDataLoader(Sums(), batch_size=4, shuffle=True),
    StatefulDataLoader(Sums(), batch_size=20),
)
