"""The way of an emitted joint graph through Inductor: cut, compile both halves.

emitted joint graph          fxdp's ops, sizes open or fixed
  | cut                      ops that Inductor knows, in a forward and a backward (`forward_backward.py`)
  | segments                 of layers that are alike one is compiled
forward, backward            compiled in the order of a `Start`, each with its strides checked
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.errors import StateError
from fxdp.ir.signature import InputSpec
from fxdp.lowering.backward import usual_zeros
from fxdp.lowering.forward_backward_pair import Boxed, ForwardBackward
from fxdp.lowering.inductor.collective_order import must_stay
from fxdp.lowering.inductor.donated import donated, donated_inputs, donated_to
from fxdp.lowering.inductor.forward_backward import Cut, Signature, cut
from fxdp.lowering.inductor.region_check import check_regions
from fxdp.lowering.inductor.region_code import AsItIs, RegionPlan, plan_regions
from fxdp.lowering.inductor.regions import CompiledRegion, NoRegionsError, regions
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.inductor.strides import copied, moved, restride, results
from fxdp.lowering.inductor.sums_in_place import sum_in_place, sums_in_place
from fxdp.lowering.op_by_op import pack_sums, reads_again
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.torch_compat import compile_with_inductor, fixed_sizes, graph_module

_log = logging.getLogger("fxdp")


@dataclass(frozen=True)
class LoweringOptions:
    """What is compiled of an emitted program, and how."""

    zero: frozenset[int] | None = None
    """The tangents for whose absence a backward is compiled at once; None: those that a training loop leaves
    out."""
    summed: tuple[int, ...] = ()
    """The numbers of the backward's results that it adds to buffers."""
    first: tuple[int, ...] | None = None
    """The backward is compiled in two, those of its results first."""
    budget: float = 1.0
    """The share of the activations that the forward may save; the backward computes others again."""
    by_layer: bool = True
    """Of layers that are alike a few are traced and cut, and one is compiled."""
    hides: bool = True
    """Collectives between layers are under way while these work, where the program has it so."""
    in_place: str = ""
    """The name of the group, if there is one, that sums large values where they lie."""


def lower_inductor(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device, start: Start,
    options: LoweringOptions,
) -> ForwardBackward:  # fmt: skip
    """Compile an emitted program.

    Parameters
    ----------
    values : the real parameters, buffers and constants, whose strides the code may rely on.
    start : in which order this rank compiles the halves.

    Raises
    ------
    SizesFixedError : a size that was to stay open became a constant.
    """
    halved = cut(gm, values, shapes, device, options.budget, by_layer=options.by_layer)
    keeps_strides = shapes.generic or not halved.chooses_layouts
    compiler = _Compiler(halved, Signature.of(gm), start, keeps_strides, options)
    pair = compiler.inference() if halved.backward is None else compiler.training()
    if constants := fixed_sizes(halved.sizes):  # asked last, as compiling may fix sizes, too
        raise SizesFixedError(constants)
    return pair


@dataclass
class _Compiler:
    """Compiles the halves of one program."""

    cut: Cut
    signature: Signature
    start: Start
    keeps_strides: bool
    """Whether results keep the strides they were traced with, so that both halves can be compiled at once."""
    options: LoweringOptions

    _donated: frozenset[str] = frozenset()
    """The names of the backward's inputs that it may write over."""

    def training(self) -> ForwardBackward:
        types, zero = self.signature.tangents, self.options.zero
        zero = usual_zeros(types) if zero is None else zero
        forward, backward, saved_order = self.cut.forward, self.cut.backward, self.cut.saved_order
        assert backward is not None
        self._donated = donated(forward, backward, self.signature.outputs)
        pair = ForwardBackward(
            _not_compiled, self.signature.outputs, forward, backward, saved_order, len(types),
            self._compile_backward, self.options.summed,
        )  # fmt: skip

        def compile_forward() -> None:
            pair.forward, strides = self._compile(forward, backward=False, inference=False)
            if not self.keeps_strides:
                restride(backward, strides[self.signature.outputs :], saved_order)

        def compile_backward() -> None:
            if self.options.first is None:
                pair.backward(zero)
            else:
                pair.halved(self.options.first)

        self.start.run(compile_forward, compile_backward, independent=self.keeps_strides)
        return pair

    def inference(self) -> ForwardBackward:
        code, _ = self._compile(self.cut.forward, backward=False, inference=True)
        return ForwardBackward(code, self.signature.outputs, self.cut.forward)

    def _compile_backward(self, graph: fx.GraphModule, half: bool) -> Boxed:
        code, _ = self._compile(graph, backward=True, inference=False, exact=half)
        return code  # type: ignore[no-any-return]

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
        may = self.options.by_layer and self.keeps_strides
        full, found, plan = self._in_regions(gm, visible, fixed) if may else (gm, [], None)
        # of a backward in two both halves read what was saved
        names = self._donated if backward and not exact else frozenset()
        if plan is None:
            return self._compile_graph(gm, visible, fixed, donated_inputs(gm.graph, names), **how)
        given_up = donated_to(found, names)

        def compile_one(one: CompiledRegion) -> Boxed:
            graph = graph_module(full, one.graph)
            if one.between:
                return AsItIs(graph)
            code, _ = self._compile_graph(graph, one.kept, one.fixed, given_up[one.kind], **how)
            return code  # type: ignore[no-any-return]

        with self.start.building():  # around all: kernels that several of them have are built once
            return plan.compile(compile_one), []

    def _in_regions(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int
    ) -> tuple[fx.GraphModule, list[CompiledRegion], RegionPlan | None]:
        """A half, or a copy that sums in place, with its segments and calls; None: it stays one piece."""
        try:
            full, found = self._found_regions(gm, visible, fixed)
            if not found:
                return gm, [], None
            plan = plan_regions(full, found)
            check_regions(full, plan)
        except Exception as error:  # what only saves time may not decide whether a program runs
            _log.debug(
                "repeated layers are left out: a half is compiled as one piece, for a bug in fxdp: %r", error
            )
            return gm, [], None
        return full, found, plan

    def _found_regions(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int
    ) -> tuple[fx.GraphModule, list[CompiledRegion]]:
        hides, summed = self.options.hides, copied(gm) if self.options.in_place else gm
        try:
            if summed is not gm and sum_in_place(summed.graph, self.options.in_place):
                found = regions(summed, visible, fixed, hides)
                if all(one.between or not sums_in_place(one.graph) for one in found):
                    return summed, found
            return gm, regions(gm, visible, fixed, hides)
        except NoRegionsError:
            return gm, []

    def _compile_graph(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int, given_up: Sequence[int], *,
        backward: bool, inference: bool, in_order: bool,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Compile a copy of a graph, whose `visible` results keep their strides."""

        def compiled(gm: fx.GraphModule) -> tuple[Any, list[Any]]:
            inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            # Inductor keeps the strides of visible results, and is free to choose those of others
            gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
            apart = pack_sums(gm.graph, reads_again)
            gm.recompile()
            with self.start.building():
                return compile_with_inductor(
                    gm, inputs, self.cut.fake_mode, backward=backward, inference=inference, fixed=fixed,
                    in_order=in_order or apart,  # it knows its own collectives alone
                    donated=given_up,
                )  # fmt: skip

        # copies: Inductor rewrites the graph that it is given, and a second try needs the first one's
        code, strides = compiled(copied(gm))
        if others := moved(gm, strides, visible):
            code, strides = compiled(copied(gm, others))
        return code, strides


def _not_compiled(_: list[Any]) -> Any:
    raise StateError("the forward is not compiled yet; this is a bug in fxdp")
