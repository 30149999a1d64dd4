"""Models of the catalogue with `fxdp.Bitwise` on real ranks: are all bits of a training those of one device?

    python -m benchmarks.conformance.bitwise  # all models in all ways
    python -m benchmarks.conformance.bitwise gpt2 llama --ways "2 ranks"  # some
    python -m benchmarks.conformance.bitwise --missing  # go on where a sweep was stopped

Losses, norms and clipped gradients of each step, and parameters and states of the optimizer after the last,
are hashed: on one device, and on real ranks, with dropout, in float32. A model that cannot have the same bits
must be refused. Results gather in a JSON file: a line a model, with the first step that differs, if any.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.zoo_suites import error_line, zoo_arguments
from tests.rank_pool import RankError, RankPool
from tests.zoo.bitwise import STEPS, curve

RESULTS = Path(__file__).with_name("results") / "bitwise.json"
CONSOLE = Console()
RESUMED = 7
MODELS = (
    "gpt2", "llama", "bert", "roberta", "distilbert", "electra", "albert", "deberta",
    "gpt_neo", "gpt_neox", "opt", "mistral", "qwen2", "phi", "gemma", "bloom", "falcon", "mamba", "t5",
    "bart", "pegasus", "marian", "vit", "deit", "swin", "convnext", "clip", "mixtral", "unet",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """The samples of each rank; `then` are those of the ranks that resume after `RESUMED` steps, if any."""

    parts: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    then: tuple[int, ...] = ()


ALONE = Way((7,))
WAYS: dict[str, Way] = {
    "2 ranks": Way((4, 3)),
    "3 ranks, shard": Way((2, 4, 1), {"strategy": "shard"}),
    "4 ranks": Way((2, 2, 0, 3)),
    "3 ranks, shard, resumed by 2": Way((2, 4, 1), {"strategy": "shard"}, (6, 1)),
}


def main() -> int:
    """Train what is asked for; 1 if any bit differs, or a training fails that is not refused."""
    asked = zoo_arguments(__doc__, WAYS, models="29 of many kinds", timeout=300.0)
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pool = RankPool()
    for name in asked.models or MODELS:
        row = found.setdefault(name, {})
        ways = [way for way in asked.ways if not (asked.missing and way in row)]
        start, alone = time.monotonic(), None
        for way in ways:
            try:
                alone = alone or _curve(pool, name, ALONE, asked.timeout)
                row[way] = _compared(alone, _curve(pool, name, WAYS[way], asked.timeout))
            except RankError as error:
                row[way] = error_line(error)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        CONSOLE.print(f"{name}: {row} ({time.monotonic() - start:.0f} s)", soft_wrap=True)
    pool.close()
    results = [result for row in found.values() for result in row.values()]
    return int(not all(result == "equal bits" or "fxdp.errors.StageError" in result for result in results))


def _curve(pool: RankPool, name: str, way: Way, timeout: float) -> list[str]:
    """Return the digests of all steps; all ranks must have the same."""
    last = RESUMED if way.then else STEPS
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/run"
        parts = [(way.parts, range(last)), *([(way.then, range(last, STEPS))] if way.then else [])]
        found = []
        for split, steps in parts:
            ranks = pool.run(len(split), curve, name, split, way.options, steps, where, timeout=timeout)
            assert all(rank == ranks[0] for rank in ranks), f"{name}: ranks with different gradients"
            found += ranks[0]
    return found


def _compared(alone: list[str], found: list[str]) -> str:
    differs = [step for step, (own, other) in enumerate(zip(alone, found, strict=True)) if own != other]
    return f"differs from step {differs[0]} on" if differs else "equal bits"


if __name__ == "__main__":
    sys.exit(main())
