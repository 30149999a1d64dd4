"""How each op acts on placements: pure functions that return all alternatives which are exact."""

from fxdp.rules import families as families
