"""Of Inductor's arithmetic on indices: a linear one is simple as it is.

To see how a vector of elements lies in memory, Inductor lets sympy simplify each index of each kernel: a
twentieth of a cold start, a quarter of which imports the units of physics. An index like `64*x0 + x1 + 3` has
no quotients or remainders, which are what is looked for, and moves by the same whichever way it is written.
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
    """Inside, only indices that are not linear are simplified."""
    module = index_arithmetic()

    def made(plain: Callable[..., sympy.Expr]) -> Callable[..., sympy.Expr]:
        def simplified(index: sympy.Expr, var: sympy.Expr, vec_length: int) -> sympy.Expr:
            return index if is_linear(index) else plain(index, var, vec_length)

        return simplified

    with patched((Patch(module, _NAME, made),)):
        yield


def index_arithmetic() -> ModuleType:
    """Torch's module of such functions."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    return sizevars if hasattr(sizevars, _NAME) else cpp  # before torch 2.13


def is_linear(index: sympy.Expr) -> bool:
    """Whether an index is a sum of symbols and integers, and of products of one of each."""
    return all(
        term.is_Symbol
        or term.is_Integer
        or (term.is_Mul and len(term.args) == 2 and term.args[0].is_Integer and term.args[1].is_Symbol)
        for term in sympy.Add.make_args(index)
    )
