"""What a call of a module does beside its result: what a program would leave out, and its backwards.

    self.calls += 1      STEPS.append(h)      print(h.shape)      random.random()

A program computes tensors and nothing else, so a module whose forward does such things runs op by op.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self

from fxdp.capture.containers import register_containers
from fxdp.capture.external_state import external_state
from fxdp.capture.patches.module_state import keep_all
from fxdp.capture.snapshot import ABSENT, ValueSnapshot
from fxdp.ranks.generator_states import numpy_generator
from fxdp.torch_compat import backward_id, without_torch_function


class Effects:
    """What a call has changed beside the contents of tensors.

    Attributes
    ----------
    found : the first change, in words; empty if there was none.
    """

    found = ""

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Look at the module's attributes, what else its code reads, generators and output, for one call."""
        attributes = [(vars(owner), keep_all(vars(owner))) for owner in module.modules()]
        places = [(place, ValueSnapshot(place.value())) for place in external_state(module).places]
        drawn = random.getstate(), numpy_generator()
        with _Written() as written:
            yield
        if written.seen:
            self.found = "its forward prints"
        elif (random.getstate(), numpy_generator()) != drawn:
            self.found = "its forward draws random numbers of Python or NumPy"
        elif any(map(_changed, *zip(*attributes, strict=True))):
            self.found = "its forward changes the module's attributes"
        elif any(kept.is_changed(place.value()) for place, kept in places):
            self.found = "its forward changes Python values outside of it"


def _changed(now: dict[str, Any], was: dict[str, ValueSnapshot]) -> bool:
    if len(now) != len(was):
        return True
    return any(kept.is_changed(now.get(name, ABSENT)) for name, kept in was.items())


class _Written(contextlib.ExitStack):
    """Standard output and error, for one call: whether something was written."""

    seen = False

    def __enter__(self) -> Self:
        self.enter_context(contextlib.redirect_stdout(_Stream(sys.stdout, self)))
        self.enter_context(contextlib.redirect_stderr(_Stream(sys.stderr, self)))
        return self


class _Stream:
    def __init__(self, stream: Any, written: _Written) -> None:
        self._stream, self._written = stream, written

    def __getattr__(self, name: str) -> Any:
        if name.startswith("write"):
            self._written.seen = True
        return getattr(self._stream, name)


class Backwards:
    """The backwards through one call: each is reported to `seen`, which gets what is unlike a single one."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        self._seen, self._numbers = seen, set[int]()

    def watch(self, output: Any) -> int:
        """Watch the tensors of a call's output; return their number."""
        register_containers(output)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.grad_fn is not None:
                with without_torch_function():
                    tensor.register_hook(self._run)  # type: ignore[no-untyped-call]
        return len(tensors)

    def _run(self, _: Tensor) -> None:
        number = backward_id()
        if number in self._numbers:
            return
        again = bool(self._numbers)
        self._numbers.add(number)
        if torch.is_grad_enabled():
            self._seen("its gradients are differentiated again (create_graph=True)")
        else:
            self._seen("its outputs have a second backward (retain_graph=True)" if again else "")
