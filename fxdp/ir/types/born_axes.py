"""Axes born inside a program: rows that values select, and concatenations of rows of several axes.

Capture names a data-dependent size `u0`. Where each rank selects rows of its own part, the selected rows are
a batch axis of this name, with the symbols `B_u0`, `b_u0` and `offset_u0`; the types of the program then say
`B_u0` instead of `u0`. Of a mask with `k` rows, each of all samples, a rank selects `k` runs: these are the
axes `u0xk.0`, `u0xk.1`, ..., of which the axis `u0xk` consists. Concatenated rows of the axes `u0` and
`nodes` are the axis `u0+nodes`: a rank has its rows of `u0`, then its rows of `nodes`, and so no single range
of the global rows.

    index: f32[u0, 4] = x[mask]         u0 -> B_u0              where x and mask are S(0)
    nonzero: i64[u1, 2] = nonzero(y)    u1 -> B_u1x3            where y is b8[3, B] and S(1)
    cat: i64[2, B_u0 + B_nodes]         -> B_u0+nodes           where both operands are S(1)

The sizes of these axes are no inputs of the program: ranks exchange these where the program reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import sympy

from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import Axis, axis, axis_of, fixed_by_data, is_axis
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType


def is_born(of: Axis) -> bool:
    """Return whether the axis is born inside the program."""
    return not of.is_contiguous or re.fullmatch(r"u\d+(x\d+\.\d+)?", of.name) is not None


def unborn(size: Dim, runs: int = 1) -> Axis | None:
    """Return the axis that a data-dependent size becomes where ranks select their own rows, or None."""
    if not isinstance(size, sympy.Symbol) or not size.name.startswith("u"):
        return None
    return axis(size.name if runs == 1 else f"{size.name}x{runs}")


def read_from_rows(symbol: sympy.Basic) -> bool:
    """Return whether a size is read from a tensor that has it: `u0`, or one of an axis born of it."""
    return fixed_by_data(symbol) or is_born(axis(str(symbol).partition("_")[2]))


def concatenation(sizes: Sequence[Dim]) -> Axis | None:
    """Return the axis of concatenated rows of different axes, or None for other sizes."""
    found = [axis_of(size) for size in sizes if is_axis(size)]
    names = [one.name for one in found if one is not None and one.is_contiguous]
    if len(names) < 2 or len(names) < len(sizes) or len(set(names)) < len(names):
        return None
    return axis("+".join(names))


def in_parts(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression with the sizes of concatenations as sums of the sizes of their parts."""
    found: dict[sympy.Basic, sympy.Basic] = {}
    for symbol in expr.free_symbols:
        kind, _, name = str(symbol).partition("_")
        if "+" in name:
            of = axis(name)
            parts = [axis(part) for part in of.parts]
            assert kind != "offset", f"a rank's rows of {name} are no range"
            found[of.total] = sympy.Add(*(part.total for part in parts))
            found[of.local] = sympy.Add(*(part.local for part in parts))
    return expr.xreplace(found) if found else expr


def renamed(type_: NodeType, of: Axis, equal: Axis | None = None) -> NodeType:
    """Return the type of a node, with sizes as capture names them in terms of an axis that was born.

    An axis `equal` with as many rows on each rank, if there is one, takes its place.
    """
    if isinstance(type_, TensorType):
        return TensorType(type_.dtype, tuple(_renamed(size, of, equal or of) for size in type_.shape))
    if isinstance(type_, ScalarType):
        return ScalarType(sympy.sympify(_renamed(type_.expr, of, equal or of)))
    if isinstance(type_, tuple):
        return tuple(renamed(one, of, equal) for one in type_)  # type: ignore[misc]
    return None


@lru_cache(maxsize=65536)
def _renamed(size: Dim, of: Axis, equal: Axis) -> Dim:
    if isinstance(size, int):
        return size
    if "+" not in of.name:
        captured = of.name.partition("x")[0]
        return size.xreplace({sympy.Symbol(captured, integer=True, nonnegative=True): equal.total})
    *others, last = (axis(part).total for part in of.parts)
    # a multiple of the sum, 2*B_u0 + 2*B_nodes, is one of the concatenation
    found = sympy.expand(size.xreplace({last: of.total - sympy.Add(*others)}))
    return size if found.free_symbols.intersection(others) else found
