"""Profiler ranges, named like the plan: stages, micro-batches, and collectives with their causes.

    forward_1_mb3
    send_hidden_mb3_to2
    backward
        all_reduce_8: 4 gradients: gradient of second.bias to first.weight
        ...
        wait for all_reduce_8

Only a step that a profiler records pays for ranges: any other step checks once or twice for a profiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, fx
from torch.profiler import record_function

from fxdp.ir.ops.packed_sums import start_sum, start_sums
from fxdp.torch_compat import TorchDispatchMode, profiling

Names = Sequence[tuple[str, str]]
"""Pairs for the collectives of a graph, in order of start: the op that starts each, and the name."""


_NOBODY = nullcontext()


def ranged(what: str, names: Names) -> AbstractContextManager[None]:
    """Return a context with profiler ranges for a graph and the graph's collectives, if a profiler runs."""
    return _recorded(what, names) if profiling() else _NOBODY


@contextmanager
def _recorded(what: str, names: Names) -> Iterator[None]:
    # a dispatch mode adds events of its own at each op, not worth it for a graph without collectives
    with record_function(what), _RangedMessages(names) if names else nullcontext():
        yield


class _RangedMessages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode with ranges around the ops that start collectives or wait.

    Inductor's code and generated code call the same ops in the same order, so the position determines the
    collective that an op starts. After an op that differs from the plan, ranges are named by ops.
    """

    def __init__(self, names: Names) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = list(reversed(names))
        self._in_flight: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = self._name(func, args) if func.namespace in ("_c10d_functional", "fxdp") else ""
        if not name:
            return func(*args, **(kwargs or {}))
        with record_function(name):
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._in_flight[result.data_ptr()] = name.partition(":")[0]
        return result

    def _name(self, func: Any, args: tuple[Any, ...]) -> str:
        op: str = func._opname
        if op.startswith(("wait", "finish")):
            started = self._in_flight.get(args[0].data_ptr())
            return f"wait for {started}" if started else op
        if func.namespace == "fxdp" and not op.startswith("start"):
            return ""
        started, name = self._names.pop() if self._names else ("", "")
        # Inductor calls the in-place op, and `start_sum` packs its operands
        if started == ("all_reduce" if func in (start_sum, start_sums) else op.rstrip("_")):
            return name
        self._names.clear()
        return op


class RangedStep(fx.Interpreter):
    """Interpreter of a pipeline rank's step with a range for each node.

    `messages` maps each module of the program to the collectives that the module starts.
    """

    def __init__(self, program: fx.GraphModule, messages: Mapping[str, Names]) -> None:
        super().__init__(program)
        self._messages = messages

    def run_node(self, n: fx.Node) -> Any:
        """Run a node in a range with the node's name."""
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        with ranged(n.name, self._messages.get(str(n.target), ())):
            return super().run_node(n)
