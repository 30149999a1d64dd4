"""Refuse parameters that the module does not know: a program would read them as constants, without gradient.

    self.heads = [nn.Linear(8, 1)]          in a plain list; an nn.ModuleList registers
    def forward(self, x):
        return shared(self.heads[0](x))     `shared` is a global or of a closure

Export makes a constant of such a parameter, and no error. What is read without gradient (under `no_grad`,
detached, frozen) is a constant in eager, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError


def check_registered(args: Any, result: Any, known: Collection[int]) -> None:
    """Raise if a gradient would flow from a result into a parameter whose `id` is not among the known ones.

    Raises
    ------
    CaptureError : names the line, and how to register.
    """
    for value in _parameters(args):
        if id(value) not in known and value.requires_grad and torch.is_grad_enabled() and _trains(result):
            raise CaptureError(
                f"at {location_of_call()}: a parameter of shape {list(value.shape)} is read that the model "
                "does not have as an attribute (a module in a plain list or dict, a global, a closure): it "
                "would get no gradient. Register it (self.name = module, nn.ModuleList, nn.ModuleDict), read "
                "it under torch.no_grad() if it is not trained, or pass fallback='eager'"
            )


def _parameters(args: Any) -> Iterator[Tensor]:
    for value in args:
        kind = type(value)
        if kind is nn.Parameter:
            yield value
        elif kind is list or kind is tuple:
            yield from (one for one in value if type(one) is nn.Parameter)


def _trains(result: Any) -> bool:
    results = result if isinstance(result, (list, tuple)) else (result,)
    return any(isinstance(one, Tensor) and one.requires_grad for one in results)
