"""What a call of a module does beside its result: what a program would leave out, and its backwards.

    self.calls += 1      STEPS.append(h)      print(h.shape)      random.random()

A program computes tensors and nothing else, so a module whose forward does such things runs op by op.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.external_state import external_state
from fxdp.capture.leaves import register_containers
from fxdp.capture.patches.module_state import keep_all
from fxdp.capture.patches.side_effects import noted_output
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
        written = list[None]()
        with noted_output(lambda: written.append(None)):
            yield
        if written:
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


DERIVED_AGAIN = "its gradients are differentiated again (create_graph=True)"
SECOND_BACKWARD = "its outputs have a second backward (retain_graph=True)"


class Backwards:
    """The backwards through one call: each is reported to `seen`, once with what is unlike a single one."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        self._seen, self._numbers, self._unlike = seen, set[int](), ""

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
        unlike = DERIVED_AGAIN if torch.is_grad_enabled() else SECOND_BACKWARD if self._numbers else ""
        self._numbers.add(number)
        self._seen("" if self._unlike else unlike)
        self._unlike = self._unlike or unlike
