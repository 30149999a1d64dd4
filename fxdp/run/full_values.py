"""Where torch keeps or reads values without asking their class: a global tensor's full value goes there.

parameter.data = value          the parameter stays plain, and gets the full value
torch.jit.trace(model, x)       so do TensorBoard's add_graph and exports: the program is of plain tensors
torch.func.linearize(f, x)      its trace would read the memory of batches: derived without one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import gathered
from fxdp.errors import InputError
from fxdp.run.script_lines import script_line
from fxdp.run.trees import map_tensors
from fxdp.torch_compat import Patch, around


def _assignable(plain: Any) -> property:
    """Return the attribute `data` of plain tensors, which torch fills without asking the value's class."""

    def assign(tensor: Tensor, value: Any) -> None:
        if type(value) is GlobalTensor and type(tensor) is not GlobalTensor:
            value = gathered(value, "data")
        plain.__set__(tensor, value)

    return property(plain.__get__, assign, plain.__delete__)


def _with_full_values(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return plain(*map_tensors(args, _full), **map_tensors(kwargs, _full))


def _full(example: Tensor) -> Tensor:
    full = gathered(example, "an example of inputs")
    return example if full is example else full.detach().requires_grad_(example.requires_grad)


def _linearized(_: Any, func: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    before, value = torch.get_rng_state(), func(*primals)
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError(
            f"{script_line()}: torch.func.linearize of a function that draws random numbers; expected one "
            "that draws none, or torch.func.jvp"
        )
    return value, lambda *tangents: torch.func.jvp(func, primals, tangents)[1]


def full_value_patches() -> Iterator[Patch]:
    """Yield the replacements by which torch gets full values."""
    yield Patch(Tensor, "data", _assignable)
    for owner, name in (
        (torch.jit, "trace"), (torch.jit, "trace_module"), (torch.export, "export"), (torch.onnx, "export"),
    ):  # fmt: skip
        yield Patch(owner, name, around(_with_full_values))
    yield Patch(torch.func, "linearize", around(_linearized))
