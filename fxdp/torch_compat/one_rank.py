"""`torch.distributed` as one device sees it: no process group, and collectives of one rank.

    dist.get_world_size()          1           dist.is_initialized()           False, but in a script by
                                               `fxdp run` that has made its own group of one rank
    dist.all_reduce(x)             x stays     dist.all_gather([out], x)       out.copy_(x)
    dist.nn.all_gather(x)          (x,)        dist.send(x, 1)                 refused

A model or script that sees the global batch must not communicate itself. fxdp and `torch.distributed` see the
real process group at the same time, in the same thread: each replacement asks which module has called it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from fxdp.errors import StateError
from fxdp.torch_compat import patch
from fxdp.torch_compat.distributed import has_lone_group
from fxdp.torch_compat.patch import Patch
from fxdp.torch_compat.permanent import replace_in_modules

__all__ = ["arguments_of_modules", "one_device", "one_device_for_good"]

_Arguments = Mapping[str, Any]
_OneRank = Callable[[_Arguments], Any]
"""What a function does for one rank, by its arguments' names."""


def one_device() -> tuple[Patch, ...]:
    """Return patches by which the calling thread's code sees one device, for `patched`."""
    return tuple(
        Patch(tuple(owners), name, functools.partial(_one_rank, act=act, sees=_always))
        for _, act, bound in _bindings()
        for name, owners in bound.items()
    )


def one_device_for_good(sees: Callable[[FrameType], bool]) -> None:
    """Let all code see one device wherever `sees(frame of the caller)` holds, until the process ends.

    For a process that runs a script of one device `sees` is always true.
    """
    for plain, act, bound in _bindings():
        replace_in_modules(bound, _one_rank(plain, act, sees))


def arguments_of_modules(frame: FrameType | None) -> Iterator[Any]:
    """Yield the arguments of each forward of a module and backward of a function in which a frame runs."""
    calls = _calls()
    while frame is not None:
        for name in calls.get(frame.f_code, ()):
            yield frame.f_locals.get(name)
        frame = frame.f_back


@functools.cache
def _calls() -> dict[CodeType, tuple[str, ...]]:
    """Return the code that calls a module's forward or a function's backward, and its arguments' names."""
    return {
        nn.Module._call_impl.__code__: ("args", "kwargs"),
        BackwardCFunction.apply.__code__: ("args",),
    }


def _always(_: FrameType) -> bool:
    return True


def _one_rank(plain: Callable[..., Any], act: _OneRank, sees: Callable[[FrameType], bool]) -> Any:
    signature = functools.cache(lambda: inspect.signature(plain))  # most are never called

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = _caller()
        if _is_communication(caller) or not sees(caller):
            return plain(*args, **kwargs)
        bound = signature().bind(*args, **kwargs)
        bound.apply_defaults()
        result = act(bound.arguments)
        return _Done() if bound.arguments.get("async_op") is True else result

    return call


