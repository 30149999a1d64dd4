"""Is every byte explained? Collectives of models on two ranks: causes, and bytes beside those counted.

    python -m benchmarks.collectives_explained [names]

A line per model and strategy: how many collectives, how many values travel in them, how many of these have a
line of the user's or the model library's, and the bytes of the plan beside those that left a rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.capture.sites import is_user_file
from tests.capture.zoo import ZOO, make
from tests.traffic import counted_bytes

STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate": {"mesh": {"dp": 2}},
    "shard": {"mesh": {"dp_shard": 2}, "strategy": "shard"},
    "pipeline": {"mesh": {"pp": 2}},
}


def measure(name: str, strategy: str) -> dict[str, int]:
    """One model and strategy, on this rank."""
    given = dict(STRATEGIES[strategy])
    mesh = given.pop("mesh")
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    compiled = fxdp.compile(make(name), axes, compute="eager", **given)
    torch.manual_seed(1)
    inputs = {key: _double(value) for key, value in ZOO[name][1](4).items()}
    with counted_bytes() as counted:
        loss = _loss(compiled(**inputs))
        loss.backward()
    rows = compiled.plan.collectives()
    needs = [need for row in rows for need in row.needs]
    return {
        "collectives": len(rows),
        "values": len(needs),
        "explained": sum(is_user_file(n.site.file) and n.site.line > 0 and n.read != "" for n in needs),
        "planned": sum(row.bytes for row in rows if row.kind != "send"),
        "counted": sum(counted.collectives),
        "planned_sends": sum(row.bytes for row in rows if row.kind == "send"),
        "sent": sum(counted.sends),
    }


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _loss(output: Any) -> Any:
    found = output.get("loss") if hasattr(output, "get") else None
    if found is not None:
        return found
    return output if isinstance(output, torch.Tensor) else output[0]


def measured(names: list[str]) -> list[tuple[str, str, Any]]:
    """All models and strategies, on this rank; an error in the place of what it refused."""
    found: list[tuple[str, str, Any]] = []
    for name in names:
        for strategy in STRATEGIES:
            try:
                found.append((name, strategy, measure(name, strategy)))
            except fxdp.FxdpError as error:
                found.append((name, strategy, str(error).partition("\n")[0]))
    return found


def main(names: list[str]) -> None:
    """Print a line for each."""
    first, second = fxdp.launch(measured, names or list(ZOO), nproc=2)
    for (name, strategy, one), (_, _, other) in zip(first, second, strict=True):
        if isinstance(one, str):
            print(f"{name:9} {strategy:10} refused: {one[:80]}")
            continue
        sent = one["sent"] + other["sent"]
        planned, counted = one["planned"] + one["planned_sends"], one["counted"] + sent
        equal = one["planned"] == one["counted"] and one["planned_sends"] == sent
        print(
            f"{name:9} {strategy:10} {one['collectives']:4} collectives, "
            f"{one['explained']} of {one['values']} values explained; "
            f"bytes {planned} planned, {counted} counted{'' if equal else '  DIFFERS'}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
