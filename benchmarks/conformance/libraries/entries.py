"""Models that a library itself lists, the smallest of each family, as entries of the zoo's sweep.

A library is a module of its name here with `families()`: for each family a function that builds its
smallest model with a loss, and its inputs. None of these libraries is needed for fxdp or its tests: install
with `pip install --no-deps` what a sweep asks for.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.entry import Entry
from tests.zoo.measure import default_float64

LIBRARIES = ("timm", "torchvision", "diffusers", "peft", "torch_geometric", "transformers")
CLASSES = 10
SAMPLES = 3
"""In the batch that eager tries."""
VANISHED = 1e-20


@dataclass(frozen=True)
class Member:
    """The smallest model of a family that eager runs."""

    name: str
    entry: Entry


class EagerError(Exception):
    """No model of a family runs in eager mode on this machine: nothing to compare with."""


Families = dict[str, Callable[[], Member]]


def families(library: str) -> Families:
    """What the library lists; a member is found when its family is measured."""
    return importlib.import_module(f"{__package__}.{library}").families()  # type: ignore[no-any-return]


class WithLoss(nn.Module):
    """A model with the loss that its outputs are trained by: cross entropy of logits, else a mean square."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor | None = None, **inputs: Any) -> Tensor:
        out = self.model(*inputs.pop("args", ()), **inputs)
        leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        scalars = [x for x in leaves if x.dim() == 0]
        if scalars:
            return scalars[0]
        if target is not None and leaves[0].dim() == 2:
            return nn.functional.cross_entropy(leaves[0], target)
        trained = [x for x in leaves if x.requires_grad] or leaves  # all, where no gradient is asked for
        return torch.stack([x.square().mean() for x in trained]).sum()


def parameters(build: Callable[[], nn.Module]) -> int:
    """How many parameters a model has, without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def first_that_runs(entries: Iterable[tuple[str, Entry]]) -> Member:
    """The first entry that eager runs forward and backward, in training, with a few samples.

    Raises
    ------
    EagerError : none does, with what the last one says.
    """
    last: Exception | None = None
    for name, entry in entries:
        try:
            return check_runs(Member(name, entry))
        except Exception as error:
            last = error
    raise EagerError(f"{type(last).__name__}: {last}") from last


def check_runs(member: Member, *, wide: bool = False) -> Member:
    """The member, whose model eager has run forward and backward, in training, with a few samples.

    `wide`: in float64, which some inputs are in.
    """
    torch.manual_seed(0)
    with default_float64() if wide else contextlib.nullcontext():
        model = member.entry.build().train()
        loss = (model.double() if wide else model)(**member.entry.inputs(SAMPLES))
    loss.backward()
    if not loss.isfinite():
        raise EagerError(f"its loss is {loss.item()}")
    grads = (p.grad for p in model.parameters() if p.grad is not None and p.numel())
    largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
    if not largest > VANISHED:
        raise EagerError(f"its gradients vanish: the largest is {largest}, of which only rounding is left")
    return member


def _import_torchvision() -> None:
    """Torchvision's compiled ops load beside the very build of torch that they were made for only."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


_OPS = torch.library.Library("torchvision", "FRAGMENT")
_import_torchvision()  # before transformers does
