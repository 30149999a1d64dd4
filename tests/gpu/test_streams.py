"""Streams and events on a GPU, and pipelines over two; these run only where they are (`pytest -m gpu`)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.ir.tensor_difference import difference
from fxdp.runtime.streams import COMPUTE, REDUCE, Streams
from tests.pipeline.models import Skips, skips

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CYCLES = 20_000_000
"""About 10 ms: without an event, what follows on another stream would be done long before."""


def test_another_stream_reads_what_compute_has_made() -> None:
    """And compute writes on only after that; memory is freed at once, and given out again."""
    streams = Streams.of(torch.device("cuda", torch.cuda.current_device()))
    record, wait = streams.record, streams.wait
    for number in range(1, 6):
        torch.cuda._sleep(CYCLES)
        value = torch.full((1 << 20,), float(number), device="cuda")
        wait(REDUCE, record(COMPUTE))
        with streams.on(REDUCE):
            torch.cuda._sleep(CYCLES)
            total = value.sum()
        wait(COMPUTE, record(REDUCE), value)
        del value
        torch.full((1 << 20,), -1.0, device="cuda")
        assert total.item() == number * 2**20


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_microbatches_on_one_gpu_are_exact(schedule: str) -> None:
    model, batch = _skips()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(model, pipeline={"microbatches": 4, "schedule": schedule}, backend="eager")
    _compare(compiled, twin, batch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_two_gpus_are_exact(shape: tuple[int, int], tmp_path: Path) -> None:
    """Two stages; or two parts of the batch, whose gradients are reduced on a stream of their own."""
    torch.multiprocessing.spawn(_rank, (shape, str(tmp_path / "store")), nprocs=2)  # type: ignore[no-untyped-call]


def _rank(rank: int, shape: tuple[int, int], store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp"))
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        model, batch = _skips()
        twin = copy.deepcopy(model)
        compiled = fxdp.compile(
            model, mesh, pipeline={"microbatches": 4, "schedule": schedule}, backend="eager"
        )
        _compare(compiled, twin, batch, compiled.mesh.rank, shape[1])
        streams = {str(n.kwargs["stream"]) for n in compiled.program.graph.nodes if n.kwargs}
        assert streams == ({"reduce"} if shape[0] == 1 else {"p2p_forward", "p2p_backward"})
    dist.destroy_process_group()


def _skips() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Skips().double().cuda()
    batch = {k: v.cuda() for k, v in skips(8).items()}
    return model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def _compare(
    compiled: fxdp.CompiledModule,
    twin: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Four steps of an optimizer beside one device's, the gradients clipped."""
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (compiled, twin))
    for _ in range(4):
        loss = compiled(**{k: v.chunk(ranks)[rank] for k, v in batch.items()})["loss"]
        expected = twin(**batch)["loss"]
        for module, value, optimizer in ((compiled, loss, ours), (twin, expected, theirs)):
            value.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert difference(loss.detach(), expected.detach()) <= 1e-9
