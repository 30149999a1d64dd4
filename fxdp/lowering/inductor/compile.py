"""Lower an emitted joint graph by Inductor: partition, then compile forward and backward.

emitted joint graph          fxdp's ops, sizes symbolic or fixed
  | cut                      ops that Inductor knows, in a forward and a backward (`forward_backward.py`)
forward, backward            compiled in the order of a `Start`, each with strides checked
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.errors import StateError
from fxdp.ir.graph.signature import InputSpec
from fxdp.lowering.backward import usual_zeros
from fxdp.lowering.forward_backward_pair import Boxed, ForwardBackward
from fxdp.lowering.inductor.collective_order import must_stay
from fxdp.lowering.inductor.donated import donated, donated_inputs
from fxdp.lowering.inductor.forward_backward import Cut, Signature, cut
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.inductor.strides import copied, moved, results
from fxdp.lowering.op_by_op import pack_sums, reads_again
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.torch_compat import compile_with_inductor, fixed_sizes
from fxdp.wings import seam


@dataclass(frozen=True)
class LoweringOptions:
    """Options for the compilation of an emitted program."""

    zero: frozenset[int] | None = None
    """The tangents for whose absence a backward is compiled at once; None: the tangents that a training loop
    leaves zero.
    """
    summed: tuple[int, ...] = ()
    """The numbers of backward results that are added to buffers."""
    first: tuple[int, ...] | None = None
    """The results computed by the first graph of a split backward; None: the backward is not split."""
    budget: float = 1.0
    """The share of the activations that the forward may save; the backward computes others again."""
    hides: bool = True
    """True if collectives between layers must stay overlapped with compute as in the program."""
    in_place: str = ""
    """The name of the group that all-reduces large values in place; empty if there is none."""


@seam("startup")
def lower_inductor(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device, start: Start,
    options: LoweringOptions,
) -> ForwardBackward:  # fmt: skip
    """Compile an emitted program.

    Parameters
    ----------
    values : the real parameters, buffers and constants, on whose strides the code may rely.
    start : the order in which this rank compiles forward and backward.

    Raises
    ------
    SizesFixedError : a size that should stay symbolic was specialized.
    """
    halved = cut(gm, values, shapes, device, options.budget)
    keeps_strides = shapes.generic or not halved.chooses_layouts
    compiler = _Compiler(halved, Signature.of(gm), start, keeps_strides, options)
    pair = compiler.inference() if halved.backward is None else compiler.training()
    if constants := fixed_sizes(halved.sizes):  # checked last, because compiling may specialize sizes, too
        raise SizesFixedError(constants)
    return pair


@dataclass(frozen=True)
class PhaseGraph:
    """The graph of one phase, forward or backward, that is to be compiled."""

    gm: fx.GraphModule
    visible: Sequence[int]
    """The numbers of the results whose strides must be kept."""
    fixed: int
    """How many inputs, the first ones, keep their addresses between steps."""
    donated: frozenset[str]
    """The names of the inputs that the code may write over."""
    keeps_strides: bool
    """Whether all strides are known before the graph is compiled."""
    options: LoweringOptions
    start: Start
    compile_graph: Callable[[fx.GraphModule, Sequence[int], int, Sequence[int]], tuple[Any, list[Any]]]
    """Compiles a graph with its visible results, fixed inputs and donated inputs; code and strides."""


@seam("startup")
def compile_phase(phase: PhaseGraph) -> tuple[Any, list[Any]]:
    """Compile a phase in one piece; return code, and the strides of its results if Inductor chose them."""
    donated = donated_inputs(phase.gm.graph, phase.donated)
    return phase.compile_graph(phase.gm, phase.visible, phase.fixed, donated)


@seam("startup")
def around_inductor() -> AbstractContextManager[None]:
    """Return a context in which Inductor compiles one graph."""
    return contextlib.nullcontext()


@seam("startup")
def callable_of(code: Any) -> Callable[[list[Any]], Any]:
    """Return the callable of Inductor's compiled code."""
    return code  # type: ignore[no-any-return]


@dataclass
class _Compiler:
    """Compiler of the forward and backward of one program."""

    cut: Cut
    signature: Signature
    start: Start
    keeps_strides: bool
    """True if results keep traced strides, so that forward and backward can be compiled independently."""
    options: LoweringOptions

    _donated: frozenset[str] = frozenset()
    """The names of backward inputs that the backward may overwrite."""

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
                _restride(backward, strides[self.signature.outputs :], saved_order)

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
        """Compile a copy of a graph; return the code, and the strides of results chosen by Inductor.

        The list of strides is empty if the strides are known in advance.
        """
        kept = range(len(results(gm)) if exact or self.keeps_strides else self.signature.outputs)
        # autograd accepts gradients of any strides
        visible = kept if exact or not backward else range(0)
        fixed = 0 if backward else self.signature.fixed
        # asked of the half: a sum that is in flight from one region to another is seen in neither
        # of a backward in two both halves read what was saved
        names = self._donated if backward and not exact else frozenset()
        compile_graph = partial(
            self._compile_graph, backward=backward, inference=inference, in_order=must_stay(gm.graph)
        )
        return compile_phase(
            PhaseGraph(gm, visible, fixed, names, self.keeps_strides, self.options, self.start, compile_graph)
        )

    def _compile_graph(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int, given_up: Sequence[int], *,
        backward: bool, inference: bool, in_order: bool,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Compile a copy of a graph, keeping the strides of the results `visible`."""

        def compiled(gm: fx.GraphModule) -> tuple[Any, list[Any]]:
            inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            # Inductor keeps the strides of user-visible results, and may change all others
            gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
            apart = pack_sums(gm.graph, reads_again)
            gm.recompile()
            with self.start.building():
                code, strides = compile_with_inductor(
                    gm, inputs, self.cut.fake_mode, backward=backward, inference=inference, fixed=fixed,
                    in_order=in_order or apart,  # it knows its own collectives alone
                    donated=given_up, around=around_inductor(),
                )  # fmt: skip
            return callable_of(code), strides

        # copies, because Inductor modifies the graph, and a second attempt needs the original
        code, strides = compiled(copied(gm))
        if others := moved(gm, strides, visible):
            code, strides = compiled(copied(gm, others))
        return code, strides


def _not_compiled(_: list[Any]) -> Any:
    raise StateError("the forward is not compiled yet; this is a bug in fxdp")


def _restride(backward: fx.GraphModule, strides: Sequence[Any], saved_order: Sequence[int]) -> None:
    """Update the backward's saved inputs to the strides that Inductor chose in the forward."""
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    for node, position in zip(placeholders, saved_order, strict=False):
        value = node.meta["val"]
        stride = strides[position] if position < len(strides) else None
        if isinstance(value, Tensor) and stride is not None and tuple(value.stride()) != tuple(stride):
            node.meta["val"] = value.as_strided(value.shape, stride)
