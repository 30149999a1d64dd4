"""Skips while a model is traced: tensors are marked in the graph, and faults are collected for one report."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor, nn

from fxdp.capture.export.skip_marks import SkipPoint, mark, skip_error, skip_key
from fxdp.ir.graph.metadata import Location
from fxdp.skip.base import Skippable
from fxdp.skip.declarations import find_faults
from fxdp.skip.exchange import Exchange
from fxdp.skip.namespace import Namespace
from fxdp.skip.tracker import SkipTracker, use_skip_tracker

_MISSING = object()


class _NothingToPopError(Exception):
    """Raised if a skip is popped without a stash, so that the forward cannot continue."""


@contextlib.contextmanager
def captured_skips(model: nn.Module) -> Iterator[_CaptureTracker]:
    """Mark the skips of one forward of `model` inside the block, which starts with empty stashes.

    Raises
    ------
    CaptureError : skips that do not match, all of them.
    """
    tracker = _CaptureTracker(model)
    try:
        with use_skip_tracker(tracker):
            yield tracker
    except Exception as error:
        if tracker.faults:
            raise skip_error(tracker.all_faults()) from error
        raise
    tracker.finish()


class _CaptureTracker(SkipTracker):
    """Tracker of marked tensors, and of the points at which they were stashed and popped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.points: list[SkipPoint] = []
        self.faults: list[tuple[str, str]] = []
        """Pairs of the skip's name and the line to report."""
        self._waiting: dict[tuple[Namespace | None, str], Location] = {}
        self._paths: dict[Skippable, str] = {}
        self._numbers: dict[Namespace, int] = {}
        for path, child in model.named_modules():
            if isinstance(child, Skippable):
                self._paths[child] = path
                for ns, _ in (*child.stashable(), *child.poppable()):
                    self._number(ns)

    def exchange(self, skippable: Skippable) -> Exchange:
        """Return the exchange of skips for one forward of a skippable."""
        return _CapturedExchange(self, skippable)

    def path(self, skippable: Skippable) -> str:
        """Return the name of a skippable in the user's model."""
        return self._paths.get(skippable, type(skippable).__name__)

    def marked(self, kind: str, ns: Namespace | None, name: str, value: Any, location: Location) -> Any:
        """Return a tensor with a mark.

        None and Python numbers are returned unchanged, because they are no values of the graph.
        """
        if not isinstance(value, Tensor):
            return value
        point = SkipPoint(kind, self._number(ns), name, location)
        self.points.append(point)
        return mark(value, point)

    def put(self, ns: Namespace | None, name: str, value: Any, location: Location) -> None:
        """Stash a value."""
        if (ns, name) in self._waiting:
            first = self._waiting[ns, name]
            self.fault(
                name,
                location,
                f"'{self._key(ns, name)}' is stashed again before it was popped (by {first.module})",
            )
        self._waiting[ns, name] = location
        self.tensors[ns, name] = self.marked("stash", ns, name, value, location)

    def take(self, ns: Namespace | None, name: str) -> Any:
        """Pop a value; `_MISSING` if nothing was stashed."""
        self._waiting.pop((ns, name), None)
        return self.tensors.pop((ns, name), _MISSING)

    def fault(self, name: str, location: Location, text: str) -> None:
        """Add a fault to the report."""
        self.faults.append((name, f"{location}: {text}"))

    def all_faults(self) -> list[str]:
        """Return all faults found; if the forward stopped early, also wrong declarations of later modules."""
        known = {name for name, _ in self.faults}
        declared = [fault.text for fault in find_faults(self._model) if fault.name not in known]
        return [line for _, line in self.faults] + declared

    def finish(self) -> None:
        """Raise an error with the faults of a complete forward, if there are any."""
        for (ns, name), location in self._waiting.items():
            self.fault(name, location, f"'{self._key(ns, name)}' is stashed but never popped")
        if self.faults:
            raise skip_error([line for _, line in self.faults])

    def _number(self, ns: Namespace | None) -> int | None:
        """Return a namespace's number: counted in the order of the model's modules, so equal on all ranks."""
        return None if ns is None else self._numbers.setdefault(ns, len(self._numbers) + 1)

    def _key(self, ns: Namespace | None, name: str) -> str:
        return skip_key(self._number(ns), name)


class _CapturedExchange(Exchange):
    """An exchange that continues after a fault, as long as there is a value to continue with."""

    tracker: _CaptureTracker

    def __init__(self, tracker: _CaptureTracker, skippable: Skippable) -> None:
        super().__init__(tracker, skippable)
        self._module = tracker.path(skippable)
        self._location = _forward_location(skippable.module, self._module)
        self._locations: dict[str, Location] = {}

    def load(self, inputs: Any) -> Any:
        for ns, name in self.skippable.poppable():
            self.loaded[name] = self.tracker.take(ns, name)
        return inputs

    def obey(self, command: Any, generator: Generator[Any, Any, Any]) -> Any:
        outside, self._location = self._location, _yield_location(generator, self._module)
        answer = super().obey(command, generator)
        self._location = outside
        return answer

    def stash(self, name: str, tensor: Any) -> None:
        super().stash(name, tensor)
        self._locations[name] = self._location

    def pop(self, name: str) -> Any:
        key = self.skippable.namespaced(name)
        if name not in self.loaded:  # undeclared
            self.loaded[name] = self.tracker.take(*key)
        value = super().pop(name)
        if value is _MISSING:
            self.fault(name, f"'{name}' has not been stashed")
            raise _NothingToPopError
        return self.tracker.marked("pop", *key, value, self._location)

    def save(self, output: Any) -> Any:
        for name in sorted(self.stashed):
            self.tracker.put(*self.skippable.namespaced(name), self.stashed[name], self._locations[name])
        return output

    def fault(self, name: str, message: str) -> None:
        self.tracker.fault(name, self._location, message)


def _forward_location(module: nn.Module, path: str) -> Location:
    """Return the location of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return Location(module=path)
    return Location.at(code.co_filename, code.co_firstlineno, path)


def _yield_location(generator: Any, path: str) -> Location:
    """Return the line of the `yield` at which a generator waits, within nested `yield from`."""
    while getattr(generator, "gi_yieldfrom", None) is not None:
        generator = generator.gi_yieldfrom
    frame = getattr(generator, "gi_frame", None)
    if frame is None:
        return Location(module=path)
    return Location.at(frame.f_code.co_filename, frame.f_lineno, path)
