"""Lightning's command line: module and data module, scheduler, logged epoch means, metrics."""

import os
import sys

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

torch.set_default_dtype(torch.float64)


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(4, (66,), generator=generator)
        images = torch.randn(4, 12, generator=generator)[labels] + torch.randn(66, 12, generator=generator)
        self.test = TensorDataset(images[50:], labels[50:])
        full = TensorDataset(images[:50], labels[:50])
        self.train, self.val = random_split(full, [34, 16], generator=torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class Classifier(LightningModule):
    def __init__(self, hidden: int = 10, learning_rate: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(12, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 4),
        )
        self.val_acc = Accuracy(task="multiclass", num_classes=4)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class Printer(Callback):
    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            found = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val")}
            print(" ".join(f"{k} {float(v):.10g}" for k, v in sorted(found.items())))

    def on_train_epoch_end(self, trainer, module):
        print(f"train {float(trainer.callback_metrics['train_loss_epoch']):.10g}")


def cli_main():
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "callbacks": [Printer()], **quiet}
    defaults |= {"default_root_dir": os.getcwd(), "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    args = sys.argv[1:] or ["--model.hidden=12", "--data.batch_size=8"]
    cli = LightningCLI(
        Classifier,
        Digits,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},
        trainer_defaults=defaults,
        run=False,
        args=args,
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    found = cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False, weights_only=False)
    print(f"test {found[0]['test_loss']:.10g}")
    print(f"norms {sum(p.norm() for p in cli.model.parameters()):.10g}")


if __name__ == "__main__":
    cli_main()
