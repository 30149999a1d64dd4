"""`optimizer.step()` on sharded parameters, beside plain tensors of the same rows and torch's own `DTensor`s.

    python benchmarks/sharded_optimizers.py [parameters ...]

One process that holds all rows, so nothing is exchanged; parameters of [32, 64], AdamW. Milliseconds are the
least of one interleaved run, and ratios are to plain tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fxdp

ROUNDS, STEPS = 40, 5
WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False, "fused": False}}


def _model(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(32, 64)) for _ in range(count))


def _sharded(count: int) -> nn.Module:
    return fxdp.compile(_model(count), strategy="shard")


def _on_dtensors(count: int) -> nn.Module:
    """The same without fxdp: parameters are copies, so no compiled module knows them."""
    copies = [nn.Parameter(p.detach().clone()) for p in _sharded(count).parameters()]
    assert all(isinstance(p, DTensor) for p in copies)
    return nn.ParameterList(copies)


def _stepping(model: nn.Module, way: dict[str, bool]) -> Callable[[], object]:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), **way)  # type: ignore[arg-type]
    optimizer.step()
    return optimizer.step


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    """Print a table."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    makers = {"tensors": _model, "fxdp": _sharded, "DTensors": _on_dtensors}
    print("| parameters | AdamW | tensors ms | fxdp | DTensors |", "|---|---|---|---|---|", sep="\n")
    for count in map(int, sys.argv[1:] or ("80", "400")):
        for name, way in WAYS.items():
            steps = {kind: _stepping(make(count), way) for kind, make in makers.items()}
            least = dict.fromkeys(steps, float("inf"))
            for _ in range(ROUNDS):
                for kind, step in steps.items():
                    least[kind] = min(least[kind], _seconds(step))
            base = least["tensors"]
            ratios = " | ".join(f"{least[kind] / base:.2f}" for kind in ("fxdp", "DTensors"))
            print(f"| {count} | {name} | {1e3 * base:.2f} | {ratios} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
