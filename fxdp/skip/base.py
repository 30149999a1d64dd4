"""`Skippable`: the wrapper of a user's module that carries out stashes and pops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from torch import nn

from fxdp.skip.namespace import Namespace
from fxdp.skip.tracker import skips_of_this_call

_S = TypeVar("_S", bound="Skippable")


class Skippable(nn.Module):
    """Base class of the classes made by `@skippable`; an instance of the decorated class is in `module`.

    State-dict keys therefore contain `module.` after the wrapper's name (`0.module.weight`), as in
    torchgpipe, so checkpoints can be exchanged in both directions. The class is wrapped when it is decorated
    and not when it is compiled: the keys are equal in eager code, in compiled code and in a pipeline.
    """

    module_cls: ClassVar[type[nn.Module]]
    """The decorated class."""
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module!r})"

    def namespaced(self, name: str) -> tuple[Namespace | None, str]:
        """Return a name with the namespace assigned by `isolate`."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield the declared stashes, sorted by name."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield the declared pops, sorted by name."""
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(self: _S, ns: Namespace | None, only: Iterable[str] | None = None) -> _S:
        """Put all names, or `only` some names, under a namespace; return this module.

        Raises
        ------
        TypeError : `ns` is not a Namespace, or `only` is a bare string.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(f"isolate needs a Namespace, got {ns!r}: make one with fxdp.skip.Namespace()")
        names = self.stashable_names | self.poppable_names if only is None else names_of("only", only)
        self.namespaces |= dict.fromkeys(sorted(names), ns)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; stashes and pops go through the skip tracker of this thread.

        Raises
        ------
        RuntimeError : a stash or pop was not declared, a declared stash or pop is missing, or a popped name
            was never stashed.
        TypeError : the forward yields a value that is neither `stash` nor `pop`.
        """
        with skips_of_this_call() as tracker:
            return tracker.exchange(self).run(args, kwargs)


def names_of(option: str, names: Iterable[str]) -> frozenset[str]:
    """Check the names given for an option, and return the set of names.

    Raises
    ------
    TypeError : the value is not a list of names; or a bare string, which would count letter by letter; or a
        name is not a string.
    """
    if isinstance(names, str):
        raise TypeError(f"{option}={names!r} would be the names {list(names)}: write {option}=[{names!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(f"{option}={names!r} is no list of names: write {option}=['skip'], or leave it out")
    found = frozenset(names)
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{option}= takes names, which are strings, got {', '.join(map(repr, wrong))}")
    return found
