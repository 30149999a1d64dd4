"""Collectives of the user's own, outside of modules: each rank has the same global value, or there is none.

    dist.all_reduce(loss)       loss * ranks: each rank has the loss of the global batch
    dist.all_gather(all, x)     refused where x is sharded: it is the batch of all ranks already
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from fxdp.eager.message_report import user_line
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import InputError

NAMESPACE = "c10d"


def check_collective(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a collective gets a global tensor that is not full on every rank.

    Raises
    ------
    InputError : names the line.
    """
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor)]
    parts = [leaf for leaf in given if not leaf._spec.layout.is_full]
    if parts:
        raise InputError(
            f"{user_line()}: {op} got a global tensor of shape {tuple(parts[0].shape)} "
            f"({parts[0]._spec.layout}), which is of all ranks already; expected no collective, or a plain "
            "tensor: .local is this rank's part, .full() the full value"
        )
