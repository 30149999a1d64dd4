"""What the tests of all trainers share: ranks as torchrun starts them, a tiny model with its data."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


@contextlib.contextmanager
def launched() -> Iterator[int]:
    """This rank of the pool as one that torchrun started, for a framework that may warn; gives the rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    here = {name: str(value) for name, value in variables.items()}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": ""}
    before = dict(os.environ)
    os.environ.update(here)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield rank
    finally:
        os.environ.clear()
        os.environ.update(before)


def forget_accelerate() -> None:
    """Accelerate keeps who the ranks are in globals."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class TinyLM(nn.Module):
    """A language model as transformers has them: its loss is a mean over tokens that the trainer counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 30)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        if labels is None:
            return {"logits": logits}
        count = kwargs.get("num_items_in_batch")
        how = "mean" if count is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return {"loss": loss if count is None else loss / count, "logits": logits}


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Sentences of which another number of tokens counts in each."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (count, 6), generator=drawn)
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    for i, row in enumerate(rows):
        row["labels"][: i % 5] = -100
    return rows


def lightning_module(kind: str = "plain") -> Any:
    """A LightningModule, or one that no program of all steps can hold."""
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = TinyLM()
            self.norms: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if (kind == "counts" and batch_idx % 2) or (kind == "steps" and self.global_step):
                return None
            loss = self.net(**batch)["loss"]
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("total", loss.detach(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            return {"loss": loss, "logits": self.net(batch["input_ids"])["logits"].square().mean().sqrt()}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"val_loss": self.net(**batch)["loss"]})

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms.append(f"{torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]):.9f}")

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit().double()


def adversarial_module() -> Any:
    """A LightningModule with two networks, each with its own optimizer, which it steps by itself."""
    from lightning.pytorch import LightningModule

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
            self.critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            fake = self.generator(torch.randn(batch.size(0), 4, dtype=batch.dtype))
            self.toggle_optimizer(first)
            loss = F.softplus(-self.critic(fake)).mean()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            other = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(batch)).mean()
            self.manual_backward(other)
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)
            self.log_dict({"generator": loss, "critic": other}, on_epoch=True, sync_dist=True)
            self.log("seen", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]

    return Gan()
