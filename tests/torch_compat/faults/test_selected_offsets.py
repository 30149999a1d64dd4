"""The offset of a selected row, as Inductor writes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
from torch.utils._sympy.functions import Min

from fxdp.torch_compat.faults.selected_offsets import selected_offsets

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


@pytest.mark.parametrize(("index", "row"), [(2, 2), (-1, 3)])
def test_sizes_are_python_in_parentheses(index: int, row: int) -> None:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen, pexpr

    few, many, number = sympy.symbols("s0 s1 u7", integer=True)
    node = SimpleNamespace(
        unbacked_offset_symbol="u9", index=number, size=Min(few, many), base_offset=few,
        base_dim_stride=few + many,
    )  # fmt: skip
    lines: list[str] = []
    writer = SimpleNamespace(writeline=lines.append, codegen_sizevar=pexpr, unbacked_symbol_decls=set())
    with selected_offsets():
        PythonWrapperCodegen.codegen_dynamic_select_index(writer, node, clamp=True)
    known = {"s0": 4, "s1": 7, "u7": index}
    exec(lines[0], known)
    assert known["u9"] == 4 + 11 * row
