"""`parameter.data = value` with a global value: the parameter stays plain, and gets the full value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import Patch


def _assignable(plain: Any) -> property:
    """Return the attribute `data` of plain tensors, which torch fills without asking the value's class."""

    def assign(tensor: Tensor, value: Any) -> None:
        if type(value) is GlobalTensor and type(tensor) is not GlobalTensor:
            value = gathered(value, "data")
        plain.__set__(tensor, value)

    return property(plain.__get__, assign, plain.__delete__)


def data_patches() -> Iterator[Patch]:
    """Yield the replacement by which plain tensors take the data of global ones."""
    yield Patch(Tensor, "data", _assignable)
