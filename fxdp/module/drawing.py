"""Ranks that all draw what one device would (`rng="single-device"`): what they need for it in common.

Their generators must be in one state, and the inputs of each lie in memory as one device's would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from fxdp.capture import Captured, strided_draws
from fxdp.errors import FxdpError, InputError
from fxdp.ranks.failure import everywhere


def generator_state(device_type: str) -> int:
    """A number below 2**62 for the state of the generators that a program draws from."""
    states = [torch.get_rng_state()]
    if device_type == "cuda":
        states.append(torch.cuda.get_rng_state())
    raw = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 2


def drawing_apart() -> FxdpError:
    """The error, raised by all ranks, of a call that draws while their generators are in other states."""
    return everywhere(
        InputError(
            'rng="single-device": every rank draws the numbers of the whole batch, but the generators of the '
            "ranks are in different states. Call torch.manual_seed with one number on all of them, and draw "
            "what each draws for itself (its data) from a torch.Generator of its own"
        )
    )


def drawing_strided(found: Captured, rows: Sequence[Mapping[str, str]]) -> FxdpError:
    """The error, raised by all ranks, of a call that draws while inputs of some lie otherwise.

    `rows` are the ranks' inputs that do, each with the copy that would not.
    """
    copies = {path: copy for row in rows for path, copy in row.items()}
    places = ((path, [str(rank) for rank, row in enumerate(rows) if path in row]) for path in copies)
    shown = "; ".join(f"{path} (rank {', '.join(ranks)})" for path, ranks in places)
    return everywhere(strided_draws(found, copies, shown))
