"""Wings: rooms that the core does without, and the seams at which they extend it.

wing         what it buys                                              without it
startup      first steps in a fraction of the time                     each layer is traced and compiled
transport    CPU: sums through shared memory, small values by message  gloo alone
python       more models: capture follows Python beyond torch.export   such models are refused
dynamo       `torch.compile(model, backend="fxdp")`                    the backend is refused

    @seam("startup")                                fxdp/startup/wing.py, imported when the first of its
    def symbolic_joint(exported, options): ...      seams runs:  symbolic_joint.extend(cached_joint)

    symbolic_joint(e, o)    FXDP_WINGS=off    symbolic_joint's own body
                            else              cached_joint(own, e, o), which may call `own(e, o)`

No room of the core imports a wing: with `FXDP_WINGS=off` no line of one is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar

from fxdp.errors import StateError
from fxdp.settings import wings_are_on

_Wing: TypeAlias = Literal["startup", "transport", "python"]

_EXTENDED_BY: dict[_Wing, str] = {
    "startup": "fxdp.startup.wing",
    "transport": "fxdp.transport.cpu_transport",
    "python": "fxdp.capture.python.python_wing",
}
"""The module of each wing whose function `extend` extends all of its seams."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Seam(Generic[_P, _R]):
    """A function of the core that a wing may extend.

    Attributes
    ----------
    wing : the name of the wing.
    own : the core's function, which runs where the wing is absent.
    """

    def __init__(self, wing: _Wing, own: Callable[_P, _R]) -> None:
        functools.update_wrapper(self, own)
        self.wing: _Wing = wing
        self.own = own
        self._by: Callable[Concatenate[Callable[_P, _R], _P], _R] | None = None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the wing's extension, or the core's own function."""
        _load(self.wing)
        return self.own(*args, **kwargs) if self._by is None else self._by(self.own, *args, **kwargs)

    def extend(self, by: Callable[Concatenate[Callable[_P, _R], _P], _R]) -> None:
        """Run `by(own, *args, **kwargs)` from now on.

        Raises
        ------
        StateError : the seam is extended already.
        """
        if self._by is not None:
            raise StateError(
                f"{self.own.__module__}.{self.own.__qualname__} is extended twice; a bug in fxdp"
            )
        self._by = by

    @property
    def is_extended(self) -> bool:
        """Whether the wing is there; the first question imports it."""
        _load(self.wing)
        return self._by is not None


def seam(wing: _Wing) -> Callable[[Callable[_P, _R]], Seam[_P, _R]]:
    """Make a function of the core a seam of this wing."""
    return lambda own: Seam(wing, own)


@functools.cache
def _load(wing: _Wing) -> None:
    """Let a wing extend its seams, once; nothing with `FXDP_WINGS=off`."""
    if wings_are_on():
        import_module(_EXTENDED_BY[wing]).extend()
