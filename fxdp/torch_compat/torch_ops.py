"""Torch's ops by name, where an op that the installed torch has not costs what it is for, never an import.

    aten.mm.default              torch's
    aten.cholesky.default        gone since torch 2.14: a `GoneOp`, which no graph has and no rule is kept for
    aten.view.dtype              so for an overload of an op that is there

Names are looked up once, and are attributes then: they cost what torch's own cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from fxdp.errors import FxdpError

__all__ = ["GoneOp", "Ops", "aten", "prims", "there"]


class GoneOp:
    """What stands for an op, or for an overload of it, that the installed torch does not have.

    Equal to itself alone, so that sets and tables may hold it; an overload of it is another one.
    """

    def __init__(self, name: str) -> None:
        self._gone = name

    def __getattr__(self, name: str) -> GoneOp:
        if name.startswith("_"):
            raise AttributeError(name)
        overload = self.__dict__[name] = GoneOp(f"{self._gone}.{name}")
        return overload

    def __repr__(self) -> str:
        return f"<{self._gone}, which torch {torch.__version__} has not>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises
        ------
        FxdpError : always.
        """
        raise FxdpError(
            f"torch {torch.__version__} has no op {self._gone}, which fxdp calls here; "
            "please report it with the model"
        )

    def overloads(self) -> list[str]:
        """None, as of an op of torch's its names."""
        return []


class _Packet:
    """An op of torch's: it is that op in sets and in calls; an overload that it has not is gone."""

    def __init__(self, plain: Any, name: str) -> None:
        self._plain, self._full = plain, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._plain, name, None)
        self.__dict__[name] = GoneOp(f"{self._full}.{name}") if found is None else found
        return self.__dict__[name]

    def __eq__(self, other: object) -> bool:
        return self._plain is (other._plain if isinstance(other, _Packet) else other)

    def __hash__(self) -> int:
        return hash(self._plain)

    def __repr__(self) -> str:
        return repr(self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)


class Ops:
    """The ops of one of torch's namespaces, with a `GoneOp` for each that is not there."""

    def __init__(self, space: str) -> None:
        self._space = space

    def __getattr__(self, name: str) -> Any:
        full = f"{self._space}.{name}"
        found = getattr(getattr(torch.ops, self._space), name, None)
        if found is None and name.startswith("__"):  # `aten.__and__` is an op; others are Python's questions
            raise AttributeError(name)
        self.__dict__[name] = GoneOp(full) if found is None else _Packet(found, full)
        return self.__dict__[name]


def there(ops: Iterable[Any]) -> tuple[Any, ...]:
    """Those of the ops that the installed torch has."""
    return tuple(op for op in ops if not isinstance(op, GoneOp))


aten: Any = Ops("aten")
"""The ops of torch."""
prims: Any = Ops("prims")
"""Those that some of its decompositions are made of."""
