"""Trace an emitted joint graph with Inductor's decompositions, cut it by min-cut, compile both halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.errors import StateError
from fxdp.ir.graphs import keep_ancestors
from fxdp.ir.notes import note
from fxdp.ir.ops.whole_draws import is_twin
from fxdp.ir.placements import Shard
from fxdp.ir.sizes import B, named_size
from fxdp.ir.slots import Buffer, Constant, Mutation, Parameter, Size, Slot
from fxdp.ir.types import TensorType, local_shape
from fxdp.lowering.eager import (
    backward_inputs,
    backward_results,
    forward_inputs,
    forward_results,
    results,
    tensor_type,
)
from fxdp.lowering.halves import Boxed, Halves
from fxdp.lowering.inductor.building import kernels_built_together
from fxdp.lowering.inductor.collective_order import collectives, put_in_order
from fxdp.lowering.inductor.masks import save_compared_values
from fxdp.lowering.inductor.memory_formats import chooses_layouts, save_laid_out_weights
from fxdp.lowering.inductor.redraws import save_draws
from fxdp.lowering.inductor.strides import copied, moved, protected, restride
from fxdp.lowering.inductor.strides import results as flat_results
from fxdp.lowering.inductor.trace import joint_function, unread_draws
from fxdp.lowering.inductor.turns import Turn
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.lowering.backward import usual_zeros
from fxdp.torch_compat import (
    FakeTensorMode,
    compile_with_inductor,
    fixed_sizes,
    interpret_sympy,
    joint_passes_for_inference,
    partition_for_inductor,
    trace_for_inductor,
)

aten = torch.ops.aten


def lower_inductor(
    gm: fx.GraphModule, values: Mapping[Slot, Any], shapes: Shapes, device: torch.device, turn: Turn,
    zero: frozenset[int] | None = None, summed: tuple[int, ...] = (), first: tuple[int, ...] | None = None,
) -> Halves:  # fmt: skip
    """Compile an emitted program.

    `values` holds the real parameters, buffers and constants, whose strides the code may rely on; `turn` says
    which half this rank compiles first; `zero` are the tangents for whose absence a backward is compiled at
    once, default: those that a training loop leaves out; `summed` numbers the backward's results that it adds
    to buffers; with `first` the backward is compiled in two, those of its results first.
    """
    fake_mode, sizes = shapes.trace_sizes()
    inputs = forward_inputs(gm.graph)
    tangents = backward_inputs(gm.graph)
    env = {named_size(name): value for name, value in sizes.items()}
    if shapes.single:
        env[named_size("b")] = env[B]
    fake_inputs = [_fake(n, values, sizes, env, fake_mode, device) for n in inputs]
    fake_tangents = [_fake(n, values, sizes, env, fake_mode, device) for n in tangents]
    function = joint_function(gm, inputs, tangents, device)
    joint = trace_for_inductor(function, fake_mode, fake_inputs, fake_tangents)
    save_laid_out_weights(joint)
    outputs = forward_results(gm.graph)
    mutations = [s for s, _ in results(gm.graph) if isinstance(s, Mutation)]
    slots = [note(n).slot for n in inputs]
    fixed = sum(isinstance(s, (Parameter, Buffer, Constant)) for s in slots)
    keeps_strides = shapes.generic or not chooses_layouts(joint, device)
    compiler = _Compiler(
        fake_mode, device, slots, mutations, len(outputs), fixed, keeps_strides, summed, first,
        len(unread_draws(gm.graph)),
    )  # fmt: skip
    if tangents or backward_results(gm.graph):
        types = [tensor_type(n) for n in tangents]
        zero = usual_zeros(types) if zero is None else zero
        halves = compiler.training(joint, [*fake_inputs, *fake_tangents], types, turn, zero)
    else:
        halves = compiler.inference(joint, fake_inputs)
    if constants := fixed_sizes(sizes):
        raise SizesFixedError(constants)
    return halves


def _fake(
    node: fx.Node, values: Mapping[Slot, Any], sizes: Mapping[str, Any], env: Mapping[Any, Any],
    fake_mode: FakeTensorMode, device: torch.device,
) -> Any:  # fmt: skip
    slot, type_ = note(node).slot, note(node).type
    if isinstance(slot, Size):
        return sizes[slot.name]
    if isinstance(slot, (Parameter, Buffer, Constant)):
        if slot in values:
            return fake_mode.from_tensor(values[slot].detach(), static_shapes=True)
        with fake_mode:  # the rows of a padded gather
            return torch.empty(sizes["B"], dtype=torch.int64, device=device)
    assert isinstance(type_, TensorType)
    placement = note(node).placement
    shape = local_shape(type_, placement if isinstance(placement, Shard) else None)
    with fake_mode:
        real = [n if isinstance(n, int) else interpret_sympy(n, env) for n in shape]
        return torch.empty(real, dtype=type_.dtype, device=device)


@dataclass
class _Compiler:
    """Compiles the halves of one traced program."""

    fake_mode: FakeTensorMode
    device: torch.device
    slots: list[Slot | None]
    mutations: list[Mutation]
    outputs: int
    fixed: int
    keeps_strides: bool
    """Whether results keep the strides they were traced with, so that both halves can be compiled at once."""
    summed: tuple[int, ...] = ()
    first: tuple[int, ...] | None = None
    unread: int = 0
    """How many results of the forward are draws that nobody reads."""

    def training(
        self, joint: fx.GraphModule, inputs: list[Any], tangents: list[TensorType], turn: Turn,
        zero: frozenset[int],
    ) -> Halves:  # fmt: skip
        kept = self.outputs + len(self.mutations)
        order = collectives(joint.graph)
        forward, backward = partition_for_inductor(joint, inputs, kept + self.unread, self.fake_mode)
        save_draws(forward, backward, kept)
        if self.device.type == "cpu":
            save_compared_values(forward, backward, kept)
        saved_order = self._save_what_is_read(forward, backward, len(tangents))
        for half in (forward, backward):
            put_in_order(half, order)
        self._write_back(forward)
        halves = Halves(
            _not_compiled, self.outputs, forward, backward, saved_order, len(tangents),
            self._compile_backward, self._compile_half, self.summed,
        )  # fmt: skip

        def compile_forward() -> None:
            halves.forward, strides = self._compile(forward, backward=False, inference=False)
            if not self.keeps_strides:
                restride(backward, strides[self.outputs :], saved_order)

        def compile_backward() -> None:
            if self.first is None:
                halves.backward(zero)
            else:
                halves.halved(self.first)

        turn.run(compile_forward, compile_backward, independent=self.keeps_strides)
        return halves

    def _compile_backward(self, graph: fx.GraphModule) -> Boxed:
        return self._compile(graph, backward=True, inference=False)[0]  # type: ignore[no-any-return]

    def _compile_half(self, graph: fx.GraphModule) -> Boxed:
        return self._compile(graph, backward=True, inference=False, exact=True)[0]  # type: ignore[no-any-return]

    def inference(self, joint: fx.GraphModule, inputs: list[Any]) -> Halves:
        joint = joint_passes_for_inference(joint, self.device, self.fake_mode)
        self._write_back(joint)
        code, _ = self._compile(joint, backward=False, inference=True)
        return Halves(code, self.outputs, joint)

    def _compile(
        self, gm: fx.GraphModule, *, backward: bool, inference: bool, exact: bool = False
    ) -> tuple[Any, list[Any]]:
        """Compile a copy of a half; its code, and how that lays out its results."""
        kept = range(len(flat_results(gm)) if exact or self.keeps_strides else self.outputs)
        visible = kept if exact or not backward else range(0)

        def compiled(gm: fx.GraphModule) -> tuple[Any, list[Any]]:
            inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
            fixed = 0 if backward else self.fixed
            with kernels_built_together():
                return compile_with_inductor(
                    gm, inputs, self.fake_mode, backward=backward, inference=inference, fixed=fixed
                )

        code, strides = compiled(copied(gm))
        if others := moved(gm, strides, visible):
            code, strides = compiled(copied(gm, others))
        return code, strides

    def _save_what_is_read(
        self, forward: fx.GraphModule, backward: fx.GraphModule, tangents: int
    ) -> tuple[int, ...]:
        """Drop what is saved for nobody; say where each saved input of the backward stands among the rest.

        With it go collectives of the forward that the partitioner repeats in the backward, and their inputs:
        it keeps them because they have side effects. Draws that nobody reads stay, as others follow them.
        """
        keep_ancestors(backward.graph)
        placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
        saved = placeholders[: len(placeholders) - tangents]
        # sizes stay: `8 * B` may be read as one number, whose code is then written in terms of `B`
        names = [n.name for n in saved if n.users or isinstance(n.meta["val"], torch.SymInt)]
        for node in saved:
            if node.name not in names:
                backward.graph.erase_node(node)
        results = flat_results(forward)
        first = self.outputs + len(self.mutations)
        read = [n for n in results[first:] if n.name in names]
        forward.graph.output_node().args = ((*results[:first], *read),)
        keep_ancestors(forward.graph, [n for n in forward.graph.nodes if is_twin(n.target)])
        position = {n.name: i for i, n in enumerate(read)}
        return tuple(position[name] for name in names)

    def _write_back(self, forward: fx.GraphModule) -> None:
        """Turn the new values of buffers from results into copies at the end of the forward."""
        if not self.mutations:
            return
        output = forward.graph.output_node()
        values = flat_results(forward)
        placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
        targets = [placeholders[self.slots.index(m.of)] for m in self.mutations]
        new = values[self.outputs : self.outputs + len(self.mutations)]
        kept = values[: self.outputs] + values[self.outputs + len(self.mutations) :]
        with forward.graph.inserting_before(output):
            kept = [protected(forward.graph, n) if n in targets else n for n in kept]
            for target, value in zip(targets, new, strict=True):
                copy = forward.graph.call_function(aten.copy_.default, (target, value))
                copy.meta["val"] = target.meta["val"]
        output.args = (tuple(kept),)


def _not_compiled(_: list[Any]) -> Any:
    raise StateError("the forward is not compiled yet; this is a bug in fxdp")
