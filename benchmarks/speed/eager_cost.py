"""CPU time of one warm op on global tensors, beside plain ones and DTensor.

    python -m benchmarks.speed.eager_cost

One process, so that nothing is sent: the least of several runs of 200 calls, in microseconds of the thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import fxdp

_CALLS, _RUNS = 200, 7

OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "x + x": lambda x, w: x + x,
    "x * 2": lambda x, w: x * 2,
    "relu": lambda x, w: F.relu(x),
    "linear": lambda x, w: F.linear(x, w),
    "view": lambda x, w: x.view(-1, 4, 4),
    "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
    "softmax": lambda x, w: x.softmax(1),
    "x[:, 0]": lambda x, w: x[:, 0],
}


def _microseconds(call: Callable[[], Any]) -> float:
    least = float("inf")
    for _ in range(_RUNS):
        begin = time.thread_time()
        for _ in range(_CALLS):
            call()
        least = min(least, time.thread_time() - begin)
    return least / _CALLS * 1e6


def main() -> None:
    """Print a table, with and without gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    kinds = {
        "plain": (x, w),
        "global": (fxdp.global_batch(x, mesh), w),
        "DTensor": (distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])),
    }
    print(f"| op, us | {' | '.join(kinds)} | {' | '.join(f'{kind} with grad' for kind in kinds)} |")
    print("|---" * (1 + 2 * len(kinds)) + "|")
    for name, op in OPS.items():
        row = []
        for grad in (False, True):
            for given in kinds.values():
                a, b = (t.detach().requires_grad_(grad) for t in given)
                row.append(_microseconds(lambda op=op, a=a, b=b: op(a, b)))  # type: ignore[misc]
        print(f"| {name} | {' | '.join(f'{us:.0f}' for us in row)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
