"""One forward of a skippable: its commands, checked against what it declares."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from fxdp.skip.batch import Batch
from fxdp.skip.commands import pop, stash

if TYPE_CHECKING:
    from fxdp.skip.base import Skippable
    from fxdp.skip.tracker import SkipTracker


class Exchange:
    """What a skippable stashes and pops in one forward.

    It pops before its forward and stashes after it, so that a tracker may tie a skip to its input and to
    its output.
    """

    def __init__(self, tracker: SkipTracker, skippable: Skippable) -> None:
        self.tracker = tracker
        self.skippable = skippable
        self.loaded: dict[str, Any] = {}
        self.stashed: dict[str, Any] = {}
        self.popped: set[str] = set()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the module."""
        args, kwargs = self.load((args, kwargs))
        output = self.follow(self.skippable.module(*args, **kwargs))
        self.check_complete()
        return self.save(output)

    def load(self, inputs: Any) -> Any:
        """Take everything that may be popped; the inputs, maybe tied to it."""
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
        """Carry out what a generator yields; the output, which is the result itself if it is none."""
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
        """Carry out one command; what the `yield` gives back."""
        if isinstance(command, stash):
            return self.stash(command.name, command.tensor)
        if isinstance(command, pop):
            return self.pop(command.name)
        raise TypeError(f"{command!r} is not a command from @skippable")

    def stash(self, name: str, tensor: Any) -> None:
        """Put a tensor aside."""
        if name not in self.skippable.stashable_names:
            self.fault(name, f"'{name}' has not been declared as stashable")
        elif name in self.stashed:
            self.fault(name, f"'{name}' has already been stashed")
        self.stashed[name] = tensor

    def pop(self, name: str) -> Any:
        """The tensor that was put aside."""
        if name not in self.skippable.poppable_names:
            self.fault(name, f"'{name}' has not been declared as poppable")
        elif name in self.popped:
            self.fault(name, f"'{name}' has already been popped")
        self.popped.add(name)
        return self.loaded[name]

    def check_complete(self) -> None:
        """Everything declared must have been stashed or popped."""
        for names, word in (
            (self.skippable.stashable_names - self.stashed.keys(), "stashed"),
            (self.skippable.poppable_names - self.popped, "popped"),
        ):
            if names:
                self.fault(quoted(names), f"{quoted(names)} must be {word} but have not")

    def save(self, output: Any) -> Any:
        """Hand everything stashed to the tracker; the output, maybe tied to it."""
        if not self.stashed:
            return output
        batch = Batch(output)
        for name in sorted(self.stashed):
            self.tracker.save(batch, *self.skippable.namespaced(name), self.stashed[name])
        return batch.value

    def fault(self, name: str, message: str) -> None:
        """Refuse what breaks the declaration."""
        raise RuntimeError(message)


def quoted(names: Iterable[str]) -> str:
    """`'a', 'b'`, in their order."""
    return ", ".join(f"'{name}'" for name in sorted(names))
