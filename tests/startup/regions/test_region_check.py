"""A half in segments is proven to compute what the half computes, before anything is compiled."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxdp
from fxdp.compiler.emit import FULL, WantedPart, lower_part
from fxdp.ir.graph.metadata import Location, copy_meta
from fxdp.lowering.inductor import compile as compiling
from fxdp.lowering.inductor.start import Start
from fxdp.module.dry_run import _local_program
from fxdp.options import Options
from fxdp.startup.regions import compile_by_region as module
from fxdp.startup.regions.compiled_regions import regions
from fxdp.startup.regions.region_check import WrongRegionsError, check_regions
from fxdp.startup.regions.region_code import RegionCall, RegionPlan, plan_regions
from fxdp.torch_compat import graph_module
from tests.captures import KNOWN, captured_once
from tests.lowering.inductor.transformers_like import Decoder, sentences

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

aten = torch.ops.aten


def _plans(
    model: nn.Module, mesh: dict[str, int], strategy: str, monkeypatch: pytest.MonkeyPatch, bucket_mb: float
) -> list[tuple[fx.GraphModule, RegionPlan]]:
    """The halves that one rank of a mesh would compile in segments; nothing is compiled."""
    found = []

    def noted(gm: fx.GraphModule, plan: RegionPlan) -> None:
        check_regions(gm, plan)
        found.append((gm, plan))

    monkeypatch.setattr(module, "check_regions", noted)
    monkeypatch.setattr(compiling, "compile_with_inductor", lambda *_, **__: (None, []))
    monkeypatch.setenv("FXDP_CACHE", "0")
    options = Options(strategy=strategy, communication={"bucket_cap_mb": bucket_mb})
    with captured_once(KNOWN.setdefault((__name__, str(model)), {})):
        local, _ = _local_program(model, sentences(2), {}, mesh, options)
    ranks = local.mesh.size
    sizes = {"B": 2 * ranks, "b": 2, "offset": 0, "b_max": 2}
    wanted = WantedPart(FULL, local.partition.parts[0], sizes, (2,) * ranks, 0)
    lower_part(wanted, local, model, generic=False, compiled=True, start=Start())
    return found


_SHARD, _HYBRID = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("layers", "tied", "rotary", "mesh", "strategy", "bucket_mb"),
    [
        (6, False, False, _SHARD, "shard", 0.03),
        (6, True, True, _SHARD, "shard", 0.03),
        (8, False, True, _SHARD, "shard", 0.05),
        (6, False, False, _SHARD, "optimizer", 0.03),
        (6, True, False, _HYBRID, "shard", 0.05),
    ],
)
def test_sharded_decoders_are_proven(
    layers: int, tied: bool, rotary: bool, mesh: dict[str, int], strategy: str, bucket_mb: float,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With gathers and sums between the layers, whose buckets end within them."""
    model = Decoder(layers, tied=tied, rotary=rotary)
    with caplog.at_level(logging.DEBUG, "fxdp"):
        found = _plans(model, mesh, strategy, monkeypatch, bucket_mb)
    assert not [r.message for r in caplog.records if "one piece" in r.message]
    assert len(found) == 2  # both halves
    for _, plan in found:
        assert len(plan.calls) >= len(plan.kinds) + 2
    assert any(one.between for one in found[1][1].kinds)


