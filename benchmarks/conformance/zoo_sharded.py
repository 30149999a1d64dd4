"""The visible zoo as it trains with sharded parameters: 20 steps of AdamW on real ranks, beside one device.

    python -m benchmarks.conformance.zoo_sharded  # all models in all ways, half an hour
    python -m benchmarks.conformance.zoo_sharded clip lstm --ways hybrid  # some
    python -m benchmarks.conformance.zoo_sharded --missing  # go on where a sweep was stopped

The losses of all steps must equal those of one device on the global batch by 1e-9, in float64, with parts of
the batch that are uneven, change, and are empty. What cannot run in micro-batches, as it needs values of the
global batch in the midst of one, is refused. Results gather in a JSON file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.zoo_suites import error_line, zoo_arguments
from tests.rank_pool import RankError, RankPool
from tests.zoo.sharded import WAYS, train
from tests.zoo.visible import VISIBLE

RESULTS = Path(__file__).with_name("results") / "zoo_sharded.json"
CONSOLE = Console()
BAR = 1e-9


def main() -> int:
    """Train what is asked for; 1 if anything known is not exact."""
    asked = zoo_arguments(__doc__, WAYS, models="the visible zoo", timeout=420.0)
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pool = RankPool()
    for name in asked.models or VISIBLE:
        for way in asked.ways:
            row = found.setdefault(name, {})
            if asked.missing and way in row:
                continue
            start = time.monotonic()
            row[way] = _trained(pool, name, way, asked.timeout)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            CONSOLE.print(f"{name}, {way}: {row[way]} ({time.monotonic() - start:.0f} s)", soft_wrap=True)
        pool.renew()  # what its ranks have captured, no other model needs
    pool.close()
    return int(not all(_exact(result) for row in found.values() for result in row.values()))


def _trained(pool: RankPool, name: str, way: str, timeout: float) -> dict[str, float] | str:
    """The worst errors of any rank, or the last line of what it raised."""
    try:
        ranks = [vars(one) for one in pool.run(WAYS[way].ranks, train, name, way, timeout=timeout)]
    except RankError as error:
        return error_line(error)
    return {what: max(rank[what] for rank in ranks) for what in ranks[0]}


def _exact(result: dict[str, float] | str) -> bool:
    """Whether the losses are one device's, or the training was refused."""
    return "fxdp.errors.StageError" in result if isinstance(result, str) else result["loss"] <= BAR


if __name__ == "__main__":
    sys.exit(main())
