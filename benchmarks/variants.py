"""The ways of training that are compared: each turns a model into a loss to call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxdp

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _ddp(model: nn.Module) -> Loss:
    return DistributedDataParallel(model)


def _compiled(loss: Loss) -> Loss:
    return torch.compile(loss)  # type: ignore[no-any-return]


VARIANTS: dict[str, tuple[str, Callable[[nn.Module], Loss]]] = {
    "eager": ("one device, eager, local batch, no communication", lambda model: model),
    "compile": ("one device, torch.compile, local batch, no communication", _compiled),
    "ddp": ("DDP", _ddp),
    "ddp-compile": ("DDP + torch.compile", lambda model: _compiled(_ddp(model))),
    "fxdp-eager": ("fxdp, compute=eager", lambda model: fxdp.compile(model, compute="eager")),
    "fxdp": ("fxdp, compute=inductor", lambda model: fxdp.compile(model, compute="inductor")),
    "fxdp-optimizer": ("fxdp, strategy=optimizer", lambda model: fxdp.compile(model, strategy="optimizer")),
    "fxdp-kept": (
        "fxdp, strategy=shard, reshard_after_forward=False",
        lambda model: fxdp.compile(model, strategy="shard", reshard_after_forward=False),
    ),
}

BASELINE = "ddp-compile"
WHOLE = "whole"  # one device with the whole batch: the reference of the losses, never timed
ALONE = ("eager", "compile", WHOLE)  # these do not average over the ranks
COMPILING = tuple(variant for variant in VARIANTS if variant not in ("eager", "ddp"))


def make_loss(variant: str, model: nn.Module) -> Loss:
    """The loss of `variant`, ready to be called with this rank's batch."""
    return model if variant == WHOLE else VARIANTS[variant][1](model)
