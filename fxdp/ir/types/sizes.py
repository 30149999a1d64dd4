"""Sizes as expressions in `B`, the global batch: which dims contain the batch as a factor.

A dim may be sharded only if its size is `c * B` with `c` free of `B` ("homogeneous"); `B - 1` and `B * B` in
one dim never. All answers are cached: sympy would otherwise dominate the analysis.

A ragged batch has further axes (nodes, edges), each with its own symbols: `B_nodes`, `b_nodes`, ... All that
holds for `B` here holds for each; a size that depends on two axes is a multiple of neither. The axis with the
empty name is the batch's own. Further axes are born inside a program (`fxdp/ir/types/born_axes.py`).

Values of symbols are given by name: `{"B": 64, "s0": 32}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import sympy

from fxdp.ir.types.placements import Dim

B: sympy.Symbol = sympy.Symbol("B", integer=True, positive=True)
"""The global batch: the sum of all ranks' local batches."""

LOCAL: sympy.Symbol = sympy.Symbol("b", integer=True, nonnegative=True)
"""This rank's local batch."""

OFFSET: sympy.Symbol = sympy.Symbol("offset", integer=True, nonnegative=True)
"""The number of samples on the ranks before this one."""


class Axis(NamedTuple):
    """A batch axis, with the symbols of its global size, of its size on a rank, and of its offset there."""

    name: str
    total: sympy.Symbol
    local: sympy.Symbol
    offset: sympy.Symbol

    @property
    def largest(self) -> str:
        """The name of the size input that holds the size of the largest rank's part."""
        return f"b_max_{self.name}" if self.name else "b_max"

    @property
    def inputs(self) -> tuple[str, str, str, str]:
        """The names of the axis' size inputs: global, local, offset, largest."""
        return self.total.name, self.local.name, self.offset.name, self.largest

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the axes of which this axis is the concatenation, in order; else its own name.

        The parts of `u0x2` are `u0x2.0` and `u0x2.1`.
        """
        return _parts_of(self.name)

    @property
    def is_contiguous(self) -> bool:
        """Whether a rank's rows are one range of the global rows, which begins at `offset`."""
        return len(self.parts) == 1


@lru_cache(maxsize=1024)
def _parts_of(name: str) -> tuple[str, ...]:
    runs = re.fullmatch(r"u\d+x(\d+)", name)
    return tuple(name.split("+") if runs is None else (f"{name}.{i}" for i in range(int(runs[1]))))


@lru_cache(maxsize=1024)
def axis(name: str = "") -> Axis:
    """Return the axis of this name, by default the batch's own."""
    if not name:
        return Axis("", B, LOCAL, OFFSET)
    # other than the batch, an axis may be empty: graphs without edges
    symbols = (sympy.Symbol(f"{of}_{name}", integer=True, nonnegative=True) for of in ("B", "b", "offset"))
    return Axis(name, *symbols)


@lru_cache(maxsize=65536)
def axis_of(size: Dim) -> Axis | None:
    """Return the one batch axis that a size depends on; None if it depends on none, or on several."""
    found = axes_in(size)
    return axis(found[0]) if len(found) == 1 else None


def axes_in(size: Dim) -> list[str]:
    """Return the names of all batch axes that a size depends on."""
    return [] if isinstance(size, int) else [name.partition("_")[2] for name in _totals_of(size)]


def _totals_of(size: sympy.Expr) -> list[str]:
    """Return the names of the global sizes of axes in an expression."""
    return [s.name for s in size.free_symbols if s.name == "B" or s.name.startswith("B_")]


def axes_of(sizes: Iterable[str]) -> list[Axis]:
    """Return the axes among the names of size inputs, the batch's own first."""
    return [axis(), *(axis(name[2:]) for name in sizes if name.startswith("B_"))]


def is_axis(size: Any) -> bool:
    """Return whether a size is that of a batch axis, once: neither a multiple nor a part."""
    found = axis_of(size) if isinstance(size, sympy.Expr) else None
    return found is not None and size == found.total


def named_size(name: str) -> sympy.Symbol:
    """Return the symbol of a size input by its name: of an axis (`B`, `b_nodes`) or a further one (`s0`)."""
    kind, _, of = name.partition("_")
    if kind in ("B", "b", "offset") and not of.startswith("max"):
        found = axis(of)
        return next(s for s in (found.total, found.local, found.offset) if s.name == name)
    return sympy.Symbol(name, integer=True, positive=True)


def is_range(size: Dim) -> bool:
    """Return whether a rank's rows along a sharded dim of this size are one range of the global rows."""
    found = axis_of(size)
    return found is not None and found.is_contiguous


@lru_cache(maxsize=65536)
def batch_factor(size: Dim) -> Dim | None:
    """Return `c` of `size == c * B`, or None if the size is no multiple of a batch axis."""
    found = axis_of(size)
    if found is None:
        return None
    quotient = sympy.cancel(size / found.total)
    if found.total in quotient.free_symbols or not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


@lru_cache(maxsize=65536)
def mentions_batch(size: Dim) -> bool:
    """Return whether the size depends on a batch axis at all (also as `B - 1` or `B * B`)."""
    return not isinstance(size, int) and bool(_totals_of(size))


