"""The frame that Dynamo traces, checked to be one that can become a program of all ranks."""

from __future__ import annotations

import re

from torch import nn

from fxdp.errors import InputError
from fxdp.torch_compat import running_ddp
from fxdp.torch_compat.dynamo import TracedFrame, traced_frame

_REMEDY = (
    '; options={"graph_breaks": True} compiles each graph as a program of its own, by which you promise that '
    "what runs between them treats samples one by one and reads no parameter"
)


class BrokenFrameError(InputError):
    """A call that torch may split into several graphs, with ordinary code between them."""

    def __init__(self, frame: TracedFrame, message: str) -> None:
        self.frame = frame
        super().__init__(message)


def frame_in_flight(graph_breaks: bool) -> TracedFrame:
    """Return the frame that Dynamo traces; with `graph_breaks` the frame may be a part of a call.

    Raises
    ------
    BrokenFrameError : Dynamo may skip code that cannot be traced.
    InputError : not called by Dynamo, or Dynamo runs inside of DistributedDataParallel.
    """
    frame = traced_frame()
    if frame is None:
        raise InputError(
            'the backend "fxdp" is for torch.compile, which tells it of the model; expected '
            "fxdp.compile(model) elsewhere"
        )
    broken = not frame.full and not graph_breaks
    if broken or frame.suppressed:
        expected = "fullgraph=True" if broken else "torch._dynamo.config.suppress_errors = False"
        raise BrokenFrameError(
            frame,
            f'torch.compile(model, backend="fxdp"): expected {expected}. Without it torch runs what it '
            "cannot trace as ordinary code, on this rank's part of the batch alone: losses would be this "
            "rank's, and parameters used there would get this rank's gradients. fxdp.compile(model) takes "
            "models that torch.compile cannot trace as one" + (_REMEDY if broken else ""),
        )
    if (ddp := running_ddp()) is not None:
        raise InputError(
            f"torch.compile compiles inside of DistributedDataParallel({type(ddp.module).__name__}), which "
            "reduces gradients itself; expected the model without it, as fxdp finds and inserts all "
            "communication"
        )
    return frame


def function_of(frame: TracedFrame) -> str:
    """Return the user's name of the function; the frame may be a resume function after a graph break."""
    name = getattr(frame.code, "co_qualname", frame.code.co_name).rpartition("<locals>.")[2]
    return re.sub(r"(torch_dynamo_resume_in_)+(.*?)(_at_\d+)+$", r"\2", name)


def title_of(frame: TracedFrame) -> str:
    """Return the name of the model in errors and plans."""
    held = (frame.locals.get(name) for name in ("self", "fn"))
    model = next((module for module in held if isinstance(module, nn.Module)), None)
    return frame.code.co_name if model is None else type(model).__name__
