"""The table of `python -m benchmarks.conformance.ragged`: models by ways, and why a cell has no number."""

from __future__ import annotations

from collections.abc import Mapping

WAYS = ("global", "replicate", "shard", "micro", "fallback")
Found = dict[str, str]
"""The largest difference by number of ranks, or the reason why there is none."""
_HEAD = """# Ragged batches: models beside one device

Made by `python -m benchmarks.conformance.ragged`, models and ways in runs of their own;
do not edit by hand. Six samples, of which two have no image, edge, box or token; parts of 5 and 1
samples, and of 3, 0, 1 and 2 (graphs: 3, 1, 1 and 1, the second without nodes). The largest
relative difference in float64 on 2 / 4 ranks: uncompiled on global tensors and
compiled on virtual ranks; in micro-batches, by `fallback="eager"`, and compiled models whose inputs do
not tell samples apart (pictures, hypergraphs; one figure), on two real ranks. `compiled`: no fallback is
needed; `not run`: no run was made.

"""


def page(rows: Mapping[str, dict[str, Found]], axes: Mapping[str, str]) -> str:
    """The table as Markdown, and the reasons below it."""
    lines = [f"| model | axes | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in axes:
        row = rows.get(name, {})
        cells = [_cell(row.get(way, {})) for way in WAYS]
        if cells[-1] == "not run" and "replicate" in row and not is_refused(row):
            cells[-1] = "compiled"
        lines.append(f"| {name} | {axes[name]} | {' | '.join(cells)} |")
        for way, found in row.items():
            for text in {text for text in found.values() if not text[:1].isdigit()}:
                reasons.setdefault((name, text), []).append(way)
    told = [f"- **{name}**, {', '.join(ways)}: {text}" for (name, text), ways in reasons.items()]
    return _HEAD + "\n".join([*lines, "", *told]) + "\n"


def _cell(found: Mapping[str, str]) -> str:
    """The differences on each number of ranks, or the first word of the reason why there is none."""
    told = [text if text[:1].isdigit() else text.partition(":")[0] for text in found.values()]
    if len(set(told)) == 1 and not told[0][:1].isdigit():
        return told[0]
    return " / ".join(told) or "not run"


def is_refused(row: Mapping[str, Found]) -> bool:
    """Return whether capture refuses a model."""
    return any(text.startswith("refused") for text in row.get("replicate", {"2": "refused"}).values())
