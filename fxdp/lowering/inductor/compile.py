"""The way of an emitted joint graph through Inductor: trace, save, partition, order, compile both halves.

    emitted joint graph          fxdp's ops, sizes open or fixed
      | trace                    ops that Inductor knows
      | partition                min-cut: what the forward saves, what the backward computes again
      | save values              where fxdp knows better than the partitioner
      | put in order             collectives run in the same order on all ranks
      | write back               new values of buffers are copied into them at the forward's end
      | segments                 of layers that are alike one is compiled
    forward, backward            compiled in the order of a `Start`, each with its strides checked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.errors import StateError
from fxdp.ir.graphs import results_of
from fxdp.ir.notes import note, tensor_type
from fxdp.ir.slots import Buffer, Constant, Mutation, Parameter, Slot
from fxdp.ir.types import TensorType
from fxdp.lowering.backward import usual_zeros
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.halves import Boxed, Halves
from fxdp.lowering.inductor.collective_order import collectives, must_stay, put_in_order
from fxdp.lowering.inductor.saved_values import (
    save_compared_values,
    save_draws,
    save_laid_out_weights,
    save_what_is_read,
)
from fxdp.lowering.inductor.segment_code import AsItIs, compile_segments
from fxdp.lowering.inductor.segments import NotInSegmentsError, Segment, segments
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.inductor.strides import chooses_layouts, copied, moved, restride, results
from fxdp.lowering.inductor.trace import Traced, trace, unread_draws
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.torch_compat import (
    code_on_call,
    compile_with_inductor,
    fixed_sizes,
    graph_module,
    joint_passes_for_inference,
    partition_for_inductor,
    quick_sizes,
)

aten = torch.ops.aten


def lower_inductor(
    gm: fx.GraphModule, values: Mapping[Slot, Any], shapes: Shapes, device: torch.device, start: Start,
    zero: frozenset[int] | None = None, summed: tuple[int, ...] = (), first: tuple[int, ...] | None = None,
    budget: float = 1.0, by_layer: bool = True,
) -> Halves:  # fmt: skip
    """Compile an emitted program.

    Parameters
    ----------
    values : the real parameters, buffers and constants, whose strides the code may rely on.
    start : in which order this rank compiles the halves.
    zero : the tangents for whose absence a backward is compiled at once; default: those that a training loop
        leaves out.
    summed : the numbers of the backward's results that it adds to buffers.
    first : the backward is compiled in two, those of its results first.
    budget : the share of the activations that the forward may save; the backward computes others again.
    by_layer : of layers that are alike one is compiled.

    Raises
    ------
    SizesFixedError : a size that was to stay open became a constant.
    """
    with code_on_call(), quick_sizes():
        traced = trace(gm, values, shapes, device)
    keeps_strides = shapes.generic or not chooses_layouts(traced.joint, device)
    compiler = _Compiler(
        traced, _Signature.of(gm), device, start, keeps_strides, summed, first, budget, by_layer
    )  # fmt: skip
    if backward_inputs(gm.graph) or backward_results(gm.graph):
        halves = compiler.training(zero)
    else:
        halves = compiler.inference()
    if constants := fixed_sizes(traced.sizes):  # asked last, as compiling may fix sizes, too
        raise SizesFixedError(constants)
    return halves


@dataclass(frozen=True)
class _Signature:
    """What a program takes and gives."""

    slots: tuple[Slot | None, ...]
    """Of the forward's inputs."""
    tangents: tuple[TensorType, ...]
    outputs: int
    mutations: tuple[Mutation, ...]
    unread: int
    """How many results of the forward are draws that nobody reads."""

    @staticmethod
    def of(gm: fx.GraphModule) -> _Signature:
        return _Signature(
            tuple(note(n).slot for n in forward_inputs(gm.graph)),
            tuple(tensor_type(n) for n in backward_inputs(gm.graph)),
            len(forward_results(gm.graph)),
            tuple(slot for slot, _ in results_of(gm.graph) if isinstance(slot, Mutation)),
            len(unread_draws(gm.graph)),
        )

    @property
    def visible(self) -> int:
        """How many results of the forward come before those that it saves."""
        return self.outputs + len(self.mutations)

    @property
    def fixed(self) -> int:
        """How many inputs keep their addresses between steps; they come first."""
        return sum(isinstance(slot, (Parameter, Buffer, Constant)) for slot in self.slots)


