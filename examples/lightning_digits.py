"""A LightningModule, as people write it: logged losses and accuracy, validation, a scheduler.

    python examples/lightning_digits.py
    fxdp run --nproc 2 examples/lightning_digits.py

Both print the same numbers. `Trainer(strategy="fxdp")` under torchrun compiles the same module
(docs/trainers.md).
"""

import argparse
import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

Batch = tuple[Tensor, Tensor]


class Digits(LightningModule):
    """A classifier of images of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
        )

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log how many are right."""
        images, labels = batch
        self.log("right", (self.net(images).argmax(1) == labels).double().mean())

    def on_train_epoch_end(self) -> None:
        """Print what was logged."""
        print({name: round(value.item(), 9) for name, value in sorted(self.trainer.callback_metrics.items())})

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        """Adam, at a rate that falls from epoch to epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=3)
asked = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.data / 16), torch.tensor(digits.target)
train = TensorDataset(images[: asked.samples], labels[: asked.samples])
test = TensorDataset(images[1400:], labels[1400:])
module = Digits()
Trainer(
    max_epochs=asked.epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
).fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=100))  # fmt: skip
print(f"norms {sum(p.norm().item() for p in module.parameters()):.9f}")
