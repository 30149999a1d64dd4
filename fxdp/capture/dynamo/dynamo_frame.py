"""The call that Dynamo traces, where it is one that can be a program of all ranks."""

from __future__ import annotations

from torch import nn

from fxdp.errors import InputError
from fxdp.torch_compat import TracedFrame, running_ddp, traced_frame


class BrokenFrameError(InputError):
    """A call that torch may cut into several graphs, with ordinary code between them."""

    def __init__(self, frame: TracedFrame, message: str) -> None:
        self.frame = frame
        super().__init__(message)


def whole_frame() -> TracedFrame:
    """What Dynamo is tracing.

    Raises
    ------
    BrokenFrameError : Dynamo may leave out what it cannot trace.
    InputError : not Dynamo, or Dynamo within DistributedDataParallel.
    """
    frame = traced_frame()
    if frame is None:
        raise InputError(
            'the backend "fxdp" is for torch.compile, which tells it of the model; expected '
            "fxdp.compile(model) elsewhere"
        )
    if not frame.whole or frame.suppressed:
        expected = "fullgraph=True" if not frame.whole else "torch._dynamo.config.suppress_errors = False"
        raise BrokenFrameError(
            frame,
            f'torch.compile(model, backend="fxdp"): expected {expected}. Without it torch runs what it '
            "cannot trace as ordinary code, on this rank's part of the batch alone: losses would be this "
            "rank's, and parameters used there would get this rank's gradients. fxdp.compile(model) takes "
            "models that torch.compile cannot trace as a whole",
        )
    if (ddp := running_ddp()) is not None:
        raise InputError(
            f"torch.compile compiles inside of DistributedDataParallel({type(ddp.module).__name__}), which "
            "reduces gradients itself; expected the model without it, as fxdp finds and inserts all "
            "communication"
        )
    return frame


def title_of(frame: TracedFrame) -> str:
    """What errors and plans call the model."""
    held = (frame.locals.get(name) for name in ("self", "fn"))
    model = next((module for module in held if isinstance(module, nn.Module)), None)
    return frame.code.co_name if model is None else type(model).__name__