@dataclass
class _Compiler:
    """Compiles the halves of one traced program."""

    traced: Traced
    signature: _Signature
    device: torch.device
    start: Start
    keeps_strides: bool
    """Whether results keep the strides they were traced with, so that both halves can be compiled at once."""
    summed: tuple[int, ...] = ()
    first: tuple[int, ...] | None = None
    budget: float = 1.0
    by_layer: bool = True

    def training(self, zero: frozenset[int] | None) -> Halves:
        types = self.signature.tangents
        zero = usual_zeros(types) if zero is None else zero
        with code_on_call(), quick_sizes():
            forward, backward, saved_order = self._cut()
        halves = Halves(
            _not_compiled, self.signature.outputs, forward, backward, saved_order, len(types),
            self._compile_backward, self._compile_half, self.summed,
        )  # fmt: skip

        def compile_forward() -> None:
            halves.forward, strides = self._compile(forward, backward=False, inference=False)
            if not self.keeps_strides:
                restride(backward, strides[self.signature.outputs :], saved_order)

        def compile_backward() -> None:
            if self.first is None:
                halves.backward(zero)
            else:
                halves.halved(self.first)

        self.start.run(compile_forward, compile_backward, independent=self.keeps_strides)
        return halves

    def inference(self) -> Halves:
        with code_on_call(), quick_sizes():
            joint = joint_passes_for_inference(self.traced.joint, self.device, self.traced.fake_mode)
        _write_back(joint, self.signature)
        code, _ = self._compile(joint, backward=False, inference=True)
        return Halves(code, self.signature.outputs, joint)

    def _cut(self) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]:
        """Forward, backward, and for each saved input of the backward its position among what is saved."""
        traced, visible = self.traced, self.signature.visible
        # before the cut: marks for the partitioner, and the order, which each rank's cut may disturb
        save_laid_out_weights(traced.joint)
        order = collectives(traced.joint.graph)
        inputs, outputs = [*traced.inputs, *traced.tangents], visible + self.signature.unread
        forward, backward = partition_for_inductor(
            traced.joint, inputs, outputs, traced.fake_mode, self.budget
        )
        save_draws(forward, backward, visible)
        if self.device.type == "cpu":  # the slow booleans are those of Inductor's C++
            save_compared_values(forward, backward, visible)
        saved_order = save_what_is_read(forward, backward, visible, len(self.signature.tangents))
        for half in (forward, backward):
            put_in_order(half, order)
        _write_back(forward, self.signature)
        return forward, backward, saved_order

    def _compile_backward(self, graph: fx.GraphModule) -> Boxed:
        return self._compile(graph, backward=True, inference=False)[0]  # type: ignore[no-any-return]

    def _compile_half(self, graph: fx.GraphModule) -> Boxed:
        return self._compile(graph, backward=True, inference=False, exact=True)[0]  # type: ignore[no-any-return]

    def _compile(
        self, gm: fx.GraphModule, *, backward: bool, inference: bool, exact: bool = False
    ) -> tuple[Any, list[Any]]:
        """Compile a copy of a half; its code, and how that lays out its results, if that is not known."""
        kept = range(len(results(gm)) if exact or self.keeps_strides else self.signature.outputs)
        # gradients go to autograd, which takes any strides
        visible = kept if exact or not backward else range(0)
        fixed = 0 if backward else self.signature.fixed
        # asked of the half: a sum that is under way from one segment to another is seen in neither
        how = {"backward": backward, "inference": inference, "in_order": must_stay(gm.graph)}
        found = _in_segments(gm, visible, fixed) if self.by_layer and self.keeps_strides else []
        if not found:
            return self._compile_graph(gm, visible, fixed, **how)

        def compile_one(one: Segment) -> Boxed:
            graph = graph_module(gm, one.graph)
            if one.between:
                return AsItIs(graph)
            return self._compile_graph(graph, one.kept, one.fixed, **how)[0]  # type: ignore[no-any-return]

        with self.start.building():  # around all: kernels that several of them have are built once
            return compile_segments(gm, found, compile_one), []

    def _compile_graph(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int, *, backward: bool, inference: bool,
        in_order: bool,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Compile a copy of a graph, whose `visible` results keep their strides."""

        def compiled(gm: fx.GraphModule) -> tuple[Any, list[Any]]:
            inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            # Inductor keeps the strides of visible results, and is free to choose those of others
            gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
            with self.start.building():
                return compile_with_inductor(
                    gm, inputs, self.traced.fake_mode, backward=backward, inference=inference, fixed=fixed,
                    in_order=in_order,
                )  # fmt: skip

        # copies: Inductor rewrites the graph that it is given, and a second try needs the first one's
        code, strides = compiled(copied(gm))
        if others := moved(gm, strides, visible):
            code, strides = compiled(copied(gm, others))
        return code, strides


def _in_segments(gm: fx.GraphModule, visible: Sequence[int], fixed: int) -> list[Segment]:
    try:
        return segments(gm, visible, fixed)
    except NotInSegmentsError:
        return []


def _write_back(forward: fx.GraphModule, signature: _Signature) -> None:
    """Turn the new values of buffers from results into copies at the end of the forward."""
    if not signature.mutations:
        return
    values = results(forward)
    placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
    targets = [placeholders[signature.slots.index(m.of)] for m in signature.mutations]
    new = values[signature.outputs : signature.visible]
    kept = values[: signature.outputs] + values[signature.visible :]
    with forward.graph.inserting_before(forward.graph.output_node()):
        # a buffer that is also handed out, or saved, is handed out as it was before
        kept = [_call(aten.clone.default, n) if n in targets else n for n in kept]
        for target, value in zip(targets, new, strict=True):
            _call(aten.copy_.default, target, value)
    forward.graph.output_node().args = (tuple(kept),)


def _call(target: Any, *operands: fx.Node) -> fx.Node:
    """A node whose result is of the first operand's type."""
    made = operands[0].graph.call_function(target, operands)
    made.meta["val"] = operands[0].meta["val"]
    return made


def _not_compiled(_: list[Any]) -> Any:
    raise StateError("the forward is not compiled yet; this is a bug in fxdp")