def _chain(times: int) -> fx.GraphModule:
    """`times` layers of 16 ops; a number and an input are results, too."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    value = x
    for node in (x, y):
        node.meta["val"] = torch.ones(4)
    for layer in range(times):
        for _ in range(8):
            for target, args in ((aten.sin.default, ()), (aten.add.Tensor, (y,))):
                value = graph.call_function(target, (value, *args))
                copy_meta(value, value, location=Location(module=f"layers.{layer}"))
                value.meta["val"] = torch.ones(4)
    graph.output((value, 2, y))
    return graph_module(nn.Module(), graph)


def _moved(plan: RegionPlan, number: int, **changes: Any) -> RegionPlan:
    calls = list(plan.calls)
    calls[number] = replace(calls[number], **changes)
    return replace(plan, calls=tuple(calls))


def _planned() -> tuple[fx.GraphModule, RegionPlan]:
    gm = _chain(5)
    plan = plan_regions(gm, regions(gm, ()))
    assert len(plan.calls) >= 4
    check_regions(gm, plan)
    return gm, plan


def test_a_value_that_is_not_made_yet() -> None:
    gm, plan = _planned()
    with pytest.raises(WrongRegionsError, match=r"call 0 takes values \[9\], which are not made"):
        check_regions(gm, _moved(plan, 0, takes=(*plan.calls[0].takes[:-1], 9)))


def test_a_value_that_is_freed_too_early() -> None:
    gm, plan = _planned()
    y = next(i for i in plan.calls[0].takes if i in plan.calls[1].takes)
    with pytest.raises(WrongRegionsError, match="call 1 takes"):
        check_regions(gm, _moved(plan, 0, frees=(*plan.calls[0].frees, y)))


def test_a_value_of_another_layer() -> None:
    gm, plan = _planned()
    shifted = tuple(i - 1 if i == max(plan.calls[3].takes) else i for i in plan.calls[3].takes)
    calls = tuple(replace(c, frees=()) for c in plan.calls)
    with pytest.raises(WrongRegionsError, match=r"results \[0\] are values of other ops"):
        check_regions(gm, _moved(replace(plan, calls=calls), 3, takes=shifted))


def test_a_code_of_another_kind() -> None:
    """Its inputs are as many, or not."""
    gm, plan = _planned()
    other = fx.Graph()
    x = other.placeholder("x")
    other.output((x,))
    kinds = (*plan.kinds, replace(plan.kinds[0], graph=other, kind="other"))
    with pytest.raises(WrongRegionsError, match="its code has 1 inputs"):
        check_regions(gm, _moved(replace(plan, kinds=kinds), 1, code=len(plan.kinds)))


def test_results_in_another_order() -> None:
    gm, plan = _planned()
    with pytest.raises(WrongRegionsError, match=r"results \[0, 1\] are values"):
        check_regions(gm, replace(plan, results=(plan.results[1], plan.results[0], plan.results[2])))


def test_random_draws_in_another_order() -> None:
    """Draws of equal arguments are told apart by their order alone: one too many is seen."""
    graph = fx.Graph()
    draws = [graph.call_function(aten.rand.default, ([4],)) for _ in range(2)]
    graph.output((*draws, *draws))
    one = fx.Graph()
    one.output((one.call_function(aten.rand.default, ([4],)),))
    gm = graph_module(nn.Module(), graph)
    region = replace(_planned()[1].kinds[0], graph=one, takes=(), kind="draw")
    call = RegionCall(0, (), ())
    check_regions(gm, RegionPlan((region,), (call, call), (0, 1, 0, 1), ()))
    with pytest.raises(WrongRegionsError, match="random draws come in another order"):
        check_regions(gm, RegionPlan((region,), (call, call, call), (0, 1, 0, 1), ()))


def test_what_is_written_is_read_by_whoever_comes_later() -> None:
    """A read that moves behind a write reads another value."""

    def half(late: bool) -> fx.GraphModule:
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        before = None if late else graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.copy_.default, (x, y))
        graph.output((before or graph.call_function(aten.sin.default, (x,)),))
        return graph_module(nn.Module(), graph)

    gm, other = half(late=False), half(late=True)
    region = replace(_planned()[1].kinds[0], kind="all")
    calls = (RegionCall(0, (0, 1), ()),)
    check_regions(gm, RegionPlan((replace(region, graph=gm.graph),), calls, (2,), ()))
    with pytest.raises(WrongRegionsError, match="results"):
        check_regions(gm, RegionPlan((replace(region, graph=other.graph),), calls, (2,), ()))


def test_what_fails_the_check_is_compiled_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one debug line for each half, and the right numbers."""

    def refuses(*_: Any) -> None:
        raise WrongRegionsError("call 1 takes values [7], which are not made yet, or freed")

    monkeypatch.setattr(module, "check_regions", refuses)
    monkeypatch.setenv("FXDP_CACHE", "0")
    torch.manual_seed(0)
    model = Decoder(4).double()
    expected = model(*sentences(2))
    with caplog.at_level(logging.DEBUG, "fxdp"):
        loss = fxdp.compile(model)(*sentences(2))
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    said = [r for r in caplog.records if "a phase is compiled as one piece" in r.message]
    assert len(said) == 2
    assert all(r.levelno == logging.DEBUG for r in said)
