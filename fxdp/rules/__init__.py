"""How each op acts on placements: pure functions that return all alternatives which are exact.

For who writes a rule as a function (`fxdp.register_rule`):

    from fxdp.rules import Alternative, Op, P, R, S

    @fxdp.register_rule(torch.ops.mylib.rows_times.default)
    def rows_times(op: Op) -> Iterator[Alternative]:
        x, weight = op.operands
        for dim in x.batch_dims:  # dims whose size counts samples
            yield op.alternative({x.index: S(dim)}, S(dim))

`R` full, `S(dim)` in parts along a dim, `P` terms of a sum. An `Op` is what a rule sees of a node, an
`Alternative` one exact way to run it, and a `Rewrite` what a rank's call must be told beside its own sizes.
"""

from fxdp.ir.decompositions import Rewrite
from fxdp.ir.placements import P, R, S
from fxdp.rules import families as families
from fxdp.rules.registry import Alternative, Op

__all__ = ["Alternative", "Op", "P", "R", "Rewrite", "S"]
