"""Rewrite a Dynamo graph for capture: parameters by name, sizes read from the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from fxdp.capture.python_values import stable_text
from fxdp.dynamo.dynamo_inputs import GraphInput, read_input
from fxdp.dynamo.dynamo_sizes import TracedSizes, is_read
from fxdp.dynamo.traced_model import GraphOperand, TracedGraph
from fxdp.errors import InputError
from fxdp.ir.graph.graphs import attribute_of
from fxdp.torch_compat.dynamo import TracedFrame, forget_sizes

_NO_NAMES: Mapping[int, str] = {}


@dataclass(frozen=True)
class ReadGraph:
    """A Dynamo graph converted for capture."""

    graph: TracedGraph
    positions: tuple[int, ...]
    """Positions of the graph's operands among Dynamo's arguments, in order."""
    dims: dict[str, int | None]
    """The batch dim of each input."""
    numbers: frozenset[str]
    """Names of the inputs that are numbers passed as tensors."""
    losses: int
    """Number of scalar results that require a gradient."""


def read_graph(
    gm: fx.GraphModule,
    frame: TracedFrame,
    dim_of: Callable[[GraphInput], int | None],
    names: Mapping[int, str] = _NO_NAMES,
) -> ReadGraph:
    """Convert a Dynamo graph for capture; torch retraces if the batch sizes are not symbols.

    `dim_of` returns the batch dim of an input; `names` maps the `id` of a tensor of the model to the model's
    name for the tensor.

    Raises
    ------
    InputError : an input that is not an argument, or a batch size that the model's code fixes.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    sizes = TracedSizes(nodes, frame)
    read = [read_input(node, frame) for node in nodes if node not in sizes.symbols]
    inputs = [_renamed(given, names) for given in read]
    dims = [dim_of(given) if given.operand.kind == "input" else None for given in inputs]
    sizes.bind(inputs, dims)
    sizes.check_batch(inputs, dims)
    guards = tuple(sizes.guards())
    cache_entry = sizes.batch | sizes.unread(gm)
    graph, operands = _rewritten(gm, inputs, sizes)
    made = fx.GraphModule(gm, graph)
    lines = (*sizes.shape_lines(inputs), *_lines(made))
    forget_sizes(frame.shape_env, cache_entry)
    kept = [i for i, node in enumerate(nodes) if node not in sizes.symbols]
    pairs = zip(inputs, dims, strict=True)
    named = {given.operand.name: dim for given, dim in pairs if given.operand.kind == "input"}
    numbers = frozenset(given.operand.name for given in inputs if given.in_tensor)
    traced = TracedGraph(made, operands, guards, lines)
    return ReadGraph(traced, tuple(kept), named, numbers, _losses(gm))


def _renamed(given: GraphInput, names: Mapping[int, str]) -> GraphInput:
    if given.operand.kind != "model" or id(given.example) not in names:
        return given
    return replace(given, operand=given.operand._replace(name=names[id(given.example)]))


def _losses(gm: fx.GraphModule) -> int:
    (results,) = gm.graph.output_node().args
    values = [n.meta.get("example_value") for n in results if isinstance(n, fx.Node)]  # type: ignore[union-attr]
    return sum(isinstance(v, Tensor) and v.dim() == 0 and v.requires_grad for v in values)


def _rewritten(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], sizes: TracedSizes
) -> tuple[fx.Graph, tuple[GraphOperand, ...]]:
    """Rewrite the graph without inputs for sizes, and without `item()` of numbers passed as tensors."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for given in inputs:
        copies[given.node] = graph.placeholder(given.node.name)
    by_name = {given.operand.name: copies[given.node] for given in inputs}
    # sorted by input, and each once: all ranks must get the same graph, in whatever order torch met the sizes
    places = {node: sizes.place(node) for node in sizes.symbols if is_read(node, gm)}
    read = {at: graph.call_method("size", (by_name[at[0]], at[1])) for at in sorted(set(places.values()))}
    for node in sizes.symbols:  # a region may take an argument that it does not read
        copies[node] = read[places[node]] if node in places else 0
    numbers = {given.node for given in inputs if given.in_tensor}
    for node in gm.graph.nodes:
        if node.target == "item" and node.args[0] in numbers:
            copies[node] = copies[node.args[0]]
        elif node not in copies:
            copies[node] = _copied(graph, node, copies, gm)
    return graph, tuple(given.operand for given in inputs)


def _copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any], gm: fx.GraphModule) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    target = node.target
    if target is torch.ops.higher_order.tag_activation_checkpoint:
        # a region of torch.utils.checkpoint: called as such, it equals the user's code
        target, kwargs = checkpoint, {"use_reentrant": False}
        body = attribute_of(gm, node.args[0])  # type: ignore[arg-type]
        args = (args[0], *_pruned(body, args[1:]))
    elif getattr(target, "namespace", "") == "higher_order":
        raise InputError(
            f"the model's graph has a region of its own kind ({target}), as torch.compile makes of "
            "an autograd.Function; expected ops and torch.utils.checkpoint: use fxdp.compile(model), which "
            "traces what the model runs"
        )
    made = graph.create_node(node.op, target, args, kwargs, name=node.name)
    if "stack_trace" in node.meta:
        made.meta["stack_trace"] = node.meta["stack_trace"]
    if stack := node.meta.get("nn_module_stack"):
        made.meta["nn_module_stack"] = {
            k: (_module_path(str(path)), kind) for k, (path, kind) in stack.items()
        }
    return made


def _pruned(body: fx.GraphModule, given: Sequence[Any]) -> tuple[Any, ...]:
    """Drop unread operands of a region: strides and offsets of inputs, which differ between ranks."""
    for node in body.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint
    ):
        inner = attribute_of(body, node.args[0])
        node.args = (node.args[0], *_pruned(inner, node.args[1:]))
    pairs = list(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    for placeholder, _ in pairs:
        if not placeholder.users:
            body.graph.erase_node(placeholder)
    body.recompile()
    return tuple(value for placeholder, value in pairs if placeholder.users)


def _module_path(path: str) -> str:
    """Return `fc` for `L['self']._modules['fc']` and for `L['self'].fc`."""
    plain = path.replace("._modules['", ".").replace("']", "").replace("L['", "").replace("[", ".")
    return ".".join(step.strip("].'\"") for step in plain.split(".")[1:])


def _lines(gm: fx.GraphModule, depth: str = "") -> Iterator[str]:
    """Yield the nodes as text. Nodes are numbered in order, since torch's names depend on earlier traces."""
    numbers: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Word(numbers[n]))
        target = node.target if isinstance(node.target, str) else _target_text(node.target)
        target = "" if node.op == "placeholder" else target
        yield f"{depth}{node.op} {target} {stable_text(args)} {stable_text(kwargs)}"
        if node.op == "get_attr":
            value = attribute_of(gm, node)
            if isinstance(value, fx.GraphModule):
                yield from _lines(value, depth + "  ")
        elif node.op == "call_module":
            yield f"{depth}  {stable_text(gm.get_submodule(str(node.target)))}"


class _Word(str):
    """A string with a `repr` without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _target_text(target: Any) -> str:
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    return f"{module}.{name}" if name else stable_text(target)
