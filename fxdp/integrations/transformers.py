"""Transformers: `compile_trainer(Trainer(...))` makes the Trainer compute the numbers of one device.

    trainer = compile_trainer(Trainer(model, args, train_dataset=data))
    trainer.train()

By default, Trainer multiplies the loss by the number of ranks, because DistributedDataParallel divides
gradients by this number. Here all of `compute_loss` is a program of the global batch: label smoothing,
`compute_loss_func` and losses of subclasses are exact, too. Batches are split as in
`fxdp/integrations/accelerate.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

import fxdp
from fxdp.errors import a_kind
from fxdp.integrations.accelerate import compile_accelerator

_T = TypeVar("_T")


def compile_trainer(trainer: _T, *, pad: Any = None, **options: Any) -> _T:
    """Make a Trainer (or a subclass) compile its model with these options; return the trainer itself.

    Call this function once, before `train`, `evaluate` or `predict`.

    Parameters
    ----------
    trainer : a trainer with a plain model, neither compiled nor wrapped.
    pad : the value that pads each column of the batch if the ranks' sequences differ in length,
        as {"input_ids": 0, "attention_mask": 0, "labels": -100}.
    options : further options of `fxdp.compile`.

    Raises
    ------
    InputError : the trainer's model is compiled or wrapped; the trainer shards models.
    """
    found: Any = trainer
    if isinstance(found.model, fxdp.CompiledModule) or found.model_wrapped is not found.model:
        raise fxdp.InputError(
            f"the trainer's model is {a_kind(found.model_wrapped)} already; expected the model as "
            "it is: compile_trainer(Trainer(model, ...)), without fxdp.compile"
        )
    if found.args.n_gpu > 1:
        raise fxdp.InputError(
            f"the trainer uses {found.args.n_gpu} GPUs in one process; expected one process for each: start "
            "it by torchrun --nproc-per-node"
        )
    accelerator = compile_accelerator(found.accelerator, pad=None if pad is None else ((), pad), **options)
    found.args.average_tokens_across_devices = True  # count the labels of the global batch
    options |= {"pad": None if pad is None else ((), {"inputs": pad})}
    found.compute_loss = _Losses(found, found.compute_loss, options)
    predict = found.prediction_step

    def prediction_step(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return predict(accelerator.prepare_model(found.model, evaluation_mode=True), *args, **kwargs)

    found.prediction_step = prediction_step
    return trainer


class _LossOfTrainer(nn.Module):
    """The computation of a trainer for a batch: loss, and the model's outputs on request."""

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any], args: Any) -> None:
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss
        self._args = args

    def forward(self, inputs: dict[str, Any], num_items_in_batch: Any, return_outputs: bool) -> Any:
        """Run `Trainer.compute_loss`, without the factor for DistributedDataParallel."""
        average, self._args.average_tokens_across_devices = self._args.average_tokens_across_devices, False
        try:
            return self._compute_loss(
                self.model, dict(inputs), return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        finally:
            self._args.average_tokens_across_devices = average

    def __deepcopy__(self, memo: dict[int, Any]) -> _LossOfTrainer:
        """Return a copy with a copied model; the trainer, which holds data and optimizer, is shared."""
        twin = _LossOfTrainer(copy.deepcopy(self.model, memo), self._compute_loss, self._args)
        return twin.train(self.training) if twin.training != self.training else twin


@dataclass
class _Losses:
    """Replacement for `Trainer.compute_loss` with the loss of the global batch."""

    trainer: Any
    compute_loss: Callable[..., Any]
    options: dict[str, Any]
    _model: nn.Module | None = None
    _compiled: Any = None

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        if self._model is not self.trainer.model:  # `model_init=` makes a new one for each `train`
            self._model = self.trainer.model
            loss = _LossOfTrainer(self._model, self.compute_loss, self.trainer.args)
            self._compiled = fxdp.compile(loss, **self.options)
        return self._compiled(
            inputs=inputs, num_items_in_batch=num_items_in_batch, return_outputs=return_outputs
        )
