"""`optimizer.step()` on sharded parameters, beside plain tensors of the same rows and torch's own `DTensor`s.

    python -m benchmarks.speed.sharded_optimizers [parameters ...]

One process that holds all rows, so nothing is exchanged; parameters of [32, 64], AdamW. Gradients lie side by
side, as a bucket of sums leaves them, or ("apart") each in its own memory. "one tensor" is all elements as
one plain tensor: no `step()` over them can be faster. Milliseconds are the least of one interleaved run, and
ratios are to plain tensors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.ir.graph.model_tensors import local_of, shard_like

ROUNDS, STEPS = 40, 5
WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False, "fused": False}}


def _model(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(32, 64)) for _ in range(count))


def _one(count: int) -> nn.Module:
    flat = torch.cat([p.detach().flatten() for p in _model(count).parameters()])
    return nn.ParameterList([nn.Parameter(flat)])


def _sharded(count: int) -> nn.Module:
    return fxdp.compile(_model(count), strategy="shard")


def _on_dtensors(count: int) -> nn.Module:
    """The same without fxdp: parameters are copies, so no compiled module knows them."""
    copies = [nn.Parameter(p.detach().clone()) for p in _sharded(count).parameters()]
    assert all(isinstance(p, DTensor) for p in copies)
    return nn.ParameterList(copies)


def _stepping(model: nn.Module, way: dict[str, bool], *, apart: bool) -> Callable[[], object]:
    parameters = list(model.parameters())
    line = torch.ones(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, line.split([local_of(p).numel() for p in parameters]), strict=True):
        rows = part.view(p.shape).clone() if apart else part.view(p.shape)
        p.grad = shard_like(p, rows) if isinstance(p, DTensor) else rows
    optimizer = torch.optim.AdamW(parameters, **way)  # type: ignore[arg-type]
    optimizer.step()
    return optimizer.step


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parameters", nargs="*", type=int, default=[80, 400], help="how many there are")
    counts = parser.parse_args().parameters
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    makers = {"tensors": _model, "one tensor": _one, "fxdp": _sharded, "DTensors": _on_dtensors}
    print(f"| parameters | AdamW | tensors ms | {' | '.join(list(makers)[1:])} |", f"|{6 * '---|'}", sep="\n")
    for count in counts:
        for (name, way), apart in product(WAYS.items(), (False, True)):
            steps = {kind: _stepping(make(count), way, apart=apart) for kind, make in makers.items()}
            least = dict.fromkeys(steps, float("inf"))
            for _ in range(ROUNDS):
                for kind, step in steps.items():
                    least[kind] = min(least[kind], _seconds(step))
            base = least.pop("tensors")
            ratios = " | ".join(f"{seconds / base:.2f}" for seconds in least.values())
            print(f"| {count} | {name}{', apart' * apart} | {1e3 * base:.2f} | {ratios} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
