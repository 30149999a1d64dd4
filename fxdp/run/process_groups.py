"""Ranks that a script starts or joins itself: one is the script's own process, more are refused.

dist.init_process_group("gloo")        a group of one rank, as by `torchrun --nproc-per-node 1`
mp.spawn(main, args, nprocs=1)         main(0, *args), in this process
mp.spawn(main, args, nprocs=4)         refused with the line: the ranks are those of `fxdp run`
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fxdp.errors import StateError, add_note
from fxdp.run.script_lines import script_line
from fxdp.settings.launch import world_size_asked
from fxdp.torch_compat import Patch, around, end_lone_group

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "bin/deepspeed")


def group_patches() -> Iterator[Patch]:
    """Yield the replacements for process groups and for starts of ranks."""
    owners = (vars(dist), vars(dist.distributed_c10d))
    yield Patch(owners, "init_process_group", around(_init))
    yield Patch(owners, "destroy_process_group", around(_destroy))
    spawning = (vars(torch.multiprocessing),)
    yield Patch(spawning, "spawn", around(_spawn))
    yield Patch(spawning, "start_processes", around(_spawn))


def refuse_launcher(command: Any, environment: Mapping[str, str] | None) -> None:
    """Refuse the start of a process that is to be one of several ranks.

    Raises
    ------
    StateError : its environment says that there are several, or it is a launcher.
    """
    ranks = (environment or {}).get("WORLD_SIZE", "1")
    words = [command] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    text = " ".join(os.fsdecode(word) for word in words[:4])  # python -m torch.distributed.run
    launcher = next((os.path.basename(word) for word in text.split()[:4] if word.endswith(_LAUNCHERS)), "")
    if launcher or ranks not in ("", "1"):
        what = launcher or f"a process with WORLD_SIZE={ranks}"
        raise _several(f"{script_line()} starts {what}")


def add_remedy(error: BaseException) -> None:
    """Add a note to the error of a script that reads a variable of torchrun."""
    if isinstance(error, KeyError) and error.args[:1] and error.args[0] in _OF_TORCHRUN:
        name, default = error.args[0], "0" if "RANK" in error.args[0] else "1"
        add_note(
            error,
            f"torchrun sets {name}; by `fxdp run` the script sees one device, without torchrun: expected "
            f"os.environ.get({name!r}, {default!r})",
        )


def _several(what: str) -> StateError:
    return StateError(
        f"{what}; expected one process, as `fxdp run` starts the ranks and shows each of them one device. "
        "Run the script in its form for one device (a world size of 1, devices=1), or without `fxdp run`, by "
        "its own launcher, with fxdp.compile (docs/many-devices.md)"
    )


def _init(
    plain: Callable[..., None],
    backend: Any = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Make a group of this one rank.

    Raises
    ------
    StateError : the script asks for more ranks.
    """
    asked = world_size if world_size > 0 else _asked(init_method)
    if asked > 1:
        raise _several(f"{script_line()} calls init_process_group for {asked} ranks")
    plain(backend, None, timeout, 1, 0, HashStore(), *args, **kwargs)


def _asked(init_method: str | None) -> int:
    url = urllib.parse.urlparse(init_method or "env://")
    named = urllib.parse.parse_qs(url.query).get("world_size")
    return int(named[0]) if named else world_size_asked()


def _destroy(plain: Callable[..., None], group: Any = None) -> None:
    """Forget the script's own groups; those of `fxdp run` stay."""
    if group is None or group is dist.GroupMember.WORLD:
        end_lone_group()


def _spawn(
    plain: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *_: Any,
    **__: Any,
) -> Any:
    """Call the function of the only rank in this process.

    Raises
    ------
    StateError : the script asks for more ranks.
    """
    if nprocs > 1:
        raise _several(f"{script_line()} starts {nprocs} processes by torch.multiprocessing")
    fn(0, *args)
    return None if join else _Joined()


class _Joined:
    """The context of processes that have ended."""

    processes: Sequence[Any] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return true at once."""
        return True
