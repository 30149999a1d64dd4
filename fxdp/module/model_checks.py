"""Check a model: supported class, device, and an optimizer that steps on the model's parameters.

A model that was copied, or moved to a different dtype after the optimizer was made, would train without
changing. A hook checks optimizer steps until the model's own optimizer has stepped.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fxdp.errors import InputError, MeshError, StateError, a_kind
from fxdp.ir.graph.model_tensors import is_sharded, local_of
from fxdp.module.function_module import as_module
from fxdp.module.module_wrapper import ModuleWrapper

_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")


def check_model(model: Any) -> nn.Module:
    """Return the model as a module, which a function becomes; raise if it is not a plain one on one device.

    Raises
    ------
    InputError : not a module; a scripted module; a module that is compiled, or wrapped for data parallelism,
        at any depth; lazy parameters without shapes; parameters that are already sharded.
    """
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is {a_kind(model)}, expected a torch.nn.Module, whose parameters are trained, or a "
            "function that uses modules"
        )
    children = [(f"its part {n!r}", m) for n, m in _children(model)]
    for where, module in [("the model", model), *children]:
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{where} is a torch.jit.ScriptModule, which has no Python code that could be captured; "
                "expected the module that was scripted or traced"
            )
        _check_plain(where, module)
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{', '.join(lazy[:3])} of the model have no shape yet (lazy modules); expected a model that "
            "knows its shapes: call it once on an example batch before"
        )
    sharded = [n for n, p in model.named_parameters() if is_sharded(p)]
    if sharded:
        raise InputError(
            f"parameters of the model are DTensors ({', '.join(sharded[:3])}, ...), which somebody sharded "
            "already; expected plain ones: leave out fully_shard, or whatever made them"
        )
    return model


def device_type(model: nn.Module) -> str:
    """Return the device type of the model's tensors; cpu for a model without tensors.

    Raises
    ------
    InputError : the tensors are on several types of devices.
    """
    types = sorted({local_of(t).device.type for t in [*model.parameters(), *model.buffers()]})
    if len(types) > 1:
        raise InputError(f"the model's parameters and buffers are on several device types {types}; use one")
    return types[0] if types else "cpu"


def home_of(model: nn.Module, mesh: Any, shards: bool) -> str:
    """Return the device type for training: the model's own, or the mesh's if the model is on the meta device.

    Raises
    ------
    InputError : the model has no values, and the strategy does not create values.
    """
    here = device_type(model)
    if here != "meta":
        return here
    if not shards:
        raise InputError(
            "the model is on the meta device and has no values; expected strategy='shard' or 'optimizer', "
            "which draw them part by part, or a model on its device"
        )
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    return "cuda" if torch.cuda.is_available() else "cpu"


def no_values(names: Collection[str]) -> StateError:
    """Return the error about tensors that got no values, of a model from the meta device."""
    return StateError(
        f"the model comes from the meta device, and nothing gave values to {', '.join(sorted(names))}; "
        "expected that their modules have a method reset_parameters(), or the model _init_weights(module), "
        "which draw them, or that all are loaded by load_state_dict() or fxdp.load() before the first call"
    )


def check_home(model: nn.Module, home: str) -> None:
    """Raise if the model has left the type of device for which the model was compiled.

    Raises
    ------
    MeshError : names both device types.
    """
    here = device_type(model)
    if here != home:
        raise MeshError(
            f"the model was moved to {here} after it was compiled for {home}; expected it to stay there: "
            "move the model first, then call fxdp.compile"
        )


def check_put(model: nn.Module, *, sharded: bool) -> None:
    """Raise if a replacement of a parameter cannot serve as a parameter.

    Raises
    ------
    StateError : plain tensors, or unsharded parameters in a `sharded` model; the message names all.
    """
    own = list(model.named_parameters(remove_duplicate=False))
    plain = [name for name, put in own if not isinstance(put, nn.Parameter)]
    if plain:
        raise StateError(
            f"{', '.join(plain)} of the model is no parameter now but a tensor, as in torch.func."
            "functional_call(compiled, ...); expected that call in the forward of the module that is compiled"
        )
    full = [name for name, put in own if sharded and put.dim() > 0 and not is_sharded(put)]
    if full:
        raise StateError(
            f"{', '.join(full)} of the model is complete, where the other parameters are sharded; expected "
            "all "
            "layers to be there before fxdp.compile, and values by load_state_dict() or in place"
        )


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside of a model, including compiled modules, which hide behind their models."""
    found = []
    for path, owner in model.named_modules():
        for name, child in owner._modules.items():
            if child is not None:
                found.append((f"{path}.{name}".lstrip("."), child))
    return found


def _check_plain(where: str, module: nn.Module) -> None:
    if isinstance(module, ModuleWrapper):
        raise InputError(
            f"{where} is compiled by fxdp already; expected it as it was before: compile the entire model "
            "once"
        )
    kind = type(module)
    if kind.__module__.startswith(_WRAPPERS):
        raise InputError(
            f"{where} is {a_kind(module)}, which reduces gradients itself; expected what is inside of it "
            "(.module), as fxdp finds and inserts all communication"
        )


class OptimizerWatch:
    """Hook that checks the first optimizer that steps on parameters like the module's.

    Raises
    ------
    StateError (from `optimizer.step()`) : the optimizer holds tensors of the same shapes as the model's
        parameters, but none of the parameters, and has no gradient to step on while the model has.
    """

    def __init__(self, module: nn.Module) -> None:
        trainable = [p for p in module.parameters() if p.requires_grad]
        # for speed, an optimizer may step on the local shard of a DTensor; no weak references to parameters,
        # because torch.utils.swap_tensors and redistributions of DTensors refuse tensors that have any
        self._own = frozenset(id(t) for p in trainable for t in (p, local_of(p)))
        self._module = weakref.ref(module)
        self._shapes = Counter(tuple(p.shape) for p in trainable)
        self._handle = register_optimizer_step_pre_hook(self._check)
        self._done = not trainable

    def remove_when_done(self) -> bool:
        """Remove the hook after a check has succeeded; a hook cannot remove itself while running."""
        if self._done:
            self.remove()
        return self._done

    def remove(self) -> None:
        """Stop checking optimizers; torch would hold the hook, and objects bound to the hook, forever."""
        self._handle.remove()

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if self._done:
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._done = any(id(p) in self._own for p in stepped)
        if not self._done and self._is_misdirected(stepped):
            raise StateError(
                f"{type(optimizer).__name__} was built on {len(stepped)} tensors of which none is a "
                "parameter of the compiled model, though they have the same shapes (a copy of the model, "
                "or the model before .to()?). Build it on compiled.parameters()"
            )

    def _is_misdirected(self, stepped: list[torch.Tensor]) -> bool:
        shapes = Counter(tuple(p.shape) for p in stepped)
        if shapes != self._shapes or any(p.grad is not None for p in stepped):
            return False
        module = self._module()
        return module is not None and any(p.grad is not None for p in module.parameters())
