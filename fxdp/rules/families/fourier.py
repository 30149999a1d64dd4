"""Fourier transforms.

Law: a transform mixes only the dims it names; all others split. It is linear. MKL refuses empty parts,
so a rank runs the op of `empty_parts`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, Rewrite, rule


@rule("fourier", aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def transform(op: Op) -> Iterator[Alternative]:
    """Real or complex transforms over `dim`."""
    (x,) = op.operands
    mixed = {d % x.ndim for d in op.arg("dim")}
    names = "".join("_" if d in mixed else c for d, c in enumerate(letters(x.ndim)))
    rewrite = Rewrite(target=local_op(op.target))
    yield from by_labels(op, [(x, names)], [names], rewrite=rewrite)
    yield from linear(op, [x])
