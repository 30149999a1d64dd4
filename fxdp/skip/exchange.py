"""Run one forward of a skippable module and check the commands against the declaration."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxdp.skip.batch import Batch

if TYPE_CHECKING:
    from fxdp.skip.base import Skippable
    from fxdp.skip.tracker import SkipTracker


class Exchange:
    """The stashes and pops of a skippable module in one forward.

    All pops happen before the forward and all stashes after the forward, so a tracker may tie a skip to the
    module's input and output.
    """

    def __init__(self, tracker: SkipTracker, skippable: Skippable) -> None:
        self.tracker = tracker
        self.skippable = skippable
        self.loaded: dict[str, Any] = {}
        self.stashed: dict[str, Any] = {}
        self.popped: set[str] = set()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and return the output."""
        args, kwargs = self.load((args, kwargs))
        output = self.follow(self.skippable.module(*args, **kwargs))
        self.check_complete()
        return self.save(output)

    def load(self, inputs: Any) -> Any:
        """Load all tensors that may be popped; return the inputs, possibly tied to the loaded tensors."""
        if not self.skippable.poppable_names:
            return inputs
        batch = Batch(inputs)
        for ns, name in self.skippable.poppable():
            try:
                self.loaded[name] = self.tracker.load(batch, ns, name)
            except KeyError:
                self.fault(name, f"'{name}' has not been stashed")
        return batch.value

    def follow(self, result: Any) -> Any:
        """Run the commands of a generator and return the final value; return any plain value unchanged."""
        if not isinstance(result, Generator):
            return result
        answer: Any = None
        while True:
            try:
                command = result.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self.obey(command, result)

    def obey(self, command: Any, generator: Generator[Any, Any, Any]) -> Any:
        """Run one command, and return the value of the `yield` expression."""
        if isinstance(command, stash):
            return self.stash(command.name, command.tensor)
        if isinstance(command, pop):
            return self.pop(command.name)
        raise TypeError(f"{command!r} is not a command from @skippable")

    def stash(self, name: str, tensor: Any) -> None:
        """Store a tensor."""
        if name not in self.skippable.stashable_names:
            self.fault(name, f"'{name}' has not been declared as stashable")
        elif name in self.stashed:
            self.fault(name, f"'{name}' has already been stashed")
        self.stashed[name] = tensor

    def pop(self, name: str) -> Any:
        """Return the stored tensor."""
        if name not in self.skippable.poppable_names:
            self.fault(name, f"'{name}' has not been declared as poppable")
        elif name in self.popped:
            self.fault(name, f"'{name}' has already been popped")
        self.popped.add(name)
        return self.loaded[name]

    def check_complete(self) -> None:
        """Check that all declared names were stashed or popped."""
        for names, word in (
            (self.skippable.stashable_names - self.stashed.keys(), "stashed"),
            (self.skippable.poppable_names - self.popped, "popped"),
        ):
            if names:
                self.fault(_quoted(names), f"{_quoted(names)} must be {word} but have not")

    def save(self, output: Any) -> Any:
        """Give all stashed tensors to the tracker; return the output, possibly tied to the tensors."""
        if not self.stashed:
            return output
        batch = Batch(output)
        for name in sorted(self.stashed):
            self.tracker.save(batch, *self.skippable.namespaced(name), self.stashed[name])
        return batch.value

    def fault(self, name: str, message: str) -> None:
        """Raise because the forward violates the declaration."""
        raise RuntimeError(message)


def _quoted(names: Iterable[str]) -> str:
    """Return names sorted and _quoted: `'a', 'b'`."""
    return ", ".join(f"'{name}'" for name in sorted(names))


class stash:  # noqa: N801 - reads as a command
    """`yield stash(name, tensor)` stores a tensor, or None, under a declared name."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"stash({self.name!r}, ...)"


class pop:  # noqa: N801 - reads as a command
    """`tensor = yield pop(name)` returns the tensor that an earlier module stashed under a declared name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"
