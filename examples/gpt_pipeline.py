"""A GPT-2-style language model over two pipeline stages, with the losses of one device.

    torchrun --nproc-per-node 2 examples/gpt_pipeline.py
    torchrun --nproc-per-node 4 examples/gpt_pipeline.py     # two pipelines side by side: mesh pp=2, dp=2

The model is plain PyTorch and knows of no stages: `fxdp.compile` cuts it where both halves cost alike, though
its first and last layers share a weight. A step runs in four micro-batches under the schedule 1F1B. Rank 0
trains the same model on one device beside it, and the program prints how far apart the losses are.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.cli.demo.data import text_batch
from fxdp.cli.demo.model import GPT, GPTConfig


def main() -> None:
    """Train in stages and on one device; print both losses of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks % 2:
        parser.error("two stages need an even number of ranks: torchrun --nproc-per-node 2 ...")
    data_ranks = ranks // 2
    mesh = init_device_mesh("cpu", (2, data_ranks), mesh_dim_names=("pp", "dp"))
    place = mesh["dp"].get_local_rank()

    torch.manual_seed(0)
    model = GPT(GPTConfig(length=64, width=64))
    alone = copy.deepcopy(model)
    compiled = fxdp.compile(
        model,
        mesh,
        pipeline=fxdp.Pipeline(microbatches=asked.microbatches, schedule=asked.schedule),
        backend=asked.backend,
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, alone)]
    furthest, is_first = 0.0, dist.get_rank() == 0
    for step in range(asked.steps):
        batch = text_batch(step, size=16, length=64)
        mine = batch.part(place, data_ranks)
        loss = compiled(mine.tokens, mine.targets)
        loss.backward()
        # every rank has every gradient, so this is clipping as on one device
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        if is_first:
            expected = alone(batch.tokens, batch.targets)
            expected.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            optimizers[1].step()
            optimizers[1].zero_grad()
            furthest = max(furthest, abs(loss.item() - expected.item()) / expected.item())
            print(f"step {step + 1}: loss {loss.item():.6f}, on one device {expected.item():.6f}")
    if is_first:
        for row in compiled.plan.stages:
            held = f"{row.parameters} parameters, {row.share:.0%} of the work"
            print(f"stage {row.stage} on rank {row.rank}: {held}")
        print(compiled.plan.timetable())
        print(f"the losses equal those of one device to {furthest:.0e}")


if __name__ == "__main__":
    main()
