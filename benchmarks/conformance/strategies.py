"""Which strategy of capture each model of the catalogue needs; writes the table in CONTRIBUTING.md.

    python -m benchmarks.conformance.strategies  # all models, in training, 30 min
    python -m benchmarks.conformance.strategies --minutes 10  # as many more as so long allows, by chance
    python -m benchmarks.conformance.strategies llava encodec  # some models
    python -m benchmarks.conformance.strategies --page  # no captures: the table from what is known

Models are captured, neither compiled nor run. Results are kept in `results/strategies.json`, a line a model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.harness.own_process import Result, in_own_process
from fxdp.capture.capture_strategies import STRATEGIES
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.request import Request
from fxdp.errors import FxdpError
from tests.capture.zoo import keep_float64
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.measure import default_float64, make

CONSOLE = Console()
RESULTS = Path(__file__).with_name("results") / "strategies.json"
PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
START = "<!-- strategies: written by `python -m benchmarks.conformance.strategies` -->\n"
END = "<!-- end of strategies -->\n"
REFUSED = "refused"
TIMEOUT = 300
"""CPU seconds for a model."""


def main() -> int:
    """Capture what is asked for, and write table and page."""
    asked = _arguments()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = read()
    left = random.Random(0).sample(sorted(CATALOGUE), len(CATALOGUE))  # a part of them is a sample
    names = asked.models or [name for name in left if name not in rows]
    end = time.monotonic() + 60 * asked.minutes
    for name in [] if asked.page else names:
        if time.monotonic() > end:
            break
        found = in_own_process([name], captured_by, TIMEOUT)[name]
        rows[name] = found.get("strategy", str(found.get("failed")))
        CONSOLE.print(f"{name}: {rows[name]}")
        _write(rows)
    PAGE.write_text(with_table(PAGE.read_text(), rows))
    return 0


def captured_by(name: str) -> Result:
    """Capture a model in training, and return the name of its strategy."""
    entry = CATALOGUE[name]
    model, inputs = make(entry)
    try:
        with keep_float64(), default_float64():
            read_in = read_inputs(model.train(), (), inputs, entry.batch_dims)
            return {"strategy": capture_request(Request(model, read_in, None, JointOptions("all"))).strategy}
    except FxdpError:
        return {"strategy": REFUSED}


def table(rows: Mapping[str, str]) -> str:
    """How many models need each strategy, as text."""
    made = [name for name, strategy in rows.items() if strategy != REFUSED]
    lines = [
        f"Of the {len(CATALOGUE)} models of the catalogue {len(rows)} were tried in training; "
        f"{len(rows) - len(made)} of them are refused.",
        "",
        "| strategy | is for | models | among them |",
        "|---|---|---|---|",
    ]
    for strategy in STRATEGIES:
        of = [name for name in made if strategy.name in rows[name].split(", ")]
        examples = ", ".join(f"`{name}`" for name in of[:3]) or "none of these; tests do"
        lines.append(f"| {strategy.name} | {strategy.when} | {len(of)} | {examples} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, rows: Mapping[str, str]) -> str:
    """The page with the table of these rows."""
    before, after = page.split(START)[0], page.split(END)[1]
    return f"{before}{START}{table(rows)}{END}{after}"


def read() -> dict[str, str]:
    """The strategy of each model that was captured, in the order of the catalogue."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # type: ignore[no-any-return]


def _write(rows: Mapping[str, str]) -> None:
    RESULTS.write_text(json.dumps({name: rows[name] for name in CATALOGUE if name in rows}, indent=0) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names of models (default: all that have no result yet)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no capture after so long")
    parser.add_argument("--page", action="store_true", help="only write the table anew")
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in CATALOGUE]:
        parser.error(f"no models {', '.join(unknown)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
