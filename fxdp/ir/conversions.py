"""The operations that fxdp inserts into a graph: communication, its waits, and local conversions.

They stand in the graph from their birth to emission, which lowers them to functional collectives
(`passes/emit_program.py`); the lock-step interpreter gives them meaning over a list of ranks. They are names,
not code: calling one is an error.

| function | converts | by |
|---|---|---|
| `all_reduce(x, op)` | P -> R | the sum over ranks, their extremum, or the combination of their moments |
| `reduce_scatter(x, dim, outer, inner)` | P -> S | each rank gets its part of the sum |
| `all_gather(x, dim, outer, inner)` | S -> R | the concatenation of the ranks' parts |
| `broadcast(x)` | ranks' own draws -> R | the value of rank 0 |
| `wait(pending)` | | the result of one of the above |
| `shard(x, dim, outer)` | R -> S | a slice |
| `partial(x)` | R -> P | rank 0 keeps the value, others hold zeros |

The sharded dim's size is `outer * B * inner`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fxdp.errors import FxdpError


def _not_executable(name: str) -> NoReturn:
    raise FxdpError(f"`{name}` is lowered at emission and cannot be called; this is a bug in fxdp")


def all_reduce(value: Any, op: str) -> Any:
    """Start summing a Partial value over the ranks; `wait` for it."""
    _not_executable("all_reduce")


def reduce_scatter(value: Any, dim: int, outer: int, inner: int) -> Any:
    """Start summing a Partial value of which each rank gets its part; `wait` for it."""
    _not_executable("reduce_scatter")


def all_gather(value: Any, dim: int, outer: int, inner: int) -> Any:
    """Start gathering the ranks' parts into the whole value; `wait` for it."""
    _not_executable("all_gather")


def broadcast(value: Any) -> Any:
    """Start sending rank 0's value to all ranks; `wait` for it."""
    _not_executable("broadcast")


def wait(pending: Any) -> Any:
    """The finished result of a collective; exactly one per collective."""
    _not_executable("wait")


def shard(value: Any, dim: int, outer: int) -> Any:
    """This rank's part of a replicated value."""
    _not_executable("shard")


def partial(value: Any) -> Any:
    """The value on rank 0 and zeros on others: terms of a sum."""
    _not_executable("partial")


COLLECTIVES = frozenset({all_reduce, reduce_scatter, all_gather, broadcast})
"""The functions that communicate; each has exactly one `wait`."""

CONVERSIONS = COLLECTIVES | {wait, shard, partial}
"""All functions of this file."""
