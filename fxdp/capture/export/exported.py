"""`Exported`: a forward graph with all facts that the second half of capture needs.

    user's code -- export --> Exported -- fxdp/capture/joint --> Captured

`export` makes an `Exported` from a model, with the user's code run under patches. Later steps do not depend
on the code: graphs from a different tracer could enter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxdp import torch_compat
from fxdp.capture.captured import Check, Route
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.export.skip_marks import route_skips
from fxdp.capture.input_axes import ONE_AXIS, InputAxes
from fxdp.capture.inputs import Inputs
from fxdp.capture.patches.deferred import deferring
from fxdp.errors import CaptureError
from fxdp.ir.graph.graphs import attribute_of, written_operands
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import aten

BatchDims: TypeAlias = Sequence["int | None"]


@dataclass(frozen=True)
class Exported:
    """A forward graph of flat tensors; the second half of capture rewrites the graph in place."""

    gm: fx.GraphModule
    """The graph: placeholders are the inputs, attributes are the parameters, buffers and constants."""
    owner: nn.Module
    """The module that names parameters and buffers; all other tensors of the graph are constants."""
    paths: tuple[str, ...]
    """Name of each input in errors and plans."""
    batch: tuple[int | None, ...]
    """The batch dim of each input."""
    symbolic: bool
    """True if the sizes of batch dims are symbols; False if the graph is for one batch size."""
    leaves: tuple[Any, ...]
    """For each leaf of the model's output: `OutputLeaf` or a Python value."""
    out_spec: pytree.TreeSpec
    loss: int | None = None
    """Index of the output that the model itself returns as `loss`."""
    checks: tuple[Check, ...] = ()
    """Checks on outputs beyond the model's own, at which the model's code raises or branches."""
    routes: tuple[Route, ...] = ()
    """The skip connections; in the graph, skipped values have labels (`label_of`)."""
    axes: InputAxes = ONE_AXIS
    """The batch axis of each input."""
    asked: Mapping[sympy.Basic, Location] = field(default_factory=dict)
    """The conditions on sizes that the code asks, in torch's symbols, with their lines."""

    @property
    def fakes(self) -> tuple[Any, ...]:
        """Return the fake inputs; the sizes of these are the symbols of the graph."""
        return tuple(node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder"))


def export(
    program: FlatModule, batch: BatchDims, hint: int, *, symbolic: bool, dynamic: bool = False
) -> Exported:
    """Export the program at a batch size of `hint`; `symbolic` makes batch sizes symbols, `dynamic` all."""
    inputs = program.inputs
    hints = _axis_hints(inputs, hint)
    batches = [hints[inputs.axes.axis(i).name] for i in range(len(batch))]
    examples = make_examples(inputs.tensors, batch, batches)
    torch_compat.begin_autograd()
    with deferring() as deferred:
        exported = torch.export.export(
            program,
            examples,
            dynamic_shapes=(_dynamic_shapes(examples, batch, dynamic),) if symbolic else None,
            strict=False,  # runs the user's code with all patches; with True, Dynamo would read bytecode
        )
    _check_constants(exported)
    gm = torch_compat.exported_module(exported)
    record = program.record
    _hold_written_constants(gm)
    _read_old_values(gm, record.assigned)
    _one_name_each(gm)
    deferred.bind(gm)
    routes = route_skips(gm, record.skips)
    assert record.spec is not None
    return Exported(
        gm=gm,
        owner=program.module,
        paths=inputs.paths,
        batch=tuple(batch),
        symbolic=symbolic,
        leaves=record.leaves,
        out_spec=record.spec,
        loss=record.loss,
        checks=record.checks,
        routes=routes,
        axes=inputs.axes,
        asked=record.sizes,
    )


def _check_constants(exported: torch.export.ExportedProgram) -> None:
    """Raise on tensors that would silently get no gradient."""
    for name, value in exported.constants.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"the model uses a tensor ({name.removeprefix('module.')}, shape {list(value.shape)}) that "
                "requires grad but is no registered parameter: it would get no gradient. Make it an "
                "nn.Parameter of the module"
            )


def _dynamic_shapes(examples: Sequence[torch.Tensor], batch: BatchDims, dynamic: bool) -> tuple[Any, ...]:
    """Return the dims that export makes symbolic, per input: batch dims must stay symbolic, the rest may."""
    auto, required = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC
    return tuple(
        {
            dim: required if dim == batch[i] else auto
            for dim, size in enumerate(example.shape)
            if dim == batch[i] or (dynamic and size > 1)
        }
        for i, example in enumerate(examples)
    )


