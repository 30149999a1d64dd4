"""The placements of a compiled graph as DTensor's: a `DTensorSpec` per tensor node.

fxdp works with one logical batch axis. On a mesh each of its data axes gets the same placement, first axis
slowest: `S(dim)` is `Shard(dim)`, and `S(dim, outer)` is `_StridedShard(dim, split_factor=outer)`, on every
axis. A spec assumes equal parts, as DTensor does; the program handles uneven local batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.mesh import REGATHER, Mesh
from fxdp.ir.types.placements import ParamShard, Placement, Replicate, Shard, per_axis
from fxdp.ir.types.sizes import B, evaluate
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat.dtensor import dtensor_spec, mesh_on_paper, tensor_metadata


def annotated(gm: fx.GraphModule, mesh: DeviceMesh, sizes: Mapping[str, int]) -> fx.GraphModule:
    """Return a copy of a placed graph for people and tools; the compiled graph stays without specs.

    Nodes of the copy have a `spec` (see `_set_specs`), and the full shape and line of the model's code for
    `print_readable()`.
    """
    shown = copy_graph(gm)
    _set_specs(shown.graph, mesh, sizes)
    for node in shown.graph.nodes:
        node.meta.pop("val", None)  # of the traced example; it would be shown instead
        if (spec := node.meta.get("spec")) is not None and not isinstance(spec, tuple):
            node.meta["tensor_meta"] = tensor_metadata(spec)
        if (location := meta(node).location).file:
            # the only format that torch.fx reads
            node.meta["stack_trace"] = (
                f'File "{location.file}", line {location.line}, in forward\n    {location.code}'
            )
    return shown


def data_mesh(mesh: Mesh, device_mesh: DeviceMesh | None = None) -> DeviceMesh:
    """Return the data axes as a `DeviceMesh`: a part of the user's mesh, or a mesh on paper.

    A mesh on paper has no process groups and needs none, so that a plan of any number of ranks has specs.
    """
    names = () if device_mesh is None else device_mesh.mesh_dim_names or ()
    if device_mesh is None or not set(mesh.axes) <= set(names):
        return mesh_on_paper(mesh.device_type, mesh.ranks, mesh.shape, mesh.ranks[mesh.rank])
    return device_mesh if tuple(names) == mesh.axes else device_mesh[mesh.axes]


def _spec_of(node: fx.Node, mesh: DeviceMesh, sizes: Mapping[str, int]) -> Any:
    """Return the node's `DTensorSpec` (a tuple for several results), or None for unplaced values.

    Parameters
    ----------
    mesh : a mesh of data axes only.
    sizes : the values of `B` and further symbols, for the full shape in the spec. Sizes that depend on data
        count as the batch.
    """
    type_, placement = meta(node).type, meta(node).placement
    if isinstance(type_, tuple) and isinstance(placement, tuple):
        return tuple(_spec(t, p, mesh, sizes) for t, p in zip(type_, placement, strict=True))
    return _spec(type_, placement, mesh, sizes)


def _set_specs(graph: fx.Graph, mesh: DeviceMesh, sizes: Mapping[str, int]) -> None:
    """Put each tensor node's spec into `node.meta["spec"]`, for tools that read DTensor's annotations."""
    for node in graph.nodes:
        spec = _spec_of(node, mesh, sizes)
        if spec is not None:
            node.meta["spec"] = spec


def _spec(type_: object, placement: object, mesh: DeviceMesh, sizes: Mapping[str, int]) -> Any:
    if not isinstance(type_, TensorType) or placement is None:
        return None
    if isinstance(placement, ParamShard) and placement.axis == REGATHER:
        return None  # DTensor cannot express a part of an axis
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    along = per_axis(placement, axes)  # type: ignore[arg-type]
    spelled = [_spelled(p, sizes) for p in along.values() if p is not None]
    shape = [evaluate(n, sizes, unknown=sizes[B.name]) for n in type_.shape]
    return dtensor_spec(mesh, spelled, shape, type_.dtype)


def _spelled(placement: Placement, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    if isinstance(placement, ParamShard):
        return "S", 0, 1
    if isinstance(placement, Shard):
        return "S", placement.dim, evaluate(placement.outer, sizes, unknown=sizes[B.name])
    return ("R" if isinstance(placement, Replicate) else f"P({placement.op})"), 0, 1
