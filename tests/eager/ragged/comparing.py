"""Run a program on a ragged batch of one device, and on its ranks' parts on virtual ranks; compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.eager.loader import _entered
from tests.eager.running import difference, plain
from tests.eager.virtual import on_virtual_ranks

EXACT = 1e-9
Program = Callable[[Any], dict[str, Any]]
"""Takes a batch, returns numbers; the same code for one device and for ranks."""


def trained(model: nn.Module, loss: Tensor, **results: Any) -> dict[str, Any]:
    """The loss with the gradients of all parameters, after a backward."""
    loss.backward()
    named = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **named, **results}


def error_of(
    program: Program, full: Any, parts: Sequence[Any], batch_dims: Any = None,
    enter: Callable[[Any, Any, Any], Any] = _entered,
) -> float:  # fmt: skip
    """The largest relative difference of the program's numbers on any rank from one device's.

    `enter` takes a rank's part, the ranks and `batch_dims`, and returns the global batch.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)

    def on_rank(ranks: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        return plain(program(enter(parts[ranks.rank], ranks, batch_dims)))

    try:
        torch.manual_seed(0)
        expected = plain(program(full))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of ops without a batching rule and the like
            found = on_virtual_ranks(len(parts), on_rank)
    finally:
        torch.set_default_dtype(default)
    worst = max(difference(expected, one) for one in found)
    assert worst[0] < EXACT, worst
    return worst[0]


def refusal_of(parts: Sequence[Any], batch_dims: Any = None) -> str:
    """What each virtual rank raises when these parts enter, which is equal on all."""
    texts: list[str] = []

    def on_rank(ranks: Any) -> None:
        try:
            _entered(parts[ranks.rank], ranks, batch_dims)
        except ValueError as error:
            texts.append(str(error))

    on_virtual_ranks(len(parts), on_rank)
    assert len(texts) == len(parts), "a rank let the batch enter"
    assert len(set(texts)) == 1
    return texts[0]
