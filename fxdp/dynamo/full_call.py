"""`_FullCall`: a call that torch may break into several graphs, run in full as by `fxdp.compile`.

    compiled(x)  --  Dynamo  -->  first graph of the call  --  backend  -->  here

What lies between two graphs would see this rank's rows alone. So the frame that Dynamo compiles becomes a
call of `fxdp.compile(model, fallback="eager")`: a program of the global batch, or global tensors op by op,
where capture refuses the model. Later calls do not enter Dynamo at all, as its guards could fail too often.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxdp.dynamo.traced_call import TracedOptions
from fxdp.module.compiled import CompiledModule
from fxdp.torch_compat.dynamo import TracedFrame
from fxdp.torch_compat.frame_code import call_instead
from fxdp.torch_compat.outer_call import OuterCall

_KEPT = "_fxdp_full_call"


class _FullCall:
    """The calls of the models of one `torch.compile`."""

    def __init__(self, chosen: TracedOptions, first: OuterCall) -> None:
        self._options = replace(chosen.options, fallback="eager")
        self._mesh = chosen.mesh
        self._first: OuterCall | None = first

    def of_frame(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the call of a frame; the first one as the user has made it, without default values."""
        first, self._first = self._first, None
        compiled = self._compiled(model)
        if first is not None:
            args, kwargs = first.args, first.kwargs
            vars(first.optimized)["forward"] = compiled
        return compiled(*args, **kwargs)

    def _compiled(self, model: nn.Module) -> CompiledModule:
        """Return the compiled module of a model, which lives as long as the model."""
        keeper = next(model.parameters(), None)
        kept: _Kept = (None if keeper is None else keeper.__dict__.get(_KEPT)) or _Kept()
        if keeper is not None:
            keeper.__dict__[_KEPT] = kept
        if kept.compiled is None or kept.compiled.module is not model:
            kept.compiled = CompiledModule(model, self._mesh, self._options)
        return kept.compiled


class _Kept:
    """A compiled module as an attribute of its first parameter."""

    compiled: CompiledModule | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a file of the model has no programs, and loads where fxdp is not installed


def runs_in_full(frame: TracedFrame, call: OuterCall | None, chosen: TracedOptions) -> bool:
    """Make the frame of a model's forward run in full; return False for a frame that cannot.

    That is a function, a part of a call, a forward with hooks around it, which have run or will run, and
    stages or micro-batches, for which there is no fallback.
    """
    if call is None or call.optimized is None or call.running:
        return False
    model = call.optimized._orig_mod
    hooks = model._forward_hooks or model._forward_pre_hooks
    code = getattr(model.forward, "__code__", None)
    cut = chosen.options.has_microbatches or "pp" in _axes(chosen.mesh)
    if cut or hooks or code is not frame.code or frame.locals.get(code.co_varnames[0]) is not model:
        return False
    of_frame = _FullCall(chosen, call).of_frame
    call_instead(frame.code, torch.compiler.disable(of_frame))  # type: ignore[no-untyped-call]
    return True


def _axes(mesh: Any) -> tuple[str, ...]:
    return tuple(getattr(mesh, "mesh_dim_names", mesh) or ())
