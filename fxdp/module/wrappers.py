"""What must not be put around a compiled module, found by what it asks of the module inside.

    DistributedDataParallel, torch.compile      read an attribute of the module in their constructor, as does
                                                Accelerate before it wraps
    fully_shard, replicate                      register a hook before its forward
    DistributedDataParallel around a parent     is running when the compiled module is called

All would sum gradients twice, shard what programs read, or trace what is compiled already.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxdp.errors import InputError, StateError, a_kind
from fxdp.module.module_wrapper import ModuleWrapper
from fxdp.torch_compat import READ_BY_WRAPPERS, running_ddp, running_transform

_TRAINERS = (
    "fxdp.integrations.transformers.compile_trainer(trainer)",
    "fxdp.integrations.accelerate.compile_accelerator(accelerator)",
    "Trainer(strategy=fxdp.integrations.lightning.FxdpStrategy())",
)
_ASKED = {**READ_BY_WRAPPERS, "_is_accelerate_prepared": "accelerator.prepare"}
"""Also Accelerate's, as Trainer uses it: it would scale losses, where it does not wrap, too."""
_WRAPPING = ("torch.distributed.fsdp.", "torch.distributed._composable.")


class _LazyHook:
    """What lazy modules have: torch 2.15 asks the class for it, and the module itself when it is called."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise _refused("torch.compile(compiled)")


class Bare(ModuleWrapper):
    """A stand-in around which nothing can be put, in loops that are written for what would be.

    Raises
    ------
    InputError : somebody tries.
    """

    _initialize_hook = _LazyHook()

    def __dir__(self) -> list[str]:
        """The attributes of the module, for tools that read all of them."""
        return [name for name in super().__dir__() if name != "_initialize_hook"]  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        wrapper = _ASKED.get(name)
        if wrapper is not None:
            raise _refused(f"{wrapper}(compiled)")
        return super().__getattr__(name)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Call a function before each call of the compiled module, with this rank's part."""
        if str(getattr(hook, "__module__", "")).startswith(_WRAPPING):
            owner = a_kind(getattr(hook, "__self__", hook))
            raise _refused(f"fully_shard, replicate or what else has the hook of {owner}")
        return super().register_forward_pre_hook(hook, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """For loops that accumulate gradients, as with `DistributedDataParallel`; it changes nothing here.

        Each backward sums its gradients over the ranks, inside of this context, too. So after any of them
        `grad` holds what one device would have accumulated so far, and the numbers of such a loop are exact.
        To communicate once for several parts of a batch, give them in one call with `microbatches=`.
        """
        return nullcontext()

    def __prepare_scriptable__(self) -> NoReturn:
        """What `torch.jit.script` asks a module for first."""
        raise _refused("torch.jit.script(compiled)")

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: it is compiled already."""
        raise _refused("compiled.compile()")


def refuse_surroundings(model: nn.Module) -> None:
    """Refuse a call from inside of what transforms code, or of a `DistributedDataParallel`.

    The latter would reduce the model's gradients, too.

    Raises
    ------
    InputError : it does.
    StateError : a transform of torch.func, or a tracer, calls it.
    """
    refuse_transforms("called")
    ddp = running_ddp()
    if ddp is None or not torch.is_grad_enabled():
        return
    reduced = {id(p) for p in ddp.parameters() if p.requires_grad}
    if any(id(p) in reduced for p in model.parameters()):
        raise _refused(f"DistributedDataParallel({type(ddp.module).__name__}), of which it is a part")


def refuse_transforms(done: str) -> None:
    """Refuse to be `done`, as called, inside of what transforms code.

    Raises
    ------
    StateError : a transform of torch.func, or a tracer, runs.
    """
    if transform := running_transform():
        raise StateError(
            f"a compiled module was {done} inside of {transform}, which cannot look into its programs; "
            "expected calls on plain tensors: transform or export the model itself, compiled.module"
        )


def _refused(what: str) -> InputError:
    """The error about a wrapper."""
    return InputError(
        f"{what}: a compiled module sums its gradients over the ranks already; expected nothing around it: "
        "call the compiled module itself. For a trainer that puts it there, there is a line to add: "
        + "; ".join(_TRAINERS)
    )
