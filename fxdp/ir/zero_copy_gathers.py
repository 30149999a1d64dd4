"""All-gathers that copy nothing: the ranks of one host map each other's parameter shards, page by page.

    %a [512, 256]   a rank's rows are 256 KiB, full pages      shown
    %b [512]        1 KiB                                        gathered with others of its kind

A full value that is shown is what the ranks' rows are at that moment. So it may not outlive its phase, as
rows may be written afterwards, nor be handed to a user, who may write into it.
"""

from __future__ import annotations

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.mesh import Mesh
from fxdp.ir.metadata import meta, tensor_type
from fxdp.ir.ops.parameter_shards import fills_pages
from fxdp.ir.parameter_buckets import readers, wait_of


def shares_memory(mesh: Mesh) -> bool:
    """Whether all ranks that hold rows of a parameter see each other's memory."""
    axes = [axis for axis in mesh.axes if axis != "microbatch"]
    return mesh.shared_memory and len(axes) == 1 and mesh.pipeline.size == 1


def fills_pages_of_memory(value: fx.Node, mesh: Mesh) -> bool:
    """Whether a value is a parameter whose rows the ranks can show each other."""
    if value.op != "placeholder" or not shares_memory(mesh):  # a cast lies elsewhere at each step
        return False
    type_ = tensor_type(value)
    ranks = mesh.sharding[0][0]
    return fills_pages([int(n) for n in type_.shape], type_.dtype.itemsize, ranks)


def is_zero_copy(start: fx.Node, mesh: Mesh) -> bool:
    """Whether a start of a gather copies nothing."""
    if start.target is not redistributions.all_gather_shards or not shares_memory(mesh):
        return False
    phase = meta(start).backward
    return all(fills_pages_of_memory(value, mesh) for value in _rows(start)) and not any(
        reader.op == "output" or meta(reader).backward != phase for reader in readers(wait_of(start))
    )


def _rows(start: fx.Node) -> list[fx.Node]:
    read = start.args[0]
    return [read] if isinstance(read, fx.Node) else list(read)  # type: ignore[arg-type]
