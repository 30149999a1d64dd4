"""A kept program imports none of Inductor's code generators, and calls the same kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxdp.torch_compat import program_header
from fxdp.torch_compat.program_header import extern_kernels, with_light_header

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


_WARM = """
import sys, torch, fxdp
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 3))
x = torch.ones(2, 3)
compiled = fxdp.compile(model)
compiled(x).sum().backward()
print(any(name in sys.modules for name in ("torch._inductor.select_algorithm", "torch.utils.cpp_extension")))
with torch.autograd.profiler.profile() as seen:
    compiled(x)
print(any("CompiledFxGraph" in event.name for event in seen.function_events))
"""


def test_a_warm_start_imports_no_code_generators_and_is_profiled(tmp_path: Path) -> None:
    environment = {
        "FXDP_CACHE": "1", "FXDP_CACHE_DIR": str(tmp_path / "kept"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }  # fmt: skip
    said = [_run(environment) for _ in range(2)]
    assert said == [["True", "True"], ["False", "True"]]


def _run(environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", _WARM]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()
