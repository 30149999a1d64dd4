"""The results of `zoo.py` as a page of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.conformance.kept import FAILURES, Row, reasons
from tests.zoo.measure import MODES, SPLITS

Found = dict[str, Any]
"""What `zoo_public.py` found of a model."""

_HEAD = """# The model zoo

Made by `python -m benchmarks.conformance.zoo` ({versions}); do not edit by hand.

Each model is small, has random weights in float64, and runs on 1, 2 and 4 virtual ranks, the batch split as
{splits}.
Every node of the program, every output, gradient and buffer is compared with one eager device. The figure is
the largest relative error of any of them over all splits; the limit is 1e-9, or 1e-6 where the model itself
computes in float32 on the way (f32). In training mode dropout is on and draws what eager draws.

`sums` and `gathers`: collectives of a training step on 4 ranks, before bucketing; one sum per parameter is
its gradient's. Gathers include those of dropout masks that must equal one device's (`rng="single-device"`).

**{exact} of {total} models are captured and exact**, in training, evaluation and without gradients.

`two ranks`: loss, gradients and buffers of training on two real ranks, through Inductor, with uneven batches
that change, beside one eager device (`python -m benchmarks.conformance.zoo_public`). Here a model's own
casts to float32 stay, except where the figure says f64, and what Inductor cannot compile has failed. {public}
"""


def markdown(
    kinds: Mapping[str, Mapping[str, Row]], versions: Mapping[str, str], public: dict[str, Found]
) -> str:
    """The entire page; `public`: what `zoo_public.py` has found."""
    models = {name: row for rows in kinds.values() for name, row in rows.items()}
    measured = {name: row for name, row in models.items() if row}
    page = [
        _HEAD.format(
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
            splits=", ".join(map(str, SPLITS)), exact=sum(map(_is_exact, measured.values())),
            total=len(measured),
            public=public_summary({name: public[name] for name in models if name in public}),
        )
    ]  # fmt: skip
    for kind, rows in kinds.items():
        if known := {name: row for name, row in rows.items() if row or name in public}:
            page.append(_table(kind, known, public))
    if failures := {name: row for name, row in measured.items() if "why" in row}:
        page.append(_failures(failures))
    missing = [name for name, row in models.items() if not row.keys() >= set(MODES)]
    if missing:
        page.append(f"Not measured here yet (`--missing` does it): {', '.join(missing)}.\n")
    return "\n".join(page)


def _is_exact(row: Row) -> bool:
    """Whether all modes were measured, and none failed."""
    return all(mode in row and row[mode] not in FAILURES for mode in MODES)


def public_summary(found: dict[str, Found]) -> str:
    """How many models were measured on two ranks, the largest error, and what has none."""
    errors = [error for row in found.values() if (error := _public_error(row)) is not None]
    alone = sum(row.get("programs") == 1 for row in found.values())
    refused = sum("refused" in row for row in found.values())
    counts = [f"**{len(errors)} models** are measured so, the largest error is {max(errors, default=0):.0e}"]
    counts += [f"of {alone} only the program that serves any size of batch"] if alone else []
    counts += [f"{refused} are refused as below"] if refused else []
    counts += [f"{len(found) - len(errors) - refused} failed"] if len(found) > len(errors) + refused else []
    return "; ".join(counts) + "."


def public_state(row: Found) -> str:
    """`3e-07`, `2e-11 f64`, in a word what went wrong, or nothing."""
    error = _public_error(row)
    if error is None:
        return next(iter(row), "")
    return f"{error:.0e} f64" if "in_float64" in row else f"{error:.0e}"


def _public_error(row: Found) -> float | None:
    return row.get("in_float64", row.get("error"))


def _table(kind: str, rows: dict[str, Row], public: dict[str, Found]) -> str:
    lines = [
        f"## {kind.capitalize()}\n",
        "| model | train | eval | no_grad | two ranks | sums | gathers | run replicated on each rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        states = [row.get(mode, "") for mode in MODES]
        lines.append(f"| {' | '.join([name, *states, public_state(public.get(name, {})), *counts(row)])} |")
    return "\n".join(lines) + "\n"


def counts(row: Row) -> tuple[str, str, str]:
    """Sums, gathers and ops that run replicated on each rank, of which none is no word."""
    fallbacks = row.get("fallbacks", "")
    return row.get("sums", ""), row.get("gathers", ""), "" if fallbacks == "0" else fallbacks


def _failures(failures: dict[str, Row]) -> str:
    """What is not exact in some mode, with fxdp's own words."""
    lines = ["## Not captured, or not exact\n"]
    for name, row in failures.items():
        modes: dict[str, list[str]] = {}
        for mode, why in reasons(row).items():
            modes.setdefault(why, []).append(mode)
        lines += [f"- **{name}** ({', '.join(where)}): {why}" for why, where in modes.items()]
    return "\n".join(lines) + "\n"
