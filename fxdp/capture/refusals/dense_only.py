"""Refuse tensors that are not dense (sparse, nested, quantized): ranks cannot divide their dims.

    s = torch.sparse_coo_tensor(indices, values, size).coalesce()
    if s._nnz() == 0:               a trace has no values, so `s` seems empty, and the code takes this branch
        return torch.zeros_like(x)

The refusal is at the line of the model's code that makes or uses the tensor, not at a node of the graph,
because decisions of the code are in no graph. Only gradients (`nn.Embedding(sparse=True)`) are made after the
code ran.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import unheard

_MAKERS = ("to_sparse", "sparse_", "to_mkldnn", "_nested_", "quantize_per_")
"""Prefixes of functions that are refused without a call: traced, `to_sparse_csr` ends the process."""

_REMEDIES = {
    "nested": "Pad the samples to one size (torch.nn.utils.rnn.pad_sequence) and compute with a mask",
    "quantize": "Compute with torch.fake_quantize_per_tensor_affine (or per_channel), which rounds alike",
    "mkldnn": "Leave this layout out: where it is faster, compiled code chooses it",
    "sparse": (
        "For an embedding pass sparse=False. For a sparse matrix compute with its rows, columns and values: "
        "as a dense one by torch.zeros(size).index_put((rows, columns), values, accumulate=True), or its "
        "product with x by torch.zeros(...).index_add(0, rows, values[:, None] * x[columns]) or scatter_add"
    ),
}
"""Remedies, by a part of the kind's name."""


class DenseOnly(TorchFunctionMode):
    """Mode that refuses tensors that are not dense, made by the model's code or held in an attribute.

    A mode instead of patches: many functions make such tensors, and some only for certain arguments.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith(_MAKERS):
            raise _refusal(f"{name} makes", name)
        for given in args:
            if isinstance(given, Tensor) and (kind := _kind_of(given)):
                raise _refusal(f"{name} is given", kind)
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and (kind := _kind_of(made)):
            raise _refusal(f"{name} makes", kind)
        return made


def _kind_of(value: Tensor) -> str:
    """Return the layout of a tensor that is not dense; empty if the tensor is dense."""
    with unheard():  # without passing through the modes of a trace
        if value.is_nested:
            return "nested"
        if value.layout is not torch.strided:
            return str(value.layout).removeprefix("torch.")
        return "quantized" if value.is_quantized else ""


def check_dense(node: fx.Node, location: Location) -> None:
    """Raise if a value of a joint graph is not dense.

    Raises
    ------
    CaptureError : the node's value is sparse.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor) and (kind := _kind_of(value)):
        what = f"a tensor of layout {kind}, shape {list(value.shape)}"
        raise CaptureError(f"{location.where}: {what}; {why_dense(kind)}")


def _refusal(done: str, kind: str) -> CaptureError:
    what = next((word for word in ("nested", "quantized", "mkldnn") if word[:8] in kind), "sparse")
    return CaptureError(f"at {location_of_call()}: {done} a tensor that is {what}; {why_dense(kind)}")


def why_dense(kind: str) -> str:
    """Return the reason why a tensor of this kind is refused, with the remedy."""
    remedy = next((text for word, text in _REMEDIES.items() if word in kind), _REMEDIES["sparse"])
    return f"only dense tensors can be divided among ranks. {remedy}"
