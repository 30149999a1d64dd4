"""`torch.compile(model, backend="fxdp")`: refused, with the line to use instead.

Dynamo compiles each rank's function for the sizes of that rank's part of the batch. It takes branches
by them (`if len(x) > 4`), writes them into its graph as constants (`loss.sum() / len(x)`), and compiles anew
on one rank alone when its sizes change. A program of the *global* batch cannot be had from that graph without
knowing which of its numbers are the batch. `fxdp.compile` captures the model, with the batch as a symbol.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

import fxdp
from fxdp.errors import InputError


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Tensor], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What `torch.compile` calls with the first graph.

    Raises
    ------
    InputError : always; it names the call of `fxdp.compile` with the same options, or those that none takes.
    """
    given = dict(options or {})
    known = list(inspect.signature(fxdp.compile).parameters)[1:]
    unknown = [_nearest(name, known) for name in given if name not in known]
    if unknown:
        raise InputError(f'torch.compile(backend="fxdp", options=...): {"; ".join(unknown)}')
    arguments = ", ".join(["model", *(f"{name}={_text(value)}" for name, value in given.items())])
    raise InputError(
        'torch.compile(model, backend="fxdp") would compile the numbers of one rank: Dynamo writes the sizes '
        "of this rank's part of the batch into its graph, and a loss outside of it is not the whole batch's. "
        f"Use compiled = fxdp.compile({arguments}), which compiles by Inductor as well"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _text(value: Any) -> str:
    """A value as one writes it; a name for what has no such text."""
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return repr(value) if plain else getattr(value, "__name__", "...")
