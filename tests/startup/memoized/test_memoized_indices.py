"""An index that is not simplified moves by the same as one that is."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fxdp.startup.memoized.memoized_indices import index_arithmetic, memoized_indices
from tests.torch_compat.taken import taken

X, Y, N = sympy.symbols("x y n", integer=True, nonnegative=True)
INDICES = [
    sympy.Integer(3),
    X,
    64 * X + Y + 3,
    64 * X + 64 * Y,
    16 * Y,
    N * X + Y,
    X * Y,
    FloorDiv(X, 16) + 2 * Y,
    ModularIndexing(X, 1, 32) + 4 * Y,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("lanes", [None, 16])
@pytest.mark.parametrize("var", [X, Y], ids=str)
def test_strides_are_torch_s_own(index: sympy.Expr, lanes: int | None, var: sympy.Symbol) -> None:
    stride = index_arithmetic().stride_at_vec_range.__wrapped__  # without its memory of answers
    wanted = stride(index, var, lanes)
    with memoized_indices():
        assert stride(index, var, lanes) == wanted


@taken("memoized_indices")
def test_linear_indices_are_not_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = index_arithmetic()
    monkeypatch.setattr(module, "simplify_index_in_vec_range", lambda index, *_: asked.append(index))
    with memoized_indices():
        for index in INDICES:
            module.simplify_index_in_vec_range(index, X, 16)
    assert asked == INDICES[5:]
