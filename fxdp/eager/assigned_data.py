"""`parameter.data = value` with a global value: the parameter stays plain, and gets the full value."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import replace_for_good


@lru_cache(maxsize=1)
def let_data_be_global() -> None:
    """Let plain tensors take the data of global ones, from now on."""
    replace_for_good("torch:Tensor.data", _assignable)


def _assignable(plain: Any) -> property:
    """Return the attribute `data`, which torch fills without asking the value's class."""

    def assign(tensor: Tensor, value: Any) -> None:
        if type(value) is GlobalTensor and type(tensor) is not GlobalTensor:
            value = gathered(value, "data")
        plain.__set__(tensor, value)

    return property(plain.__get__, assign, plain.__delete__)
