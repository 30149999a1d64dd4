"""Check how the batches of the ranks are related, apart from their sizes.

    ranks of one pipeline           must pass the same batch
    inputs without a batch dim      must be equal on all ranks
    all other ranks                 have different samples; equal samples mean that the data is not sharded
    ranks that draw as one device   must have equal generator states, and inputs with one device's strides

Sizes are compared at each call. A comparison of contents costs a hash of the batch, so contents are compared
when a kind of call is compiled: a data loader that is wrong at the first step is wrong at each step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import torch

from fxdp.capture.captured import Captured
from fxdp.capture.refusals.input_layouts import strided_draws
from fxdp.errors import FxdpError, InputError
from fxdp.module.calls.call import Call
from fxdp.ranks.agreement import content_digest, gather_objects
from fxdp.ranks.liveness.failure import everywhere
from fxdp.ranks.process_mesh import ProcessMesh

_log = logging.getLogger("fxdp")


def check_inputs_agree(process_mesh: ProcessMesh, call: Call) -> None:
    """Compare the ranks' inputs; a collective call.

    Raises
    ------
    InputError : on every rank: ranks of one pipeline pass different batches, or an input without a batch dim
        differs.
    """
    mesh = process_mesh.mesh
    if mesh.world == 1:
        return
    own: dict[int, str] = {}
    batch = hashlib.sha256()
    for i, (tensor, dim) in enumerate(zip(call.tensors, call.batch_dims, strict=True)):
        if tensor.layout == torch.strided and dim is None:
            own[i] = content_digest(tensor)
        elif tensor.layout == torch.strided:
            batch.update(content_digest(tensor).encode())
    rows = gather_objects(process_mesh, (own, batch.hexdigest() if call.batch else ""))
    _check_shared([shared for shared, _ in rows], call.inputs.paths)
    batches = [batch for _, batch in rows]
    places = mesh.pipeline.data_ranks or tuple(range(mesh.world))
    _check_pipelines(batches, places)
    if process_mesh.comms is not None and process_mesh.comms.rank == 0:
        _warn_of_copies(dict(zip(places, batches, strict=True)))


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


def drawing_apart() -> FxdpError:
    """Return the error, for all ranks, of a call that draws while generator states differ between ranks."""
    return everywhere(
        InputError(
            'with rng="single-device" or fxdp.Bitwise all ranks draw from one seed, but the generators of '
            "the ranks are in different states. Call torch.manual_seed with one number on all of them, and "
            "draw what each draws for itself (its data) from a torch.Generator of its own"
        )
    )


def drawing_strided(found: Captured, rows: Sequence[Mapping[str, str]]) -> FxdpError:
    """Return the error, for all ranks, of a call that draws with inputs in unexpected strides.

    `rows` holds for each rank the inputs concerned, each with the expression for a copy without the fault.
    """
    copies = {path: copy for row in rows for path, copy in row.items()}
    places = ((path, [str(rank) for rank, row in enumerate(rows) if path in row]) for path in copies)
    shown = "; ".join(f"{path} (rank {', '.join(ranks)})" for path, ranks in places)
    return everywhere(strided_draws(found, copies, shown))
