"""The diffusion U-Net of skippable_unet.py in stages: its skips go straight from stage to stage.

    torchrun --nproc-per-node 2 examples/unet_pipeline.py
    torchrun --nproc-per-node 3 examples/unet_pipeline.py --schedule gpipe

Each rank has one stage: on three, the way down, the bottom, and the way up. What is stashed on the way down
is sent to the stage that pops it, past the one in between, and its gradient comes back the same way. Rank 0
trains the same model on one device beside it.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from skippable_unet import load, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp

STAGES = {2: ["3"], 3: ["2", "3"]}
"""The layers of the `nn.Sequential` at which stages 1, 2 begin; other numbers are balanced by cost."""


def main() -> None:
    """Train in stages and on one device; print both losses of each step, and where the skips went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))

    noisy, noise = load()
    model = make_model()
    alone = copy.deepcopy(model)
    pipeline = fxdp.Pipeline(
        microbatches=asked.microbatches, schedule=asked.schedule, stages=STAGES.get(ranks)
    )
    compiled = fxdp.compile(model, mesh, loss_fn=F.mse_loss, pipeline=pipeline, backend=asked.backend)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, alone)]
    furthest, is_first = 0.0, dist.get_rank() == 0
    for step in range(asked.steps):
        rows = slice(50 * step, 50 * (step + 1))  # every rank of a pipeline passes the same batch
        loss = compiled(noisy[rows], target=noise[rows])
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        if is_first:
            expected = F.mse_loss(alone(noisy[rows]), noise[rows])
            expected.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            furthest = max(furthest, abs(loss.item() - expected.item()) / expected.item())
            print(f"step {step + 1}: loss {loss.item():.6f}, on one device {expected.item():.6f}")
    if is_first:
        for sent in compiled.plan.communication:
            if "skip" in sent.cause:
                print(f"{sent.phase}: {sent.cause}, {sent.bytes} bytes per step")
        print(f"the losses equal those of one device to {furthest:.0e}")


if __name__ == "__main__":
    main()
