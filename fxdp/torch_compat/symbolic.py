"""Of torch's sizes that stand for any number, and of the fake tensors that have them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource, LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols
from torch.utils._sympy.functions import FloatPow, IntTrueDiv, OpaqueUnaryFn_log2, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "FakeTensorMode",
    "ShapeEnv",
    "as_float",
    "binary_logarithm",
    "fixed_sizes",
    "float_power",
    "interpret_sympy",
    "known_of_symbols",
    "sizes_behind",
    "static_mode",
    "symbolic_sizes",
    "true_quotient",
]


_LARGEST_SIZE = 2**48
"""What memory can address."""


def static_mode() -> FakeTensorMode:
    """A fake mode for fixed sizes; Inductor's cache wants it to have a shape environment all the same."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)


def symbolic_sizes(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """A fake mode and one backed, unconstrained SymInt per name."""
    # without `duck_shape` sizes whose hints happen to be equal stay two; without 0/1 a batch of 1 stays open
    env = _HalfGuards(duck_shape=False, specialize_zero_one=False)
    sizes = {}
    for name, value in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(
            value, source, DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
        )
        sizes[name] = env.create_symintnode(symbol, hint=value, source=source)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), sizes


class _HalfGuards(ShapeEnv):
    """Sizes of a program whose halves are compiled, and cached, one by one.

    Inductor stores a half with its guards and evaluates them on that half's own sizes. A backward may take
    `25*B` without `B`; a guard that says so could only fail there, by a NameError.
    """

    def _constrain_range_for_size(self, a: Any, min: int | None = None, max: int | None = None) -> None:
        """A size that depends on data (`x[mask]`) has bounds that torch may divide, and round, as floats.

        With 2**63 - 2, torch's own, `n == 16 * b` gives `16 * b <= 2**63`, which it then refuses.
        """
        largest = _LARGEST_SIZE if max is None else builtins.min(max, _LARGEST_SIZE)
        super()._constrain_range_for_size(a, min, largest)

    def produce_guards_expression(
        self, placeholders: Sequence[Any], *, guards: Any = None, ignore_static: bool = True
    ) -> str | None:
        """Guards on the plain sizes among `placeholders`; what is computed from sizes needs none."""
        named = [(p, LocalSource(f"t{i}")) for i, p in enumerate(placeholders) if p.node.expr.is_Symbol]
        sizes = {p.node.expr for p, _ in named}
        own = [g for g in (self.guards if guards is None else guards) if g.expr.free_symbols <= sizes]
        # guards on a size that this half does not take were true when the program was traced for these
        # sizes, and the other half evaluates them
        plain, sources = [p for p, _ in named], [source for _, source in named]
        found = self.produce_guards(plain, sources, guards=own, ignore_static=ignore_static)
        return " and ".join(found) or None

    def evaluate_guards_expression(self, code: str, args: Sequence[object]) -> bool:
        """Whether a cached half fits; one stored by plain torch may speak of sizes that it does not take."""
        try:
            return bool(super().evaluate_guards_expression(code, args))
        except NameError:
            return False


def fixed_sizes(sizes: Mapping[str, Any]) -> list[str]:
    """The names of the sizes that tracing or compiling took for constants or for functions of others."""
    symbolic = {name: size.node for name, size in sizes.items() if isinstance(size, torch.SymInt)}
    return [name for name, node in symbolic.items() if node.shape_env.replace(node.expr) != node.expr]


def sizes_behind(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Those inputs that are sizes of which sizes among the nodes are made, whether or not an op reads them.

    nodes `%mul: 3*s0`, `%x: [s1, 4]`, inputs `%b: s0`, `%c: s2`   ->   `%b`: code for the nodes must know s0
    """
    values = [n.meta.get("val") for n in nodes]
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat)
    mentioned = {symbol for value in values if isinstance(value, kinds) for symbol in free_symbols(value)}
    sizes = [(n, n.meta.get("val")) for n in inputs]
    return [n for n, size in sizes if isinstance(size, torch.SymInt) and size.node.expr in mentioned]


def known_of_symbols(env: ShapeEnv) -> str:
    """All that a trace has learned of its symbols, each guard with the line that asked."""
    guards = [f"{guard.expr} {guard.sloc}" for guard in env.guards]
    tables = ("replacements", "var_to_range", "var_to_val", "backed_var_to_val", "deferred_runtime_asserts")
    known = [f"{name}: {getattr(env, name, None)}" for name in tables]
    modes = ("specialize_zero_one", "duck_shape", "assume_static_by_default")
    return "\n".join([*guards, *known, *(f"{name}: {getattr(env, name, None)}" for name in modes)])


def true_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """The float `a / b` of two integers, as Python divides them."""
    return IntTrueDiv(a, b)


def float_power(base: sympy.Expr, exponent: float) -> sympy.Expr:
    """The float `base ** exponent` of an integer or a float."""
    return FloatPow(base, sympy.Float(exponent))


def binary_logarithm(number: sympy.Expr) -> sympy.Expr:
    """The float `log2(number)` of a float."""
    return OpaqueUnaryFn_log2(number)


def as_float(number: sympy.Expr) -> sympy.Expr:
    """An integer as a float."""
    return ToFloat(number)


def interpret_sympy(expr: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Evaluate an expression by Python operators on ints, SymInts or fx proxies.

    A quotient stands for an exact integer division.
    """
    # sympy writes an integer quotient as a fraction, which Python would compute as a float
    numerator, denominator = expr.as_numer_denom()
    if denominator != 1:
        return interpret_sympy(numerator, values) // interpret_sympy(denominator, values)
    return sympy_interp(_Arithmetic, dict(values), expr)


class _Arithmetic(PythonReferenceAnalysis):
    """What torch's own cannot do with fx proxies."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, dtype: Any) -> Any:
        return _call(round, x)


def _call(function: Callable[..., Any], x: Any) -> Any:
    """Python's own rounding functions ask a number's class, which for an fx proxy says nothing."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x,), {})
    return function(x)
