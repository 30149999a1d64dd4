"""The decisions that a model's code takes at flags of the batch when it runs on values."""

from __future__ import annotations

from collections.abc import Callable

from fxdp.ir.graph.metadata import Location
from fxdp.wings import seam


@seam("python")
def taken_branches(run: Callable[[], object]) -> list[tuple[Location, bool]]:
    """Run code and return its decisions in order, by line; without the wing none, as branches are refused."""
    run()
    return []
