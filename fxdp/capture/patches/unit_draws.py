"""Decisions by one number that torch draws between 0 and 1, where they come out alike for all such numbers.

    if torch.rand([]) < self.layerdrop:     False at each step where layerdrop is 0: the program draws the
        continue                            number all the same, so that those after it are eager's
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.patches.raise_checks import shadowed

_MARK = "_fxdp_between_0_and_1"


@contextlib.contextmanager
def answered_draws() -> Iterator[None]:
    """While the user's code is traced, such comparisons are constants, which Python may read."""
    plain = torch.rand

    def rand(*args: Any, **kwargs: Any) -> Tensor:
        drawn = plain(*args, **kwargs)
        if all(isinstance(size, int) and size == 1 for size in drawn.shape):  # asks no symbolic size
            setattr(drawn, _MARK, True)
        return drawn

    torch.rand = rand
    try:
        with contextlib.ExitStack() as stack:
            for name, always in _ALWAYS.items():
                stack.enter_context(shadowed(name, _comparison(getattr(Tensor, name), always)))
            yield
    finally:
        torch.rand = plain


_ALWAYS: dict[str, Callable[[float], bool | None]] = {
    "__lt__": lambda bound: True if bound >= 1 else False if bound <= 0 else None,
    "__le__": lambda bound: True if bound >= 1 else False if bound < 0 else None,
    "__gt__": lambda bound: False if bound >= 1 else True if bound < 0 else None,
    "__ge__": lambda bound: False if bound >= 1 else True if bound <= 0 else None,
}
"""What a comparison is for all numbers of [0, 1); None if it differs."""


def _comparison(plain: Callable[..., Any], always: Callable[[float], bool | None]) -> Callable[..., Any]:
    def compare(self: Tensor, other: Any) -> Any:
        if isinstance(other, (int, float)) and getattr(self, _MARK, False):
            answer = always(other)
            if answer is not None:
                return torch.tensor(answer, device=self.device).reshape(self.shape)
        return plain(self, other)

    return compare
