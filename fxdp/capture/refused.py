"""What a joint graph may hold that no program of fxdp can run."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxdp.annotations import Site
from fxdp.errors import CaptureError


def check_dense(node: fx.Node, site: Site) -> None:
    """Refuse sparse tensors, which have no dims that ranks could divide.

    Raises
    ------
    CaptureError : the node's value is sparse.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        where = f"at {site}" if site.file else "in the model"
        raise CaptureError(
            f"{where}: a tensor of layout {str(value.layout).removeprefix('torch.')}, shape "
            f"{list(value.shape)}; only dense tensors can be divided among ranks. For an embedding pass "
            "sparse=False, for a sparse matrix its indices and values (gather, multiply, index_add)"
        )


def changed_parameter(name: str) -> CaptureError:
    """The error of a forward that writes into a parameter."""
    return CaptureError(
        f"the forward changes parameter {name} in place. Only buffers can be written by a step: register it "
        "with register_buffer (an average of other weights, a queue), or change it outside of the model, "
        "after optimizer.step() (what nn.Embedding(max_norm=) does to its weight)"
    )
