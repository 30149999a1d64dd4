"""The result of `fxdp.verify`, for people and programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fxdp.errors import ExactnessError
from fxdp.ir.graph.metadata import Location
from fxdp.oracle.bits import BitRun
from fxdp.oracle.fault import Fault
from fxdp.oracle.results import ResultError
from fxdp.oracle.virtual_run import SplitRun
from fxdp.reports.rows import flat_dict
from fxdp.reports.sheet import Sheet, Shown


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of comparing a model's data-parallel program with the model on one device.

    Attributes
    ----------
    model, mesh : the verified model and mesh.
    splits : one run per split of the global batch.
    compared : a description of the comparison.
    casts : lines at which the float64 copy computes in float32 or narrower; after these lines 1e-6 is equal.
    invariants : the message of the graph verifier; empty if all invariants hold.
    bits : with `fxdp.Bitwise`, one run per split, compared bit by bit with one device in the same blocks.
    """

    model: str
    mesh: str
    splits: tuple[SplitRun, ...]
    compared: str = ""
    casts: tuple[Location, ...] = ()
    invariants: str = ""
    bits: tuple[BitRun, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every value was equal on every split."""
        runs: list[SplitRun | BitRun] = [*self.splits, *self.bits]
        return not self.invariants and bool(runs) and all(run.ok for run in runs)

    @property
    def first_fault(self) -> Fault | None:
        """The first node that differs from one device."""
        return next((fault for run in self.splits for fault in run.faults), None)

    @property
    def wrong_results(self) -> tuple[ResultError, ...]:
        """Outputs, gradients and buffers that differ from the unmodified model."""
        return tuple(row for run in self.splits for row in run.wrong)

    @property
    def worst(self) -> float:
        """The largest relative error of any node or result."""
        errors = [run.worst for run in self.splits]
        errors += [row.error for run in self.splits for row in run.results]
        return max(errors, default=0.0)

    def raise_if_wrong(self) -> None:
        """Raise if a value differs.

        Raises
        ------
        ExactnessError : with the first differing node, its line, placement, rule and operands.
        """
        if not self.ok:
            raise ExactnessError(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON; an infinite error becomes None."""
        plain: dict[str, Any] = _finite(
            {
                "ok": self.ok,
                "model": self.model,
                "mesh": self.mesh,
                "compared": self.compared,
                "worst": self.worst,
                "casts": [str(location) for location in self.casts],
                "invariants": self.invariants,
                "splits": [_split_dict(run) for run in self.splits],
                "bits": [_bits_dict(run) for run in self.bits],
            }
        )
        return plain

    def __str__(self) -> str:
        lines = [self._headline(), f"  {self.compared}"]
        lines += [f"  {line}" for line in self._casts()]
        lines += [f"  {line}" for line in self._ties()]
        lines += [f"  {_split_line(run)}" for run in self.splits]
        if self.invariants:
            lines += ["the graph breaks an invariant:", _indented(self.invariants)]
        if self.first_fault is not None:
            lines += ["first differing node:", _indented(str(self.first_fault))]
        lines += [f"  split {list(run.split)}: {row}" for run in self.splits for row in run.wrong]
        lines += [line for run in self.bits for line in _bit_lines(run)]
        if not self.ok:
            lines.append(_REMEDY)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Report({self._headline()})"

    def sheets(self) -> tuple[Sheet, ...]:
        """Return a table with one row per split, and the remaining text as a note."""
        rows = tuple(
            (str(list(run.split)), str(run.nodes), str(len(run.results)), f"{run.worst:.1e}", run.worst_node,
             "equal" if run.ok else "differs")
            for run in self.splits
        )  # fmt: skip
        columns = ("split", "#nodes", "#results", "#largest error", "at", "=")
        meta, style = "\n".join(self._beside_splits()), "green" if self.ok else "red"
        return (Sheet(self._headline(), columns, rows, meta, style=style),)

    def _beside_splits(self) -> list[str]:
        """Return the lines of the text without the headline and the splits."""
        said = {_split_line(run) for run in self.splits}
        return [line for line in str(self).splitlines()[1:] if line.strip() not in said]

    def _headline(self) -> str:
        if not self.ok:
            return f"{self.model} on {self.mesh} differs from one device"
        if not self.splits:
            return f"{self.model} on {self.mesh} has the bits of one device"
        return f"{self.model} on {self.mesh} equals one device: largest relative error {self.worst:.1e}"

    def _casts(self) -> list[str]:
        said = "the model computes in float32 or narrower at these lines, 1e-6 is equal there:"
        return _locations(said, self.casts)

    def _ties(self) -> list[str]:
        ties = tuple(dict.fromkeys(location for run in self.splits for location in run.ties))
        said = "rounding decides at these lines (x > y where both are equal but for it), as one device did:"
        return _locations(said, ties)


_REMEDY = (
    "This is a bug in fxdp, in a rule added by fxdp.register_rule, or (of bits alone) in an op of your own: "
    "please report the lines above. Until it is fixed do not train this model with this program"
)


def _locations(said: str, locations: tuple[Location, ...]) -> list[str]:
    """Return a sentence followed by the first five locations; empty without locations."""
    more = [f"  and {len(locations) - 5} more"] if len(locations) > 5 else []
    return [said, *(f"  {location}" for location in locations[:5]), *more] if locations else []


def _split_line(run: SplitRun) -> str:
    counted = f"{run.nodes} nodes, {len(run.results)} results"
    return f"split {list(run.split)}: {'equal' if run.ok else 'differs'}, {counted}, error {run.worst:.1e}"


def _bit_lines(run: BitRun) -> list[str]:
    """Return a line for a split, and the first op and all results with different bits."""
    counted = f"{run.nodes} nodes, {run.results} results"
    lines = [f"  split {list(run.split)}: {'equal bits' if run.ok else 'different bits'}, {counted}"]
    if run.fault is not None:
        lines += ["first op with different bits:", _indented(str(run.fault))]
    elif run.differing:
        lines.append("  each op has equal bits in every block: sums of blocks or the optimizer differ")
    return lines + ([f"  different bits: {', '.join(run.differing)}"] if run.differing else [])


def _bits_dict(run: BitRun) -> dict[str, Any]:
    return {
        "split": list(run.split),
        "ok": run.ok,
        "nodes": run.nodes,
        "fault": None if run.fault is None else flat_dict(run.fault),
        "differing": list(run.differing),
    }


def _split_dict(run: SplitRun) -> dict[str, Any]:
    return {
        "split": list(run.split),
        "ok": run.ok,
        "nodes": run.nodes,
        "worst": run.worst,
        "worst_node": run.worst_node,
        "ties": [str(location) for location in run.ties],
        "faults": [flat_dict(fault) for fault in run.faults],
        "results": [asdict(result) for result in run.results],
    }


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
