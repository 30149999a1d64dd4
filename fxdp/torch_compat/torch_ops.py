"""Torch's ops by name; an op that the installed torch lacks becomes a placeholder instead of an import error.

    aten.mm.default              torch's
    aten.cholesky.default        gone since torch 2.14: a `GoneOp`, which no graph has and no rule is kept for
    aten.view.dtype              a `GoneOp`, too, if the op exists without this overload

A name is looked up once and stored as an attribute, so later accesses cost as much as torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from fxdp.errors import FxdpError

__all__ = ["GoneOp", "Ops", "aten", "prims", "there"]


class GoneOp:
    """Placeholder for an op, or for an overload of an op, that the installed torch does not have.

    A `GoneOp` is hashable and equal to itself alone, for sets and tables; each overload is a `GoneOp`, too.
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
        """Raise, because the op does not exist.

        Raises
        ------
        FxdpError : always.
        """
        raise FxdpError(
            f"torch {torch.__version__} has no op {self._gone}, which fxdp calls here; "
            "please report it with the model"
        )

    def overloads(self) -> list[str]:
        """Return no names: the op has no overloads."""
        return []


class _Packet:
    """Wrapper of one of torch's ops, equal to this op in sets and calls; a missing overload is a `GoneOp`."""

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
    """The ops of one namespace of torch, with a `GoneOp` for each missing op."""

    def __init__(self, space: str) -> None:
        self._space = space

    def __getattr__(self, name: str) -> Any:
        full = f"{self._space}.{name}"
        found = getattr(getattr(torch.ops, self._space), name, None)
        if found is None and name.startswith("__"):  # `aten.__and__` is an op; Python probes others
            raise AttributeError(name)
        self.__dict__[name] = GoneOp(full) if found is None else _Packet(found, full)
        return self.__dict__[name]


def there(ops: Iterable[Any]) -> tuple[Any, ...]:
    """Return the ops that the installed torch has."""
    return tuple(op for op in ops if not isinstance(op, GoneOp))


aten: Any = Ops("aten")
"""The ops in torch's namespace `aten`."""
prims: Any = Ops("prims")
"""The ops in torch's namespace `prims`, of which some decompositions are made."""
