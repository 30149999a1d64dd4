"""Programs of one device on global tensors, unedited: is each number one device's?

    python -m benchmarks.conformance.eager_programs                 # all, 10 minutes of one core
    python -m benchmarks.conformance.eager_programs metrics         # one kind of programs
    python -m benchmarks.conformance.eager_programs rules --draws 50

Kinds: `programs` (those of the tests), `metrics` (each class of torchmetrics' classification and regression
families: `update`, `compute`, `forward`), `steps` (each optimizer of torch, schedulers, clipping, scaling,
averages of weights), `zoo` (uncompiled transformers models in training with dropout), `rules` (random calls
of each op with a rule, batch sizes that other dims have, too). On virtual ranks with (5, 3) and (5, 0, 3)
samples in float64: a line for each program that differs by more than 1e-12, or than its own float32 rounds,
and a table. Exit code 1 if one does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import torch

from tests.eager import every_rule, metrics, programs, steps, zoo_steps
from tests.eager.outcomes import outcome
from tests.eager.programs import Program
from tests.eager.running import EXACT

SPLITS = ((5, 3), (5, 0, 3))
ZOO_SPLITS = ((4, 2), (4, 0, 2))
KINDS: Mapping[str, Callable[[], Mapping[str, Program]]] = {
    "programs": lambda: programs.PROGRAMS,
    "metrics": metrics.metric_programs,
    "steps": steps.step_programs,
    "zoo": zoo_steps.zoo_programs,
}
_ROUNDED = metrics.ROUNDED | steps.ROUNDED | zoo_steps.ROUNDED


def run_kind(kind: str) -> tuple[int, int, float]:
    """Run the programs of a kind; the number of programs, of wrong ones, and the largest difference."""
    made, wrong, worst = KINDS[kind](), 0, 0.0
    for name, program in made.items():
        for split in ZOO_SPLITS if kind == "zoo" else SPLITS:
            error, where = outcome(program, split)
            if error > _ROUNDED.get(name, EXACT):
                wrong += 1
                print(f"{kind}: {name} on {split}: {error:.1e} in {where}", flush=True)
                break
            worst = max(worst, 0.0 if name in _ROUNDED else error)
    return len(made), wrong, worst


def run_rules(draws: int) -> tuple[int, int]:
    """Run random calls of each op; the number of calls, and of wrong ones."""
    wrong = 0
    for found in every_rule.every(draws):
        wrong += 1
        print(f"rules: {found}", flush=True)
    return len(every_rule.TARGETS) * draws, wrong


def main() -> None:
    """Print what differs, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}, rules (default: all)")
    parser.add_argument("--draws", type=int, default=12, help="calls of each op")
    asked = parser.parse_args()
    kinds = asked.kinds or [*KINDS, "rules"]
    if unknown := set(kinds) - KINDS.keys() - {"rules"}:
        parser.error(f"no kinds {sorted(unknown)}; there are {', '.join(KINDS)}, rules")
    torch.set_num_threads(1)
    rows, failed = [], 0
    for kind in kinds:
        began = time.process_time()
        if kind == "rules":
            count, wrong = run_rules(asked.draws)
            worst = "1e-9"
        else:
            count, wrong, largest = run_kind(kind)
            worst = f"{largest:.0e}"
        failed += wrong
        rows.append(f"| {kind} | {count} | {count - wrong} | {worst} | {time.process_time() - began:.0f} s |")
    print("| kind | run | exact | largest difference | CPU |\n|---|---|---|---|---|", *rows, sep="\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
