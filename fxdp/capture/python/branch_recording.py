"""Record the decisions that a model's code takes at flags of the batch when it runs on values."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from fxdp.capture.locations import location_of_call, location_of_frame
from fxdp.capture.python.flags import FLAGS, found_places, is_flag, is_selection, rows_at
from fxdp.capture.python.unit_draws import UNIT_DRAWS
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around, calling_frame, patched


def record_branches(_own: Callable[..., Any], run: Callable[[], object]) -> list[tuple[Location, bool]]:
    """Run code and return its decisions in order, by line."""
    asked: list[tuple[Location, bool]] = []

    def record(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        value = plain(self)
        if is_flag(self):
            asked.append((location_of_frame(calling_frame()), bool(value)))
        return value

    truth = Tensor.__bool__  # torch's own: the patches below are not installed yet

    def goes(flag: Tensor, frame: FrameType) -> bool:
        asked.append((location_of_frame(frame), truth(flag)))
        return asked[-1][1]

    def record_rows(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        places = found_places(self)
        return plain(self) if places is None else rows_at(places, goes)

    def record_count(plain: Callable[[Tensor], int], self: Tensor) -> int:
        count = plain(self)
        return _Count(count, asked) if is_selection(self) else count

    patches = [Patch(Tensor, name, around(record)) for name in ("__bool__", "item")]
    patches.append(Patch(Tensor, "numel", around(record_count)))
    patches.append(Patch(Tensor, "__iter__", around(record_rows)))
    with patched((*FLAGS, *UNIT_DRAWS, *patches)):
        run()
    return asked


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
