"""Fingerprint of a rank: all on which the bits of its results depend, apart from program and operands.

Numerical kernels choose their order of additions by the processor, its vector instructions, the number of
threads, the release of torch and some switches. Ranks with equal fingerprints compute equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxdp.errors import AgreementError
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.comms.processors import processor
from fxdp.ranks.liveness.failure import everywhere
from fxdp.ranks.process_mesh import ProcessMesh

_NAMED = 8  # most ranks named for a value


def fingerprint(device_type: str) -> dict[str, str]:
    """Return the fingerprint of this rank: values by the names that errors use."""
    found = processor(device_type) | {
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if device_type == "cuda":
        found["cuDNN, chosen by time"] = str(torch.backends.cudnn.benchmark)
    return found


def check_fingerprints(process_mesh: ProcessMesh) -> None:
    """Compare the fingerprints of all ranks; all ranks call this together.

    Raises
    ------
    AgreementError : (on all ranks) names all values that differ, each with its ranks.
    """
    rows = gather_objects(process_mesh, fingerprint(process_mesh.mesh.device_type))
    faults = unlike_ranks(rows)
    if faults:
        listed = "\n  ".join(faults)
        raise everywhere(
            AgreementError(
                f"fxdp.Bitwise(...): the ranks would compute different bits of equal values:\n  {listed}\n"
                "expected equal ones: OMP_NUM_THREADS sets the threads, ATEN_CPU_CAPABILITY lowers "
                "the vector instructions; or use numerics='exact', which is equal up to rounding"
            )
        )


def unlike_ranks(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each name whose values differ, as `threads: 2 on rank 3, 1 on the other ranks`."""
    lines = []
    for name in rows[0]:
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(row[name], []).append(rank)
        *few, most = sorted(ranks, key=lambda value: len(ranks[value]))
        if few:
            parts = [f"{value} on {_named(ranks[value])}" for value in few]
            lines.append(f"{name}: {', '.join(parts)}, {most} on the other ranks")
    return lines


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each name whose values differ, as `threads: 1, now 2`."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name}: {before.get(name, 'not told')}, now {now.get(name, 'not told')}" for name in names]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' and more' if len(ranks) > _NAMED else ''}"
