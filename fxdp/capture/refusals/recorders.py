"""Hooks on modules that keep what they see: `register_forward_hook(lambda m, args, out: seen.append(out))`.

A program has what a hook computes, but the hook itself runs while the model is captured, and never again.
What it keeps then are tensors without values. They are found by being there when the capture is over:

    a hook sees %relu and puts the %mean of it into a list     after the capture %relu is gone, %mean is not
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_log = logging.getLogger("fxdp")

_KINDS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass
class Watched:
    """A hook, and the tensors that it was shown or made, as long as somebody has them."""

    hook: Callable[..., Any]
    owner: str
    """Its module."""
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)

    def add(self, values: Any, but: frozenset[int] = frozenset()) -> None:
        """Look at the tensors among these values, too."""
        leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
        self.tensors.extend(weakref.ref(leaf) for leaf in leaves if id(leaf) not in but)

    @property
    def keeps(self) -> bool:
        """Whether any of them is still there."""
        return any(tensor() is not None for tensor in self.tensors)

    def __str__(self) -> str:
        name = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        code = getattr(self.hook, "__code__", None)
        place = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        return f"the hook {name}{place} on {self.owner}"


class _Results(TorchFunctionMode):
    """While a hook runs, look at all that it computes."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watched.add(result)
        return result


@contextlib.contextmanager
def watching_hooks(module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[list[Watched]]:
    """Around a forward that is traced; gives the hooks of the model that ran, the user's own.

    The traced inputs, parameters and buffers are kept by others as well, so nothing is said of these.
    """
    found: list[Watched] = []
    others = frozenset(map(id, [*inputs, *module.parameters(), *module.buffers()]))
    with contextlib.ExitStack() as stack:
        for path, owner in module.named_modules():
            for hooks in (getattr(owner, kind) for kind in _KINDS):
                for key, hook in list(hooks.items()):
                    if not str(getattr(hook, "__module__", "")).startswith("torch."):
                        name = f"{path or 'the model'} ({type(owner).__name__})"
                        hooks[key] = _watching(Watched(hook, name), found, others)
                        stack.callback(hooks.__setitem__, key, hook)
        yield found


def _watching(watched: Watched, found: list[Watched], others: frozenset[int]) -> Callable[..., Any]:
    def run(module: nn.Module, *seen: Any) -> Any:
        found.append(watched)
        watched.add(seen, but=others)
        with _Results(watched):
            return watched.hook(module, *seen)

    return run


def warn_of_recorders(watched: Sequence[Watched]) -> None:
    """Say which of these hooks keep tensors; called when nobody else has one."""
    keeping = dict.fromkeys(str(one) for one in watched if one.keeps)
    for text in keeping:
        _log.warning(
            "%s keeps tensors that have no values: it ran while the model was captured, and does not run at "
            "each call. Let the model return what is to be seen, or call the model itself (compiled.module)",
            text,
        )
