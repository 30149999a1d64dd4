"""Tokens a second, MFU, memory and exactness on the GPUs of this run, beside DDP and FSDP2; to be sent in.

    torchrun --nproc-per-node 8 -m benchmarks.speed.gpus            # ten minutes on eight GPUs
    torchrun --nproc-per-node 2 -m benchmarks.speed.gpus --tiny     # on CPUs, to try it

Contenders take turns in one process per rank, each from its own copy of the model, in bfloat16 on GPUs. MFU
counts 6 FLOPs a parameter and token, and 12 * layers * width * length a token for attention (Chowdhery et
al., PaLM, 2022, appendix B); for ResNet-50 3 * 4.1 GFLOPs of multiply-adds an image. Exactness: the loss of
the first step in float32, of a batch whose ranks count different numbers of tokens, beside one device that
computes the global batch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fxdp
from benchmarks.harness.models import Classifier
from benchmarks.harness.resnet50 import ResNet50
from fxdp.cli.demo.model import GPT, GPTConfig

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "MI300X": 1307.0}
"""Dense bfloat16, by a part of the device's name, of the vendors' data sheets; --peak for others."""

Loss = Callable[..., Tensor]


class MaskedGPT(nn.Module):
    """A GPT whose loss counts the targets that are not -100: the mean of ranks' means is another number."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.body = config, GPT(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the counted tokens of the batch."""
        return F.cross_entropy(self.body(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


@dataclass(frozen=True)
class Size:
    """A model to train.

    Attributes
    ----------
    unit : what is counted: tokens or images.
    local : the samples of a rank.
    flops : of forward and backward of one unit, for MFU.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    local: int
    unit: str
    units: int
    flops: Callable[[nn.Module], float]


def _gpt(name: str, config: GPTConfig, local: int) -> Size:
    def draw(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(config.vocabulary, (samples, config.length), generator=generator)
        lengths = torch.linspace(config.length / 4, config.length, samples).long()[:, None]
        targets = tokens.roll(-1, 1).masked_fill(torch.arange(config.length) >= lengths, -100)
        return tokens, targets

    def flops(model: nn.Module) -> float:
        parameters = sum(p.numel() for p in model.parameters())
        return 6 * parameters + 12 * config.layers * config.width * config.length

    return Size(name, lambda: MaskedGPT(config), draw, local, "tokens", config.length, flops)


def _resnet(name: str, width: int, blocks: tuple[int, ...], side: int, local: int) -> Size:
    def draw(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 3, side, side, generator=generator), torch.arange(samples) % 10

    def flops(model: nn.Module) -> float:
        return 3 * 2 * 4.1e9 * (width / 64) ** 2 * (side / 224) ** 2

    return Size(name, lambda: Classifier(ResNet50(width, blocks)), draw, local, "images", 1, flops)


SIZES = (
    _gpt("gpt-124m", GPTConfig(50304, 1024, layers=12, width=768, heads=12), 8),
    _gpt("gpt-1.3b", GPTConfig(50304, 1024, layers=24, width=2048, heads=16), 4),
    _resnet("resnet-50", 64, (3, 4, 6, 3), 224, 64),
)
TINY = (
    _gpt("gpt-tiny", GPTConfig(64, 16, layers=2, width=32, heads=2), 2),
    _resnet("resnet-tiny", 4, (1,), 32, 2),
)


def _sharded(model: nn.Module, policy: MixedPrecisionPolicy | None) -> nn.Module:
    options = {} if policy is None else {"mp_policy": policy}
    for block in [m for m in model.modules() if type(m).__name__ in ("Block", "Bottleneck")]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _replicated(model: nn.Module, policy: MixedPrecisionPolicy | None) -> nn.Module:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


CONTENDERS: dict[str, Callable[[nn.Module, MixedPrecisionPolicy | None], Loss]] = {
    "DDP + torch.compile": lambda model, policy: torch.compile(_replicated(model, policy)),
    "FSDP2 + torch.compile": lambda model, policy: torch.compile(_sharded(model, policy)),
    "fxdp, replicate": lambda model, policy: fxdp.compile(model, mp_policy=policy),
    "fxdp, shard": lambda model, policy: fxdp.compile(model, strategy="shard", mp_policy=policy),
}


def main(words: list[str] | None = None) -> int:
    """Measure on all ranks; rank 0 prints and writes the file."""
    asked = _arguments(words)
    cuda = torch.cuda.is_available() and not asked.tiny
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    rows = [
        row
        for size in (TINY if asked.tiny else SIZES)
        if asked.models is None or size.name in asked.models
        for row in _measured(size, device, asked)
    ]
    if dist.get_rank() == 0:
        report = {"machine": _machine(device), "rows": rows}
        asked.json.write_text(json.dumps(report, indent=1))
        _show(rows, report["machine"], asked.json)
    return 1 if any("error" in row for row in rows) else 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small models on CPUs")
    parser.add_argument("--models", nargs="+", choices=[size.name for size in (*SIZES, *TINY)])
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--peak", type=float, help="dense bfloat16 TFLOPs of a device")
    parser.add_argument("--json", type=Path, default=Path("gpus.json"))
    return parser.parse_args(words)


def _measured(size: Size, device: torch.device, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    expected = _one_device(size, device)
    for name in asked.contenders:
        row: dict[str, Any] = {"model": size.name, "contender": name, "unit": size.unit}
        try:
            row["loss error"] = abs(_first_loss(size, name, device) - expected) / abs(expected)
            row |= _speed(size, name, device, asked)
        except Exception as error:  # of one contender: out of memory, say; the others go on
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield row


def _model(size: Size, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return size.make().to(device)


def _batch(size: Size, device: torch.device, step: int, *, part: bool) -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * size.local, (rank + 1) * size.local) if part else slice(None)
    drawn = size.draw(size.local * world, torch.Generator().manual_seed(step))
    return [value[rows].to(device) for value in drawn]


def _one_device(size: Size, device: torch.device) -> float:
    """The loss of the global batch, by rank 0 alone."""
    found = [0.0]
    if dist.get_rank() == 0:
        with torch.no_grad():
            found = [_model(size, device)(*_batch(size, device, 0, part=False)).item()]
    dist.broadcast_object_list(found)
    return found[0]


def _first_loss(size: Size, name: str, device: torch.device) -> float:
    """The loss that a contender reports in float32: the mean over ranks of what they have."""
    loss = CONTENDERS[name](_model(size, device), None)(*_batch(size, device, 0, part=True)).detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def _speed(size: Size, name: str, device: torch.device, asked: argparse.Namespace) -> dict[str, Any]:
    cuda = device.type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else None
    model = _model(size, device)
    flops = size.flops(model)
    loss = CONTENDERS[name](model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    own = not name.startswith("DDP")
    batches = [_batch(size, device, step, part=True) for step in range(4)]
    seconds = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for turn in range(asked.rounds + 1):  # the first compiles
        _wait(device)
        begin = time.perf_counter()
        for step in range(asked.steps):
            with contextlib.nullcontext() if own or not cuda else torch.autocast("cuda", torch.bfloat16):
                value = loss(*batches[step % len(batches)])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        _wait(device)
        if turn:
            seconds.append((time.perf_counter() - begin) / asked.steps)
    units = size.local * size.units * dist.get_world_size()
    rate = units / statistics.median(seconds)
    peak = asked.peak or next(
        (t for part, t in PEAK_TFLOPS.items() if cuda and part in torch.cuda.get_device_name()), 0
    )
    return {
        "ms": 1e3 * statistics.median(seconds),
        "units/s": rate,
        "MFU": rate * flops / (peak * 1e12 * dist.get_world_size()) if peak else None,
        "memory GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _machine(device: torch.device) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "fxdp": fxdp.__version__,
        "commit": commit.stdout.strip() or "none",
        "date": time.strftime("%Y-%m-%d"),
    }


def _show(rows: list[dict[str, Any]], machine: dict[str, Any], file: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(" ".join(f"{name}={value}" for name, value in machine.items()))
    for row in rows:
        if "error" in row:
            console.print(f"{row['model']:12} {row['contender']:22} {row['error']}", markup=False)
            continue
        extra = "" if row["MFU"] is None else f"  MFU {row['MFU']:.1%}"
        extra += "" if row["memory GiB"] is None else f"  {row['memory GiB']:.1f} GiB"
        rate = f"{row['ms']:9.2f} ms {row['units/s']:12,.0f} {row['unit']}/s{extra}"
        console.print(f"{row['model']:12} {row['contender']:22} {rate}  loss off by {row['loss error']:.0e}")
    console.print(f"written: {file}; please send it in with the output of `fxdp doctor`")


if __name__ == "__main__":
    sys.exit(main())
