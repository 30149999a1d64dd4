"""Trainer on two ranks prints what it prints on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxdp
from tests.integrations.frameworks import TinyLM, forget_accelerate, launched, sentences
from tests.rank_pool import RankPool

SHOWN = ("loss", "grad_norm", "eval_loss", "eval_largest", "train_loss", "step")


class Deciding(TinyLM):
    """Sets an attribute at its first call, as classifiers of transformers set `config.problem_type`."""

    kind: str | None = None

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        if self.kind is None:
            self.kind = "tokens" if input_ids.dtype == torch.int64 else "vectors"
        if self.kind == "tokens":
            return super().forward(input_ids, labels, **kwargs)
        raise NotImplementedError(self.kind)


def _largest(prediction: Any) -> dict[str, float]:
    assert len(prediction.label_ids) == len(prediction.predictions) == 5
    return {"largest": float(prediction.predictions.max())}


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss outside of the model, of which a part is no sum over samples."""
    logits = outputs["logits"]
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / num_items_in_batch + logits.square().mean().sqrt()


def _trainer(folder: str, loss: Any = None) -> Any:
    from transformers import Trainer, TrainingArguments

    share = 4 // torch.distributed.get_world_size()
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=share,
        per_device_eval_batch_size=share, gradient_accumulation_steps=2, max_steps=20, learning_rate=1e-2,
        max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=10, save_strategy="steps",
        save_steps=13,
    )  # fmt: skip
    data = sentences(17)  # the last batch has one sample, and a step of its own
    how = {"compute_metrics": _largest, "compute_loss_func": loss}
    how |= {"model_init": TinyLM} if loss else {"model": Deciding()}  # a new one at each `train`
    return Trainer(args=args, train_dataset=data, eval_dataset=data[:5], **how)


def _trained(folder: str, compiled: bool, loss: Any) -> list[dict[str, str]]:
    """All that it logs, as Trainer prints it, in 20 steps, and again in those after a checkpoint."""
    from fxdp.integrations.transformers import compile_trainer

    forget_accelerate()
    rows: list[dict[str, float]] = []
    with launched():
        trainer = _trainer(folder, loss)
        if compiled:
            assert compile_trainer(trainer, backend="eager") is trainer
        for checkpoint in (None, f"{folder}/checkpoint-13"):
            trainer.train(resume_from_checkpoint=checkpoint)
            rows += trainer.state.log_history
        assert type(trainer.model) is (TinyLM if loss else Deciding)  # the user's own
    forget_accelerate()
    return [{name: f"{row[name]:.4g}" for name in SHOWN if name in row} for row in rows]


@pytest.mark.parametrize("loss", [None, _own_loss])
def test_trainer_prints_the_numbers_of_one_device(ranks: RankPool, tmp_path: Path, loss: Any) -> None:
    (expected,) = ranks.run(1, _trained, str(tmp_path / "one"), False, loss)
    assert sum("grad_norm" in row for row in expected) == 40
    assert sum("eval_loss" in row for row in expected) == 4
    for found in ranks.run(2, _trained, str(tmp_path / "two"), True, loss):
        assert found == expected


def _misused(folder: str) -> list[str]:
    from fxdp.integrations.transformers import compile_trainer

    forget_accelerate()
    said = []
    with launched():
        trainer = _trainer(folder)
        trainer.model = trainer.model_wrapped = fxdp.compile(trainer.model)
        for action in (lambda: compile_trainer(trainer), trainer.train, trainer.evaluate):
            try:
                action()
            except fxdp.InputError as error:
                said.append(str(error))
    forget_accelerate()
    return said


def test_a_compiled_model_needs_the_integration(ranks: RankPool, tmp_path: Path) -> None:
    for twice, *wrapped in ranks.run(2, _misused, str(tmp_path)):
        assert "compile_trainer(Trainer(model, ...))" in twice
        assert len(wrapped) == 2
        for said in wrapped:
            assert said.startswith("accelerator.prepare(compiled): ")
            assert "fxdp.integrations.transformers.compile_trainer(trainer)" in said
