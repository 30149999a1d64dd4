"""Both lowerings on entire models of one rank: tiny ones, for Inductor takes its time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.compiler.emit import FULL, WantedPart, lower_part
from fxdp.lowering.inductor import compile as inductor
from fxdp.lowering.inductor.start import Start
from fxdp.module.compiled import CompiledModule
from fxdp.module.dry_run import _local_program
from fxdp.options import Options
from tests.fallbacks import no_fallback

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class Everything(nn.Module):
    """BatchNorm's buffers, a buffer that the backward reads, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x)) * self.frozen
        z = torch.tanh(y) * self.scale.clone()
        self.scale.mul_(0.5)
        return z.square().sum(), z.detach()


def _step(model: Any, x: Tensor) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    loss, shown = model(x)
    (loss * 3).backward()
    found = {"loss": loss.detach(), "shown": shown, "x": x.grad}
    found |= {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    return found | {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_steps_are_eager_s_own(backend: str) -> None:
    """The first sizes get a program, the second make it generic, further ones compile nothing."""
    torch.manual_seed(0)
    model = Everything().double()
    twin = copy.deepcopy(model)
    compiled: CompiledModule = fxdp.compile(model, backend=backend)
    for step, batch in enumerate((4, 7, 2, 4)):
        x = torch.randn(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        with no_fallback():
            torch.testing.assert_close(_step(compiled, x), _step(twin, x))
    assert compiled._programs.compiled == 2
    assert model.unused.grad is None
    assert model.frozen.grad is None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inference(backend: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).eval()
    compiled = fxdp.compile(model, backend=backend)
    x = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert not compiled(x).requires_grad


class _Images(nn.Module):
    """Convolutions whose layout Inductor chooses: strided, grouped, transposed, over one dim, as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, stride=2, bias=False), nn.Conv2d(8, 8, 3, groups=4)
        self.norm, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2)
        self.line = nn.Conv1d(4, 3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.second(self.first(x))).relu()
        z = self.line(self.up(y).flatten(2)).tanh()
        return z.square().mean(), y.detach()


def test_convolutions() -> None:
    torch.manual_seed(0)
    model = _Images().double()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(model, backend="inductor")
    x = torch.randn(3, 2, 11, 11, dtype=torch.float64)
    for image in (x, x.transpose(2, 3), x.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(_step(compiled, image), _step(twin, image))


def test_padding_keeps_the_batch_open() -> None:
    """`F.pad` once made a constant of the batch: its C++ kernel reads sizes as ints."""
    model = nn.Linear(6, 6).double()
    compiled = fxdp.compile(_Padded(model))
    for size in (4, 5, 7):
        x = torch.randn(size, 6, dtype=torch.float64)
        assert torch.allclose(compiled(x), _Padded(model)(x), rtol=1e-12)
    assert compiled._programs.compiled == 2


class _Padded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.inner(x), (0, 1))[:, 1:].pow(2).sum()


class _Normed(nn.Module):
    """Its counts are 4 times the batch, of which nothing else in the backward depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().sum()


def test_a_backward_takes_all_sizes_of_which_its_numbers_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes `4 * B` out, wherever it was computed."""
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda *_, **__: (None, []))
    model = _Normed().double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    local, _ = _local_program(model, (x,), {}, {"dp": 2}, Options())
    sizes = {"B": 8, "b": 5, "offset": 0, "b_max": 5}
    wanted = WantedPart(FULL, local.partition.parts[0], sizes, (5, 3), 0)
    lowered = lower_part(wanted, local, model, generic=True, compiled=True, start=Start())
    graph = lowered.pair.backward_graph
    assert graph is not None
    given = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    numbers = {v.node.expr for v in given if isinstance(v, torch.SymInt)}
    made_of = {symbol for number in numbers for symbol in number.free_symbols}
    assert made_of
    assert made_of <= numbers
