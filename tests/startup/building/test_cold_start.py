"""Kernels that are built together compute what they compute alone, halves that ranks share are the same.

With the cold start left out a program is the same, too.
"""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fxdp
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.lowering.inductor.compile import _Compiler
from fxdp.lowering.inductor.start import Start, start_of
from fxdp.startup.building import cold_start
from fxdp.startup.building.cold_start import ColdStart, kernels_built_together
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
    """The functions of the kernels of as many programs, asked for as Inductor's programs do."""
    scopes = []
    with kernels_built_together():
        for t, source in zip(types, sources, strict=True):
            program = cpp_building().programs.AsyncCompile()
            arguments = [f"const {t}*", f"{t}*", "const int64_t", "const float"]
            scopes.append({"kernel": program.cpp_pybinding(arguments, source)})
            with kernels_built_together():
                program.wait(scopes[-1])
    return [scope["kernel"] for scope in scopes]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The kernels of each unit that is built."""
    seen: list[list[int]] = []

    def units(asked: Any) -> Any:
        found = original(asked)
        seen.extend(numbers for _, numbers in found)
        return found

    original = cold_start.units
    monkeypatch.setattr(cold_start, "units", units)
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


def test_inductor_s_class_is_back_whatever_happens() -> None:
    own = cpp_building().programs.AsyncCompile
    seen: list[Any] = []

    def fails() -> None:
        with kernels_built_together():
            seen.append(cpp_building().programs.AsyncCompile)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen[0] is not own
    assert cpp_building().programs.AsyncCompile is own


def test_halves_by_turns() -> None:
    """A rank waits between its halves, and once only."""
    done: list[str] = []

    def steps(*, independent: bool) -> list[str]:
        done.clear()
        start = ColdStart(lambda: done.append("wait"), backward_first=True)
        pair = (lambda: done.append("forward"), lambda: done.append("backward"))
        start.run(*pair, independent=independent)
        start.finish()
        return done

    assert steps(independent=True) == ["backward", "wait", "forward"]
    assert steps(independent=False) == ["forward", "wait", "backward"]


@pytest.mark.parametrize("kind", [Start, ColdStart])
def test_every_rank_waits_exactly_once(kind: type[Start]) -> None:
    """Also where a half fails, and with the cold start left out on one rank alone."""
    done: list[str] = []
    start = kind(lambda: done.append("wait"))
    with pytest.raises(ZeroDivisionError):
        start.run(lambda: None, lambda: done.append(str(1 // 0)), independent=True)
    start.finish()
    start.finish()
    assert done == ["wait"]


def test_the_settings_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [getattr(start_of(rank), "backward_first", None) for rank in range(3)] == [False, True, False]
    monkeypatch.setenv("FXDP_COLD_START", "0")
    plain = start_of(1)
    assert type(plain) is Start
    assert isinstance(plain.building(), nullcontext)


def test_left_out_a_program_is_the_same(libraries: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs node by node, its numbers bit by bit; several kernels are one library, or each its own."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 6)
    found = {}
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)  # each compiles anew
    for setting in ("1", "0"):
        monkeypatch.setenv("FXDP_COLD_START", setting)
        with monkeypatch.context() as patched:
            found[setting] = _trained(copy.deepcopy(model), x, patched), len(libraries)
    (with_it, units), (without, still) = found["1"], found["0"]
    assert units == 2, "one for each half"
    assert max(map(len, libraries)) >= 2
    assert still == units, "with the cold start left out nothing is built together"
    assert with_it[0] == without[0]
    assert all(map(torch.equal, with_it[1], without[1]))


def _trained(
    model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[torch.Tensor]]:
    """The graphs of both halves as text; the loss, the gradients and the buffers after a step."""
    seen: list[ForwardBackward] = []

    def training(self: _Compiler, *args: Any) -> ForwardBackward:
        seen.append(original(self, *args))
        return seen[-1]

    original = _Compiler.training
    monkeypatch.setattr(_Compiler, "training", training)
    loss = fxdp.compile(model, backend="inductor")(x).square().sum()
    loss.backward()
    (pair,) = seen
    assert pair.backward_graph is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    texts = [str(pair.forward_graph.graph), str(pair.backward_graph.graph)]
    return texts, [loss.detach(), *gradients, *model.buffers()]


def test_kernels_are_built_under_the_settings_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a warm start, which builds none, would try vector instructions that the cold start knew."""
    import torch._inductor.config as inductor_config

    found = []
    monkeypatch.setattr(cold_start._Kernels, "build", lambda _: found.append(inductor_config.cpp.vec_isa_ok))
    monkeypatch.setattr("fxdp.startup.building.vector_instructions._gcc", lambda: 12)
    with cold_start.kernels_built_together():
        pass
    assert found == [True]
    assert inductor_config.cpp.vec_isa_ok is None
