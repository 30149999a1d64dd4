"""Correct the states of torch's LSTM decomposition before 2.13, which have an extra dim for batches above 1.

state of a layer    (1, batch, features)   torch squeezes dim 1, which has one element for a single sample
                    (batch, features)      squeezing dim 0 gives this
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
"""Patches that correct the shape of the states, empty on releases without the fault."""
