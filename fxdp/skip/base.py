"""`Skippable`: a module around the user's, which carries out what that stashes and pops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from torch import nn

from fxdp.skip.namespace import Namespace
from fxdp.skip.tracker import skips_of_this_call

S = TypeVar("S", bound="Skippable")


class Skippable(nn.Module):
    """The base class of what `@skippable` makes; it holds an instance of the decorated class in `module`.

    Its state-dict keys therefore have `module.` after its own name (`0.module.weight`), as those of
    torchgpipe do, so that checkpoints go both ways. The wrapping happens where the class is decorated and
    not where it is compiled: the keys are the same eagerly, compiled and in a pipeline.
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
        """The name with the namespace that it was isolated by."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """What it declares to stash, in the order of the names."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """What it declares to pop, in the order of the names."""
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(self: S, ns: Namespace | None, only: Iterable[str] | None = None) -> S:
        """Put all its names, or `only` some, under a namespace; returns itself.

        Raises
        ------
        TypeError : `ns` is no Namespace, or `only` is a bare string.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(f"isolate needs a Namespace, got {ns!r}: make one with fxdp.skip.Namespace()")
        names = self.stashable_names | self.poppable_names if only is None else names_of("only", only)
        self.namespaces |= dict.fromkeys(sorted(names), ns)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; what it stashes and pops goes through this thread's skip tracker.

        Raises
        ------
        RuntimeError : it stashes or pops other than it declares, or pops what was not stashed.
        TypeError : it yields something else.
        """
        with skips_of_this_call() as tracker:
            return tracker.exchange(self).run(args, kwargs)


def names_of(option: str, names: Iterable[str]) -> frozenset[str]:
    """The names given for an option.

    Raises
    ------
    TypeError : no names at all, a bare string, which would be taken letter by letter, or a name that is no
        string.
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
