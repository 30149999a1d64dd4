"""Random numbers of torch from [0, 1), by which the user's code decides in Python.

    if torch.rand([]) < self.layerdrop:     one result for all numbers if layerdrop is 0; the program still
        continue                            draws the number, so that later numbers are those of eager code
    sizes[int(torch.empty(1).uniform_(0, len(sizes)).item())]       the first element, if there is only one

Comparisons with one result for all numbers are constants; others are refused where Python decides by these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.python.flags import mark
from fxdp.torch_compat import Patch, around

_MARK = "_fxdp_between_0_and_1"
_FULL = "_fxdp_whole"

_ALWAYS: dict[str, Callable[[float], bool | None]] = {
    "__lt__": lambda bound: True if bound >= 1 else False if bound <= 0 else None,
    "__le__": lambda bound: True if bound >= 1 else False if bound < 0 else None,
    "__gt__": lambda bound: False if bound >= 1 else True if bound < 0 else None,
    "__ge__": lambda bound: False if bound >= 1 else True if bound <= 0 else None,
}
"""Result of a comparison for all numbers in [0, 1); None if the result depends on the number."""


def _marked(drawn: Tensor) -> Tensor:
    if all(isinstance(size, int) and size == 1 for size in drawn.shape):  # avoids a guard on a symbolic size
        setattr(drawn, _MARK, drawn._version)
    return drawn


def _is_unit(tensor: Tensor) -> bool:
    """Return whether a tensor is a random number from [0, 1) that was not written since."""
    drawn = getattr(tensor, _MARK, None)
    return drawn is not None and drawn == tensor._version


def _uniform(plain: Callable[..., Tensor], self: Tensor, *bounds: Any, **kwargs: Any) -> Tensor:
    drawn = plain(self, *bounds, **kwargs)
    low, high = bounds if len(bounds) == 2 else (0, 1)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and not kwargs
    # with a nonzero low bound, rounding may yield the high bound
    return _marked(drawn) if numbers and low == 0 and 0 < high <= 1 else drawn


def integer_part(drawn: Tensor, value: Any) -> Any:
    """Return the value of a tensor; the integer part of a random number from [0, 1) is set to 0."""
    if isinstance(value, torch.SymFloat) and _is_unit(drawn):
        setattr(value, _FULL, 0)
    return value


def _integer(plain: Callable[[Any], int], self: torch.SymFloat) -> int:
    full = getattr(self, _FULL, None)
    return plain(self) if full is None else int(full)


def _compare(
    always: Callable[[float], bool | None], plain: Callable[..., Any], self: Tensor, other: Any
) -> Any:
    if isinstance(other, (int, float)) and _is_unit(self):
        answer = always(other)
        if answer is not None:  # a constant, which Python may read
            return torch.tensor(answer, device=self.device).reshape(self.shape)
        if other == 0:  # 0 itself is drawn once in many millions
            return mark(plain(self, other), likely=always(-1.0) is True)
    return plain(self, other)


UNIT_DRAWS: tuple[Patch, ...] = (
    Patch(torch, "rand", around(lambda plain, *args, **kwargs: _marked(plain(*args, **kwargs)))),
    Patch(Tensor, "uniform_", around(_uniform)),
    Patch(torch.SymFloat, "__int__", around(_integer)),
    *(Patch(Tensor, name, around(partial(_compare, always))) for name, always in _ALWAYS.items()),
)
"""Patches for tracing the user's code: comparisons with one result for all random numbers are constants."""
