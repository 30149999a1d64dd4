"""Trace an emitted joint graph with Inductor's decompositions, which differ from the capture's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graphs import argument, results_of
from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.graph.signature import (
    Buffer,
    Constant,
    InputSpec,
    Mutation,
    Parameter,
    Size,
    StageValue,
    rows_axis,
)
from fxdp.ir.ops import collectives, layouts
from fxdp.ir.ops.full_batch_draws import is_twin
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import axes_of, axis_of, named_size
from fxdp.ir.types.sizes import axis as axis_named
from fxdp.ir.types.value_types import ScalarType, TensorType, local_shape, tensor_types
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.inductor.decomposition_overrides import mended
from fxdp.lowering.inductor.partitioner_hints import marked, save_results_alone
from fxdp.lowering.inductor.scalar_tensors import NumberTensors
from fxdp.lowering.inductor.strides import channels_last, of_that_shape, traces_channels_last
from fxdp.lowering.shapes import Shapes
from fxdp.torch_compat import (
    FakeTensorMode,
    OpOverload,
    aten,
    interpret_sympy,
    release_before,
    trace_for_inductor,
    traced_nodes,
)
from fxdp.wings import seam

_TAKE_A_NUMBER = frozenset({collectives.start_all_gather, collectives.start_broadcast})
"""Collectives whose ops take a tensor and a number, which Inductor promotes together: bool to int64."""

_READ = aten._local_scalar_dense.default
_FORMATS = frozenset({layouts.in_format, layouts.in_format_of})
"""Ops that set the memory format for kernels that Inductor decomposes; symbolic strides hide formats."""


@dataclass(frozen=True)
class Traced:
    """A joint graph of ops that Inductor compiles, with the fake inputs of the trace."""

    joint: fx.GraphModule
    """The graph; results are outputs, mutations, results that only the partitioner reads, gradients."""
    fake_mode: FakeTensorMode
    inputs: list[Any]
    tangents: list[Any]
    sizes: Mapping[str, Any]
    """Fixed or symbolic sizes; symbolic sizes stay symbolic unless an op specializes one."""


def trace(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device
) -> Traced:
    """Trace the emitted graph for Inductor; `values` holds real tensors, on whose strides code may rely."""
    fake_mode, sizes = shapes.trace_sizes()
    inputs, tangents = forward_inputs(gm.graph), backward_inputs(gm.graph)
    env = {named_size(name): value for name, value in sizes.items()}
    if shapes.single:
        for axis in axes_of(sizes):  # one symbol instead of two equal ones, so that equality stays provable
            env[axis.local] = env[axis.total]
    fake = partial(_fake, values=values, sizes=sizes, env=env, fake_mode=fake_mode, device=device)
    given = [_laid_out(fake(n), n, shapes) for n in inputs]
    later = [fake(n) for n in tangents]
    joint = trace_for_inductor(joint_function(gm, inputs, tangents, device), fake_mode, given, later)
    save_results_alone(joint)
    return Traced(joint, fake_mode, given, later, sizes)


def _fake(
    node: fx.Node, values: Mapping[InputSpec, Any], sizes: Mapping[str, Any], env: Mapping[Any, Any],
    fake_mode: FakeTensorMode, device: torch.device,
) -> Any:  # fmt: skip
    spec, type_ = meta(node).spec, meta(node).type
    if isinstance(spec, Size):
        return sizes[spec.name]
    if isinstance(spec, (Parameter, Buffer, Constant)):
        if spec in values:
            return fake_mode.from_tensor(values[spec].detach(), static_shapes=True)
        with fake_mode:  # the row index of a padded gather
            total = axis_named(rows_axis(spec.name)).total
            return torch.empty(sizes[total.name], dtype=torch.int64, device=device)
    assert isinstance(type_, TensorType)
    placement = meta(node).placement
    shape = local_shape(type_, placement if isinstance(placement, Shard) else None)
    with fake_mode:
        real = [n if isinstance(n, int) else interpret_sympy(n, env) for n in shape]
        return torch.empty(real, dtype=type_.dtype, device=device)


def _laid_out(value: Any, node: fx.Node, shapes: Shapes) -> Any:
    """Return an input's fake value in the memory format in which another part passes it."""
    spec = meta(node).spec
    return channels_last(value) if isinstance(spec, StageValue) and spec.name in shapes.images else value


