"""What the ranks' batches have to do with one another, beside their sizes.

    ranks of one pipeline           must pass the same batch
    inputs without a batch dim      must be the same on all ranks
    other ranks                     have other samples; the same everywhere mean that nobody shards the data

Sizes are compared at each call. Contents cost a hash of the batch, so they are compared when a kind of call
is compiled: a data loader that is wrong at the first step is wrong at each.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.errors import InputError
from fxdp.module.call import Call
from fxdp.ranks.agreement import content_digest, gather_objects
from fxdp.ranks.failure import everywhere
from fxdp.ranks.joined import Joined

_log = logging.getLogger("fxdp")


def check_contents(joined: Joined, call: Call) -> None:
    """Compare the ranks' inputs; all ranks call this together.

    Raises
    ------
    InputError : on every rank: ranks of one pipeline that pass different batches; an input without a batch
        dim that differs.
    """
    mesh = joined.mesh
    if mesh.world == 1:
        return
    rows = gather_objects(joined, _digests(call))
    _check_shared([shared for shared, _ in rows], call.inputs.paths)
    batches = [batch for _, batch in rows]
    places = mesh.pipeline.data_ranks or tuple(range(mesh.world))
    _check_pipelines(batches, places)
    if joined.links is not None and joined.links.rank == 0:
        _warn_of_copies(dict(zip(places, batches, strict=True)))


def _digests(call: Call) -> tuple[dict[int, str], str]:
    """Of each input without a batch dim, by its number, and of all samples together; empty for none."""
    shared: dict[int, str] = {}
    batch = hashlib.sha256()
    for i, (tensor, dim) in enumerate(zip(call.tensors, call.batch_dims, strict=True)):
        if tensor.layout != torch.strided:
            continue
        digest = _digest(tensor)
        if dim is None:
            shared[i] = digest
        else:
            batch.update(digest.encode())
    return shared, batch.hexdigest() if call.batch else ""


def _digest(tensor: Tensor) -> str:
    with torch.no_grad():
        return content_digest(tensor)


def _check_shared(rows: Sequence[dict[int, str]], paths: Sequence[str]) -> None:
    differing = [i for i in rows[0] if len({row.get(i) for row in rows}) > 1]
    if differing:
        listed = ", ".join(paths[i] for i in differing)
        raise everywhere(
            InputError(
                f"{listed} of the inputs has no batch dim, but its values differ between the ranks; "
                "expected the same on all ranks: make it from the same seed or broadcast it, or name its "
                "batch dim with batch_dims= of fxdp.compile"
            )
        )


def _check_pipelines(batches: Sequence[str], places: Sequence[int]) -> None:
    first: dict[int, int] = {}
    for rank, (place, batch) in enumerate(zip(places, batches, strict=True)):
        other = first.setdefault(place, rank)
        if batches[other] != batch:
            raise everywhere(
                InputError(
                    f"rank {rank} of the mesh passes other samples than rank {other}, though both are in one "
                    "pipeline; expected the same batch on all its ranks: let them read by their place along "
                    "the data axes, as DistributedSampler(..., num_replicas=compiled.mesh.size, "
                    "rank=compiled.mesh.rank)"
                )
            )


def _warn_of_copies(batches: dict[int, str]) -> None:
    if len(batches) > 1 and len(set(batches.values())) == 1:
        _log.warning(
            "all %d ranks passed the same samples, so the batch has each of them %d times: if that is not "
            "meant, let each rank read its own part, as DistributedSampler does",
            len(batches),
            len(batches),
        )
