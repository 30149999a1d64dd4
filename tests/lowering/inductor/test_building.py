"""Kernels that are built together compute what they compute alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fxdp.lowering.inductor import building
from fxdp.lowering.inductor.building import kernels_built_together
from fxdp.torch_compat import cpp_building

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

SCALE = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const {type}* in_ptr0, {type}* out_ptr0, const int64_t ks0, const float ks1)
{{
    if (ks0 < 0) throw std::runtime_error("a negative size");
    for (int64_t i = 0; i < ks0; i++) out_ptr0[i] = {factor} * ks1 * in_ptr0[i];
}}
"""


def _kernels(*sources: str, types: tuple[str, ...] = ("float", "double")) -> list[Any]:
    """The functions of a program's kernels, asked for as Inductor's programs do."""
    with kernels_built_together():
        program = cpp_building().programs.AsyncCompile()
    scope = {
        f"kernel{n}": program.cpp_pybinding([f"const {t}*", f"{t}*", "const int64_t", "const float"], source)
        for n, (t, source) in enumerate(zip(types, sources, strict=True))
    }
    program.wait(scope)
    return list(scope.values())


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The kernels of each unit that is built."""
    seen: list[list[int]] = []

    def units(asked: Any) -> Any:
        found = original(asked)
        seen.extend(numbers for _, numbers in found)
        return found

    original = building.units
    monkeypatch.setattr(building, "units", units)
    return seen


def test_functions_of_one_library(libraries: list[list[int]]) -> None:
    """They take tensors, sizes and numbers, whatever the types of their neighbours; errors reach Python."""
    twice, thrice = _kernels(
        SCALE.format(type="float", factor=2), SCALE.format(type="double", factor=3), types=("float", "double")
    )
    assert libraries == [[0, 1]]
    x, y = torch.arange(4.0), torch.zeros(4)
    assert twice(x, y, 3, 0.5) is None
    assert y.tolist() == [0, 1, 2, 0]
    z = torch.zeros(4, dtype=torch.float64)
    thrice(x.double(), z, 4, 1.0)
    assert z.tolist() == [0, 3, 6, 9]
    with pytest.raises(RuntimeError, match="a negative size"):
        twice(x, y, -1, 1.0)
    with pytest.raises(TypeError, match="takes 4 arguments, got 2"):
        twice(x, y)
    with pytest.raises(TypeError, match="int"):
        twice(x, y, "three", 1.0)


def test_a_refused_unit_is_built_one_by_one(
    libraries: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that holds together only outside of a namespace costs time, not the program."""
    special = "template <> struct std::hash<struct Own> {};\n" + SCALE.format(type="float", factor=5)
    with caplog.at_level(logging.WARNING, logger="fxdp"):
        plain, odd = _kernels(SCALE.format(type="float", factor=2), special, types=("float", "float"))
    assert libraries == [[0, 1]]
    assert "2 kernels are built one by one" in caplog.text
    x, y = torch.ones(2), torch.zeros(2)
    plain(x, y, 2, 1.0)
    assert y.tolist() == [2, 2]
    odd(x, y, 2, 1.0)
    assert y.tolist() == [5, 5]


def test_a_program_is_the_same_built_together_and_alone(
    libraries: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's own program for a function of several kernels, bit for bit."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.nn.functional.layer_norm(x @ w, (16,)).tanh()
        return x.softmax(-1)

    x, w = torch.randn(5, 16), torch.randn(16, 16)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "alone"))
    alone = torch.compile(function)(x, w)
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "together"))
    with kernels_built_together():
        together = torch.compile(function)(x, w)
    torch._dynamo.reset()
    assert len(libraries) == 1
    assert len(libraries[0]) >= 2
    assert torch.equal(together, alone)
