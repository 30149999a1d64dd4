"""Is every byte explained? Collectives of models on two ranks: causes, and bytes beside those counted.

    python -m benchmarks.conformance.collectives_explained [names]

A line per model and strategy, as soon as it is known: how many collectives, how many values travel in them,
how many of these have a line of the user's or the model library's, and the bytes of the plan beside those
that left a rank. The exit code is 1 where a value has no line, or bytes differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.capture.locations import is_user_file
from tests.capture.zoo import ZOO, make
from tests.captures import captured_once
from tests.traffic import counted_bytes

STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate": {"mesh": {"dp": 2}},
    "shard": {"mesh": {"dp_shard": 2}, "strategy": "shard"},
    "pipeline": {"mesh": {"pp": 2}},
}


def measure(name: str, strategy: str) -> dict[str, int]:
    """One model and strategy, on this rank; sends are those of both ranks."""
    given = dict(STRATEGIES[strategy])
    mesh = given.pop("mesh")
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    compiled = fxdp.compile(make(name), axes, backend="eager", **given)
    torch.manual_seed(1 if "pp" in mesh else dist.get_rank())  # a batch of each data rank
    inputs = {key: _double(value) for key, value in ZOO[name][1](4).items()}
    _loss(compiled(**inputs)).backward()  # apart: who counts hears each op of the capture, too
    with counted_bytes() as counted:
        _loss(compiled(**inputs)).backward()
    rows = compiled.plan.collectives()
    needs = [need for row in rows for need in row.needs]
    sent: list[int] = [0, 0]
    dist.all_gather_object(sent, sum(counted.sends))
    return {
        "collectives": len(rows),
        "values": len(needs),
        "explained": sum(
            is_user_file(n.location.file) and n.location.line > 0 and n.read != "" for n in needs
        ),
        "planned": sum(row.bytes for row in rows if row.kind != "send"),
        "counted": sum(counted.collectives),
        "planned sends": sum(row.bytes for row in rows if row.kind == "send"),
        "sent": sum(sent),
    }


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _loss(output: Any) -> Any:
    found = output.get("loss") if hasattr(output, "get") else None
    if found is not None:
        return found
    return output if isinstance(output, torch.Tensor) else output[0]


def _is_right(one: dict[str, int]) -> bool:
    bytes_agree = one["planned"] == one["counted"] and one["planned sends"] == one["sent"]
    return bytes_agree and one["explained"] == one["values"]


def _text(one: dict[str, int]) -> str:
    planned, counted = one["planned"] + one["planned sends"], one["counted"] + one["sent"]
    return (
        f"{one['collectives']:4} collectives, {one['explained']} of {one['values']} values explained; "
        f"bytes {planned} planned, {counted} counted{'' if _is_right(one) else '  DIFFERS'}"
    )


def measured(names: list[str]) -> bool:
    """All models and strategies, on this rank; the first one prints. Whether all is right."""
    right = True
    for name in names:
        with captured_once():
            for strategy in STRATEGIES:
                start = time.perf_counter()
                try:
                    one = measure(name, strategy)
                    right, text = right and _is_right(one), _text(one)
                except fxdp.FxdpError as error:
                    text = f"refused: {str(error).partition(chr(10))[0][:80]}"
                if dist.get_rank() == 0:
                    seconds = time.perf_counter() - start
                    print(f"{name:9} {strategy:10} {text} ({seconds:.1f} s)", flush=True)
    return right


def main() -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ZOO)} (default: all)")
    asked = parser.parse_args().names or list(ZOO)
    if unknown := set(asked) - ZOO.keys():
        parser.error(f"no models {sorted(unknown)}; there are {', '.join(ZOO)}")
    hf.logging.set_verbosity_error()
    for name in asked:
        make(name)  # imports the library's files here, once for both ranks, which are forks
    return 0 if all(fxdp.launch(measured, asked, nproc=2)) else 1


if __name__ == "__main__":
    sys.exit(main())
