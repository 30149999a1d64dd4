"""The sizes of all ranks' batches, from what the ranks have exchanged about a call."""

from __future__ import annotations

from collections.abc import Sequence

from fxdp.errors import InputError
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import Cuts, Split
from fxdp.module.calls.call import Call
from fxdp.ranks.liveness.failure import everywhere

FURTHER = 9
"""The first column with the size of a further axis."""


def batches_of(mesh: Mesh, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the batch size of each data rank; pipeline ranks with the same data must agree."""
    places = mesh.pipeline.data_ranks
    if mesh.pipeline.size == 1 or len(places) < len(sizes):
        return tuple(sizes)
    found: dict[int, int] = {}
    for rank, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if found.setdefault(place, size) != size:
            raise everywhere(
                InputError(
                    f"rank {rank} of the mesh has a batch of {size}, another rank with the same data "
                    f"one of {found[place]}: all ranks of a pipeline must pass the same batch"
                )
            )
    return tuple(found[place] for place in range(mesh.size))


def all_axes(call: Call, batches: tuple[int, ...], further: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks' batch sizes, with those of the further axes and the cuts of a ragged batch.

    `further` are the columns of the exchange from `FURTHER` on.
    """
    if not further:
        return batches
    names, cuts = call.inputs.axes.further, None
    if call.cuts is not None:
        samples, digests = further[len(call.further) :]
        cuts = Cuts(samples, digests, dict(zip(("", *names), call.cuts.ends, strict=True)))
    return Split(batches, dict(zip(names, further, strict=False)), cuts)


def further_of(call: Call) -> tuple[int, ...]:
    """Return what the ranks exchange of a ragged batch beside the size of its own axis."""
    return call.further if call.cuts is None else (*call.further, *call.cuts.columns)


def nonempty(batches: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch sizes, of which not all may be 0."""
    if sum(batches) == 0:
        raise everywhere(InputError("the global batch is empty: no rank was given a sample"))
    return batches
