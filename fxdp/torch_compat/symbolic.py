"""Symbolic sizes of torch, the fake tensors with symbolic sizes, and arithmetic on sympy expressions."""

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
    "FakeTensorMode", "ShapeEnv", "as_float", "binary_logarithm", "fixed_sizes", "float_power",
    "interpret_sympy", "known_of_symbols", "sizes_behind", "static_mode", "symbolic_sizes", "true_quotient",
]  # fmt: skip


_LARGEST_SIZE = 2**48
"""The largest size that memory can address."""


def static_mode() -> FakeTensorMode:
    """Return a fake mode for fixed sizes, with a shape environment because Inductor's cache requires one."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)


def symbolic_sizes(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """Return a fake mode and one backed, unconstrained SymInt per name."""
    # without `duck_shape`, sizes with equal hints stay separate; without 0/1, a batch of 1 stays symbolic
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
    """Shape environment of a program in which forward and backward are compiled and cached separately.

    Inductor stores each of the two with guards, and evaluates the guards on the sizes among the inputs. A
    backward may take `25*B` without `B`; a guard on `B` could only fail there with a NameError.
    """

    def _constrain_range_for_size(self, a: Any, min: int | None = None, max: int | None = None) -> None:
        """Bound a data-dependent size (as of `x[mask]`) by a number that torch can convert to float exactly.

        With torch's own bound, 2**63 - 2, the guard `n == 16 * b` gives `16 * b <= 2**63`, which torch then
        refuses.
        """
        largest = _LARGEST_SIZE if max is None else builtins.min(max, _LARGEST_SIZE)
        super()._constrain_range_for_size(a, min, largest)

    def produce_guards_expression(
        self, placeholders: Sequence[Any], *, guards: Any = None, ignore_static: bool = True
    ) -> str | None:
        """Return guards on the plain sizes among `placeholders`; computed sizes need no guard."""
        named = [(p, LocalSource(f"t{i}")) for i, p in enumerate(placeholders) if p.node.expr.is_Symbol]
        sizes = {p.node.expr for p, _ in named}
        own = [g for g in (self.guards if guards is None else guards) if g.expr.free_symbols <= sizes]
        # guards on a size that is not among these inputs were true when the program was traced for these
        # sizes, and the other part of the pair evaluates them
        plain, sources = [p for p, _ in named], [source for _, source in named]
        found = self.produce_guards(plain, sources, guards=own, ignore_static=ignore_static)
        return " and ".join(found) or None

    def evaluate_guards_expression(self, code: str, args: Sequence[object]) -> bool:
        """Return whether cached code fits; False if a guard stored by plain torch names an unknown size."""
        try:
            return bool(super().evaluate_guards_expression(code, args))
        except NameError:
            return False


def fixed_sizes(sizes: Mapping[str, Any]) -> list[str]:
    """Return the names of the sizes that tracing or compiling fixed, or made a function of another size."""
    symbolic = {name: size.node for name, size in sizes.items() if isinstance(size, torch.SymInt)}
    return [name for name, node in symbolic.items() if node.shape_env.replace(node.expr) != node.expr]


def sizes_behind(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the inputs that are sizes and occur in a value of the nodes, whether or not an op reads them.

    nodes `%mul: 3*s0`, `%x: [s1, 4]`, inputs `%b: s0`, `%c: s2`   ->   `%b`: code for the nodes must know s0
    """
    values = [n.meta.get("val") for n in nodes]
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat)
    mentioned = {symbol for value in values if isinstance(value, kinds) for symbol in free_symbols(value)}
    sizes = [(n, n.meta.get("val")) for n in inputs]
    return [n for n, size in sizes if isinstance(size, torch.SymInt) and size.node.expr in mentioned]


def known_of_symbols(env: ShapeEnv) -> str:
    """Return as text all that a trace knows of symbols, each guard with the source line of the guard."""
    guards = [f"{guard.expr} {guard.sloc}" for guard in env.guards]
    tables = ("replacements", "var_to_range", "var_to_val", "backed_var_to_val", "deferred_runtime_asserts")
    known = [f"{name}: {getattr(env, name, None)}" for name in tables]
    modes = ("specialize_zero_one", "duck_shape", "assume_static_by_default")
    return "\n".join([*guards, *known, *(f"{name}: {getattr(env, name, None)}" for name in modes)])


def true_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return the float `a / b` of two integers, divided as in Python."""
    return IntTrueDiv(a, b)


def float_power(base: sympy.Expr, exponent: float) -> sympy.Expr:
    """Return the float `base ** exponent` of an integer or a float."""
    return FloatPow(base, sympy.Float(exponent))


def binary_logarithm(number: sympy.Expr) -> sympy.Expr:
    """Return the float `log2(number)` of a float."""
    return OpaqueUnaryFn_log2(number)


def as_float(number: sympy.Expr) -> sympy.Expr:
    """Return an integer as a float."""
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
    """Operations that torch's own analysis cannot apply to fx proxies."""

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
    """Apply a rounding function to a number or to an fx proxy, which has no `__round__`, `__floor__` etc."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x,), {})
    return function(x)
