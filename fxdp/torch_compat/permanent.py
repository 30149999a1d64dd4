"""All changes of torch or Python that every thread sees, most of which last until the process ends.

    replace_for_good("sys:excepthook", make)      sys.excepthook = make(sys.excepthook), a row of PERMANENT

All other changes go through `patch.py`, for one thread and a limited time. A row gives the reason why a
thread-local change is not possible, the effect on code that does not use fxdp, and the event that restores
the former state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PERMANENT", "Permanent", "replace_for_good", "replace_in_modules"]


@dataclass(frozen=True)
class Permanent:
    """One change that all threads see."""

    name: str
    """The attribute as `module:path`, or a description if no attribute is changed."""
    where: str
    """The module of fxdp that makes the change."""
    since: str
    """The event that triggers the change."""
    reason: str
    """The reason why a guard for one thread (`patch.py`) is not enough."""
    reach: str
    """The effect on code that does not use fxdp."""
    ends: str
    """The event that restores the former state."""


_HANDLERS = "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers"
_NEVER = "never: another library may have chained to it since"

PERMANENT: tuple[Permanent, ...] = (
    Permanent(
        "sys:excepthook", "ranks/hooks.py", "the first mesh of several ranks",
        "Python asks it once, when the process ends",
        "an error is told to the other ranks, then the former hook is called", _NEVER,
    ),
    Permanent(
        "threading:excepthook", "ranks/hooks.py", "the first mesh of several ranks",
        "it is asked in the thread that has failed, whichever that is",
        "nothing for threads that have called no compiled module: the former hook is called", _NEVER,
    ),
    Permanent(
        "sys:unraisablehook", "ranks/hooks.py", "the first mesh of several ranks",
        "Ctrl-C inside of a destructor is dropped in whichever thread runs that",
        "Ctrl-C is raised again 50 ms later; all other errors go to the former hook", _NEVER,
    ),
    Permanent(
        "the handler of SIGTERM, and the descriptor to which Python writes signals", "ranks/hooks.py",
        "the first mesh of several ranks", "signals are the process's",
        "the other ranks are told, then the process ends by the signal as before; nothing where either "
        "is in use", "the interpreter's exit, and in forked children",
    ),
    Permanent(
        "the handler of SIGURG", "ranks/liveness/interrupt.py", "the first mesh of several ranks",
        "signals are the process's",
        "a system call of the main thread is interrupted and goes on; nothing where it has a handler",
        "never: a signal that comes late would meet none",
    ),
    Permanent(
        "the handler of SIGTERM while ranks run", "ranks/launcher.py", "fxdp.launch",
        "signals are the process's", "SIGTERM raises SystemExit; nothing where it has a handler",
        "the end of fxdp.launch",
    ),
    Permanent(
        "torch.distributed.tensor:DTensor.data", "torch_compat/dtensor.py", "the first sharded parameter",
        "any thread may assign to the data of a sharded parameter",
        "tensors without the mark of a parameter of fxdp's: torch's own, one attribute asked before",
        "never: a copy of a parameter has the mark, too",
    ),
    Permanent(
        _HANDLERS, "torch_compat/dtensor_ops.py", "the first sharded parameter",
        "any thread may compute with sharded parameters, autograd's among them",
        "tensors on meshes without parameters of fxdp's: torch's own, after each operand was asked for its "
        "mesh; meanwhile torch has no handler for that op", "never: gradients and copies outlive their model",
    ),
    Permanent(
        "torch._inductor.lowering:lowerings", "torch_compat/inductor.py", "the first compilation by Inductor",
        "graphs ask whether an op is in the table, for which no entry of one thread can stand",
        "addmm_ calls its kernel, as Inductor does by itself unless the environment says CI; the other op "
        "is fxdp's own", "never: code may be compiled at any time",
    ),
    Permanent(
        "torch._dynamo.backends.registry:_BACKENDS", "torch_compat/dynamo.py",
        "the import of fxdp.dynamo.backend",
        "torch.compile(backend='fxdp') finds a backend there in any thread", "one more name of a backend",
        "never, as for the backend of an installed package",
    ),
    Permanent(
        "torch.distributed.distributed_c10d:_world.pg_group_ranks", "torch_compat/distributed.py",
        "each process group of fxdp's", "torch keeps there which ranks a process group has",
        "nothing: one more group of fxdp's own", "dist.destroy_process_group",
    ),
    Permanent(
        "the device of torch.distributed's group of all ranks", "torch_compat/distributed.py",
        "each process group of some ranks", "NCCL would split the new group from it, which takes all ranks",
        "groups that another thread makes at the same moment are not split either", "once the group is made",
    ),
    Permanent(
        "the functions of torch.distributed that communicate or tell about ranks",
        "torch_compat/one_rank.py", "the first global tensor",
        "a module may be called in any thread, and its end is not told: no block for a guard of one thread",
        "one Python frame more in each call; then torch's own, unless a module's forward or an autograd "
        "function's backward with global tensors is the caller",
        "never: global tensors may be made at any time",
    ),
    Permanent(
        "the first of warnings.filters", "capture/patches/silence.py", "each capture",
        "C code reads this very list", "nothing: the filter applies to the thread that captures",
        "the end of the capture",
    ),
    Permanent(
        "os.environ", "settings/launch.py", "the start of a rank by fxdp.launch; the first gloo group",
        "torch and C++ libraries read it in any thread",
        "the variables of torchrun in a process of fxdp.launch; GLOO_SOCKET_IFNAME where it is not set",
        "never: process groups may be made at any time",
    ),
    Permanent(
        "the handlers of SIGINT, SIGTERM and SIGHUP while ranks run", "run/ranks.py", "fxdp run",
        "signals are the process's", "nothing: no other code runs in that process", "the end of the script",
    ),
    Permanent(
        "sys:argv, sys:modules, sys:path", "run/script.py", "fxdp run",
        "the process is the script's", "nothing: no other code runs in that process", _NEVER,
    ),
    Permanent(
        "sys:stdin", "run/standard_input.py", "fxdp run",
        "the process is the script's", "nothing: no other code runs in that process", _NEVER,
    ),
    Permanent(
        "the default process group of torch.distributed", "torch_compat/distributed.py", "fxdp run",
        "the process is the script's, and sees one device", "torch.distributed is not initialized",
        "the end of the script",
    ),
    Permanent(
        "sys:modules, sys:path", "cli/target.py", "a command of `fxdp` that is given a file",
        "the process is the command's", "nothing: no other code runs in that process", "never",
    ),
)  # fmt: skip
"""All permanent changes; `tests/torch_compat/test_permanent.py` finds a change without a row."""


def replace_for_good(name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute that has a row in `PERMANENT` by `make(current value)`.

    Raises
    ------
    KeyError : no row has this name.
    """
    if name not in {row.name for row in PERMANENT}:
        raise KeyError(f"{name} has no row in PERMANENT, expected one that says why it is replaced for good")
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, attribute, make(getattr(owner, attribute)))


def replace_in_modules(bound: Mapping[str, Sequence[dict[str, Any]]], value: Any) -> None:
    """Replace a function of `torch.distributed` in the modules that bind it, given by name."""
    for name, owners in bound.items():
        for owner in owners:
            owner[name] = value
