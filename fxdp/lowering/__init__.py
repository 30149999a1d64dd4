"""From an emitted joint graph to a forward and a backward callable."""

from fxdp.lowering.eager import lower_eager
from fxdp.lowering.halves import Halves
from fxdp.lowering.inductor.compile import lower_inductor

__all__ = ["Halves", "lower_eager", "lower_inductor"]
