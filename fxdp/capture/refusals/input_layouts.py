"""Refuse inputs with strides that differ from the program's, if strides matter.

A program has contiguous inputs, whatever the strides of the caller's. Most models do not notice. Two things
depend on strides:

    x.stride(0), x.as_strided(...)       the model's code reads strides or offsets (`Captured.layout_reads`)
    dropout with rng="single-device"     eager code assigns random numbers in the memory order of the operand

Calls that depend on strides are refused, with the line and with the copy that the caller should pass.
"""

from __future__ import annotations

from torch import Tensor

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import Inputs
from fxdp.errors import InputError
from fxdp.ir.graph.draws import graph_draws, node_draws
from fxdp.ir.graph.metadata import meta


def is_contiguous(tensor: Tensor) -> bool:
    """Return whether a tensor has the strides of a new tensor of its sizes; True for an empty tensor."""
    # Dims of size 1 count too: [n, 1, h, w] in channels_last is contiguous for torch, but a convolution of
    # this tensor returns channels_last. A stride of 0 in such a dim (NumPy's `a[:, None]`) has no such
    # effect.
    strides = [stride for stride in tensor.stride() if stride]
    return not tensor.numel() or (tensor.is_contiguous() and strides == sorted(strides, reverse=True))


def copies_in_order(inputs: Inputs) -> dict[str, str]:
    """Return for each input that is not contiguous, by path, the expression that makes a contiguous copy."""
    strided = [pair for pair in zip(inputs.paths, inputs.tensors, strict=True) if not is_contiguous(pair[1])]
    return {path: _copy(path, tensor) for path, tensor in strided}


def check_layouts(found: Captured, inputs: Inputs, *, full_batch_draws: bool) -> None:
    """Raise if inputs have strides that differ from the program's, and strides matter.

    `full_batch_draws`: random numbers are those of one device.

    Raises
    ------
    InputError : names a line that depends on strides, the inputs, and the copies to pass.
    """
    starts, of = any(r.offset for r in found.layout_reads), {r.of for r in found.layout_reads}
    tensors = enumerate(inputs.tensors if of else ())
    asked = [(i, t) for i, t in tensors if not {None, i}.isdisjoint(of)]
    strided = {i for i, t in asked if not is_contiguous(t)}
    offset = {i for i, t in asked if starts and t.numel() and t.storage_offset()}
    if wrong := sorted(strided | offset):
        reads = (read for read in found.layout_reads if strided or read.offset)
        read = next(read for read in reads if read.of in (None, *wrong))
        named = [(inputs.paths[i], inputs.tensors[i]) for i in wrong]
        shown = "; ".join(
            f"{path} (strides {list(t.stride())}, offset {t.storage_offset()})" for path, t in named
        )
        clones = (f"{path}.clone(memory_format=torch.contiguous_format)" for path, _ in named)
        raise InputError(
            f"at {read.location}: the model's code reads how its inputs lie in memory ({read.how}), and "
            f"these lie other than a program has them, contiguous from the start of their memory: {shown}. "
            f"Pass {', '.join(clones)}"
        )
    if full_batch_draws and (copies := copies_in_order(inputs)) and graph_draws(found.gm.graph):
        raise strided_draws(found, copies, ", ".join(copies))


def strided_draws(found: Captured, copies: dict[str, str], shown: str) -> InputError:
    """Return the error for random numbers of one device with inputs that are not contiguous."""
    location = next(meta(node).location for node in found.gm.graph.nodes if node_draws(node))
    return InputError(
        f'{location}: rng="single-device" draws for contiguous inputs, as one device lays its numbers down '
        f"in the order of memory, but these inputs lie otherwise: {shown}. Pass {', '.join(copies.values())}"
    )


def _copy(path: str, tensor: Tensor) -> str:
    # `contiguous()` returns a tensor unchanged that is contiguous except for strides of dims of size 1
    return (
        f"{path}.clone(memory_format=torch.contiguous_format)"
        if tensor.is_contiguous()
        else f"{path}.contiguous()"
    )
