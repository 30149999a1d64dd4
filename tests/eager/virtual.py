"""Global tensors on virtual ranks: each rank is a thread of this process, and one runs at a time.

    results = on_virtual_ranks((5, 0, 3), lambda ranks: f(part_of(x, ranks.axis((5, 0, 3)), S(0))))

A rank runs until it sends; then it is the next one's turn. When all have arrived, the message is computed
from the values of all ranks, by what the compiler's oracle takes for it. So an op costs no process and no
socket, and a wait that nobody ends is an error instead of a hang. Each rank has its own state of torch's
random generator. Autograd and gradients work, as on real ranks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

import fxdp.eager.dispatch
import fxdp.eager.local_parts  # noqa: F401  (both: before their functions are replaced)
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.spec import spec_of
from fxdp.eager.tensor import GlobalTensor
from fxdp.ir.routes import route
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Placement, R
from fxdp.ir.types.value_types import TensorType
from fxdp.ranks.plain_values import decode, encode
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.rules.proof.samples import split

Result = TypeVar("Result")


class PartedError(AssertionError):
    """Ranks are at different messages, or one has ended while others wait for it."""


class VirtualRanks(DataRanks):
    """The data ranks as one virtual rank sees them."""

    def __init__(self, turns: _Turns, rank: int) -> None:
        mesh = Mesh(("dp",), (turns.world,), rank, tuple(range(turns.world)), "cpu")
        super().__init__(ProcessMesh(mesh))
        self.turns = turns

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """All ranks' integers."""
        return [tuple(row) for row in self.turns.meet(self.rank, "exchange", tuple(values))]

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, as they come through the encoding."""
        return [decode(one) for one in self.turns.meet(self.rank, "gather", encode(value))]

    def message(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: `meet` compares what ranks send."""
        return contextlib.nullcontext()


class _Turns:
    """Whose turn it is, and what was sent."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._gates = [threading.Semaphore(0) for _ in range(world)]
        self._rounds: list[list[Any]] = []
        self._round = [0] * world
        self._ended = [False] * world
        self._states = [torch.get_rng_state()] * world
        self._done = threading.Event()

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Run all ranks to their end; raises the first rank's error."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def of_rank(rank: int) -> None:
            self._gates[rank].acquire()
            torch.set_rng_state(self._states[rank])
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
            self._ended[rank] = True
            self._pass_on(rank)

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        self._done.wait()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def meet(self, rank: int, name: str, value: Any) -> list[Any]:
        """Return what all ranks send, once all have come."""
        number = self._round[rank]
        self._round[rank] += 1
        if number == len(self._rounds):
            self._rounds.append([None] * self.world)
        sent = self._rounds[number]
        sent[rank] = name, value
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._gates[rank].acquire()
        torch.set_rng_state(state)
        if None in sent:
            raise PartedError(f"rank {rank} waits in {name} for ranks that have ended")
        if len({one[0] for one in sent}) > 1:
            raise PartedError(f"ranks are at {[one[0] for one in sent]}")
        return [one[1] for one in sent]

    def _pass_on(self, rank: int) -> None:
        order = [*range(rank + 1, self.world), *range(rank + 1)]
        for other in order:
            if not self._ended[other]:
                self._gates[other].release()
                return
        self._done.set()


def _redistributed(
    local: Tensor, type_: TensorType, have: Placement, want: Placement, axis: BatchAxis, cause: str
) -> Tensor:
    """As `fxdp.eager.redistribute.redistributed`, from the values of all virtual ranks."""
    ranks, at = axis.ranks, have
    if have == want or ranks.world == 1:
        return local
    assert isinstance(ranks, VirtualRanks)
    steps = route(have, want)
    for number, step in enumerate(steps, 1):
        to = want if number == len(steps) else R
        arguments = step.arguments(type_, at, to)
        name = f"{step.target.__name__} of {list(type_.shape)} for {cause}"
        values = ranks.turns.meet(ranks.rank, name, local)
        local = step.on_ranks(values, axis.sizes, *arguments)[ranks.rank].clone()
        at = to
    return local


@contextlib.contextmanager
def _virtual() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("fxdp.eager.") and hasattr(module, "redistributed"):
                stack.enter_context(mock.patch.object(module, "redistributed", _redistributed))
        yield


def part_of(full: Tensor, axis: BatchAxis, placement: Placement) -> Tensor:
    """The global tensor of which this virtual rank holds what the placement says; of a sum, its term."""
    local = split(full, placement, axis.sizes)[axis.ranks.rank]
    spec = spec_of(full.dtype, tuple(full.shape), tuple(full.stride()), full.device, axis.layout(placement))
    return GlobalTensor(local, spec)


def on_virtual_ranks(world: int, function: Callable[[VirtualRanks], Result]) -> list[Result]:
    """`function(ranks)` on each virtual rank, in rank order; raises what the first failing rank raised."""
    turns = _Turns(world)
    with _virtual():
        return turns.run(lambda rank: function(VirtualRanks(turns, rank)))
