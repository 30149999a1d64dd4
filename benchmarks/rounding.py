"""How far training in float32 and under bfloat16 autocast is from float64, beside eager on one device.

    python benchmarks/rounding.py                      # the models below, with and without Inductor
    python benchmarks/rounding.py gpt2 unet --compute eager

Two ranks with 5 and 3 samples train a model of the zoo. A deviation is the norm of the difference from
float64 by the norm of the value (of the change, for parameters), as root mean square over batches. The table
shows fxdp's by eager's: 1 is eager's own rounding, more than 2 a fault. Dropout is off: masks do not round.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.capture.zoo import keep_float64
from tests.zoo.catalogue import CATALOGUE

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "unet")
SPLIT = (5, 3)
STEPS, BATCHES, MOST = 20, 3, 2.0
VALUES = ("loss", "gradients", "parameters")
CONSOLE = Console()

Deviations = dict[str, list[float]]


def main() -> int:
    """Measure, show, and return 1 if a model is further from float64 than twice eager."""
    asked = _arguments()
    table = Table("model", "precision", "compute", *(f"{v} (eager's)" for v in VALUES), title="times eager's")
    worst = 0.0
    for name in asked.models:
        for compute in asked.compute:
            for precision, found in _on_ranks(name, compute).items():
                ratios = [found["fxdp"][v] / max(found["eager"][v], 1e-30) for v in VALUES]
                own = [found["eager"][v] for v in VALUES]
                shown = [f"{r:.2f} ({e:.1e})" for r, e in zip(ratios, own, strict=True)]
                CONSOLE.print(name, precision, compute, *shown)
                table.add_row(name, precision, compute, *shown)
                worst = max(worst, *ratios)
    CONSOLE.print(table)
    return int(worst > MOST)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, help="names of models of the zoo")
    parser.add_argument("--compute", nargs="+", default=["eager", "inductor"])
    return parser.parse_args()


def _on_ranks(name: str, compute: str) -> dict[str, dict[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, compute, folder)
        mp.spawn(_rank, arguments, nprocs=len(SPLIT))  # type: ignore[no-untyped-call]
        return torch.load(Path(folder) / "found.pt")  # type: ignore[no-any-return]


def _rank(rank: int, name: str, compute: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SPLIT))
    found = {precision: measure(name, compute, precision) for precision in ("float32", "bfloat16")}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def measure(name: str, compute: str, precision: str) -> dict[str, dict[str, float]]:
    """The deviations of eager and of fxdp, as root mean squares over batches."""
    rows: dict[str, list[dict[str, float]]] = {"eager": [], "fxdp": []}
    entry, rank = CATALOGUE[name], dist.get_rank()
    torch.manual_seed(0)
    model = _without_dropout(entry.build())
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(twin, compute=compute)
    cast = _autocast if precision == "bfloat16" else nullcontext
    for seed in range(BATCHES):
        torch.manual_seed(seed)
        inputs = entry.inputs(sum(SPLIT))
        mine = pytree.tree_map_only(Tensor, lambda x: x.split(SPLIT)[rank], inputs)
        with _float64():
            wide = copy.deepcopy(model).double()
            exact = _trained(wide, wide, _widened(inputs), nullcontext)
        one = copy.deepcopy(model)
        rows["eager"].append(_deviation(_trained(one, one, inputs, cast), exact))
        twin.load_state_dict(model.state_dict())
        rows["fxdp"].append(_deviation(_trained(twin, compiled, mine, cast), exact))
    return {who: {v: _rms([row[v] for row in found]) for v in VALUES} for who, found in rows.items()}


def _trained(
    model: nn.Module, run: Any, inputs: dict[str, Any], cast: Callable[[], AbstractContextManager[Any]]
) -> dict[str, Tensor]:
    """The loss and gradients of the first step, and how the parameters have changed after the last."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first = _flat(parameters)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        with cast():
            loss = _loss(run(**inputs))
        loss.backward()
        if step == 0:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            found = {"loss": loss.detach().double().view(1), "gradients": _flat(gradients)}
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "parameters": _flat(parameters) - first}


def _loss(output: Any) -> Tensor:
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    scalars = [x for x in leaves if x.dim() == 0]
    loss: Tensor = scalars[0] if scalars else leaves[0].square().mean()
    return loss


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([x.detach().double().reshape(-1) for x in tensors])


def _deviation(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {v: float((found[v] - exact[v]).norm() / exact[v].norm()) for v in VALUES}


def _rms(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt())


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _widened(inputs: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with keep_float64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    sys.exit(main())
