"""Backwards that a program has not: the compiled call runs once more, op by op, within that backward.

out = model(x)                   compiled, the generator's state kept
loss.backward()                  the program's own
autograd.grad(out, x, create_graph=True)    op by op from the same x, parameters and numbers:
                                 any derivative of that is there, as if the call had not been compiled
loss.backward() twice            the first is the program's own, the second op by op
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.leaves import register_containers
from fxdp.eager.autograd.gradients import full_value, replicated
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import StateError
from fxdp.ir.graph.draws import RandomState, kept_random_state, set_random_state
from fxdp.run.calls.module_program import ModuleProgram
from fxdp.run.calls.observed_call import DERIVED_AGAIN, SECOND_BACKWARD
from fxdp.runtime.chained_modules import replace_backward
from fxdp.torch_compat import without_torch_function


class ReplayedCall:
    """A compiled call of a module, which runs again op by op for backwards that its program has not.

    Parameters
    ----------
    plain : `plain(module, *args, **kwargs)` calls the module op by op.
    program : the programs that serve the call.
    told : called with what was unlike a single plain backward, the first time that the call is repeated.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        program: ModuleProgram,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        told: Callable[[str], None],
    ) -> None:
        self._plain, self._program, self._args, self._kwargs = plain, program, args, kwargs
        self._told = told
        self._modes = [(part, part.training) for part in program.script_modules]
        self._tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._inputs = list({id(t): t for t in self._tensors if t.requires_grad}.values())
        self._parameters = {name: p for name, p in program.script_parameters.items() if p.requires_grad}
        self._buffers: Mapping[str, Tensor] = {}
        self._state: RandomState | None = None
        self._versions = _versions(self._tensors)
        device = next((t.device.type for t in self._tensors), "cpu")
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._backwards, self._was_due, self._places = 0, False, list[int]()

    def watch(self, output: Any) -> Any:
        """Return the output of the program, right after its call, with tensors that have all backwards."""
        self._buffers, self._state = self._program.buffers_before, self._program.random_before
        register_containers(output)
        leaves, structure = pytree.tree_flatten(output)
        self._places = [i for i, leaf in enumerate(leaves) if _is_differentiable(leaf)]
        if not self._places:
            return output
        derived = (*self._inputs, *self._parameters.values())
        with without_torch_function():
            made = _Replayed.apply(self, len(self._places), *(leaves[i] for i in self._places), *derived)  # type: ignore[no-untyped-call]
        for place, tensor in zip(self._places, made, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def is_due(self) -> bool:
        """Count a backward, and return whether it is one that the program has not."""
        self._backwards += 1
        is_due = torch.is_grad_enabled() or self._backwards > 1
        if is_due and not self._was_due:
            self._was_due = True
            self._told(DERIVED_AGAIN if torch.is_grad_enabled() else SECOND_BACKWARD)
        return is_due

    def gradients(self, grads: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Run the call op by op, and return the gradients of its tensors and parameters.

        The call gets tensors of its own for these: an argument may have been computed from a parameter, whose
        gradient through the argument is no part of the call's.
        """
        differentiable_again = torch.is_grad_enabled()
        unit = next(t for t in self._tensors if isinstance(t, GlobalTensor))._spec.axis.ranks.unit
        with torch.enable_grad():
            inputs = {id(t): t.view_as(t) for t in self._inputs}
            parameters = {name: p.view_as(p) for name, p in self._parameters.items()}
            leaves = pytree.tree_leaves(self._again(inputs, parameters))
        pairs = [(leaves[i], g) for i, g in zip(self._places, grads, strict=True) if g is not None]
        pairs = [(out, g) for out, g in pairs if out.requires_grad]
        if not pairs:
            return (None,) * (len(inputs) + len(parameters))
        outputs, tangents = zip(*pairs, strict=True)
        with without_torch_function():
            found = torch.autograd.grad(
                outputs,
                (*inputs.values(), *parameters.values()),
                [g if isinstance(g, GlobalTensor) else replicated(g, unit) for g in tangents],
                create_graph=differentiable_again,
                allow_unused=True,
            )
        return (*found[: len(inputs)], *map(_full, found[len(inputs) :]))

    def _again(self, inputs: Mapping[int, Tensor], parameters: Mapping[str, Tensor]) -> Any:
        """Call the module as it was called, with the same random numbers and buffers.

        Raises
        ------
        StateError : an argument was written since.
        """
        module, buffers = self._program.script_module, self._buffers
        if _versions(self._tensors) != self._versions:
            raise StateError(
                f"an argument of {type(module).__name__} was changed in place before a backward that "
                "computes its call anew (create_graph=True or retain_graph=True); expected the value of the "
                "forward: run the backward first, or change a copy"
            )
        modes = [(part, part.training) for part, _ in self._modes]
        args, kwargs = pytree.tree_map(lambda leaf: inputs.get(id(leaf), leaf), (self._args, self._kwargs))
        written = {name: buffers.get(name, module.get_buffer(name)).clone() for name in self._program.written}
        device, dtype, enabled = self._autocast
        try:
            for part, training in self._modes:
                part.training = training
            with kept_random_state(), torch.autocast(device, dtype, enabled):
                if self._state is not None:
                    set_random_state(self._state)
                output = self._plain(_WithValues(module, {**parameters, **written}), *args, **kwargs)
        finally:
            for part, training in modes:
                part.training = training
        register_containers(output)
        return output


class _WithValues(nn.Module):
    """A module with values in place of its parameters and buffers."""

    def __init__(self, module: nn.Module, values: dict[str, Tensor]) -> None:
        super().__init__()
        self._module, self._values = module, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._module, self._values, args, kwargs)


class _Replayed(torch.autograd.Function):
    """Outputs of a program; their gradients go to the program, or to the call's tensors and parameters."""

    @staticmethod
    def forward(ctx: Any, call: ReplayedCall, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: Any = tensors[:count]
        ctx.call, ctx.outputs = call, [output.grad_fn for output in outputs]
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)
        return tuple(GlobalTensor(output._local, output._spec) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: ReplayedCall = ctx.call
        derived = ctx.saved_tensors  # raises if a parameter was written since
        if not call.is_due():
            return (None, None, *grads, *[None] * len(derived))
        replace_backward(ctx.outputs)
        return (None, None, *[None] * len(grads), *call.gradients(grads))


def _is_differentiable(value: Any) -> bool:
    return type(value) is GlobalTensor and value.grad_fn is not None


def _full(gradient: Any) -> Any:
    """Return the gradient of a plain tensor, which may become its `.grad` and be written."""
    return full_value(gradient).clone() if isinstance(gradient, GlobalTensor) else gradient


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was written; tensors of `torch.inference_mode` do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
