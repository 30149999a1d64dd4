"""Ragged calls: options that the keys of a batch tell, and the check of sizes and of values that point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxdp.capture.inputs import Inputs
from fxdp.errors import InputError
from fxdp.options import Options


def with_recognised(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Options:
    """Return the options of one device's batch, with `batch_dims` where its keys tell what no size does."""
    from fxdp.eager.ragged.recognised import recognised_dims, tells_of_rows

    if options.batch_dims is not None or not tells_of_rows(args, kwargs):
        return options
    return replace(options, batch_dims=recognised_dims(args, kwargs))


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
