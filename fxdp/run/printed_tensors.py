"""Tensors of a script as text: `print(loss)` prints one device's values, which are gathered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fxdp.eager.tensor import GlobalTensor
from fxdp.torch_compat import Patch, around

_WIDTH = 80


def _printed(plain: Callable[..., str], tensor: GlobalTensor, /, **contents: Any) -> str:
    """Return the text of one device's tensor; a collective call if the tensor is sharded."""
    values = tensor.detach()
    text = repr(values.full() if isinstance(values, GlobalTensor) else values)
    if getattr(tensor, "_is_param", False):
        text = f"Parameter containing:\n{text}"
    if not tensor.requires_grad:
        return text
    made_by = tensor.grad_fn
    suffix = "requires_grad=True" if made_by is None else f"grad_fn=<{type(made_by).__name__}>"
    last_line = len(text) - text.rfind("\n")
    between = f",\n{' ' * len('tensor(')}" if last_line + len(suffix) + 2 > _WIDTH else ", "
    return f"{text.removesuffix(')')}{between}{suffix})"


def text_patches() -> Iterator[Patch]:
    """Yield the replacement by which global tensors are printed as one device's."""
    yield Patch(GlobalTensor, "__repr__", around(_printed))
