"""Backwards that a program has not: the compiled call runs once more, op by op, within that backward.

out = model(x)                   compiled, the generator's state kept
loss.backward()                  the program's own
autograd.grad(out, x, create_graph=True)    op by op from the same x, parameters and numbers:
                                 any derivative of that is there, as if the call had not been compiled
loss.backward() twice            the first is the program's own, the second op by op
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.containers import register_containers
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import StateError
from fxdp.ir.graph.draws import kept_random_state, random_state, set_random_state
from fxdp.runtime.chained_modules import replace_backward
from fxdp.torch_compat import same_versions, without_torch_function


class ReplayedCall:
    """A compiled call of a module, which runs again op by op for backwards that its program has not.

    Parameters
    ----------
    plain : `plain(module, *args, **kwargs)` calls the module op by op.
    told : called with what was unlike a single plain backward, each time that the call is repeated.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        told: Callable[[str], None],
    ) -> None:
        self._plain, self._module, self._args, self._kwargs, self._told = plain, module, args, kwargs, told
        self._state, self._training = random_state(), module.training
        self._tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._versions = [t._version for t in self._tensors]
        device = next((t.device.type for t in self._tensors), "cpu")
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._backwards, self._places = 0, list[int]()

    def watch(self, output: Any) -> Any:
        """Return the output of the program with tensors that have all backwards."""
        register_containers(output)
        leaves, structure = pytree.tree_flatten(output)
        self._places = [i for i, leaf in enumerate(leaves) if _is_differentiable(leaf)]
        if not self._places:
            return output
        derived = [t for t in (*self._tensors, *self._module.parameters()) if t.requires_grad]
        with without_torch_function():
            made = _Replayed.apply(self, len(self._places), *(leaves[i] for i in self._places), *derived)  # type: ignore[no-untyped-call]
        for place, tensor in zip(self._places, made, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def is_due(self) -> bool:
        """Count a backward, and return whether it is one that the program has not."""
        self._backwards += 1
        if torch.is_grad_enabled():
            self._told("its gradients are differentiated again (create_graph=True)")
        elif self._backwards > 1:
            self._told("its outputs have a second backward (retain_graph=True)")
        return torch.is_grad_enabled() or self._backwards > 1

    def gradients(self, grads: tuple[Tensor | None, ...], derived: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Run the call op by op, and return the gradients of its tensors and parameters."""
        differentiable_again = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = pytree.tree_leaves(self._again())
        pairs = [(leaves[i], g) for i, g in zip(self._places, grads, strict=True) if g is not None]
        pairs = [(out, g) for out, g in pairs if out.requires_grad]
        if not pairs:
            return (None,) * len(derived)
        outputs, tangents = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs, derived, tangents, create_graph=differentiable_again, allow_unused=True
        )

    def _again(self) -> Any:
        """Call the module as it was called, with the same random numbers, and leave its statistics alone.

        Raises
        ------
        StateError : an argument was written since.
        """
        if [t._version for t in self._tensors] != self._versions:
            raise StateError(
                f"an argument of {type(self._module).__name__} was changed in place before a backward that "
                "computes its call anew (create_graph=True or retain_graph=True); expected the value of the "
                "forward: run the backward first, or change a copy"
            )
        modes = [(module, module.training) for module in self._module.modules()]
        buffers = list(self._module.buffers())
        kept = [buffer.clone() for buffer in buffers]
        device, dtype, enabled = self._autocast
        try:
            if self._module.training is not self._training:
                self._module.train(self._training)
            with kept_random_state(), same_versions(buffers), torch.autocast(device, dtype, enabled):
                set_random_state(self._state)
                output = self._plain(self._module, *self._args, **self._kwargs)
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad(), same_versions(buffers):
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
        register_containers(output)
        return output


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
        if not ctx.call.is_due():
            return (None, None, *grads, *[None] * len(ctx.saved_tensors))
        replace_backward(ctx.outputs)
        return (None, None, *[None] * len(grads), *ctx.call.gradients(grads, ctx.saved_tensors))


def _is_differentiable(value: Any) -> bool:
    return type(value) is GlobalTensor and value.grad_fn is not None
