"""Checks of data, and decisions at flags, in one run of the model's code, as results of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fxdp import torch_compat
from fxdp.capture.captured import Otherwise
from fxdp.capture.locations import is_user_file, location_of_frame
from fxdp.capture.patches.unbacked_hints import HintedNumber, UnbackedHints
from fxdp.ir.graph.metadata import Location

_UNKNOWN = (torch_compat.GuardOnDataDependentSymNode, torch_compat.DataDependentOutputException)


class AskedChecks:
    """Checks on data, and decisions at flags, in one run of the model's code.

    `branches` are the decisions at the first flags; later flags get their likely value. None refuses flags.
    """

    def __init__(self, branches: tuple[bool, ...] | None = (), told: Sequence[HintedNumber] = ()) -> None:
        self._branches = branches
        self.told = UnbackedHints(told)
        self.has_branches = branches is not None
        self.tensors: list[Tensor] = []
        self.answers: list[tuple[bool, Otherwise, Location]] = []
        """For each check: the tensor's required value, the code's behavior on failure, and the location."""
        self._askers: list[Any] = []
        """Keys of the checks, equal for one check in several iterations of a loop; unique for a branch."""

    def answer(self, tensor: Tensor, passes: bool, raises: bool, frame: FrameType) -> bool:
        """Record a line with one normal branch, taken for `passes`; the opposite may raise."""
        self._note(tensor, (passes, "raises" if raises else "not finite", location_of_frame(frame)))
        if raises:
            self._askers[-1] = (frame.f_code, frame.f_lasti, tensor.device)
        return passes

    def way(self, flag: Tensor, read: Callable[[Tensor], Any], frame: FrameType, likely: bool) -> bool:
        """Return and record the decision of the code on a flag; `likely` without one that was given.

        Values that the trace knows are returned directly.
        """
        try:
            return bool(read(flag))
        except _UNKNOWN:
            if self._branches is None or not is_user_file(frame.f_code.co_filename):
                raise
        taken, location = self._taken(), location_of_frame(frame)
        way = (
            self._branches[len(taken)] if len(taken) < len(self._branches) else self._guess(likely, location)
        )
        self._note(flag, (way, "branches", location))
        return way

    def _guess(self, likely: bool, location: Location) -> bool:
        """Return the likely value of a flag; True if an earlier flag at this line was True."""
        if likely:
            return True
        before = (
            passes for passes, otherwise, at in self.answers if otherwise == "branches" and at == location
        )
        return any(before)

    def _taken(self) -> tuple[bool, ...]:
        return tuple(passes for passes, otherwise, _ in self.answers if otherwise == "branches")

    def other_guess(self) -> tuple[bool, ...] | None:
        """Return the decisions so far with the last one inverted; None if the last one was not a guess."""
        taken = self._taken()
        return (*taken[:-1], not taken[-1]) if len(taken) > len(self._branches or ()) else None

    def settle(self) -> None:
        """Record at the end of the run that all hints must be correct."""
        for location, right in self.told.checks():
            self._note(right, (True, "other number", location))
        self._join()

    def _join(self) -> None:
        """Combine a check that several iterations of a loop evaluate into one, at the last iteration."""
        iterations: dict[Any, list[int]] = {}
        for place, asker in enumerate(self._askers):
            iterations.setdefault(asker, []).append(place)
        for places in filter(lambda places: len(places) > 1, iterations.values()):
            every = torch.stack([self.tensors[place] for place in places])
            passes = self.answers[places[-1]][0]
            self.tensors[places[-1]] = every.all() if passes else every.any()
        last = sorted(places[-1] for places in iterations.values())
        self.tensors, self.answers = [self.tensors[i] for i in last], [self.answers[i] for i in last]

    def must(self, tensor: Tensor, location: Location) -> None:
        """Record that a value must be true at each step, as for `torch._assert_async`."""
        self._note(tensor, (True, "raises", location))

    def _note(self, tensor: Tensor, answer: tuple[bool, Otherwise, Location]) -> None:
        # a new bool: the tensor itself may be written later, or be a view
        self.tensors.append((tensor != 0).reshape(()).detach())
        self.answers.append(answer)
        self._askers.append(len(self._askers))
