"""Canonical sizes for torch's symbols: each batch symbol is `B`, further dynamic dims are `s0`, `s1`, ..."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch

from fxdp.capture.input_axes import ONE_AXIS, InputAxes
from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import Axis
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType


class Sizes:
    """Converter of torch's symbolic sizes; one per capture, with a cache by expression."""

    def __init__(
        self,
        fakes: Sequence[Any] = (),
        batch: Sequence[int | None] = (),
        equations: Iterable[sympy.Basic] = (),
        axes: InputAxes = ONE_AXIS,
    ) -> None:
        self.symbols: dict[str, tuple[int, int]] = {}
        self._mapping: dict[sympy.Basic, sympy.Basic] = {}
        self._cache: dict[sympy.Basic, sympy.Basic] = {}
        self._dims: dict[sympy.Basic, Dim] = {}
        self._unbacked = 0
        for index, (fake, dim) in enumerate(zip(fakes, batch, strict=True)):
            if dim is not None:
                self._bind_batch(fake.shape[dim], axes.axis(index))
        for index, fake in enumerate(fakes):
            for dim, size in enumerate(fake.shape):
                self._bind_other(size, index, dim)
        for equation in equations:
            self._identify(equation)

    def expr(self, value: Any) -> sympy.Basic:
        """Return the canonical expression of a SymInt, SymFloat, SymBool or raw torch expression."""
        raw = value if isinstance(value, sympy.Basic) else value.node.expr
        found = self._cache.get(raw)
        if found is None:
            # the order of a set differs between processes, and all ranks must number symbols equally
            for symbol in sorted(raw.free_symbols, key=str):
                self._bind_unbacked(symbol, None if raw is value else value.node.shape_env)
            found = self._cache[raw] = raw.xreplace(self._mapping)
        return found

    def knows(self, raw: sympy.Basic) -> bool:
        """Return whether an expression only contains sizes of the inputs, and no numbers read from data."""
        return bool(raw.free_symbols <= self._mapping.keys())

    def dim(self, size: Any) -> Dim:
        """Return a size as an int or a canonical expression."""
        if isinstance(size, int):
            return size
        raw = size.node.expr
        found = self._dims.get(raw)
        if found is None:
            expr = self.expr(raw)
            found = self._dims[raw] = int(expr) if expr.is_Integer else expr
        return found

    def type(self, value: Any) -> NodeType:
        """Return the type of a node's result, from the node's example value."""
        if isinstance(value, torch.Tensor):
            return TensorType(value.dtype, tuple(self.dim(size) for size in value.shape))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ScalarType(self.expr(value))
        if isinstance(value, (int, float, bool)):
            return ScalarType(sympy.sympify(value))
        if isinstance(value, (tuple, list)):
            return tuple(self._member(member) for member in value)
        return None

    def _member(self, value: Any) -> TensorType | ScalarType | None:
        found = self.type(value)
        return None if isinstance(found, tuple) else found

    def _bind_batch(self, size: Any, axis: Axis) -> None:
        """Map the symbol in this batch dim so that the dim becomes `B`, or the size of its further axis."""
        raw = size.node.expr
        # for a batch of samples in pairs torch's size is 2*s0: then the symbol is B/2, and the size still is
        # B
        for symbol in raw.free_symbols - self._mapping.keys():
            self._mapping[symbol] = axis.total if raw == symbol else sympy.solve(raw - axis.total, symbol)[0]

    def _bind_other(self, size: Any, index: int, dim: int) -> None:
        raw = None if isinstance(size, int) else size.node.expr
        if raw is None or not raw.is_Symbol or raw in self._mapping:
            return
        name = f"s{len(self.symbols)}"
        self._mapping[raw] = _symbol(name)
        self.symbols[name] = (index, dim)

    def _identify(self, raw: sympy.Basic) -> None:
        """Unify two symbols that tracing found equal, as in `Eq(B*s0, B*s1)`."""
        if not isinstance(raw, sympy.Eq) or not self.knows(raw):
            return
        equation = raw.xreplace(self._mapping)
        names = [str(symbol) for symbol in equation.free_symbols if str(symbol) in self.symbols]
        if len(names) != 2:
            return
        kept, dropped = (_symbol(name) for name in sorted(names, key=lambda name: int(name[1:])))
        if sympy.solve(equation, dropped) == [kept]:
            self._mapping = {raw: value.xreplace({dropped: kept}) for raw, value in self._mapping.items()}
            del self.symbols[str(dropped)]

    def _bind_unbacked(self, symbol: sympy.Basic, env: Any) -> None:
        """Name a symbol that is no size of an input: a data-dependent size, or a number, maybe negative."""
        if symbol in self._mapping:
            return
        name = f"u{self._unbacked}"
        self._unbacked += 1
        known = {"integer": True} if symbol.is_integer else {}
        if known and (env is None or env.bound_sympy(symbol).lower >= 0):
            known["nonnegative"] = True  # or `abs` of a number would be the number
        self._mapping[symbol] = sympy.Symbol(name, **known)


def _symbol(name: str) -> sympy.Symbol:
    """Return the canonical symbol of a further dynamic size."""
    # positive, so that B*s0 == B*s1 can be divided by B
    return sympy.Symbol(name, integer=True, positive=True)
