"""Zero-copy all-gathers: each rank maps the parameter shards of all ranks on the host, page by page.

    %a [512, 256]   a rank's rows are 256 KiB, full pages      mapped
    %b [512]        1 KiB                                      gathered with similar ones

A mapped full value shows the current contents of the ranks' shards. So it may not outlive its phase, as
shards may be written afterwards, nor be returned to a user, who may write into it.
"""

from __future__ import annotations

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.parameter_buckets import readers, wait_of
from fxdp.ir.ops.parameter_shards import fills_pages
from fxdp.ir.types.mesh import Mesh


def shares_memory(mesh: Mesh) -> bool:
    """Return whether all ranks that shard a parameter can read one another's memory."""
    axes = [axis for axis in mesh.axes if axis != "microbatch"]
    return mesh.shared_memory and len(axes) == 1 and mesh.pipeline.size == 1


def fills_pages_of_memory(value: fx.Node, mesh: Mesh) -> bool:
    """Return whether a value is a parameter with shards that ranks can map."""
    if value.op != "placeholder" or not shares_memory(mesh):  # a cast has a new address at each step
        return False
    type_ = tensor_type(value)
    ranks = mesh.sharding[0][0]
    return fills_pages([int(n) for n in type_.shape], type_.dtype.itemsize, ranks)


def is_zero_copy(start: fx.Node, mesh: Mesh) -> bool:
    """Return whether a start is a zero-copy all-gather."""
    if start.target is not redistributions.all_gather_shards or not shares_memory(mesh):
        return False
    phase = meta(start).backward
    return all(fills_pages_of_memory(value, mesh) for value in _rows(start)) and not any(
        reader.op == "output" or meta(reader).backward != phase for reader in readers(wait_of(start))
    )


def _rows(start: fx.Node) -> list[fx.Node]:
    read = start.args[0]
    return [read] if isinstance(read, fx.Node) else list(read)  # type: ignore[arg-type]
