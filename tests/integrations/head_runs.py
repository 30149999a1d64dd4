"""A head of transformers trained and evaluated by Trainer, on this rank; and two such runs compared."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.capture.zoo import keep_float64
from tests.integrations.frameworks import forget_accelerate, launched
from tests.integrations.heads import EVALUATED, HEADS

BATCH = 4
STEPS = 6
_TIMES = ("_runtime", "_per_second", "learning_rate", "epoch", "step", "total_flos")


@dataclass
class Run:
    """All numbers of a run: what is logged, row by row, and the parameters at its end."""

    rows: list[dict[str, float]]
    parameters: dict[str, torch.Tensor]
    problem_type: str | None


def trained(
    name: str, folder: str, dtype: torch.dtype, options: dict[str, Any] | None = None, pads: bool = True
) -> Run:
    """Train a head and evaluate it twice; with options of `fxdp.compile` by `compile_trainer`."""
    forget_accelerate()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with launched(), keep_float64() if dtype is torch.float64 else contextlib.nullcontext():
            return _run(_trainer(name, folder, options, pads))
    finally:
        torch.set_default_dtype(before)
        forget_accelerate()


def _trainer(name: str, folder: str, options: dict[str, Any] | None, pads: bool) -> Any:
    from fxdp.integrations.transformers import compile_trainer

    trainer = plain_trainer(name, folder, BATCH // dist.get_world_size())
    if options is None:
        return trainer
    return compile_trainer(trainer, pad=HEADS[name].pad if pads else None, **options)


def plain_trainer(name: str, folder: str, batch: int = BATCH) -> Any:
    """Make a head's Trainer as its user does, with batches of this size on each rank."""
    import transformers as hf

    head = HEADS[name]
    arguments: Any = hf.Seq2SeqTrainingArguments if "Seq2Seq" in head.trainer else hf.TrainingArguments
    args = arguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch, max_steps=STEPS, learning_rate=1e-2, logging_steps=1,
        eval_strategy="steps", eval_steps=STEPS // 2, save_strategy="no", **head.arguments,
    )  # fmt: skip
    rows, model = head.samples(), head.make()
    return getattr(hf, head.trainer)(
        model, args, head.collate(model), rows, rows[:EVALUATED], compute_metrics=head.metrics
    )


def _run(trainer: Any) -> Run:
    trainer.train()
    parameters = {key: x.detach().clone() for key, x in trainer.model.named_parameters()}
    return Run(rows_of(trainer), parameters, trainer.model.config.problem_type)


def rows_of(trainer: Any) -> list[dict[str, float]]:
    """Return what a Trainer has logged, without times and counts of steps."""
    return [
        {key: float(x) for key, x in row.items() if not key.endswith(_TIMES)}
        for row in trainer.state.log_history
    ]


@dataclass
class Compared:
    """How many numbers there were of each kind, and by how much they differ at most."""

    counts: dict[str, int]
    largest: dict[str, float]


def compared(one: Run, other: Run) -> Compared:
    """Each number beside that of another run: relative to it where it is larger than 1."""
    assert [row.keys() for row in one.rows] == [row.keys() for row in other.rows]
    pairs: list[tuple[str, float]] = []
    for ours, theirs in zip(one.rows, other.rows, strict=True):
        for key, value in ours.items():
            kind = "evaluation" if key.startswith("eval") else key.removeprefix("train_")
            pairs.append((kind, abs(value - theirs[key]) / max(1.0, abs(value))))
    for key, tensor in one.parameters.items():
        apart = (tensor - other.parameters[key]).abs().max()
        pairs.append(("parameters", float(apart / tensor.abs().max().clamp_min(1.0))))
    kinds = {kind: [x for key, x in pairs if key == kind] for kind, _ in pairs}
    return Compared({key: len(x) for key, x in kinds.items()}, {key: max(x) for key, x in kinds.items()})
