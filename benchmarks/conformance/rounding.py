"""How far training in float32 and under bfloat16 autocast is from float64, beside eager on one device.

    python -m benchmarks.conformance.rounding  # the models below, with and without Inductor
    python -m benchmarks.conformance.rounding gpt2 unet --backend eager

Two ranks with 5 and 3 samples train a model of the zoo, 20 steps of AdamW from each of eight batches. A
deviation is the norm of the difference from float64 by the norm of the value (of the change, for parameters),
as root mean square over batches. The table shows fxdp's by eager's: 1 is eager's own rounding, more than 2 a
fault. Dropout is on, and all draw what one device draws: its scale rounds, too. Results gather in a JSON
file, from which `ROUNDING.md` is made.
"""

from __future__ import annotations

import argparse
import copy
import json
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxdp
from tests.capture.zoo import keep_float64
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import Entry, Inputs

SPLIT = (5, 3)
STEPS, BATCHES, MOST = 20, 8, 2.0
VALUES = ("loss", "outputs", "gradients", "parameters")
RESULTS = Path(__file__).with_name("results") / "rounding.json"
TABLE = Path(__file__).with_name("ROUNDING.md")
CONSOLE = Console()


class Segments(nn.Module):
    """What nodes of all samples say to a few segments, as sums and means, and hear of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.back, self.head = nn.Linear(16, 32), nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, region: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, index = F.gelu(self.first(x)).flatten(0, 1), region.flatten()
        total = h.new_zeros(6, 32).index_add(0, index, h)
        count = h.new_zeros(6).index_add(0, index, torch.ones_like(h[:, 0])).clamp(min=1)
        effects = torch.cat([total, total / count[:, None]], 1)[index]
        out = self.head((h + self.back(effects).tanh()).unflatten(0, region.shape).mean(1))
        return F.cross_entropy(out, y), out


def _nodes(batch: int) -> Inputs:
    drawn = {"region": torch.randint(6, (batch, 12)), "y": torch.randint(3, (batch,))}
    return {"x": torch.randn(batch, 12, 16), **drawn}


ENTRIES: dict[str, Entry] = {
    **{name: CATALOGUE[name] for name in ("mlp", "resnet", "gpt2", "bert", "vit")},
    "regions": Entry(Segments, _nodes),
    **{name: CATALOGUE[name] for name in ("llama", "t5", "mixtral", "mamba", "unet")},
}

Values = dict[str, Tensor]


def main() -> int:
    """Measure, show, and return 1 if a model is further from float64 than twice eager."""
    asked = _arguments()
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked.models:
        for backend in asked.backend:
            for precision, found in _on_ranks(name, backend).items():
                rows[f"{name}, {precision}, {backend}"] = found
                CONSOLE.print(name, precision, backend, *_cells(found), highlight=False)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.write_text(_page(rows))
    return int(max(_ratio(found, value) for found in rows.values() for value in VALUES) > MOST)


def _ratio(found: dict[str, dict[str, float]], value: str) -> float:
    """fxdp's deviation by eager's, which counts as a rounding of float32 where luck has made it less."""
    return found["fxdp"][value] / max(found["eager"][value], 2.0**-24)


def _cells(found: dict[str, dict[str, float]]) -> list[str]:
    return [f"{_ratio(found, v):.2f} ({found['eager'][v]:.0e})" for v in VALUES]


def _page(rows: dict[str, Any]) -> str:
    lines = [f"| {' | '.join([*row.split(', '), *_cells(found)])} |" for row, found in rows.items()]
    return _HEAD.format(
        torch=torch.__version__, steps=STEPS, batches=BATCHES, columns=" | ".join(VALUES),
        lines="|---" * (3 + len(VALUES)) + "|", rows="\n".join(lines),
    )  # fmt: skip


_HEAD = """# Rounding

Made by `python -m benchmarks.conformance.rounding` (torch {torch}); do not edit by hand.

How far training is from float64 on one device, in float32 and under bfloat16 autocast: fxdp on two ranks
with 5 and 3 samples, by eager on one device, whose own deviation stands in parentheses. 1 is as far as eager.
Loss, outputs and gradients are those of the first step; parameters, how they have changed after {steps} steps
of AdamW. Root mean squares over {batches} batches. Dropout is on, with the numbers that one device draws.

| model | precision | backend | {columns} |
{lines}
{rows}
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(ENTRIES), help="names in `ENTRIES`")
    parser.add_argument("--backend", nargs="+", default=["eager", "inductor"])
    return parser.parse_args()


def _on_ranks(name: str, backend: str) -> dict[str, dict[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, backend, folder)
        mp.spawn(_rank, arguments, nprocs=len(SPLIT))  # type: ignore[no-untyped-call]
        return torch.load(Path(folder) / "found.pt")  # type: ignore[no-any-return]


def _rank(rank: int, name: str, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SPLIT))
    found = {precision: measure(name, backend, precision) for precision in ("float32", "bfloat16")}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def measure(name: str, backend: str, precision: str) -> dict[str, dict[str, float]]:
    """The deviations of eager and of fxdp, as root mean squares over batches."""
    rows: dict[str, list[dict[str, float]]] = {"eager": [], "fxdp": []}
    entry, rank = ENTRIES[name], dist.get_rank()
    torch.manual_seed(0)
    model = entry.build()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(twin, backend=backend, rng="single-device")
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
) -> Values:
    """Loss, outputs and gradients of the first step, and how the parameters have changed after the last."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first = _flat(parameters)
    found: Values = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        with cast():
            output = run(**inputs)
        values = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        loss = next(x for x in values if x.dim() == 0)
        loss.backward()
        if step == 0:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            outputs = next(x for x in values if x.dim())
            full = outputs if run is model else _of_all_ranks(outputs)
            found = {"loss": _flat([loss]), "outputs": _flat([full]), "gradients": _flat(gradients)}
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "parameters": _flat(parameters) - first}


def _of_all_ranks(own: Tensor) -> Tensor:
    parts = [own] * len(SPLIT)
    dist.all_gather_object(parts, own.detach())
    return torch.cat(parts)


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([x.detach().double().reshape(-1) for x in tensors])


def _deviation(found: Values, exact: Values) -> dict[str, float]:
    return {v: float((found[v] - exact[v]).norm() / exact[v].norm()) for v in VALUES}


def _rms(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt())


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