def joint_function(
    gm: fx.GraphModule, inputs: list[fx.Node], tangents: list[fx.Node], device: torch.device
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Return the graph as `f(primals, tangents)` with outputs, mutations, unread results, gradients.

    If Inductor runs convolutions channels-last, images and weights are converted from the start. Bools that
    are gathered or broadcast are sent as bytes, because Inductor would promote bools.
    """
    order: list[fx.Node | None] = list(forward_results(gm.graph))
    order += [n for s, n in results_of(gm.graph) if isinstance(s, Mutation)]
    order += [*_unread_results(gm.graph), *backward_results(gm.graph)]
    placeholders = [*inputs, *tangents]
    lays_out = traces_channels_last(device)

    def joint(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        run = _Run(dict(zip(placeholders, [*primals, *tangents], strict=True)), lays_out)
        for number, node in enumerate(gm.graph.nodes):
            if node.op == "call_function":
                with traced_nodes() as made:
                    run.env[node] = run.call(node, number)
                for one in made:  # of the same module
                    one.meta["fxdp"] = Metadata(location=meta(node).location)
                    one.meta["is_gradient_acc"] = node.meta.get("is_gradient_acc")
        found: list[Any] = [None if n is None else run.env[n] for n in order]
        return [value for value in found if not isinstance(value, int)]  # without rows, none are selected

    return joint


def _call(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return target(*args, **kwargs)


@seam("startup")
def op_caller() -> Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]:
    """Return the function that calls the ops of one trace that draw nothing and are not recomputed."""
    return _call


class _Run:
    """A run of an emitted graph, node by node, for the trace."""

    def __init__(self, env: dict[fx.Node, Any], lays_out: bool) -> None:
        self.env = env
        self._lays_out = lays_out
        self._as_bytes: set[fx.Node] = set()
        self._numbers: set[fx.Node] = set()
        self._tensors = NumberTensors()
        self._drawn: Tensor | None = None
        self._call = op_caller()

    def call(self, node: fx.Node, number: int) -> Any:
        """Return the value of a node, the `number`th of the graph; operands must be in `env`."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        if node.target in _FORMATS:
            return args[0]
        if is_twin(node.target):
            return self._draw(node, args)
        args = self._sendable(node, self._in_memory_format(node, args) if self._lays_out else args)
        with marked(node, number):
            target, given = self._tensors.call(node, args)
            if (instead := mended(target, given)) is not None:
                value = instead(*given, **kwargs)
            elif meta(node).recompute or node_draws(node):
                value = target(*given, **kwargs)
            else:
                value = self._call(target, given, kwargs)
            self._tensors.keep(node, args, self.env)
        if node.target is _READ or self._numbers.intersection(node.all_input_nodes):
            value = _read_again(value, self._numbers, node)
        return value if self._as_bytes.isdisjoint(node.all_input_nodes) else value.to(torch.bool)

    def _in_memory_format(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with those of a convolution converted to channels-last.

        Inductor would convert after the trace: the strides of saved values would then be known only after the
        forward is compiled.
        """
        if node.target is aten.convolution.default:
            return (channels_last(args[0]), channels_last(args[1]), *args[2:])
        # converted again where read: otherwise the forward would save a copy of all weights
        if node.target is aten.convolution_backward.default:
            if not argument(node, "output_mask")[0]:
                return (*args[:2], of_that_shape(args[2]), *args[3:])
            if release_before(2, 13) and not isinstance(args[1].shape[0], int):
                # Inductor does not convert here, and kernels for empty batches use the given format
                return (*args[:2], channels_last(args[2]), *args[3:])
        return args

    def _sendable(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with a bool that is sent as bytes converted."""
        if node.target not in _TAKE_A_NUMBER or args[0].dtype != torch.bool:
            return args
        self._as_bytes.add(node)
        return (args[0].to(torch.uint8), *args[1:])

    def _draw(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """Run a random op that takes the previous random result, so that Inductor cannot change the order."""
        made = node.target(*args[:-1], self._drawn)  # type: ignore[operator]
        self._drawn = made if isinstance(made, Tensor) else made[0]
        return made if node.users else self._drawn


def _read_again(value: Any, numbers: set[fx.Node], node: fx.Node) -> Any:
    """Return a symbolic number computed from tensors' values as a number read from a new tensor.

    A backward that Inductor writes identifies inputs by symbol, and `1 - 0.5 * u0` is no symbol.
    """
    if not isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    numbers.add(node)
    if not isinstance(node.target, OpOverload):
        dtype = torch.float64 if isinstance(value, torch.SymFloat) else torch.int64
        return aten.scalar_tensor.default(value, dtype=dtype).item()
    return value


def _unread_results(graph: fx.Graph) -> list[fx.Node]:
    """Return the results of the forward that nothing but the partitioner reads."""
    return [*_dead_rng_ops(graph), *_sizes_of_parts(graph)]


def _sizes_of_parts(graph: fx.Graph) -> list[fx.Node]:
    """Return the sizes of a rank's rows that it concatenates to those of another axis.

    A backward that saves the concatenation would know a sum of sizes, and Inductor none of the two.
    """
    types = [type_ for node in graph.nodes for type_ in tensor_types(meta(node).type)]
    joined = {of for type_ in types for size in type_.shape if (of := axis_of(size)) and not of.is_contiguous}
    local = {axis_named(part).local for of in joined for part in of.parts}
    return [
        node
        for node in graph.find_nodes(op="call_function", target=aten.sym_size.int)
        if isinstance(type_ := meta(node).type, ScalarType) and type_.expr in local
    ]


def _dead_rng_ops(graph: fx.Graph) -> list[fx.Node]:
    """Return the last random op of one device if the op has no reader.

    The forward returns this op, otherwise the partitioner would drop the op; earlier random ops are read by
    later ones. Without a backward nothing is dropped, and the list is empty.
    """
    last = [n for n in graph.nodes if is_twin(n.target)][-1:]
    return [n for n in last if not n.users and backward_results(graph)]
