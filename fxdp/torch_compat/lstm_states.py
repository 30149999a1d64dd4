"""Torch's decomposition of an LSTM before 2.13: states have a dim too many, if the batch is no single sample.

state of a layer    (1, batch, features)   torch takes dim 1 away, where it has one element
                    (batch, features)      as dim 0 taken away gives it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._decomp import decompositions

from fxdp.torch_compat.operators import release_before
from fxdp.torch_compat.patch import Patch, around

__all__ = ["LSTM_STATES"]


def _layer(
    plain: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]], *args: Any, **kwargs: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    rows, (hidden, cell) = plain(*args, **kwargs)
    return rows, (_two_dims(hidden), _two_dims(cell))


def _two_dims(state: Tensor) -> Tensor:
    return state.squeeze(0) if state.dim() == 3 else state


LSTM_STATES = (Patch(decompositions, "one_layer_lstm", around(_layer)),) if release_before(2, 13) else ()
"""What makes the shapes right, on the releases that need it."""
