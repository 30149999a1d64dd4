"""Conditions on sizes that the user's Python code evaluated during the trace (`if x.shape[0] > 4`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.capture.captured import Condition
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.locations import LocationIndex, Origin
from fxdp.ir.graph.metadata import Location, meta, tensor_type
from fxdp.ir.types.sizes import B, is_axis
from fxdp.torch_compat import aten

_TRAINING = 5  # the position of `training` among the arguments of aten.batch_norm
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_BATCHES = (2, 3, 4, 5, 6, 8, 9, 12, 15, 16, 25, 31, 64, 100, 1000)
_ONE = sympy.Integer(1)
_OTHERS = (2, 3, 5, 8, 17, 100)


def find_conditions(shape_env: Any, sizes: Sizes) -> tuple[Condition, ...]:
    """Return the guards of a trace that do not hold for all sizes of at least 2.

    Torch guards many sizes against 0 and 1 by itself: what holds at all sample sizes may fail at others
    (`x.shape[0] == 20`), but says nothing of these.
    """
    found: dict[sympy.Basic, Condition] = {}
    for raw, guard in guards_of(shape_env):
        if _chooses_kernel(guard) or not sizes.knows(raw) or (expr := sizes.expr(raw)) in found:
            continue
        asked = _of_several(expr) if _holds_at_samples(expr) else expr
        if asked != sympy.true:
            found[expr] = Condition(asked, _location(guard))
    return tuple(found.values())


def asked_of_sizes(shape_env: Any, *, replaced: bool = True) -> list[tuple[sympy.Basic, Location]]:
    """Return the conditions on sizes that a trace evaluated, each with the user's line.

    If `replaced`, the conditions are in the symbols that remain in the trace, otherwise as evaluated.
    """
    pairs = [(expr if replaced else guard.expr, guard) for expr, guard in guards_of(shape_env)]
    return [(expr, _user_location(guard)) for expr, guard in pairs if not _chooses_kernel(guard)]


def _user_location(guard: Any) -> Location:
    """Return the user's line of a guard, which Dynamo stores as `if n > 4:  # models.py:12 in forward`."""
    said = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)
    code, _, place = str(said or "").rpartition("  # ")
    file, _, line = place.partition(" in ")[0].rpartition(":")
    return Location(file, int(line), code.strip()) if line.isdigit() else _location(guard)


def kept_dims(graph: fx.Graph) -> tuple[Condition, ...]:
    """Return conditions for the dims that squeezes in the forward keep because sizes are larger than 1.

    A single sample has size 1, but torch traces sizes of at least 2 and leaves no guard.
    """
    found: dict[sympy.Basic, Condition] = {}
    for node in graph.nodes:
        if node.target in _SQUEEZES and not meta(node).backward:
            for size in _squeezed(node):
                if isinstance(size, sympy.Basic) and size.subs(dict.fromkeys(size.free_symbols, 1)) == 1:
                    found.setdefault(size, Condition(sympy.Ne(size, 1), meta(node).location or Location()))
    return tuple(found.values())


def _squeezed(node: fx.Node) -> list[Any]:
    """Return the sizes of the dims that a squeeze removes if they are 1."""
    source: Any = node.args[0]
    shape = tensor_type(source).shape
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    return [shape[d] for d in ([dims] if isinstance(dims, int) else dims)]


def sizes_of_one(asked: Mapping[sympy.Basic, Location], sizes: Sizes) -> tuple[Condition, ...]:
    """Return conditions that sizes are not 1, for questions of the code that have another answer there.

    Torch traces sizes of at least 2, and leaves no guard for what holds for all of these.
    """
    found: dict[sympy.Basic, Condition] = {}
    for raw, location in asked.items():
        if not sizes.knows(raw):
            continue
        expr = sizes.expr(raw)
        for symbol in sorted(expr.free_symbols, key=str):
            if _differs_at_one(expr, symbol):
                found.setdefault(symbol, Condition(sympy.Ne(symbol, 1), location))
    return tuple(found.values())


def several_values(exported: fx.Graph) -> tuple[Condition, ...]:
    """Return conditions that BatchNorms in training see several values per channel: one has no variance.

    Eager code raises for one value. Torch traces sizes of at least 2, for which no guard remains.
    """
    found = []
    for node in exported.nodes:
        if "batch_norm" not in str(node.target) or len(node.args) <= _TRAINING or not node.args[_TRAINING]:
            continue
        shape = getattr(node.args[0].meta.get("val"), "shape", ())  # graphs of Dynamo have no values
        sizes = [n for dim, n in enumerate(shape) if dim != 1 and not (isinstance(n, int) and n == 1)]
        if len(sizes) == 1 and isinstance(sizes[0], torch.SymInt) and sizes[0].node.expr.is_Symbol:
            location = Origin.here().of(LocationIndex(exported.nodes).location(node))
            words = (
                "Expected more than 1 value per channel when training, got a global batch of 1 for the "
                f"BatchNorm at {location}: a single value has no variance"
            )
            found.append(Condition(sympy.Ne(B, 1), location, words))
    return tuple(found)


def guards_of(shape_env: Any) -> list[tuple[sympy.Basic, Any]]:
    """Return the guards of a trace, in the symbols that remain in the trace."""
    return [(shape_env.replace(guard.expr), guard) for guard in getattr(shape_env, "guards", ())]


def _holds_at_samples(expr: sympy.Basic) -> bool:
    """Return whether a condition holds at all sample sizes."""
    symbols = sorted(expr.free_symbols, key=str)
    if not symbols:
        return bool(expr != sympy.false)
    return len(symbols) <= 2 and _answers(expr, symbols) == {sympy.true}


def _of_several(expr: sympy.Basic) -> sympy.Basic:
    """Return a condition without its answers at sizes of 0 and 1; true if it holds for all larger ones."""
    symbols = sorted(expr.free_symbols, key=str)
    more = {symbol: 2 + sympy.Symbol(f"{symbol}_more", integer=True, nonnegative=True) for symbol in symbols}
    if expr.xreplace(more) == sympy.true:
        return sympy.true
    return sympy.Or(expr, *(sympy.Lt(symbol, 2) for symbol in symbols))


def _differs_at_one(expr: sympy.Basic, symbol: sympy.Basic) -> bool:
    """Return whether a condition has one answer at all sample sizes, and another one if a size is 1."""
    symbols = sorted(expr.free_symbols, key=str)
    if len(symbols) > 2:
        return False
    others = [other for other in symbols if other != symbol]
    several = _answers(expr, symbols)
    return len(several) == 1 and _answers(expr.xreplace({symbol: _ONE}), others) != several


def _answers(expr: sympy.Basic, symbols: Sequence[sympy.Basic]) -> set[sympy.Basic]:
    """Return the answers of a condition at all sample sizes."""
    grids = [_BATCHES if is_axis(symbol) else _OTHERS for symbol in symbols]
    places = (dict(zip(symbols, map(sympy.Integer, values), strict=True)) for values in product(*grids))
    return {expr.xreplace(place) for place in places}


def _chooses_kernel(guard: Any) -> bool:
    """Return whether torch made the guard to choose a convolution kernel; results are equal in both cases."""
    frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    is_fake = str(getattr(frame, "filename", "")).endswith("torch/_subclasses/fake_impls.py")
    return is_fake and frame.name == "conv"  # sizes of slices and views are decided in this file, too


def _location(guard: Any) -> Location:
    """Return the line at which a guard was made, as recorded by torch."""
    frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if not hasattr(frame, "filename"):
        return Location(file=str(frame or ""))
    return Location(frame.filename, frame.lineno or 0, frame.line or "")
