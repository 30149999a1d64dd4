"""Compare two plans: model and options, parameters, memory, communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fxdp.reports.plan_data.details import Details
from fxdp.reports.rows import format_bytes
from fxdp.reports.sheet import Sheet, Shown


@dataclass(frozen=True, slots=True)
class _Difference:
    """One difference between two plans: name, value here, value there; empty if the value is missing."""

    what: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.what}: {self.here or 'none'} here, {self.there or 'none'} there"


@dataclass(frozen=True, repr=False)
class PlanDiff(Shown):
    """The differences between two plans; empty (and false) for equal plans. Times are not compared."""

    rows: tuple[_Difference, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"PlanDiff({len(self.rows)} differences)"

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "the plans are alike"

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the differences as one table."""
        rows = tuple((row.what, row.here or "none", row.there or "none") for row in self.rows)
        return (Sheet(f"{len(rows)} differences" if rows else str(self), ("what", "here", "there"), rows),)


def differences(here: Details, there: Details) -> PlanDiff:
    """List the differences, from the model down to each collective."""

    def about(one: Details) -> dict[str, str]:
        mesh = ", ".join(f"{axis}={size}" for axis, size in one.mesh.items())
        options = dict(line.removeprefix("option ").split("=", 1) for line in one.options)
        return {"model": one.model, "mesh": mesh, "global batch": str(one.batch), **options}

    def parameters(one: Details) -> dict[str, str]:
        return {f"parameter {p.name}": f"{p.dtype}{list(p.shape)} {p.placement}" for p in one.parameters}

    def memory(one: Details) -> dict[str, str]:
        return {f"peak memory of rank {m.rank}": format_bytes(m.peak.bytes) for m in one.memory}

    parts: tuple[Callable[[Details], Mapping[str, str]], ...] = (about, parameters, memory, _exchanged)
    rows: list[_Difference] = []
    for part in parts:
        rows += _differing(part(here), part(there))
    return PlanDiff(tuple(rows))


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> Iterable[_Difference]:
    names = dict.fromkeys([*here, *there])
    pairs = ((name, here.get(name, ""), there.get(name, "")) for name in names)
    return [_Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def _exchanged(one: Details) -> dict[str, str]:
    """Describe the communication by purpose; the values of a bucket are listed one by one."""
    found: dict[str, list[int]] = {}
    for row in one.collectives:
        for need in row.needs if row.kind != "send" else row.needs[:1]:
            text = row.text if row.kind == "send" else need.text
            size = row.bytes if row.kind == "send" else need.bytes
            found.setdefault(f"{row.phase} {row.kind}: {text}", []).append(size)
    size = sum(row.bytes for row in one.collectives)
    total = {"bytes of a step": format_bytes(size)} if one.collectives else {}
    times = {name: f"{len(sizes)}x " if len(sizes) > 1 else "" for name, sizes in found.items()}
    return {**total, **{name: times[name] + format_bytes(sum(sizes)) for name, sizes in found.items()}}
