"""Programs for one device, as people write them; each runs on plain tensors, and on global ones.

A program takes `batch`, which turns the tensors of the full batch into what the program sees, and returns
numbers and tensors by name. Losses, metrics, noise and control flow stand outside of any compiled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = Callable[..., Any]
Program: TypeAlias = Callable[[Batch], dict[str, Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """List a program under its name."""
    PROGRAMS[function.__name__] = function
    return function


def gradients(*modules: nn.Module) -> dict[str, Any]:
    """The gradients of modules, by name."""
    named = ((f"{i}.{n}", p.grad) for i, m in enumerate(modules) for n, p in m.named_parameters())
    return {name: grad for name, grad in named if grad is not None}


def net(inputs: int = 6, hidden: int = 7, outputs: int = 4, norm: bool = False) -> nn.Sequential:
    """Two layers, with BatchNorm between if asked for."""
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(inputs, hidden), *between, nn.Tanh(), nn.Linear(hidden, outputs))


def data(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """Samples and labels."""
    torch.manual_seed(seed)
    return torch.randn(size, 6), torch.randint(0, 4, (size,))
