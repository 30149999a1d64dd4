"""The ranges of a profile, named as the plan names what runs: stages, micro-batches, messages with causes.

    forward_1_mb3
    send_hidden_mb3_to2
    backward
        all_reduce_8: 4 gradients: gradient of second.bias to first.weight
        ...
        wait for all_reduce_8

Only a step that a profiler records pays for them: any other asks once or twice whether one does.
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
"""Of the messages of a half, in the order in which they start: the op that starts each, and its name."""


_NOBODY = nullcontext()


def ranged(what: str, names: Names) -> AbstractContextManager[None]:
    """Under a profiler a range for a half, and ranges in it for the messages that it starts."""
    return _recorded(what, names) if profiling() else _NOBODY


@contextmanager
def _recorded(what: str, names: Names) -> Iterator[None]:
    # under a dispatch mode torch records itself at each op, which nobody wants to see where nothing travels
    with record_function(what), RangedMessages(names) if names else nullcontext():
        yield


class RangedMessages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ranges around the ops that start messages and wait for them.

    Inductor's code and generated code call the same ops in the same order: which message an op starts, its
    place tells. Where another op comes than the plan has there, ranges are named by ops from then on.
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
        # Inductor calls the op that writes into its operand, and `start_sum` packs what it sums
        if started == ("all_reduce" if func in (start_sum, start_sums) else op.rstrip("_")):
            return name
        self._names.clear()
        return op


class RangedStep(fx.Interpreter):
    """Runs the written step of a pipeline rank with a range for each of its nodes.

    `messages` are the names of what each of its modules starts.
    """

    def __init__(self, program: fx.GraphModule, messages: Mapping[str, Names]) -> None:
        super().__init__(program)
        self._messages = messages

    def run_node(self, n: fx.Node) -> Any:
        """Run it in a range of its name."""
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        with ranged(n.name, self._messages.get(str(n.target), ())):
            return super().run_node(n)