_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Batch sizes to trace with: odd and prime, so that the batch size seldom equals a different size."""

_STATIC_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)
_EVEN_SIZES = tuple(2 * size for size in _STATIC_SIZES[1:])


def batch_hint(sizes: Set[int]) -> int:
    """Return the batch size to trace with: the first hint that differs from all other sizes of the inputs."""
    return _first_free(_HINTS, sizes, 1)[0]


def static_hints(sizes: Set[int]) -> tuple[int, ...]:
    """Return the four batch sizes of the static fallback, which differ from all other sizes; one is even."""
    return tuple(sorted((*_first_free(_STATIC_SIZES, sizes, 3), *_first_free(_EVEN_SIZES, sizes, 1))))


def _axis_hints(inputs: Inputs, batch: int) -> dict[str, int]:
    """Return the size of each axis to trace with, by name; equal ones would become one symbol."""
    found = {"": batch}
    for name in inputs.axes.further:
        found[name] = _first_free(_HINTS, inputs.fixed_sizes | set(found.values()), 1)[0]
    return found


def _first_free(candidates: Iterable[int], taken: Set[int], count: int) -> tuple[int, ...]:
    """Return the first `count` candidates that are not taken; taken candidates only if too few are free."""
    ordered = sorted(candidates, key=lambda size: size in taken)
    return tuple(sorted(ordered[:count]))


def make_examples(
    tensors: Sequence[torch.Tensor], dims: Sequence[int | None], batches: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return uninitialized contiguous tensors like the inputs, with as many samples; no values are read."""
    return tuple(_example(*given) for given in zip(tensors, dims, batches, strict=True))


def _example(tensor: torch.Tensor, dim: int | None, batch: int) -> torch.Tensor:
    shape = [batch if i == dim else size for i, size in enumerate(tensor.shape)]
    made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_() if tensor.requires_grad else made


def _hold_written_constants(gm: fx.GraphModule) -> None:
    """Register written constants as buffers of the graph's module, which makes them inputs; in place.

        places = self.places["a"].clone()       a tensor that is neither parameter nor buffer: a constant
        places[0] += 1                          written in place

    Tracing functionalizes in-place ops on values computed from inputs and factories. Values computed only
    from an attribute of the graph are not functionalized, and tracing fails on the remaining write.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    written: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and _is_constant(gm, node):
            roots[node] = frozenset({node})
        elif node.op == "call_function" and node.all_input_nodes:
            sources = node.all_input_nodes
            if node.args and node.args[0] in written_operands(node):
                written |= dict.fromkeys(roots.get(sources[0], ()))
            if all(source in roots for source in sources):
                roots[node] = frozenset[fx.Node]().union(*(roots[source] for source in sources))
    for node in written:
        _register(gm, str(node.target))


def _is_constant(gm: fx.GraphModule, node: fx.Node) -> bool:
    value: Any = attribute_of(gm, node)
    owner, _, name = str(node.target).rpartition(".")
    held = gm.get_submodule(owner)
    return isinstance(value, Tensor) and name not in held._parameters and name not in held._buffers


def _register(gm: fx.GraphModule, target: str) -> None:
    owner, _, name = target.rpartition(".")
    held = gm.get_submodule(owner)
    value = getattr(held, name)
    if name not in held._buffers:
        delattr(held, name)
        held.register_buffer(name, value, persistent=False)


def _read_old_values(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Let reads before the last write of these buffers use a copy, as an assignment keeps the old tensor.

    before: `%div = div(%x, %v)`, ..., `copy_(%v, %new)`     modifies a tensor that the backward of div saved
    after:  `%old = clone(%v)`, `%div = div(%x, %old)`, ..., `copy_(%v, %new)`
    """
    known = {id(gm.get_buffer(name)) for name in names}
    first: dict[int, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, node)
        if id(value) in known:  # a shared module's buffer has several names
            node.replace_all_uses_with(first.setdefault(id(value), node))
    for node in first.values():
        _let_copy_be_read(node)
    gm.recompile()


def _let_copy_be_read(node: fx.Node) -> None:
    last = next(n for n in reversed(node.graph.nodes) if n in node.users)
    with node.graph.inserting_after(node):
        old = node.graph.call_function(aten.clone.default, (node,))
    old.meta = dict(node.meta)
    node.replace_all_uses_with(old, lambda user: user is not old and user is not last)


def _one_name_each(gm: fx.GraphModule) -> None:
    """Reduce the names of a shared module's buffers in the graph to the first name.

    Each name would be an input of the trace, and torch cannot trace writes into one of two aliased inputs.
    """
    names: dict[int, str] = {}
    named = list(gm.named_buffers(remove_duplicate=False))
    first = {name: names.setdefault(id(buffer), name) for name, buffer in named}
    for node in gm.graph.find_nodes(op="get_attr"):
        node.target = first.get(str(node.target), node.target)
    for name in first.keys() - names.values():
        owner, _, key = name.rpartition(".")
        del gm.get_submodule(owner)._buffers[key]
