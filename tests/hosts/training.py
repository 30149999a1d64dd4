"""What runs on the hosts under torchrun: a few exact steps, then steps until a host or a rank is lost.

python training.py PLACES RANKS_OF_EACH ENDPOINT FOLDER [stages] [sharded]
                              writes FOLDER/RANK.json after the steps, FOLDER/RANK.end when it ends

    this process ──┬── enters host 0: torchrun ──┬── rank 0
                   │                             └── rank 1
                   └── enters host 1: torchrun ──┬── ...

PLACES are processes, one on each host. All others are forks, as each would import torch otherwise: torchrun
runs by its Python interface. It ends when they have ended, at once by an error where one of them does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

import fxdp
from fxdp.ranks.comms import Comms, live_comms
from fxdp.transport import cpu_transport
from tests.captures import traced_once
from tests.hosts.machines import enter
from tests.rank_host import know_capture

STEPS = 5


def make() -> nn.Module:
    torch.manual_seed(0)
    # one gradient is too large for messages
    return nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 128), nn.Linear(128, 3)
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(11, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (11,), generator=generator)


def main(places: str, each: str, endpoint: str, folder: str, *options: str) -> None:
    know_capture()
    hosts = [int(place) for place in places.split(",")]
    config = LaunchConfig(
        len(hosts), len(hosts), int(each), rdzv_backend="c10d", rdzv_endpoint=endpoint, run_id="1",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    for number, place in enumerate(hosts):
        if os.fork() == 0:
            run_host(place, config, Path(folder), number, *options)
    for _ in hosts:
        _, status = os.wait()
        if status:
            sys.exit(f"a host ended with status {os.waitstatus_to_exitcode(status)}")


def run_host(place: int, config: LaunchConfig, folder: Path, number: int, *options: str) -> NoReturn:
    """In a fork: all that a host runs; never returns."""
    log = os.open(folder / f"output {number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        enter(place)
        elastic_launch(config, run_rank)(str(folder), *options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_rank(path: str, *options: str) -> None:
    with traced_once(Path(path) / "joints"):
        _train(path, *options)


def _train(path: str, *options: str) -> None:
    # torchrun ends the ranks beside a killed one at once: this one is to hear the news, too
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, rank, world = Path(path), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # over so quick a link all gradients are summed
    link = 1000.0 if "summed" in options else None
    if "summed" in options:  # what is measured while other tests run may say that gloo alone is quicker
        cpu_transport.is_cheaper = lambda *_: True  # type: ignore[attr-defined, assignment]
    compiled = fxdp.compile(
        make(), loss_fn=F.cross_entropy, backend="eager", communication={"link_gbit": link}
    )
    step = _steps_of(compiled, [part.tensor_split(world)[rank] for part in batch()])
    losses = [step() for _ in range(STEPS)]
    transports = sorted({row.by for row in compiled.plan.communication if row.gradient})
    found = _seen(*live_comms(), losses=losses, process=os.getpid(), transports=transports)
    found["gathered"] = [row.cause for row in compiled.plan.communication if row.op == "all_gather"]
    if "stages" in options:
        found["memory of a stage"] = _memory_of_a_stage()
    if "sharded" in options:
        found["sharded"] = _sharded_losses()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    try:
        while True:
            step()
            time.sleep(0.02)
    except fxdp.FxdpError as error:
        (folder / f"{rank}.end").write_text(json.dumps([time.time(), str(error)]))
        time.sleep(1.0)  # torchrun ends all ranks when it sees the first one end
        raise


def _steps_of(compiled: nn.Module, part: Sequence[Tensor]) -> Callable[[], float]:
    """A step on this rank's part of the batch; gives the loss before it."""
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

    def step() -> float:
        loss = compiled(part[0], target=part[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    return step


def _sharded_losses() -> dict[str, list[float]]:
    """Rows over all ranks, with parts of full values left to a host's, and over those of a host."""
    rank, world = dist.get_rank(), dist.get_world_size()
    over_all = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    of_a_host = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    part = [part.tensor_split(world)[rank] for part in batch()]
    found = {}
    for name, mesh, regather in (
        ("over all", over_all, True),
        ("left to a host", over_all, world // 2),
        ("of a host", of_a_host, True),
    ):
        compiled = fxdp.compile(
            make(), mesh, strategy="shard", reshard_after_forward=regather, loss_fn=F.cross_entropy,
            backend="eager",
        )  # fmt: skip
        step = _steps_of(compiled, part)
        found[name] = [step() for _ in range(STEPS)]
    return found


def _seen(comms: Comms, **more: Any) -> dict[str, Any]:
    """Over which addresses this rank talks, and how."""
    return {
        "control": sorted(peer.connection.getpeername()[0] for peer in comms.control.peers),
        "gloo": sorted({there for item in comms._sockets for there, _ in (item.here, item.there)}),
        "memory": comms.transport.memory is not None,
        "seconds per byte": None if comms.transport.cost is None else comms.transport.cost.per_byte,
        **more,
    }


def _memory_of_a_stage() -> bool:
    """Whether ranks share memory where those of a stage are on one host, and the stages on two."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    staged = fxdp.compile(model, mesh, loss_fn=F.cross_entropy, pipeline={"microbatches": 2}, backend="eager")
    x, y = (part.tensor_split(2)[mesh.get_local_rank("dp")] for part in batch())
    staged(x, target=y).backward()
    return any(comms.transport.memory is not None for comms in live_comms())


if __name__ == "__main__":
    main(*sys.argv[1:])
