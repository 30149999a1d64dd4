"""A training script as people write it for one device, with a clock; `script_step.py` starts it.

`--by-hand` makes the edits that `fxdp.compile` takes.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.models import CASES

name, steps, by_hand = sys.argv[1], int(sys.argv[2]), "--by-hand" in sys.argv
print(json.dumps({"began": time.time()}), flush=True)
case = CASES[name]
batch = 2 * case.local_batch
model = case.model(torch.device("cpu"))
model = getattr(model, "body", model)
data = TensorDataset(*case.draw(batch * steps, torch.Generator().manual_seed(0)))


def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


if by_hand:
    import torch.distributed as dist

    import fxdp

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    loader = fxdp.data_loader(data, batch, mesh=mesh, local=True)
    step = fxdp.compile(model, mesh, loss_fn=loss_fn)
else:
    loader = DataLoader(data, batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

seconds, processor, losses = [], [], []
last, spent = time.perf_counter(), time.process_time()
for x, target in loader:
    loss = step(x, target=target) if by_hand else loss_fn(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    now, used = time.perf_counter(), time.process_time()
    seconds.append(now - last)
    processor.append(used - spent)
    last, spent = now, used
print(json.dumps({"seconds": seconds, "processor": processor, "loss": losses[-1]}), flush=True)
