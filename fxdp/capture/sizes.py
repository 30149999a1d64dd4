"""From torch's symbols to canonical sizes: every batch symbol is `B`, other dynamic dims `s0`, `s1`, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from fxdp.annotations import NodeType, ScalarType, TensorType
from fxdp.placements import Dim
from fxdp.symbols import B


class Sizes:
    """Converts torch's symbolic sizes; one per capture, with a cache by expression."""

    def __init__(self, fakes: Sequence[Any] = (), batch: Sequence[int | None] = ()) -> None:
        self.symbols: dict[str, tuple[int, int]] = {}
        self._mapping: dict[sympy.Basic, sympy.Basic] = {}
        self._cache: dict[sympy.Basic, sympy.Basic] = {}
        self._dims: dict[sympy.Basic, Dim] = {}
        self._unbacked = 0
        for fake, dim in zip(fakes, batch, strict=True):
            if dim is not None:
                self._bind_batch(fake.shape[dim])
        for index, fake in enumerate(fakes):
            for dim, size in enumerate(fake.shape):
                self._bind_other(size, index, dim)

    def expr(self, value: Any) -> sympy.Basic:
        """The canonical expression of a SymInt, SymFloat, SymBool or raw torch expression."""
        raw = value if isinstance(value, sympy.Basic) else value.node.expr
        found = self._cache.get(raw)
        if found is None:
            for symbol in sorted(raw.free_symbols, key=str):
                self._bind_unbacked(symbol)
            found = self._cache[raw] = raw.xreplace(self._mapping)
        return found

    def knows(self, raw: sympy.Basic) -> bool:
        """Whether an expression has sizes of the inputs only, nothing read from data."""
        return raw.free_symbols <= self._mapping.keys()

    def dim(self, size: Any) -> Dim:
        """A size as an int or a canonical expression."""
        if isinstance(size, int):
            return size
        raw = size.node.expr
        found = self._dims.get(raw)
        if found is None:
            expr = self.expr(raw)
            found = self._dims[raw] = int(expr) if expr.is_Integer else expr
        return found

    def type(self, value: Any) -> NodeType:
        """The type of what a node computes, from its example value."""
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

    def _bind_batch(self, size: Any) -> None:
        """Let the symbol of this batch dim be `B` (or what makes the dim `B`)."""
        raw = size.node.expr
        for symbol in raw.free_symbols - self._mapping.keys():
            self._mapping[symbol] = B if raw == symbol else sympy.solve(raw - B, symbol)[0]

    def _bind_other(self, size: Any, index: int, dim: int) -> None:
        raw = None if isinstance(size, int) else size.node.expr
        if raw is None or not raw.is_Symbol or raw in self._mapping:
            return
        name = f"s{len(self.symbols)}"
        self._mapping[raw] = sympy.Symbol(name, integer=True, positive=True)
        self.symbols[name] = (index, dim)

    def _bind_unbacked(self, symbol: sympy.Basic) -> None:
        """Give a symbol that no input carries (a data-dependent size) a name of its own."""
        if symbol in self._mapping:
            return
        name = f"u{self._unbacked}"
        self._unbacked += 1
        integer = bool(symbol.is_integer)
        self._mapping[symbol] = sympy.Symbol(name, integer=True, nonnegative=True) if integer else sympy.Symbol(name)
