"""Partition an emitted joint graph into two graphs for Inductor.

emitted joint graph          fxdp's ops, sizes symbolic or fixed
  | trace                    ops that Inductor knows
  | partition                min-cut: the forward saves some values, the backward recomputes the rest
  | partitioner hints        where fxdp knows better than the partitioner
  | collective order         collectives run in the same order on all ranks
  | write back               new values of buffers are copied into the buffers at the forward's end
forward, backward
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Buffer, Constant, InputSpec, Mutation, Parameter
from fxdp.ir.types.value_types import TensorType
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.inductor.collective_order import collectives, put_in_order
from fxdp.lowering.inductor.partitioner_hints import (
    compute_where_operands_are,
    save_compared_values,
    save_draws,
    save_formatted_weights,
    save_what_is_read,
)
from fxdp.lowering.inductor.strides import chooses_layouts, results
from fxdp.lowering.inductor.trace import Traced, trace
from fxdp.lowering.shapes import Shapes
from fxdp.torch_compat import (
    FakeTensorMode,
    aten,
    joint_passes_for_inference,
    partition_for_inductor,
)
from fxdp.wings import seam

Pair: TypeAlias = tuple[fx.GraphModule, fx.GraphModule | None, tuple[int, ...]]
"""Forward, backward, and the order in which the backward takes what is saved."""


@dataclass(frozen=True)
class Signature:
    """The inputs and results of a program."""

    specs: tuple[InputSpec | None, ...]
    """The specs of the forward's inputs; None for an input without a spec."""
    tangents: tuple[TensorType, ...]
    outputs: int
    mutations: tuple[Mutation, ...]

    @staticmethod
    def of(gm: fx.GraphModule) -> Signature:
        """Return the signature of an emitted program."""
        return Signature(
            tuple(meta(n).spec for n in forward_inputs(gm.graph)),
            tuple(tensor_type(n) for n in backward_inputs(gm.graph)),
            len(forward_results(gm.graph)),
            tuple(spec for spec, _ in results_of(gm.graph) if isinstance(spec, Mutation)),
        )

    @property
    def visible(self) -> int:
        """The number of forward results before the saved values."""
        return self.outputs + len(self.mutations)

    @property
    def fixed(self) -> int:
        """The number of inputs, at the beginning, that keep their addresses between steps."""
        return sum(isinstance(spec, (Parameter, Buffer, Constant)) for spec in self.specs)


@dataclass(frozen=True)
class Cut:
    """A partitioned program; without a backward, the forward is the full program."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved_order: tuple[int, ...]
    """For each saved input of the backward, the position among the saved values."""
    fake_mode: FakeTensorMode
    sizes: Mapping[str, Any]
    """Fixed or symbolic sizes; symbolic sizes stay symbolic unless an op specializes one."""
    chooses_layouts: bool
    """True if Inductor may change the memory format of results from the traced one."""


def cut(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device, budget: float
) -> Cut:
    """Partition an emitted program; see `lower_inductor`."""
    with around_lowering():
        found = partition(gm, values, shapes, device, budget)
    _write_back(found.forward, Signature.of(gm))
    return found


@seam("startup")
def around_lowering() -> AbstractContextManager[None]:
    """Return a context in which one program is traced and partitioned."""
    return contextlib.nullcontext()


@seam("startup")
def partition(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device, budget: float
) -> Cut:
    """Trace a program with Inductor's decompositions, and partition it into forward and backward."""
    traced, signature = trace(gm, values, shapes, device), Signature.of(gm)
    lays_out = chooses_layouts(traced.joint, device)
    pair: Pair
    gradients = len(backward_results(gm.graph))
    if backward_inputs(gm.graph) or gradients:
        pair = _halves(traced, signature, gradients, device, budget)
    else:
        pair = joint_passes_for_inference(traced.joint, device, traced.fake_mode), None, ()
    return Cut(*pair, traced.fake_mode, traced.sizes, lays_out)


def _halves(
    traced: Traced, signature: Signature, gradients: int, device: torch.device, budget: float
) -> Pair:
    visible = signature.visible
    # before partitioning, which may disturb the order on each rank
    save_formatted_weights(traced.joint)
    order = collectives(traced.joint.graph)
    inputs, outputs = [*traced.inputs, *traced.tangents], len(results(traced.joint)) - gradients
    forward, backward = partition_for_inductor(traced.joint, inputs, outputs, traced.fake_mode, budget)
    save_draws(forward, backward, visible)
    if device.type == "cpu":  # only Inductor's C++ is slow for booleans
        save_compared_values(forward, backward, visible)
    saved_order = save_what_is_read(forward, backward, visible, len(signature.tangents))
    compute_where_operands_are(forward, visible)
    for half in (forward, backward):
        put_in_order(half, order)
    return forward, backward, saved_order


def _write_back(forward: fx.GraphModule, signature: Signature) -> None:
    """Turn the new values of buffers from results into copies at the end of the forward."""
    if not signature.mutations:
        return
    values = results(forward)
    placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
    targets = [placeholders[signature.specs.index(m.of)] for m in signature.mutations]
    new = values[signature.outputs : signature.visible]
    kept = values[: signature.outputs] + values[signature.visible :]
    with forward.graph.inserting_before(forward.graph.output_node()):
        # a buffer that is also an output, or saved, is returned as before the write
        kept = [_call(aten.clone.default, n) if n in targets else n for n in kept]
        for target, value in zip(targets, new, strict=True):
            _call(aten.copy_.default, target, value)
    forward.graph.output_node().args = (tuple(kept),)


def _call(target: Any, *operands: fx.Node) -> fx.Node:
    """Create a node whose result has the type of the first operand."""
    made = operands[0].graph.call_function(target, operands)
    made.meta["val"] = operands[0].meta["val"]
    return made
