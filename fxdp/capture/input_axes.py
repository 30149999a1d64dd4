"""`InputAxes`: the batch axis of each tensor of a ragged call, and the axis into which its values point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxdp.capture.ragged_rows import Rows
from fxdp.capture.row_lengths import from_lengths, to_lengths
from fxdp.errors import InputError
from fxdp.ir.types.sizes import Axis, Meaning
from fxdp.ir.types.sizes import axis as axis_named

SAMPLES = "samples"
"""The axis of tensors for which `batch_dims` has an int, or nothing."""


@dataclass(frozen=True, slots=True)
class InputAxes:
    """The axes of the tensors of calls, by index of the tensor; empty for a batch with one axis.

    Attributes
    ----------
    names : the axis of each tensor's batch dim, as the program names it; empty for the batch's own.
    meanings : what each tensor's values say about an axis; None for other values.
    rows : what each tensor holds, with the axes as the user names them; None without a batch dim.
    """

    names: tuple[str, ...] = ()
    meanings: tuple[Meaning | None, ...] = ()
    rows: tuple[Rows | None, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Rows | None], paths: Sequence[str]) -> InputAxes:
        """Return the axes of tensors with these descriptions.

        The batch's own is that of the samples, of which a batch has some: the axis that points into no other,
        or of several such axes the first.

        Raises
        ------
        InputError : a description that only global tensors fit, or an axis of which no tensor has rows.
        """
        known: dict[str, str] = {}
        for axis in _samples_first([one for one in rows if one is not None]):
            known[axis] = _symbol_name(axis, known)
        for one, path in zip(rows, paths, strict=True):
            if one is not None:
                _check(one, path, known)
        return cls(
            tuple("" if one is None else known[one.axis] for one in rows),
            tuple(None if one is None else _meaning(one, known) for one in rows),
            tuple(rows),
        )

    @property
    def further(self) -> tuple[str, ...]:
        """The names of all axes but the batch's own, in order."""
        return tuple(dict.fromkeys(name for name in self.names if name))

    @property
    def points(self) -> tuple[str | None, ...]:
        """The axis of which each tensor's values are row numbers; None for other values."""
        return tuple(one.axis if one is not None and one.kind == "into" else None for one in self.meanings)

    def to_lengths(
        self, tensors: Sequence[torch.Tensor], batch_dims: Sequence[int | None]
    ) -> tuple[torch.Tensor, ...]:
        """Return a rank's tensors as a program gets these: lengths for starts and bounds."""
        found = list(tensors)
        for i, one in enumerate(self.rows):
            if one is None or (one.starts is None and one.bounds is None):
                continue
            of_target = (
                tensor.shape[dim or 0]
                for tensor, dim, rows in zip(tensors, batch_dims, self.rows, strict=False)
                if rows is not None and rows.axis == one.targets[0] and rows.bounds is None
            )
            found[i] = to_lengths(tensors[i], one, next(of_target, 0))
        return tuple(found)

    def from_lengths(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a program as the model gets it: with starts or bounds of the global batch."""
        one = self.rows[index] if index < len(self.rows) else None
        is_told = one is not None and (one.starts is not None or one.bounds is not None)
        return from_lengths(tensor, one) if one is not None and is_told else tensor

    def axis(self, index: int) -> Axis:
        """Return the axis of a tensor's batch dim."""
        return axis_named(self.names[index] if index < len(self.names) else "")

    def target(self, index: int) -> Axis | None:
        """Return the axis into which a tensor's values point."""
        one = self.meanings[index] if index < len(self.meanings) else None
        return axis_named(one.axis) if one is not None and one.kind == "into" else None


ONE_AXIS = InputAxes()
"""The axes of a batch that is not ragged."""


def _samples_first(rows: Sequence[Rows]) -> list[str]:
    """Return the axes, the one that points into no other before the others if there is one such axis."""
    axes, pointing = list(dict.fromkeys(one.axis for one in rows)), set[str]()
    for one in rows:
        if one.into is not None and one.targets != (one.axis,):
            pointing.add(one.axis)
        elif one.meaning in ("starts", "bounds", "lengths"):  # each row of the target is of one of these
            pointing.update(one.targets)
    roots = [axis for axis in axes if axis not in pointing]
    return list(dict.fromkeys([*roots, *axes])) if len(roots) == 1 else axes


def _symbol_name(name: str, known: dict[str, str]) -> str:
    """Return the name of an axis in symbols of sizes, which are identifiers."""
    if not known:
        return ""
    made = re.sub(r"\W+", "_", name).strip("_") or "axis"
    # `u0` is an axis born inside a program
    while made in known.values() or made.startswith("max") or re.fullmatch(r"u\d+(x\d+)?", made):
        made += "_"
    return made


def _meaning(one: Rows, known: dict[str, str]) -> Meaning | None:
    if one.meaning is None:
        return None
    if one.within is not None:
        return Meaning("within", known.get(one.within, one.within))
    return Meaning("into" if one.into is not None else "lengths", known[one.targets[0]])


def _check(one: Rows, path: str, known: dict[str, str]) -> None:
    for name in one.targets:
        if name not in known:
            raise InputError(
                f"{path}: into={name!r} is an axis of which no input has rows; expected one of "
                f"{sorted(known)}"
            )
