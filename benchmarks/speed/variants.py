"""The ways of training that are compared: each turns a model into a loss to call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

import fxdp
from fxdp.ranks.mesh_init import init_mesh

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LeastSums:
    """A model without communication, and the least that ranks of one host can do to train it together.

    The loss is summed by a message, as it is handed out, and all gradients at once after the backward,
    each where it lies, by the quickest way that fxdp knows: nothing is packed, and ranks wait for each other
    twice a step. What is the batch's in the model itself (BatchNorm) stays a rank's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._loss, self._parameters = _compiled(model), [*model.parameters()]
        process_mesh = init_mesh(None, "cpu")
        if (
            process_mesh.comms is None
            or process_mesh.comms.transport.memory is None
            or not process_mesh.comms.transport.memory.direct
        ):
            raise RuntimeError("ranks of one host that may read each other's memory are wanted")
        self._memory, self._group = process_mesh.comms.transport.memory, process_mesh.mesh.group("messages")
        self._size = process_mesh.mesh.size

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self._loss(*batch) / self._size
        with torch.no_grad():
            full = torch.ops._c10d_functional.all_reduce(loss, "sum", self._group)
            loss.copy_(torch.ops._c10d_functional.wait_tensor(full))
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self._sum))
        return loss

    def _sum(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._memory.finish(self._memory.start_in_place(gradients))


def _ddp(model: nn.Module) -> Loss:
    return DistributedDataParallel(model)


def _compiled(loss: Loss) -> Loss:
    return torch.compile(loss)  # type: ignore[no-any-return]


VARIANTS: dict[str, tuple[str, Callable[[nn.Module], Loss]]] = {
    "eager": ("one device, eager, local batch, no communication", lambda model: model),
    "compile": ("one device, torch.compile, local batch, no communication", _compiled),
    "ddp": ("DDP", _ddp),
    "ddp-compile": ("DDP + torch.compile", lambda model: _compiled(_ddp(model))),
    "least": ("one device, torch.compile, and the least that sums its gradients", LeastSums),
    "fxdp-eager": ("fxdp, backend=eager", lambda model: fxdp.compile(model, backend="eager")),
    "fxdp": ("fxdp, backend=inductor", lambda model: fxdp.compile(model, backend="inductor")),
    "fxdp-optimizer": ("fxdp, strategy=optimizer", lambda model: fxdp.compile(model, strategy="optimizer")),
    "fxdp-kept": (
        "fxdp, strategy=shard, reshard_after_forward=False",
        lambda model: fxdp.compile(model, strategy="shard", reshard_after_forward=False),
    ),
}

BASELINE = "ddp-compile"
FULL = "full"  # one device with the global batch: the reference of the losses, never timed
ALONE = ("eager", "compile", FULL)  # these do not average over the ranks
COMPILING = tuple(variant for variant in VARIANTS if variant not in ("eager", "ddp"))


def make_loss(variant: str, model: nn.Module) -> Loss:
    """The loss of `variant`, ready to be called with this rank's batch."""
    return model if variant == FULL else VARIANTS[variant][1](model)