def _caller() -> FrameType:
    """Return the frame that called a replacement, without the frames of guards and other replacements."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals in (globals(), vars(patch)):
        frame = frame.f_back
    assert frame is not None
    return frame


def _is_communication(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("fxdp.", "torch.distributed."))


class _Done:
    """The work of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return true."""
        return True

    is_success = is_completed


def _copied(target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise StateError(
            f"a collective of the model's own has room for {target.numel()} elements, expected "
            f"{source.numel()}: the model sees one device, which has one rank. Read dist.get_world_size() "
            "where it is used, not before the model is called"
        )
    target.detach().copy_(source.detach().view(target.shape))


def _only(values: Any) -> Any:
    if len(values) != 1:
        raise StateError(
            f"a collective of the model's own has a list of {len(values)}, expected 1: the model sees one "
            "device of one rank. Read dist.get_world_size() where it is used, not before the model is called"
        )
    return values[0]


def _refused(name: str, _: _Arguments) -> Any:
    raise StateError(
        f"torch.distributed.{name} was called by code that sees one device, which has no other rank; "
        "expected code for one device, or the call outside of the model"
    )


def _into_list(values: str, value: str) -> _OneRank:
    return lambda a: None if a[values] is None else _copied(_only(a[values]), a[value])


def _from_list(value: str, values: str) -> _OneRank:
    return lambda a: None if a[values] is None else _copied(a[value], _only(a[values]))


def _object_into_list(values: str, value: str) -> _OneRank:
    def act(a: _Arguments) -> None:
        if a[values] is not None:
            _only(a[values])
            a[values][0] = a[value]

    return act


def _into(target: str, source: str) -> _OneRank:
    return lambda a: _copied(a[target], a[source])


def _answer(value: Any) -> _OneRank:
    return lambda _: value


def _same(name: str) -> _OneRank:
    return lambda a: a[name]


_NOTHING = _answer(None)
_HOME: dict[str, dict[str, _OneRank]] = {
    "torch.distributed.distributed_c10d": {
        "is_initialized": lambda _: has_lone_group(),
        "get_world_size": _answer(1),
        "get_rank": _answer(0),
        "get_node_local_rank": _answer(0),
        "get_group_rank": _answer(0),
        "get_global_rank": _answer(0),
        "get_process_group_ranks": lambda _: [0],
        "barrier": _NOTHING,
        "monitored_barrier": _NOTHING,
        "all_reduce": _NOTHING,
        "all_reduce_coalesced": _NOTHING,
        "broadcast": _NOTHING,
        "reduce": _NOTHING,
        "broadcast_object_list": _NOTHING,
        "all_gather": _into_list("tensor_list", "tensor"),
        "all_gather_into_tensor": _into("output_tensor", "input_tensor"),
        "_all_gather_base": _into("output_tensor", "input_tensor"),
        "gather": _into_list("gather_list", "tensor"),
        "scatter": _from_list("tensor", "scatter_list"),
        "reduce_scatter": _from_list("output", "input_list"),
        "reduce_scatter_tensor": _into("output", "input"),
        "_reduce_scatter_base": _into("output", "input"),
        "all_to_all": lambda a: _copied(_only(a["output_tensor_list"]), _only(a["input_tensor_list"])),
        "all_to_all_single": _into("output", "input"),
        "all_gather_object": _object_into_list("object_list", "obj"),
        "gather_object": _object_into_list("object_gather_list", "obj"),
        "scatter_object_list": lambda a: a["scatter_object_output_list"].__setitem__(
            0, _only(a["scatter_object_input_list"])
        ),
        **{
            name: functools.partial(_refused, name)
            for name in (
                "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list",
            )
        },
    },
    "torch.distributed.nn.functional": {
        "all_reduce": _same("tensor"),
        "broadcast": _same("tensor"),
        "reduce": _same("tensor"),
        "all_gather": lambda a: (a["tensor"],),
        "gather": lambda a: (a["tensor"],),
        "scatter": lambda a: _only(a["tensors"]),
        "reduce_scatter": lambda a: _only(a["input_list"]),
        "all_to_all": lambda a: (_only(a["input_tensor_list"]),),
        "all_to_all_single": lambda a: a["input"].view(a["output"].shape),
        "_all_gather_base": lambda a: a["input_tensor"].view(a["output_tensor"].shape),
    },
    "torch.distributed._functional_collectives": {
        "wait_tensor": _same("tensor"),
        **{
            name: _same("self")
            for name in (
                "all_reduce", "broadcast", "all_gather_tensor", "all_gather_tensor_autograd",
                "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "all_to_all_single",
                "all_to_all_single_autograd", "all_reduce_coalesced", "all_gather_into_tensor_coalesced",
                "reduce_scatter_tensor_coalesced", "permute_tensor",
            )
        },
    },
}  # fmt: skip
"""Functions of torch that communicate or tell about ranks, by the module that defines them."""


def _bindings() -> list[tuple[Any, _OneRank, dict[str, list[dict[str, Any]]]]]:
    """Return each function, what it does for one rank, and the modules that bind it, by name.

    `from torch.distributed import get_rank as rank` binds a function under another name.
    """
    found: dict[int, tuple[Any, _OneRank, dict[str, list[dict[str, Any]]]]] = {}
    for home, functions in _HOME.items():
        defined = vars(importlib.import_module(home))
        for name, act in functions.items():
            if (plain := defined.get(name)) is not None:
                found[id(plain)] = plain, act, {}
    may_keep = not any(patch.is_guard(plain) for plain, _, _ in found.values())
    for module, owner in list(_owners()):
        for name in _binding_names(module, owner, found.keys(), may_keep):
            if (known := found.get(id(owner.get(name)))) is not None:
                known[2].setdefault(name, []).append(owner)
    return list(found.values())


def _owners() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in sys.modules.copy().items():
        if isinstance(module, ModuleType) and not name.startswith("fxdp."):
            yield name, vars(module)


class _Searched(NamedTuple):
    """An installed module's globals, as many as they were, and those that are functions of `_HOME`."""

    owner: dict[str, Any]
    size: int
    names: list[str]


@functools.cache
def _searched() -> dict[str, _Searched]:
    """Return what each installed module binds: a process has thousands, and each capture asks."""
    return {}


_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")})


def _binding_names(module: str, owner: dict[str, Any], ids: Collection[int], may_keep: bool) -> list[str]:
    """Return the names that a module binds to one of the functions.

    An installed module is searched again once it has another number of globals, any other module always.
    While functions are patched, a module may bind the guard of another name: nothing is kept.
    """
    before = _searched().get(module)
    if before is not None and before.owner is owner and before.size == len(owner):
        return before.names
    names = [name for name, value in list(owner.items()) if id(value) in ids]
    if may_keep and str(owner.get("__file__")).startswith(_INSTALLED):
        _searched()[module] = _Searched(owner, len(owner), names)
    return names
