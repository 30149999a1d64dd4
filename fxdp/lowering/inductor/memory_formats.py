"""Memory layouts of images, which Inductor would rather choose itself.

On CPU it runs every convolution on channels-last values. A forward that is traced so from the start has the
strides that Inductor would give it, hence what it saves is known before it is compiled, and the ranks can
compile both halves at the same time. Elsewhere Inductor weighs layouts by its own heuristics: there the
backward has to wait for the forward's strides.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def traces_channels_last(device: torch.device) -> bool:
    """Whether Inductor runs all convolutions channels-last on this device."""
    if device.type != "cpu":
        return False
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[no-untyped-call]


def channels_last(image: Tensor) -> Tensor:
    """The image as Inductor's convolutions read it; itself where it is laid out so."""
    layout = _FORMATS.get(image.dim())
    return image if layout is None else image.contiguous(memory_format=layout)


def chooses_layouts(joint: fx.GraphModule, device: torch.device) -> bool:
    """Whether Inductor would lay values out in another way than they were traced: for convolutions."""
    if traces_channels_last(device):
        return False
    return any(n.target is aten.convolution.default for n in joint.graph.nodes)


def save_laid_out_weights(joint: fx.GraphModule) -> None:
    """Let the forward save the weights that it lays out for convolutions, which read them in both halves.

    The partitioner would rather save the parameter, which is there anyway, and lay it out a second time.
    """
    for node in joint.graph.nodes:
        if node.target is aten.convolution.default:
            weight = node.args[1]
            if weight.target is aten.clone.default and weight.args[0].op == "placeholder":
                weight.meta["recompute"] = CheckpointPolicy.MUST_SAVE
