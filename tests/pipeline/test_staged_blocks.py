"""Stages that run blocks of the global batch: no cut changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.types.placements import Replicate
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.partition import Total
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.write.step_values import StepValues
from tests.captures import KNOWN, captured_once
from tests.pipeline.cut.cuts import program
from tests.rank_pool import RankPool

D, T, WORDS = 16, 9, 23


class Layer(nn.Module):
    """Fused attention, whose result is strided, and a feed-forward layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(2, (2, D // 2)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(D, 2)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(mixed.flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class GPT(nn.Module):
    """A tied head, whose gradient has terms of the first and the last stage, and a mean by weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, D), nn.Sequential(Layer(dropout), Layer(dropout))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.layers(self.words(ids))))
        targets = (ids * 3 + 1).remainder(WORDS).flatten()
        each = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()


def _trained(stages: int, parts: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    """Every number of two steps of this process, or of this rank of a process group."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of which the order of sums within a block depends
    torch.manual_seed(0)
    ranks = stages * len(parts)
    mesh = init_device_mesh("cpu", (stages, len(parts)), mesh_dim_names=("pp", "dp")) if ranks > 1 else None
    place = 0 if mesh is None else mesh.get_local_rank("dp")
    found, data = dict[str, Tensor](), torch.Generator().manual_seed(1)
    with captured_once(KNOWN.setdefault(__name__, {})):
        compiled = fxdp.compile(GPT(0.1), mesh, numerics={"block": 2}, backend="eager", **options)
        optimizer = torch.optim.AdamW(compiled.parameters(), 0.01)
        own = slice(sum(parts[:place]), sum(parts[: place + 1]))
        for step in range(2):
            ids = torch.randint(0, WORDS, (7, T), generator=data)
            loss = compiled(ids[own], torch.rand(7, T, generator=data)[own])
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            found[f"norm {step}"] = nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found |= compiled.state_dict()
    torch.set_num_threads(before)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    return {name: value.detach().clone() for name, value in full.items()}


def test_no_cut_changes_a_bit(ranks: RankPool) -> None:
    alone = _trained(1, (7,), {})
    behind_attention = {"pipeline": {"schedule": "zero-bubble", "stages": ["layers.1.out"]}}
    for stages, parts, options in (
        (2, (7,), behind_attention),
        (3, (7,), {}),
        (2, (2, 5), {"strategy": "shard"}),
    ):
        for found in ranks.run(stages * len(parts), _trained, stages, parts, options):
            assert [n for n in alone if not torch.equal(found[n], alone[n])] == [], (stages, parts, options)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.shift = nn.Parameter(torch.randn(33, 5)), nn.Parameter(torch.zeros(33, 1))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x + self.shift).sin().transpose(1, 2) @ self.mix
        return mixed.square().mean() + x.sum(-1).square().mean()


class Strided(nn.Module):
    """A value that is strided where stages are cut, and sums over its gradient, which is strided, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift, self.second = nn.Linear(6, 33), nn.Parameter(torch.zeros(33, 1)), Second()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).transpose(1, 2).cos() + self.shift)


def _loss_and_gradients(
    kind: Callable[[], nn.Module], shape: tuple[int, ...], stages: int, options: dict[str, Any]
) -> list[Tensor]:
    """The loss of a model over a random batch, and this rank's gradients."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (stages, 1), mesh_dim_names=("pp", "dp")) if stages > 1 else None
    model = kind()
    loss = fxdp.compile(model, mesh, numerics={"block": 2}, **options)(torch.randn(shape))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _strided(stages: int) -> list[Tensor]:
    options = {"backend": "eager", "pipeline": {"stages": ["second"] if stages > 1 else None}}
    return _loss_and_gradients(Strided, (4, 29, 6), stages, options)


def test_strides_travel_between_stages(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, _strided, 1)
    for found in ranks.run(2, _strided, 2):
        assert len(found) == 6
        assert all(map(torch.equal, found, alone))


def _planned(model: nn.Module, **options: Any) -> fxdp.Plan:
    batch = torch.zeros(4, T, dtype=torch.long), torch.ones(4, T)
    return fxdp.plan(model, batch, mesh={"pp": 2}, numerics={"block": 2}, **{"backend": "eager", **options})


class Fused(nn.Module):
    """Functions between linear layers, of which a cut anywhere else would fuse others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.dropout(self.first(x)), approximate="tanh").sigmoid()
        return F.silu(self.last(hidden * hidden)).square().mean()


_FUSED: dict[str, Any] = {"numerics": {"block": 2}, "pipeline": {"stages": 2}}


def test_stages_that_inductor_compiles_are_those_of_any_mesh() -> None:
    """What is fused depends on the parts and on whether their backwards are divided."""
    made = [program(Fused(), torch.ones(4, 6), ranks=ranks, dp=2, **_FUSED) for ranks in (1, 2)]
    parts = [[graph_text(part.gm, {}, exact=True) for part in one.partition.parts] for one in made]
    assert len(parts[0]) == 2
    assert parts[0] == parts[1]
    kinds = {action.kind for one in made for row in one.run_schedule(4).ranks for action in row}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def _fused(stages: int) -> list[Tensor]:
    return _loss_and_gradients(Fused, (4, 6), stages, {"pipeline": {"stages": 2}})


def test_stages_that_inductor_compiles_have_the_bits_of_one_device(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, _fused, 1)
    for found in ranks.run(2, _fused, 2):
        assert len(found) == 5
        assert all(map(torch.equal, found, alone))


def test_cuts_that_would_change_bits_are_refused() -> None:
    with pytest.raises(fxdp.MeshError, match=r"fused within a stage, .*fxdp.Pipeline\(stages=\.\.\."):
        _planned(GPT(), backend="inductor")
    with pytest.raises(fxdp.ScheduleError, match=r"schedule='zero-bubble', which .*expected '1f1b'"):
        _planned(GPT(), backend="inductor", pipeline={"stages": 2, "schedule": "zero-bubble"})


def test_rows_that_data_chooses_do_not_travel_between_stages() -> None:
    chosen = TensorType(torch.float32, (sympy.Symbol("u0"), sympy.Integer(3)))
    values = StepValues(cast(Any, None), cast(Any, SimpleNamespace(everything=())), [0, 1])
    with pytest.raises(fxdp.StageError, match=r"how many rows there are at .* follows from the data"):
        values.type(Total("chosen", 0, False, chosen, Replicate()))
