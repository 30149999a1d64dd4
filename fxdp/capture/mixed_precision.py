"""Mixed precision: the model runs on casts of parameters and inputs; the originals are not changed.

    parameter, float32 ──cast──> bfloat16 ──┐
    input, float32     ──cast──> bfloat16 ──┴─ model ─ output, cast to `output`
    gradient, float32  <──cast── sum over ranks in `reduce` <── bfloat16

The casts are ordinary nodes of the graph, so the program shows which dtypes are gathered, saved and sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.errors import a_kind

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a model computes; None leaves a dtype unchanged.

    Source: `torch.distributed.fsdp.MixedPrecisionPolicy`, of a module that is sharded as one.
    """

    param: torch.dtype | None = None
    """Dtype of the parameters that the model's code reads, and of the inputs, if `inputs` is True."""
    reduce: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; accumulation is in the parameter's own dtype."""
    output: torch.dtype | None = None
    inputs: bool = True
    """True if inputs are cast."""

    @classmethod
    def of(cls, policy: Any) -> MixedPrecision | None:
        """Convert torch's policy; None stays None. The default of `reduce_dtype` is `param_dtype`."""
        if policy is None:
            return None
        reduce = policy.param_dtype if policy.reduce_dtype is None else policy.reduce_dtype
        return cls(policy.param_dtype, reduce, policy.output_dtype, policy.cast_forward_inputs)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `module(*args, **kwargs)` with casts of parameters, inputs and outputs."""
        own = {name: _cast(self.param, p) for name, p in module.named_parameters()}
        if self.inputs:
            args, kwargs = pytree.tree_map_only(Tensor, partial(_cast, self.param), (args, dict(kwargs)))
        output = torch.func.functional_call(module, own, args, dict(kwargs))
        return pytree.tree_map_only(Tensor, partial(_cast, self.output), output)


def policy_faults(policy: Any) -> list[str]:
    """Return an error text for each fault of an `mp_policy`."""
    if policy is None:
        return []
    if not all(hasattr(policy, name) for name in (*_DTYPES, "cast_forward_inputs")):
        return [f"mp_policy is {a_kind(policy)}, expected a torch.distributed.fsdp.MixedPrecisionPolicy"]
    given = {name: getattr(policy, name) for name in _DTYPES}
    return [
        f"mp_policy has {name}={dtype!r}, expected a floating-point dtype or None"
        for name, dtype in given.items()
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point))
    ]


def _cast(dtype: torch.dtype | None, value: Tensor) -> Tensor:
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)
