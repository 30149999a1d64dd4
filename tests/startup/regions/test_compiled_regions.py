"""A half in segments computes what the half computes; layers that are alike are compiled once."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.ir.graph.metadata import Location, copy_meta
from fxdp.lowering.inductor.compile import lower_inductor
from fxdp.startup.regions import compile_by_region as module
from fxdp.startup.regions.compiled_regions import CompiledRegion, NoRegionsError, regions
from fxdp.startup.regions.region_code import RegionCode, plan_regions
from fxdp.torch_compat import boxed_code, graph_module
from tests.fallbacks import no_fallback
from tests.lowering.inductor.transformers_like import Decoder, sentences
from tests.rank_pool import RankPool

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class _Layer(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.rate = nn.Linear(2 * width, width), rate

    def forward(self, x: Tensor) -> Tensor:
        made = self.down(F.gelu(self.up(self.norm(x))))
        return x + F.dropout(made, self.rate, self.training)


class _Deep(nn.Module):
    """Layers between two that are not like them."""

    def __init__(self, layers: int = 6, width: int = 8, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(_Layer(width, rate) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.last(x), y)


def _batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(3.0 * size).double().reshape(size, 3).sin(), torch.arange(size) % 2


def _letters(found: list[CompiledRegion]) -> str:
    """The segments' kinds, as letters."""
    names: dict[str, str] = {}
    return "".join(names.setdefault(one.kind, chr(ord("a") + len(names))) for one in found)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("compiled anew")


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of segments of each half that is compiled."""
    found: list[str] = []
    monkeypatch.setattr(module, "regions", _noting(found))
    return found


def _noting(found: list[str]) -> Callable[..., list[CompiledRegion]]:
    def noted(gm: fx.GraphModule, *how: Any) -> list[CompiledRegion]:
        made = regions(gm, *how)
        found.append(_letters(made))
        return made

    return noted


def _steps(model: nn.Module, sizes: tuple[int, ...]) -> list[Tensor]:
    """Losses and gradients after some steps."""
    compiled, found = fxdp.compile(copy.deepcopy(model)), []
    for size in sizes:
        torch.manual_seed(size)
        loss = compiled(*_batch(size))
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in compiled.parameters() if p.grad is not None)]


def test_layers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[str]) -> None:
    """The same numbers as of a program that is compiled full, draws included; the second start too."""
    model = _Deep(rate=0.4).double()
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    by_layer = _steps(model, (4,))
    assert len(cuts) == 2
    assert all(len(cut) - len(set(cut)) >= 2 for cut in cuts), cuts
    with monkeypatch.context() as patch:
        patch.setattr(lower_inductor, "own", _never)
        assert all(map(torch.equal, _steps(model, (4,)), by_layer))
    monkeypatch.setenv("FXDP_LAYERS", "0")
    for ours, theirs in zip(by_layer, _steps(model, (4,)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def _chain(times: int, *, each: int = 9) -> fx.GraphModule:
    """Modules of `each` sines in a list, a constant for all, and a split whose halves leave the layer."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    example = torch.ones(4)
    x.meta["val"] = example

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        copy_meta(node, node, location=Location(module=module))
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        return node

    aten, module = torch.ops.aten, ""
    constant = call(aten.full.default, [4], 0.5)
    kept = []
    for layer in range(times):
        module = f"layers.{layer}"
        for _ in range(each):
            x = call(aten.mul.Tensor, call(aten.sin.default, x), constant)
        pair = graph.call_function(aten.split.Tensor, (x, 2))
        copy_meta(pair, pair, location=Location(module=module))
        pair.meta["val"] = example.split(2)
        one, two = (call(_part, pair, i) for i in range(2))
        kept.append(one)
        x = call(aten.cat.default, [two, one])
    graph.output((x, None, *kept, 3, 1, True, 1.0))
    return graph_module(nn.Module(), graph)


def _part(values: Any, number: int) -> Any:
    return values[number]


def _with_getitem(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=_part):
        node.target = operator.getitem
    return gm


def test_in_segments_it_computes_the_same() -> None:
    """Constants are made where they are read, a tuple never leaves its segment, results may be numbers."""
    gm = _with_getitem(_chain(5))
    found = regions(gm, ())
    assert _letters(found) == "aaaab"
    assert all(isinstance(n.meta["val"], Tensor) for one in found for n in one.gives)
    code = plan_regions(gm, found).compile(lambda one: boxed_code(graph_module(gm, one.graph)))
    assert isinstance(code, RegionCode)
    assert len(code.codes) < len(code.calls)
    inputs = [torch.arange(4.0)]
    expected = gm(*inputs)
    for ours, theirs in zip(code(inputs), expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else repr(ours) == repr(theirs)
    assert inputs == []


def test_few_layers_or_small_ones_stay_whole() -> None:
    """Two of them, or a few ops each: a call is not worth it. Nor for a long run of views."""
    assert regions(_with_getitem(_chain(2)), ()) == []
    graph = fx.Graph()
    weights = [graph.placeholder(f"w{i}") for i in range(60)]
    for weight in weights:
        weight.meta["val"] = torch.ones(2, 3)
    views = [graph.call_function(torch.ops.aten.permute.default, (w, [1, 0])) for w in weights]
    for i, view in enumerate(views):
        copy_meta(view, view, location=Location(module=f"layers.{i // 20}"))
        view.meta["val"] = torch.ones(2, 3).t()
    graph.output(tuple(views))
    assert regions(graph_module(nn.Module(), graph), ()) == []


def test_a_half_that_reads_graphs_stays_whole() -> None:
    """A loop's body is no value that could be handed on."""
    gm = _with_getitem(_chain(4))
    gm.body = graph_module(nn.Module(), fx.Graph())
    with gm.graph.inserting_before(next(iter(gm.graph.nodes)).next):
        gm.graph.get_attr("body")
    with pytest.raises(NoRegionsError):
        regions(gm, ())


def _on_ranks(strategy: str, bucket_mb: float | None, sizes: tuple[int, ...]) -> float:
    """How far steps of two ranks are from one device's; a rank that runs ops as they are fails."""
    torch.manual_seed(0)
    shards = strategy == "shard"
    model, batch = (Decoder(), sentences) if shards else (_Deep(), _batch)
    model = model.double()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard" if shards else "dp",))
    compiled, apart = (
        fxdp.compile(model, mesh, strategy=strategy, communication={"bucket_cap_mb": bucket_mb}),
        [0.0],
    )
    for size in sizes:
        x, y = batch(size)
        part = slice(0, 4) if dist.get_rank() == 0 else slice(4, size)  # of 8: one code for both ranks
        cuts: list[str] = []
        with no_fallback(), mock.patch.object(module, "regions", _noting(cuts)):
            loss = compiled(x[part], y[part])
        assert not cuts or any(len(cut) - len(set(cut)) >= 2 for cut in cuts), cuts
        expected = single(x, y)
        loss.backward()
        expected.backward()
        apart.append((loss - expected).abs().max().item())
    for ours, theirs in zip(compiled.parameters(), single.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        apart.append((grad - theirs.grad).abs().max().item())
    return max(apart)


@pytest.mark.parametrize(("strategy", "bucket_mb"), [("replicate", 0.008), ("shard", 0.03)])
def test_sums_and_gathers_between_layers(ranks: RankPool, strategy: str, bucket_mb: float | None) -> None:
    """What starts in one segment is waited for in another, and buckets end in the midst of layers; a second
    size is compiled for any.
    """
    assert max(ranks.run(2, _on_ranks, strategy, bucket_mb, (8, 7))) < 1e-12
