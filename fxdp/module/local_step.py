"""The step of an elementwise optimizer on sharded parameters: each rank steps on the rows it holds.

Each element of a parameter is stepped by itself, so rows give the numbers of the whole. torch would give the
same on `DTensor`s, where it can, but dispatches each op of a step for each of them, which takes longer than
the step itself.

On a CPU torch's `fused=True` rounds the last few elements of a tensor otherwise than those before, which fill
vectors of the processor. So there, and on one device with another number of threads, a last bit may differ.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxdp.ir.model_tensors import held
from fxdp.module.optimizer_twin import dealt, keep_options, rows_of, twin_of
from fxdp.torch_compat import dtensor_like


class LocalStep:
    """One step of an elementwise optimizer."""

    twin: Optimizer
    """Its parameters are this rank's rows."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.twin = twin_of(optimizer)
        for group, own in zip(optimizer.param_groups, self.twin.param_groups, strict=True):
            own["params"] = [self._own(parameter) for parameter in group["params"]]

    def _own(self, parameter: Tensor) -> Tensor:
        """What the twin steps on, with its gradient and state in place."""
        states = self._optimizer.state.get(parameter)
        if not isinstance(parameter, DTensor):
            if states is not None:
                self.twin.state[parameter] = states
            return parameter
        local, gradient = held(parameter), parameter.grad
        local.grad = None if gradient is None else rows_of(parameter, gradient)
        if states:
            own = {name: _rows_in(parameter, value) for name, value in states.items()}
            self.twin.state[local] = own
        return local

    def finish(self) -> None:
        """Let the optimizer have the twin's state."""
        keep_options(self._optimizer, self.twin)
        for group, own in zip(self._optimizer.param_groups, self.twin.param_groups, strict=True):
            for parameter, local in zip(group["params"], own["params"], strict=True):
                if local is not parameter:
                    local.grad = None
                if local in self.twin.state:
                    self._keep(parameter, self.twin.state[local])

    def _keep(self, parameter: Tensor, own: dict[str, Any]) -> None:
        if not isinstance(parameter, DTensor):
            self._optimizer.state[parameter] = own
            return
        states = self._optimizer.state[parameter]
        for name, value in own.items():
            before = states.get(name)
            known = held(before) if isinstance(before, DTensor) else before
            if known is not value or name not in states:
                states[name] = _as_seen(parameter, value)


def _rows_in(parameter: DTensor, value: Any) -> Any:
    """What the twin has for a state: rows of what has the parameter's shape, anything else as it is."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        return rows_of(parameter, value)
    return value


def _as_seen(parameter: DTensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != held(parameter).shape:
        return value
    if value.dtype == parameter.dtype:
        return dtensor_like(parameter, value)
    return dealt(parameter, value, len(parameter))
