"""Flags of the batch that the user's Python code branches on: whether any or all of its values are so.

    if not padding.any():           one program for batches without padding, another one for those with some
        padding = None

    if torch.rand(1) > 0: ...       true but for one number of many millions

    for i in hit.nonzero(): ...     a flag for each place of a short row whose length is fixed: a mixture's
                                    experts, most of which have tokens in most batches

    if seen.min() > -1e-5: ...      whether all are so: an average that begins at its first batch

    if places.max() + 1 > 4096: ... whether any is so: tables for longer texts

    (rows,) = torch.where(mask)     whether any is so
    if rows.numel() == 0: ...

A program goes one way, and gives the flag of the global batch as a result; a call that finds it to be another
runs the program of the other way (`fxdp/module/branch_specialization.py`). Only what says any or all is such
a flag,
which places are found, and what is as good as sure: these are seldom others from step to step, while a
comparison of sums (`if x.sum() > 0`) may be another at each.
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
"""A longer row seldom has the same places in two batches."""


def mark(tensor: Tensor, likely: bool) -> Tensor:
    """Make a tensor of one truth a flag, which is likely to be so."""
    setattr(tensor, _MARK, likely)
    return tensor


def is_flag(tensor: Tensor) -> bool:
    """Whether it is what `any` or `all` said of a full tensor, or was marked."""
    return hasattr(tensor, _MARK)


def likely(flag: Tensor) -> bool:
    """What a flag is taken for before the first call has said."""
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
    if known and not location_of_call().code.startswith("while "):  # how often a loop runs is seldom the same
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
    """Whether it says where something is true."""
    return bool(getattr(tensor, _SELECTION, False))


_SELECT = ((Tensor, "nonzero"), (torch, "nonzero"), (torch, "where"))


class Selections:
    """By what a trace calls how many a mask selects: the mask."""

    def __init__(self) -> None:
        self._masks: dict[Any, Tensor] = {}

    def patches(self) -> tuple[Patch, ...]:
        """While the user's code is traced."""

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
        """Whether a question of a size only asks whether a mask selects any."""
        expr = asked.node.expr
        number = next(iter(expr.free_symbols), None)
        if len(expr.free_symbols) != 1 or number not in self._masks:
            return False
        none, *some = (_at(expr, count) for count in (0, 1, 2, 1 << 40))
        return none not in some and len(set(some)) == 1

    def any_of(self, asked: torch.SymBool) -> tuple[Tensor, bool]:
        """Whether it selects any, and the answer if it does."""
        expr = asked.node.expr
        mask = self._masks[next(iter(expr.free_symbols))]
        return mark((mask != 0).any(), likely=True), _at(expr, 1)


def _at(expr: sympy.Basic, count: int) -> bool:
    return bool(expr.xreplace(dict.fromkeys(expr.free_symbols, sympy.Integer(count))) == sympy.true)


def found_places(tensor: Tensor) -> Tensor | None:
    """Of the result of `nonzero` of a short row whose length is fixed: where that is not zero."""
    return getattr(tensor, _FOUND, None)


def rows_at(places: Tensor, goes: Callable[[Tensor, FrameType], bool]) -> Iterator[Tensor]:
    """The rows that `nonzero` gives; `goes` says of a flag whether its place is there, and hears who asks."""
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
"""While the user's code is traced."""