@lru_cache(maxsize=65536)
def product(*sizes: Dim) -> Dim:
    """Return the product of sizes, as an int if possible."""
    value = sympy.Integer(1)
    for size in sizes:
        value = value * size
    return int(value) if value.is_Integer else value


@lru_cache(maxsize=65536)
def exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """Return `a / b` if this is an integer (expression), else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def evaluate(size: Dim, values: Mapping[str, int], *, unknown: int | None = None) -> int:
    """Return the value of a size.

    Parameters
    ----------
    values : the value of each symbol, by name.
    unknown : the value of symbols missing from `values`; None raises `KeyError` for these.
    """
    return size if isinstance(size, int) else int(number(size, values, unknown=unknown))


def number(expr: sympy.Basic, values: Mapping[str, Any], *, unknown: int | None = None) -> int | float | bool:
    """Return the value of any expression as a Python number; parameters as in `evaluate`."""
    found = [values[s.name] if unknown is None else values.get(s.name, unknown) for s in _symbols_of(expr)]
    return _substituted(expr, *found)


@lru_cache(maxsize=65536)
def _symbols_of(expr: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """Return the symbols of an expression, sorted by name."""
    return tuple(sorted(expr.free_symbols, key=str))


@lru_cache(maxsize=65536, typed=True)  # an expression with 1.0 differs from one with 1
def _substituted(expr: sympy.Basic, *numbers: Any) -> int | float | bool:
    value = expr.xreplace(dict(zip(_symbols_of(expr), map(sympy.sympify, numbers), strict=True)))
    if value.is_Boolean:
        return bool(value)
    return int(value) if value.is_Integer else float(value)


@lru_cache(maxsize=65536)
def hint(size: Dim, batch: int = 64) -> int:
    """Return a typical value of the size for cost estimates: an axis counts `batch`, further symbols 32."""
    return evaluate(size, {} if isinstance(size, int) else dict.fromkeys(_totals_of(size), batch), unknown=32)


@lru_cache(maxsize=65536)
def fixed_by_data(size: Any) -> bool:
    """Return whether a size or number depends on tensor values: capture names these symbols `u0`, `u1`."""
    return isinstance(size, sympy.Basic) and any(str(symbol).startswith("u") for symbol in size.free_symbols)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the ranks' parts of a ragged batch are cut into micro-batches or blocks.

    Attributes
    ----------
    samples : the number of samples of each rank.
    digests : a number by rank that tells apart where that rank's part is cut.
    ends : where this rank's micro-batches but the last end, by axis; its digest says so, too.
    """

    samples: tuple[int, ...]
    digests: tuple[int, ...]
    ends: Mapping[str, tuple[int, ...]] = field(compare=False)


class Split(tuple[int, ...]):
    """The sizes of a ragged batch: of its own axis by rank, and of its further axes."""

    further: Mapping[str, tuple[int, ...]]
    """The size by rank of each further axis."""
    cuts: Cuts | None
    """None without micro-batches and blocks."""

    def __new__(
        cls, own: Sequence[int], further: Mapping[str, Sequence[int]], cuts: Cuts | None = None
    ) -> Split:
        """Make the sizes of all axes."""
        made = super().__new__(cls, own)
        made.further = {name: tuple(sizes) for name, sizes in further.items()}
        made.cuts = cuts
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return False
        return tuple(self) == tuple(other) and (self.further, self.cuts) == (other.further, other.cuts)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), *self.further.items(), self.cuts))


def samples_of(split: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each rank: rows of the batch, or of a ragged one what is never cut."""
    cuts = split.cuts if isinstance(split, Split) else None
    return tuple(split) if cuts is None else cuts.samples


def by_axis(split: Sequence[int]) -> dict[str, Sequence[int]]:
    """Return the size by rank of each axis, by name: of the batch alone, or of all axes of a ragged batch."""
    return {"": split, **split.further} if isinstance(split, Split) else {"": split}


def is_even(split: Sequence[int]) -> bool:
    """Return whether all ranks' parts have equal sizes, along each axis."""
    return all(len(set(sizes)) == 1 for sizes in by_axis(split).values())


def rank_sizes(split: Sequence[int], rank: int) -> dict[str, int]:
    """Return the values of `B`, `b` and `offset` on a rank, and those of further axes."""
    found: dict[str, int] = {}
    for name, sizes in by_axis(split).items():
        known = axis(name)
        values = sum(sizes), sizes[rank], sum(sizes[:rank])
        found |= zip((known.total.name, known.local.name, known.offset.name), values, strict=True)
    return found


@lru_cache(maxsize=65536)
def local_size(size: Dim) -> Dim:
    """Return the local size of a sharded dim of the global `size`: `c * B` becomes `c * b`."""
    factor, found = batch_factor(size), axis_of(size)
    if factor is None or found is None:
        raise ValueError(f"{size} is no multiple of the batch")
    return product(factor, found.local)


class Meaning(NamedTuple):
    """What the values of an input say: the fields of `fxdp.Rows` that have a program of their own.

    `into`: they are row numbers of `axis`. `within`: they count the rows of each sample of `axis` from 0.
    `lengths`: how many rows of `axis` each row has.
    """

    kind: Literal["into", "within", "lengths"]
    axis: str
