"""Sharding rules: pure functions that map an op to all exact alternatives of placements.

To write a rule as a function (`fxdp.register_rule`):

    from fxdp.rules import Alternative, Op, P, R, S

    @fxdp.register_rule(torch.ops.mylib.rows_times.default)
    def rows_times(op: Op) -> Iterator[Alternative]:
        x, weight = op.operands
        for dim in x.batch_dims:  # dims whose size counts samples
            yield op.alternative({x.index: S(dim)}, S(dim))

`R` is full, `S(dim)` sharded along a dim, `P` terms of a sum. An `Op` is a node as the input of a rule, an
`Alternative` one exact way to run the node, and a `Rewrite` lists changes to a rank's call beyond local
sizes.
"""

from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import P, R, S
from fxdp.rules import families as families
from fxdp.rules.registry import Alternative, Op

__all__ = ["Alternative", "Op", "P", "R", "Rewrite", "S"]
