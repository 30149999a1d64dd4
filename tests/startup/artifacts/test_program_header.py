"""The light header of a kept program: it calls the same kernels (see also tests/test_fresh_process.py)."""

from __future__ import annotations

import pytest

from fxdp.startup.artifacts import program_header
from fxdp.startup.artifacts.program_header import extern_kernels, with_light_header

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

_HEADER = """\
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
"""


def test_a_program_keeps_its_lines() -> None:
    source = f"{_HEADER}aten = torch.ops.aten\nextern_kernels.mm(a, b, out=c)\n"
    light = with_light_header(source)
    assert light == source.replace(
        "torch._inductor.codegen.memory_planning", "torch._inductor.utils"
    ).replace("torch._inductor.select_algorithm", program_header.__name__)


def test_a_program_that_names_ops_of_others_is_left_as_it_is() -> None:
    source = f"{_HEADER}torch.ops.mylib.twice(a)\n"
    assert with_light_header(source) == source


def test_kernels_are_inductor_s() -> None:
    from torch._inductor.codegen.memory_planning import _align
    from torch._inductor.select_algorithm import extern_kernels as inductors
    from torch._inductor.utils import _align as same

    assert same is _align
    for name in (*program_header._OWN_KERNELS, "bias_addmm"):
        assert getattr(extern_kernels, name) is getattr(inductors, name), name
