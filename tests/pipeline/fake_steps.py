"""Run a program on a fake device: each call is an operation that reads its operands and makes its results."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxdp.runtime import p2p
from fxdp.runtime.p2p import _Pending
from fxdp.runtime.streams import COMPUTE, _CudaStreams
from tests.fake_cuda import FakeCuda, Value

EVENTS = ("record_event", "wait_event")


class FakeStep(fx.Interpreter):
    """Interprets the program of a rank, letting go of values after their last use as generated code does."""

    def __init__(self, graph: fx.Graph, cuda: FakeCuda) -> None:
        names = {str(n.target) for n in graph.nodes if n.op == "call_module"}
        super().__init__(fx.GraphModule({name: torch.nn.Module() for name in names}, graph))
        self.cuda = cuda
        self.streams = _CudaStreams(torch.device("cuda"), cuda)
        self.events: dict[str, Any] = {"record_event": self.streams.record, "wait_event": self.streams.wait}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.events[target](*args) if target in EVENTS else self._call(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (p2p.wait, p2p.wait_sent):
            return target(*args)
        if target in (operator.getitem, getattr):
            return target(*args)
        return self._call(target.__name__, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def _call(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name, reads = self.node.name, [v for v in tree_leaves((args, dict(kwargs))) if isinstance(v, Value)]
        stream = str(kwargs.get("stream", COMPUTE))
        if target.startswith("receive_"):
            value = self.cuda.new()
            with self.streams.on(stream):
                return _pending(self.cuda.transfer(name, (), [value]), value)
        with self.streams.on(stream):
            if target.startswith("send_"):
                return _pending(self.cuda.transfer(name, reads, ()), reads[0])
            made = self._results(reads)
            self.cuda.run(name, reads, [v for v in tree_leaves(made) if isinstance(v, Value)])
        return made

    def _results(self, reads: list[Value]) -> Any:
        """One value, or those that are taken out of a tuple, of which what is saved keeps the operands."""
        items = {u.args[1]: u.name for u in self.node.users if u.target is operator.getitem}
        if not items:
            return self.cuda.new()
        values = {index: self.cuda.new() for index in items}
        for index, name in items.items():
            if name.startswith(("saved_", "rest_")):
                values[index].keeps = tuple(reads)
        return values


def _pending(work: Any, value: Any) -> _Pending:
    return _Pending(work, value)


def races_of(graph: fx.Graph, steps: int = 3) -> list[tuple[str, str]]:
    """What is not ordered in some steps and the optimizer's between them, which reads all results."""
    cuda = FakeCuda()
    step = FakeStep(graph, cuda)
    for number in range(steps):
        batch = cuda.new()
        cuda.run("batch", (), [batch])
        results = [v for v in step.run(batch) if isinstance(v, Value)]
        cuda.run(f"optimizer {number}", results, ())
        del batch, results
    return cuda.races
