"""Skip the simplification of linear index expressions in Inductor.

To find how a vector of elements is laid out in memory, Inductor lets sympy simplify each index of each
kernel: a twentieth of a cold start, a quarter of which is the import of the units of physics. An index like
`64*x0 + x1 + 3` has no quotient or remainder to simplify, and has the same stride in every form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import sympy

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["memoized_indices"]

_NAME = "simplify_index_in_vec_range"


@shortcut("memoized_indices")
def memoized_indices() -> Iterator[None]:
    """Simplify only indices that are not linear inside the block."""
    module = index_arithmetic()

    def made(plain: Callable[..., sympy.Expr]) -> Callable[..., sympy.Expr]:
        def simplified(index: sympy.Expr, var: sympy.Expr, vec_length: int) -> sympy.Expr:
            return index if _is_linear(index) else plain(index, var, vec_length)

        return simplified

    with patched((Patch(module, _NAME, made),)):
        yield


def index_arithmetic() -> ModuleType:
    """Return torch's module that defines the simplification."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    return sizevars if hasattr(sizevars, _NAME) else cpp  # before torch 2.13


def _is_linear(index: sympy.Expr) -> bool:
    """Return whether an index is a sum of symbols, integers, and products of one symbol and one integer."""
    return all(
        term.is_Symbol
        or term.is_Integer
        or (term.is_Mul and len(term.args) == 2 and term.args[0].is_Integer and term.args[1].is_Symbol)
        for term in sympy.Add.make_args(index)
    )
