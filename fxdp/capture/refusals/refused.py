"""What a joint graph may hold that no program of fxdp can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxdp import torch_compat
from fxdp.capture.sites import SiteIndex, module_path
from fxdp.errors import CaptureError
from fxdp.ir.notes import Site


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


def check_written(graph: fx.Graph, sites: SiteIndex) -> None:
    """Refuse writes into parameters.

    Raises
    ------
    CaptureError : with the line of the first one.
    """
    output = graph.output_node()
    values: Any = output.args[0]
    for value, descriptor in zip(values, output.meta["desc"], strict=True):
        written = getattr(descriptor, "mutated_input", None)
        if isinstance(written, torch_compat.ParamAOTInput):
            raise changed_parameter(module_path(written.target), sites.site(value))


def changed_parameter(name: str, site: Site | None = None) -> CaptureError:
    """The error of a forward that writes into a parameter."""
    where = f"at {site}: " if site is not None and site.file else ""
    return CaptureError(
        f"{where}the forward changes parameter {name} in place. Only buffers can be written by a step: "
        "register it with register_buffer (an average of other weights, a queue), or change it outside of "
        "the model, after optimizer.step() (what nn.Embedding(max_norm=) does to its weight)"
    )
