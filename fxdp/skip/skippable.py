"""`@skippable`: modules that stash tensors for later modules and pop tensors of earlier modules.

@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return self.pool(x)

@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return self.grow(x) + skip
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from fxdp.skip.base import Skippable, names_of
from fxdp.skip.declarations import find_faults


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module class whose forward stashes and pops.

    Parameters
    ----------
    stash : the names that the forward yields in `stash(name, tensor)`, each once.
    pop : the names that the forward yields in `pop(name)`, each once; an earlier module must stash each name.

    Raises
    ------
    TypeError : a bare string instead of a list of names, or a class that is not an `nn.Module`.
    """
    stashable, poppable = names_of("stash", stash), names_of("pop", pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise TypeError(f"@skippable decorates subclasses of nn.Module, got {module_cls!r}")
        facts = {
            "module_cls": module_cls,
            "stashable_names": stashable,
            "poppable_names": poppable,
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
        }
        return type(module_cls.__name__, (Skippable,), facts)

    return decorate


def verify_skippables(module: nn.Module) -> None:
    """Check that every stash of a model has a pop, at any depth.

    Modules in an `nn.Sequential` run in order. For any other container the order is unknown, so a pop only
    needs a stash anywhere.

    Raises
    ------
    TypeError : some stashes and pops do not match; the message lists all mismatches.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"verify_skippables takes a model, which is a module, got a {type(module).__name__}")
    faults = find_faults(module)
    if faults:
        listing = "\n".join(f"* {fault.text}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listing}")
