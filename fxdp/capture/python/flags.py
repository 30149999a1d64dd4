"""Flags of the batch on which the user's Python code branches: a condition on any or on all values.

    if not padding.any():           one program for batches without padding, another one for those with some
        padding = None

    if torch.rand(1) > 0: ...       true except for one number of many millions

    for i in hit.nonzero(): ...     a flag for each position of a short row of fixed length: the experts of a
                                    mixture, most of which have tokens in most batches

    if seen.min() > -1e-5: ...      a condition on all values: an average that starts at its first batch

    if places.max() + 1 > 4096: ... a condition on any value: tables for longer texts

    (rows,) = torch.where(mask)     a condition on any value
    if rows.numel() == 0: ...

A program takes one branch, and returns the flag of the global batch as a result. If the flag of a call
differs, the program of the opposite branch runs (`fxdp/module/branch_specialization.py`). Flags are
restricted to any, all, positions found, and nearly certain comparisons: these seldom change between steps,
while a comparison of sums (`if x.sum() > 0`) may change at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor

from fxdp.capture.locations import location_of_call
from fxdp.torch_compat import Patch, around, calling_frame

_MARK = "_fxdp_flag"
_FOUND = "_fxdp_found"
_EXTREME = "_fxdp_extreme"
_SELECTION = "_fxdp_selection"
_PLACES = 32
"""Largest length of a row with flags per position; longer rows seldom have equal positions in two batches."""


def mark(tensor: Tensor, likely: bool) -> Tensor:
    """Mark a boolean scalar tensor as a flag with a likely value, and return the tensor."""
    setattr(tensor, _MARK, likely)
    return tensor


def is_flag(tensor: Tensor) -> bool:
    """Return whether a tensor is a result of `any` or `all` over a full tensor, or was marked as a flag."""
    return hasattr(tensor, _MARK)


def likely(flag: Tensor) -> bool:
    """Return the value that a flag is assumed to have before the first call."""
    return bool(getattr(flag, _MARK))


def _marked(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    if isinstance(made, Tensor) and made.dim() == 0 and made.dtype == torch.bool:
        mark(made, likely=False)
    return made


def _with_places(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    of = args[0] if len(args) == 1 and not kwargs.get("as_tuple") else None
    if isinstance(of, Tensor) and of.dim() == 1 and isinstance(of.shape[0], int) and of.shape[0] <= _PLACES:
        setattr(made, _FOUND, of != 0)
    return made


def _extreme(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    if len(args) == 1 and not kwargs and isinstance(made, Tensor):
        setattr(made, _EXTREME, True)
    return made


def _shifted(plain: Callable[..., Any], self: Tensor, other: Any) -> Any:
    made = plain(self, other)
    if hasattr(self, _EXTREME) and isinstance(other, (int, float)) and made is not NotImplemented:
        setattr(made, _EXTREME, True)
    return made


def _compared(plain: Callable[..., Any], self: Tensor, other: Any) -> Any:
    made = plain(self, other)
    known = hasattr(self, _EXTREME) and isinstance(other, (int, float)) and made is not NotImplemented
    if known and not location_of_call().code.startswith("while "):  # loops run a varying number of times
        mark(made, likely=False)
    return made


def _selected(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    for rows in made if isinstance(made, tuple) else [made]:
        setattr(rows, _SELECTION, len(args) == 1)
    return made


def _passed_on(plain: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    made = plain(self, *args, **kwargs)
    if is_selection(self):
        setattr(made, _SELECTION, True)
    return made


def is_selection(tensor: Tensor) -> bool:
    """Return whether a tensor has positions at which a mask is true."""
    return bool(getattr(tensor, _SELECTION, False))


_SELECT = ((Tensor, "nonzero"), (torch, "nonzero"), (torch, "where"))


class Selections:
    """Masks by the unbacked symbols for the numbers of selected elements."""

    def __init__(self) -> None:
        self._masks: dict[Any, Tensor] = {}

    def patches(self) -> tuple[Patch, ...]:
        """Return patches that record masks while the user's code is traced."""

        def selected(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            if len(args) != 1:
                return made
            count = next(iter(made)).shape[0] if isinstance(made, tuple) else made.shape[0]
            if isinstance(count, torch.SymInt):
                self._masks[count.node.expr] = args[0]
            return made

        return tuple(Patch(owner, name, around(selected)) for owner, name in _SELECT)

    def knows(self, asked: torch.SymBool) -> bool:
        """Return whether a condition on sizes only checks whether a mask selects any element."""
        expr = asked.node.expr
        number = next(iter(expr.free_symbols), None)
        if len(expr.free_symbols) != 1 or number not in self._masks:
            return False
        none, *some = (_at(expr, count) for count in (0, 1, 2, 1 << 40))
        return none not in some and len(set(some)) == 1

    def any_of(self, asked: torch.SymBool) -> tuple[Tensor, bool]:
        """Return the flag whether the mask selects any element, and the condition's value if so."""
        expr = asked.node.expr
        mask = self._masks[next(iter(expr.free_symbols))]
        return mark((mask != 0).any(), likely=True), _at(expr, 1)


def _at(expr: sympy.Basic, count: int) -> bool:
    return bool(expr.xreplace(dict.fromkeys(expr.free_symbols, sympy.Integer(count))) == sympy.true)


def found_places(tensor: Tensor) -> Tensor | None:
    """Return the mask of nonzero positions, if a tensor is the `nonzero` of a short row of fixed length."""
    return getattr(tensor, _FOUND, None)


def rows_at(places: Tensor, goes: Callable[[Tensor, FrameType], bool]) -> Iterator[Tensor]:
    """Yield the rows of `nonzero`; `goes` decides for a flag and the calling frame whether a row exists."""
    for place in range(places.shape[0]):
        if goes(mark(places[place], likely=True), calling_frame()):
            yield torch.tensor([place], device=places.device)


FLAGS = (
    *(Patch(owner, name, around(_marked)) for owner in (Tensor, torch) for name in ("any", "all")),
    *(Patch(owner, "nonzero", around(_with_places)) for owner in (Tensor, torch)),
    *(Patch(owner, name, around(_selected)) for owner, name in _SELECT),
    Patch(Tensor, "squeeze", around(_passed_on)),
    *(Patch(owner, name, around(_extreme)) for owner in (Tensor, torch) for name in ("min", "max")),
    *(Patch(Tensor, f"__{name}__", around(_shifted)) for name in ("add", "radd", "sub")),
    *(Patch(Tensor, f"__{name}__", around(_compared)) for name in ("gt", "ge", "lt", "le")),
)
"""Patches for tracing the user's code."""
