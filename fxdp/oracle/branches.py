"""Find the data-dependent branches that a model's code takes on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import read_inputs, run_model
from fxdp.capture.locations import location_of_call, location_of_frame
from fxdp.capture.python.flags import FLAGS, found_places, is_flag, is_selection, rows_at
from fxdp.capture.python.unit_draws import UNIT_DRAWS
from fxdp.capture.refusals.stateful import aside, copy_of
from fxdp.ir.graph.draws import reseed
from fxdp.ir.graph.metadata import Location
from fxdp.options import Options
from fxdp.oracle.one_device import first_samples
from fxdp.torch_compat import Patch, around, calling_frame, patched


def branches_at(
    found: Captured, module: nn.Module, inputs: Any, options: Options, batch: int, seed: int
) -> tuple[bool, ...]:
    """Return the answer at each branch of a capture for the first samples, up to the first different answer.

    `seed` must be the seed of the run to be compared, because dropout may affect the answers.
    """
    if not found.branches:
        return ()
    args, kwargs = inputs
    given = read_inputs(module, args, kwargs, options.batch_dims)
    args, kwargs = given.rebuild(first_samples(given.tensors, found.batch, batch))
    asked: list[tuple[Location, bool]] = []

    def hear(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        value = plain(self)
        if is_flag(self):
            asked.append((location_of_frame(calling_frame()), bool(value)))
        return value

    truth = Tensor.__bool__  # torch's own: the patches below are not installed yet

    def goes(flag: Tensor, frame: FrameType) -> bool:
        asked.append((location_of_frame(frame), truth(flag)))
        return asked[-1][1]

    def hear_rows(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        places = found_places(self)
        return plain(self) if places is None else rows_at(places, goes)

    def hear_count(plain: Callable[[Tensor], int], self: Tensor) -> int:
        count = plain(self)
        return _Count(count, asked) if is_selection(self) else count

    recording_effects = [Patch(Tensor, name, around(hear)) for name in ("__bool__", "item")]
    recording_effects.append(Patch(Tensor, "numel", around(hear_count)))
    recording_effects.append(Patch(Tensor, "__iter__", around(hear_rows)))
    with aside(), patched((*FLAGS, *UNIT_DRAWS, *recording_effects)):
        reseed(seed)
        run_model(copy_of(module), args, kwargs, options.loss_fn, options.precision)
    return _at_branches(found, asked)


def _at_branches(found: Captured, asked: list[tuple[Location, bool]]) -> tuple[bool, ...]:
    left: dict[Location, deque[bool]] = {}
    for location, value in asked:
        left.setdefault(location, deque()).append(value)
    branches: list[bool] = []
    for check in found.checks:
        if check.branch:
            effects = left.get(check.location)
            branches.append(effects.popleft() if effects else check.passes)
            if branches[-1] != check.passes:
                break
    return tuple(branches)


class _Count(int):
    """The number of elements that a mask selects; records each comparison as a comparison with zero."""

    _asked: list[tuple[Location, bool]]

    def __new__(cls, count: int, asked: list[tuple[Location, bool]]) -> _Count:
        made = super().__new__(cls, count)
        made._asked = asked
        return made

    def _compared(self, answer: bool) -> bool:
        self._asked.append((location_of_call(), int(self) > 0))
        return answer

    def __eq__(self, other: object) -> bool:
        return self._compared(int(self) == other)

    def __ne__(self, other: object) -> bool:
        return self._compared(int(self) != other)

    def __gt__(self, other: int) -> bool:
        return self._compared(int(self) > other)

    def __lt__(self, other: int) -> bool:
        return self._compared(int(self) < other)

    __hash__ = int.__hash__


def on_branch(found: Captured, branches: tuple[bool, ...]) -> bool:
    """Return whether a capture took these branches."""
    return found.branches[: len(branches)] == branches
