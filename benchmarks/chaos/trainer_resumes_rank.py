"""What one rank of `trainer_resumes.py` does: train up to a step, from a checkpoint on or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxdp
from tests.integrations.frameworks import forget_accelerate, launched

STOP, LAST = 7, 16
"""Steps; an epoch has 5 (29 samples in batches of 6)."""
SAMPLES, BATCH = 29, 6


class Model(nn.Module):
    """A regression whose loss is its first output, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error."""
        return {"loss": F.mse_loss(self.net(x)[:, 0], labels)}


def _samples() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=drawn)
    return [{"x": row, "labels": row.sum().sin()} for row in x]


def _loader() -> fxdp.ResumableLoader:
    return fxdp.data_loader(_samples(), BATCH, shuffle=True, seed=1, local=True)


def _by_trainer(folder: str, first: bool, stop: int) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fxdp.integrations.transformers import compile_trainer

    losses: list[float] = []

    class Stops(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == stop

    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=LAST, logging_steps=1,
        per_device_train_batch_size=BATCH // dist.get_world_size(), learning_rate=1e-2, save_strategy="no",
        max_grad_norm=0.0, seed=1,
    )  # fmt: skip
    trainer = Trainer(Model(), args, train_dataset=_samples(), callbacks=[Stops()])
    compile_trainer(trainer, backend="eager")
    trainer.train(resume_from_checkpoint=None if first else f"{folder}/checkpoint-{STOP}")
    return losses


def _by_accelerate(folder: str, first: bool, stop: int) -> list[float]:
    from accelerate import Accelerator

    from fxdp.integrations.accelerate import compile_accelerator

    accelerator = compile_accelerator(Accelerator(cpu=True), backend="eager")
    made = Model()
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    loader = _loader()
    accelerator.register_for_checkpointing(loader)
    if not first:
        accelerator.load_state(folder)
    losses: list[float] = []
    while True:
        for batch in loader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) + (0 if first else STOP) == stop:
                accelerator.save_state(folder)
                return losses


def _by_lightning(folder: str, first: bool, stop: int) -> list[float]:
    from lightning.pytorch import LightningModule, Trainer

    from fxdp.integrations.lightning import FxdpStrategy

    losses: list[float] = []

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=FxdpStrategy(backend="eager"),
        default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, max_steps=stop,
        enable_model_summary=False, max_epochs=-1, logger=False,
    )  # fmt: skip
    trainer.fit(Lit(), _loader(), ckpt_path=None if first else f"{folder}/stopped.ckpt")
    trainer.save_checkpoint(f"{folder}/stopped.ckpt")
    return losses


TRAINERS: dict[str, Callable[[str, bool, int], list[float]]] = {
    "trainer": _by_trainer, "accelerate": _by_accelerate, "lightning": _by_lightning,
}  # fmt: skip


def run(name: str, folder: str, first: bool, stop: int) -> list[float]:
    """Train up to step `stop`, from the checkpoint in `folder` on if not `first`; the losses of the steps."""
    torch.set_default_dtype(torch.float64)  # of the sum from which Trainer logs
    forget_accelerate()
    with launched():
        losses = TRAINERS[name](folder, first, stop)
    forget_accelerate()
    torch.set_default_dtype(torch.float32)
    return losses
