"""Sharded decoders through Inductor from a cold cache, with repeated layers compiled once and without.

    python -m benchmarks.conformance.repeated_layers  # all cases, some minutes
    python -m benchmarks.conformance.repeated_layers --layers 6 --only shard

Each case runs twice on fresh ranks with a cache of its own: once as users run it, once with `FXDP_LAYERS=0`.
Losses of three steps and all gradients are compared with one another and with one device, in float64. The
exit code is 1 where one differs by more than 1e-9, or where no half was compiled in segments.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness.processes import launch

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {"strategy": "shard"}),
    "optimizer": (2, {"strategy": "optimizer"}),
    "hybrid": (4, {"strategy": "shard"}),
    "stages": (2, {"pipeline": {"microbatches": 2}}),
}
_MESHES = {
    "shard": {"dp_shard": 2}, "optimizer": {"dp": 2}, "hybrid": {"dp_replicate": 2, "dp_shard": 2},
    "stages": {"pp": 2},
}  # fmt: skip
_TOLERANCE = 1e-9
_CONSOLE = Console(width=max(Console().width, 100))


def _rank(case: dict[str, Any], results: Path) -> None:
    """One rank of a case: three steps, beside one device."""
    import fxdp
    from fxdp.startup.regions import compile_by_region as module
    from tests.fallbacks import no_fallback
    from tests.lowering.inductor.transformers_like import Decoder, sentences

    dist.init_process_group("gloo")
    segmented: list[int] = []
    plan_regions = module.plan_regions

    def noted(*given: Any) -> Any:
        plan = plan_regions(*given)
        segmented.append(len(plan.calls))
        return plan

    module.plan_regions = noted
    torch.manual_seed(0)
    width, words = case["width"], case["words"]
    model = Decoder(
        case["layers"], tied=case["tied"], rotary=case["rotary"], width=width, words=words
    ).double()
    single = copy.deepcopy(model)
    axes = _MESHES[case["strategy"]]
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    compiled = fxdp.compile(
        model, mesh, communication={"bucket_cap_mb": case["bucket_mb"]}, **STRATEGIES[case["strategy"]][1]
    )
    parts = 1 if case["strategy"] == "stages" else dist.get_world_size()
    losses, error = [], 0.0
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (compiled, single)]
    for step in range(3):
        x, y = (t.roll(step, 1) for t in sentences(4 * parts, words))
        part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if parts > 1 else slice(None)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with no_fallback():
            loss = compiled(x[part], y[part])
            loss.backward()
        expected = single(x, y)
        expected.backward()
        losses.append(loss.item())
        error = max(error, abs(loss.item() - expected.item()), _apart(compiled, single))
        for optimizer in optimizers:
            optimizer.step()
    if dist.get_rank() == 0:
        results.write_text(json.dumps({"losses": losses, "error": error, "regions": segmented}))
    dist.destroy_process_group()


def _apart(compiled: Any, single: Any) -> float:
    """The largest difference of a gradient; of stages those that this rank holds."""
    found, theirs = 0.0, dict(single.named_parameters())
    for name, ours in compiled.named_parameters():
        if (grad := ours.grad) is not None:
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found = max(found, (grad - theirs[name].grad).abs().max().item())
    return found


def _run(case: dict[str, Any], layers: str) -> dict[str, Any]:
    """A case on fresh ranks, from a cold cache."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        environment = {
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "FXDP_LAYERS": layers, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.conformance.repeated_layers"]
        command += ["--case", json.dumps(case), "--results", str(results)]
        ranks = STRATEGIES[case["strategy"]][0]
        if launch(command, ranks, environment=environment, timeout=600) or not results.exists():
            return {"losses": [], "error": float("nan"), "regions": []}
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def main() -> int:
    """Run the cases, print the table, and say whether all are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 6, 24])
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--words", type=int, default=512)
    parser.add_argument("--bucket-mb", type=float, default=0.5)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        _rank(asked.case, asked.results)
        return 0
    names = ("strategy", "layers", "head", "positions", "regions", "from one device", "from FXDP_LAYERS=0")
    table = Table(*names)
    wrong = 0
    for strategy, layers, (tied, rotary) in product(
        asked.only, asked.layers, ((False, False), (False, True), (True, False), (True, True))
    ):
        if layers != 6 and tied != rotary:  # all kinds at one depth, two at the others
            continue
        case = {
            "strategy": strategy, "layers": layers, "tied": tied, "rotary": rotary, "width": asked.width,
            "words": asked.words, "bucket_mb": asked.bucket_mb,
        }  # fmt: skip
        ours, plain = _run(case, "1"), _run(case, "0")
        pairs = list(zip(ours["losses"], plain["losses"], strict=False))
        apart = max((abs(a - b) for a, b in pairs), default=float("nan"))
        right = len(pairs) == 3 and max(ours["error"], plain["error"], apart) <= _TOLERANCE
        wrong += not right
        row = (
            strategy, str(layers), "tied" if tied else "untied", "rotary" if rotary else "learned",
            str(ours["regions"]), f"{ours['error']:.1e}", f"{apart:.1e}",
        )  # fmt: skip
        table.add_row(*row, style="" if right else "red")
        _CONSOLE.print(*row, "" if right else "WRONG")
    _CONSOLE.print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
