"""The launch variables of torchrun, and the variables that fxdp sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fxdp.errors import MeshError

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MOST_RANKS = 1 << 20
_LONGEST = 1e7  # seconds, 115 days: longer timeouts overflow in socket calls


def integer(env: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return the value of a variable; raise `MeshError` if it is no integer in these bounds."""
    text = env.get(name)
    if not text:
        return default
    digits = text.isascii() and text.isdigit() and len(text) < 10  # rejects numbers of any length
    if not digits or not least <= int(text) <= most:
        raise MeshError(
            f"environment variable {name} is {text[:30]!r}; expected an integer from {least} to {most}"
            + (", as torchrun sets it" if name in _LAUNCH_VARIABLES else "")
        )
    return int(text)


def number(env: Mapping[str, str], name: str, default: float) -> float:
    """Return the value of a variable; raise `MeshError` if it is no number, negative or too large."""
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST:
        raise MeshError(
            f"environment variable {name} is {text!r}; expected a number >= 0, and at most {_LONGEST:g}"
        )
    return value


_MOST_RESTARTS = 1 << 20
_OF_TORCHRUN = (
    *_LAUNCH_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes that torchrun started."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    ranks_here: int = 0
    """The number of torchrun's processes on this host; 0 if unknown."""
    restarts: int = 0
    """The number of restarts by torchrun with the same store, in which old failure broadcasts remain."""
    agent_store: bool = False
    """True if the store belongs to torchrun, so that the store exists before any rank starts."""

    @property
    def several_hosts(self) -> bool:
        """True if some of the processes may be on other hosts."""
        return self.ranks_here < self.world_size


def launch_of(env: Mapping[str, str]) -> Launch | None:
    """Return the launch that an environment describes; None if torchrun did not start this process."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    world_size = integer(env, "WORLD_SIZE", 1, 1, MOST_RANKS)
    missing = [name for name in _LAUNCH_VARIABLES if not env.get(name) and name != "LOCAL_RANK"]
    rank = integer(env, "RANK", 0, 0, world_size - 1)
    if missing:
        import torch.distributed as dist  # here alone: a command checks its settings before it imports torch

        if world_size == 1 or dist.is_initialized():  # another launcher, with a group of its own
            return None
        raise MeshError(
            f"the environment says WORLD_SIZE={world_size}, but {', '.join(missing)} is not set; "
            f"expected all of {', '.join(_LAUNCH_VARIABLES)}: launch with torchrun, or call "
            "torch.distributed.init_process_group yourself before fxdp.compile"
        )
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=integer(env, "LOCAL_RANK", rank, 0, MOST_RANKS),
        master_addr=env["MASTER_ADDR"],
        master_port=integer(env, "MASTER_PORT", 0, 1, 65_535),
        ranks_here=integer(env, "LOCAL_WORLD_SIZE", 0, 0, MOST_RANKS),
        restarts=integer(env, "TORCHELASTIC_RESTART_COUNT", 0, 0, _MOST_RESTARTS) if shared else 0,
        agent_store=shared,
    )


def become(place: Launch) -> None:
    """Make this process a rank: set torchrun's variables, for a store in another process."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def see_one_gpu(local_rank: int) -> None:
    """Leave the rank's own GPU visible, as device 0; before CUDA is used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return
    devices = visible.split(",") if visible else [str(local_rank)] * (local_rank + 1)
    os.environ.update(CUDA_VISIBLE_DEVICES=",".join(devices[local_rank : local_rank + 1]), LOCAL_RANK="0")


def world_size_asked() -> int:
    """Return the number of ranks that the environment tells a process to be one of; 1 if it does not."""
    return integer(os.environ, "WORLD_SIZE", 1, 1, MOST_RANKS)


def without_gpus() -> dict[str, str]:
    """Return the environment for a process that sees no GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def hide_launch() -> None:
    """Take torchrun's variables from the environment."""
    for name in [name for name in os.environ if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def log_into(folder: str) -> None:
    """Let loggers that have a process and a server, on a rank above 0, keep what they log in a folder."""
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder)


def lead_gloo_to(interface: str) -> None:
    """Let gloo use this network interface, unless the environment names one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def compile_into(folder: str) -> None:
    """Let Inductor keep compiled code in this folder, also in processes that are forked from now on."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
