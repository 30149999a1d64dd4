"""Run the unmodified model on one device, as the reference of every virtual run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Captured, OutputLeaf
from fxdp.capture.inputs import run_model
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.capture.refusals.stateful import copy_of
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.model_tensors import is_placeholder_parameter, signature_values
from fxdp.ir.graph.signature import (
    Buffer,
    Gradient,
    Input,
    InputSpec,
    Mutation,
    Output,
    OutputSpec,
    Parameter,
    Tangent,
)
from fxdp.torch_compat import one_device, patched, without_autocast


@dataclass(frozen=True)
class _EagerRun:
    """The effects of one step.

    Attributes
    ----------
    results : outputs, gradients, and the values of all parameters, buffers and inputs after the step.
    tangents : the random weights of the outputs from which the gradient was taken.
    changed : the entries of `results` that the step has written.
    """

    results: dict[OutputSpec, Tensor]
    tangents: dict[int, Tensor]
    changed: frozenset[OutputSpec] = frozenset()


def first_samples(tree: Any, batch: Sequence[int | None], size: int) -> Any:
    """Return a copy of the inputs with only the first `size` samples, in the same memory format."""
    leaves, spec = pytree.tree_flatten(tree)
    dims = iter(batch)
    cut = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            dim = next(dims)
            part = leaf if dim is None else leaf.narrow(dim, 0, size)
            leaf = part.detach().clone().requires_grad_(leaf.requires_grad)
        cut.append(leaf)
    return pytree.tree_unflatten(cut, spec)


def run_eager(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    captured: Captured,
    loss_fn: Callable[..., Any] | None,
    precision: MixedPrecision | None = None,
) -> _EagerRun:
    """Run one forward and backward on copies of the module and of the inputs."""
    given = _tensors((args, kwargs))
    args, inputs = first_samples((args, dict(kwargs)), (None,) * len(given), 0)
    tensors = _tensors((args, inputs))
    twin = copy_of(module)
    twin.zero_grad(set_to_none=True)
    with patched(one_device()):
        leaves = pytree.tree_leaves(run_model(twin, args, inputs, loss_fn, precision))
    kinds = zip(leaves, captured.leaves, strict=True)
    outputs = [leaf for leaf, kind in kinds if isinstance(kind, OutputLeaf)]
    tangents = {i: _tangent(i, output) for i, output in enumerate(outputs) if output.requires_grad}
    values: dict[OutputSpec, Tensor] = {Output(i): o.detach().clone() for i, o in enumerate(outputs)}
    values |= {Output(check.output): torch.tensor(check.passes) for check in captured.checks}
    if tangents:
        with patched(one_device()), without_autocast():
            torch.autograd.backward([outputs[i] for i in tangents], list(tangents.values()))
    named = twin.named_parameters()
    values |= {Gradient(Parameter(n)): p.grad.to_dense() for n, p in named if p.grad is not None}
    values |= {Gradient(Input(i)): t.grad for i, t in enumerate(tensors) if t.grad is not None}
    values |= _written_into(twin)
    values |= {Mutation(Input(i)): t.detach() for i, t in enumerate(tensors)}
    before = _written_into(module)
    before |= {Mutation(Input(i)): t.detach() for i, t in enumerate(given)}
    changed = frozenset(s for s, value in before.items() if s in values and _is_written(values[s], value))
    return _EagerRun(values, tangents, changed)


def input_values(
    module: nn.Module,
    captured: Captured,
    tensors: Sequence[Tensor],
    tangents: Mapping[int, Tensor],
) -> dict[InputSpec, Any]:
    """Return the global value of every input of the captured program except sizes."""
    graph = captured.gm.graph
    written = {spec.of for spec, _ in results_of(graph) if isinstance(spec, Mutation)}
    values: dict[InputSpec, Any] = {
        # a run writes into buffers, and into tensors that the step returns as new values
        spec: value.detach().clone() if isinstance(spec, Buffer) or spec in written else value.detach()
        for spec, value in signature_values(graph, module, captured.constants).items()
    }
    for node in graph.find_nodes(op="placeholder"):
        match meta(node).spec:
            case Input(index) as spec:
                values[spec] = tensors[index].detach()
            case Tangent(index) as spec:
                values[spec] = tangents[index]
    return values


def _written_into(module: nn.Module) -> dict[OutputSpec, Tensor]:
    """Return the current values of all tensors that a step may write."""
    found: dict[OutputSpec, Tensor] = {Mutation(Buffer(n)): b for n, b in module.named_buffers()}
    named = module.named_parameters()
    return found | {Mutation(Parameter(n)): p.detach() for n, p in named if not is_placeholder_parameter(p)}


def _is_written(now: Tensor, before: Tensor) -> bool:
    """Return whether an element was written; nan equals nan. A new shape or dtype means a new tensor."""
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    return bool(((now != before) & ~((now != now) & (before != before))).any())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _tangent(seed: int, output: Tensor) -> Tensor:
    """Return random weights for an output, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
