"""The results of `zoo_sweep.py` as a page of tables."""

from __future__ import annotations

import re
from typing import Any

Result = dict[str, Any]
Modes = dict[str, Result]

_MODES = ("train", "eval", "no_grad")

_HEAD = """# The model zoo

Made by `python benchmarks/zoo_sweep.py` ({versions}); do not edit by hand.

Each model is small, has random weights in float64, and runs on 1, 2 and 4 virtual ranks, the batch split as
{splits}.
Every node of the program, every output, gradient and buffer is compared with one eager device. The figure is
the largest relative error of any of them over all splits; the limit is 1e-9, or 1e-6 where the model itself
computes in float32 on the way (f32). In training mode dropout is on and draws what eager draws.

`sums` and `gathers`: collectives of a training step on 4 ranks, before bucketing; one sum per parameter is
its gradient's. Gathers include those of dropout masks that must equal one device's (`rng="single-device"`).

**{exact} of {total} models are captured and exact**, in training, evaluation and without gradients.

`two ranks`: loss, gradients and buffers of training on two real ranks, through Inductor, with uneven batches
that change, beside one eager device (`python benchmarks/zoo_public.py`). Here a model's own casts to float32
stay, except where the figure says f64, and what Inductor cannot compile has failed. {public}
"""


def state(result: Result) -> str:
    """`6.0e-16`, `6.0e-16 f32`, or in a word what went wrong."""
    if "failed" in result:
        return str(result["failed"])
    worst = max(result["errors"].values())
    return f"{worst:.0e} f32" if result["narrow"] else f"{worst:.0e}"


def markdown(kinds: dict[str, dict[str, Modes]], versions: dict[str, str], public: dict[str, Result]) -> str:
    """The whole page; `public`: what `zoo_public.py` has found."""
    models = {name: modes for rows in kinds.values() for name, modes in rows.items()}
    measured = {name: modes for name, modes in models.items() if modes}
    exact = [name for name, modes in measured.items() if _is_exact(modes)]
    splits = next(
        (list(r["errors"]) for modes in models.values() for r in modes.values() if "errors" in r), []
    )
    page = [
        _HEAD.format(
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
            splits=", ".join(splits), exact=len(exact), total=len(measured),
            public=public_summary({name: public[name] for name in models if name in public}),
        )
    ]  # fmt: skip
    for kind, rows in kinds.items():
        if known := {name: modes for name, modes in rows.items() if modes or name in public}:
            page.append(_table(kind, known, public))
    failures = {name: modes for name, modes in measured.items() if any("failed" in r for r in modes.values())}
    if failures:
        page.append(_failures(failures))
    missing = [name for name, modes in models.items() if not modes.keys() >= set(_MODES)]
    if missing:
        page.append(f"Not measured here yet (`--missing` does it): {', '.join(missing)}.\n")
    return "\n".join(page)


def _is_exact(modes: Modes) -> bool:
    """Whether all modes were measured, and none failed."""
    return all(mode in modes and "failed" not in modes[mode] for mode in _MODES)


def public_summary(found: dict[str, Result]) -> str:
    """How many models were measured on two ranks, the largest error, and what has none."""
    errors = [error for row in found.values() if (error := _public_error(row)) is not None]
    alone = sum(row.get("programs") == 1 for row in found.values())
    refused = sum("refused" in row for row in found.values())
    counts = [f"**{len(errors)} models** are measured so, the largest error is {max(errors, default=0):.0e}"]
    counts += [f"of {alone} only the program that serves any size of batch"] if alone else []
    counts += [f"{refused} are refused as below"] if refused else []
    counts += [f"{len(found) - len(errors) - refused} failed"] if len(found) > len(errors) + refused else []
    return "; ".join(counts) + "."


def public_state(row: Result) -> str:
    """`3e-07`, `2e-11 f64`, in a word what went wrong, or nothing."""
    error = _public_error(row)
    if error is None:
        return next(iter(row), "")
    return f"{error:.0e} f64" if "in_float64" in row else f"{error:.0e}"


def _public_error(row: Result) -> float | None:
    return row.get("in_float64", row.get("error"))


def _table(kind: str, rows: dict[str, Modes], public: dict[str, Result]) -> str:
    lines = [
        f"## {kind.capitalize()}\n",
        "| model | train | eval | no_grad | two ranks | sums | gathers | run whole on each rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, modes, public_state(public.get(name, {}))) for name, modes in rows.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, modes: Modes, public: str) -> str:
    measured = next((r for r in modes.values() if "failed" not in r), None)
    counts = ["", "", ""]
    if measured is not None:
        whole = len(measured["fallbacks"])
        counts = [
            str(measured["collectives"] - measured["gathers"]),
            str(measured["gathers"]),
            str(whole or ""),
        ]
    states = [state(modes[mode]) if mode in modes else "" for mode in _MODES]
    return f"| {' | '.join([name, *states, public, *counts])} |"


def _failures(failures: dict[str, Modes]) -> str:
    """What is not exact in some mode, with fxdp's own words."""
    lines = ["## Not captured, or not exact\n"]
    for name, modes in failures.items():
        reasons: dict[str, list[str]] = {}
        for mode, result in modes.items():
            if "failed" in result:
                reasons.setdefault(shortened(result["why"]), []).append(mode)
        lines += [f"- **{name}** ({', '.join(where)}): {why}" for why, where in reasons.items()]
    return "\n".join(lines) + "\n"


def shortened(why: str) -> str:
    """One line, with paths from the library's folder on."""
    text = re.sub(r"\S*/(?:site|dist)-packages/", "", " ".join(why.split()))
    return text if len(text) <= 420 else f"{text[:417]}..."
