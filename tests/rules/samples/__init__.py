"""One maker of random arguments per op with a rule."""

from __future__ import annotations

from tests.rules.samples import (
    algebra,
    cuda,
    cuda_attention,
    layers,
    numbers,
    planes,
    pointwise,
    positions,
    quantized,
    shapes,
    sums,
)
from tests.rules.samples.draw import Maker

STAND_INS = {**cuda.STAND_INS, **cuda_attention.STAND_INS, **quantized.STAND_INS}
"""What computes, on the CPU and in float64, what an op computes that cannot be run so."""


def all_samples() -> dict[str, Maker]:
    """Makers by the op's name without `aten.` and `.default`; nobody has two."""
    tables = [
        m.SAMPLES
        for m in (shapes, sums, positions, layers, planes, algebra, numbers, quantized, cuda, cuda_attention)
    ]
    found: dict[str, Maker] = {}
    for table in (pointwise.samples(), *tables):
        twice = found.keys() & table.keys()
        assert not twice, f"two makers for {sorted(twice)}"
        found |= table
    return found
