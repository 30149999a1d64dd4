"""Draw arguments of ops at random: which dims hold the batch, how often, and the sizes of the others.

A tensor is spelled by its dims, a letter per dim; equal letters have equal sizes within one draw.

    "Nk"    N is of batch size (B or 2*B), k is small or, now and then, the batch once more
    "N3"    a digit is that very size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch

from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import B
from fxdp.rules.proof.samples import Sample as T

Choice = TypeVar("Choice")

_LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Call:
    """Arguments of an op, and what its case must know: see `harness.Case`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


Maker = Callable[["Draw"], Call]


def call(*args: Any, **kwargs: Any) -> Call:
    """A call; `random=True` and `law=` are options of its case."""
    options = {name: kwargs.pop(name) for name in ("random", "law") if name in kwargs}
    return Call(args, kwargs, options)


class Draw:
    """A source of random choices; one seed, one draw."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._sizes: dict[str, Dim] = {}

    def n(self, label: str) -> Dim:
        """The size that a letter or digit stands for."""
        if label.isdigit():
            return int(label)
        if label not in self._sizes:
            self._sizes[label] = self._size(label.isupper())
        return self._sizes[label]

    def _size(self, batch: bool) -> Dim:
        if batch or self._random.random() < 0.15:
            return self._random.choice((B, B, 2 * B))
        return self._random.choice((2, 3, 4))

    def t(self, dims: str, *more: Dim | str, **options: Any) -> T:
        """A tensor with these dims (and then those sizes)."""
        return T(*(self.n(label) for label in dims), *more, **options)

    def ints(self, dims: str, below: Dim = 3, **options: Any) -> T:
        """Row numbers below a bound."""
        return T(*(self.n(label) for label in dims), dtype=torch.int64, low=0, high=below, **options)

    def mask(self, dims: str) -> T:
        """Booleans."""
        return self.t(dims, dtype=torch.bool)

    def dims(self, low: int, high: int) -> str:
        """Letters of `low` to `high` dims, one of which (if any) is the batch."""
        names = list(_LETTERS[: self._random.randint(low, high)])
        if names:
            names[self._random.randrange(len(names))] = "N"
        return "".join(names)

    def broadcast(self, dims: str) -> str:
        """The same dims with some of size 1 and leading ones left out, but never all of them."""
        dims = dims[self._random.choice((0, 0, 1)) if len(dims) > 1 else 0 :]
        return "".join("1" if self._random.random() < 0.2 else label for label in dims)

    def dim(self, dims: str) -> int:
        """One of the dims, counted from either end."""
        return self._random.randrange(-len(dims), len(dims))

    def some(self, dims: str) -> list[int]:
        """One or more of the dims."""
        return sorted(self._random.sample(range(len(dims)), self._random.randint(1, len(dims))))

    def flag(self) -> bool:
        """True or False."""
        return self._random.random() < 0.5

    def one(self, of: Sequence[Choice]) -> Choice:
        """One of several."""
        return self._random.choice(of)

    def order(self, count: int) -> list[int]:
        """A permutation."""
        return self._random.sample(range(count), count)


def sizes(value: T) -> list[Dim]:
    """A tensor's shape, as an op takes it."""
    return list(value.shape)
