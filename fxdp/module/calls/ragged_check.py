"""Check of a ragged call on this rank: sizes of its axes, and values that point into an axis."""

from __future__ import annotations

from fxdp.capture.inputs import Inputs
from fxdp.errors import InputError


def check_pointers(inputs: Inputs) -> None:
    """Raise if this rank's part of a ragged batch contradicts itself, as where a batch enters eagerly.

    Raises
    ------
    InputError : with all faults by argument path.
    """
    from fxdp.eager.ragged.faults import sizes_and_faults
    from fxdp.eager.ragged.structure import Entry

    entries = [Entry(*one) for one in zip(inputs.paths, inputs.tensors, inputs.axes.rows, strict=False)]
    _, faults = sizes_and_faults(entries)
    if faults:
        raise InputError(
            "a ragged batch does not fit together, so nothing of it was computed:\n  " + "\n  ".join(faults)
        )
