"""A device without a device: streams, events and memory that say which accesses nothing orders."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class FakeStream:
    """`done` are the operations, as bits, that end before whatever the stream is given next."""

    name: str
    cuda: FakeCuda
    done: int = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")
        self.done |= event.done


@dataclass(eq=False)
class FakeEvent:
    cuda: FakeCuda
    name: str = "an event never recorded"
    done: int = 0

    def record(self, stream: FakeStream) -> None:
        self.name, self.done = f"event {next(self.cuda.numbers)} of {stream.name}", stream.done
        self.cuda.log.append(f"{stream.name} records {self.name}")


@dataclass(eq=False)
class Value:
    """Memory that an operation fills; handed back to the pool of its stream when nobody holds it any more."""

    block: object
    keeps: tuple[Value, ...] = ()


@dataclass
class FakeCuda:
    """In place of `torch.cuda`. Memory is given out again at once, the last that came back first.

    `races` names pairs of operations that use the same memory, one of them to write, in no certain order.
    """

    log: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    names: list[str] = field(default_factory=list)
    races: list[tuple[str, str]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    _uses: dict[object, list[tuple[int, bool]]] = field(default_factory=dict)
    _free: dict[FakeStream, list[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.current = FakeStream("the caller's", self)

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802
        self.streams.append(FakeStream(f"stream {len(self.streams)}", self))
        return self.streams[-1]

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def current_stream(self, device: Any) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new(self) -> Value:
        """Memory of the current stream's pool."""
        pool = self._free.setdefault(self.current, [])
        value = Value(pool.pop() if pool else object())
        weakref.finalize(value, pool.append, value.block)
        return value

    def run(self, name: str, reads: Sequence[Value], writes: Sequence[Value]) -> None:
        """Give an operation to the current stream."""
        self.log.append(f"{self.current.name} runs {name}")
        number = len(self.names)
        self.names.append(name)
        done = self.current.done
        for value, write in [*((v, False) for v in _all(reads)), *((v, True) for v in writes)]:
            uses = self._uses.setdefault(value.block, [])
            unordered = [other for other, wrote in uses if (write or wrote) and not done >> other & 1]
            self.races += [(self.names[other], name) for other in unordered if other != number]
            uses.append((number, write))
        self.current.done |= 1 << number

    def transfer(self, name: str, reads: Sequence[Value], writes: Sequence[Value]) -> FakeWork:
        """The same beside the current stream, as process groups do."""
        beside = FakeStream("the group's", self, self.current.done)
        with self.stream(beside):
            self.run(name, reads, writes)
        return FakeWork(self, beside.done, name)


@dataclass
class FakeWork:
    """Of an asynchronous transfer."""

    cuda: FakeCuda
    done: int
    name: str

    def wait(self) -> None:
        self.cuda.log.append(f"{self.cuda.current.name} waits for {self.name}")
        self.cuda.current.done |= self.done


def _all(values: Sequence[Value]) -> Iterator[Value]:
    for value in values:
        yield value
        yield from _all(value.keeps)
