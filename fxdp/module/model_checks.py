"""Which models fxdp takes, and where they live."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxdp.errors import InputError
from fxdp.ir.model_tensors import held, is_sharded
from fxdp.module.stand_in import StandIn

_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")


def check_model(model: Any) -> None:
    """Refuse what is no plain module on one device.

    Raises
    ------
    InputError : no module; one that is compiled, or wrapped for data parallelism, at any depth; parameters
        that are sharded.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, expected a torch.nn.Module, whose parameters are trained"
        )
    children = [(f"its part {n!r}", m) for n, m in _children(model)]
    for where, module in [("the model", model), *children]:
        _check_plain(where, module)
    sharded = [n for n, p in model.named_parameters() if is_sharded(p)]
    if sharded:
        raise InputError(
            f"parameters of the model are DTensors ({', '.join(sharded[:3])}, ...), which somebody sharded "
            "already; expected plain ones: leave out fully_shard, or whatever made them"
        )


def device_type(model: nn.Module) -> str:
    """Where the model lives: the type of its tensors' device, cpu for a model without any.

    Raises
    ------
    InputError : its tensors are on several types of devices.
    """
    types = sorted({held(t).device.type for t in [*model.parameters(), *model.buffers()]})
    if len(types) > 1:
        raise InputError(f"the model's parameters and buffers are on several device types {types}; use one")
    return types[0] if types else "cpu"


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules inside of a model, compiled ones among them, which hide themselves behind their models."""
    found = []
    for path, owner in model.named_modules():
        for name, child in owner._modules.items():
            if child is not None:
                found.append((f"{path}.{name}".lstrip("."), child))
    return found


def _check_plain(where: str, module: nn.Module) -> None:
    if isinstance(module, StandIn):
        raise InputError(
            f"{where} is compiled by fxdp already; expected it as it was before: compile the whole model once"
        )
    kind = type(module)
    if kind.__module__.startswith(_WRAPPERS):
        raise InputError(
            f"{where} is a {kind.__name__}, which reduces gradients itself; expected what is inside of it "
            "(.module), as fxdp finds and inserts all communication"
        )
