"""The zoo as users train it: two real ranks, the public API, Inductor, uneven batches that change.

    python benchmarks/zoo_public.py                     # all models, a minute each
    python benchmarks/zoo_public.py swin whisper        # some

`zoo_sweep.py` compares every node of a program on virtual ranks, without Inductor; this one compares losses,
gradients and buffers of compiled programs. Results gather in a JSON file; models that are in it are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.rank_pool import RankError, RankPool
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.public import public_error

RESULTS = Path(__file__).with_name("zoo_public.json")
CONSOLE = Console()


def main() -> int:
    """Measure what is missing; 1 if a model failed or is not exact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names (default: all without a result)")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds per model")
    asked = parser.parse_args()
    found: dict[str, float | str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pool = RankPool()
    for name in asked.models or [name for name in CATALOGUE if name not in found]:
        start = time.monotonic()
        try:
            found[name] = max(pool.run(2, public_error, name, timeout=asked.timeout))
        except RankError as error:
            lines = [line for line in str(error).splitlines() if "Error" in line]
            found[name] = (lines or [str(error)])[-1][:300]
        RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        CONSOLE.print(f"{name}: {found[name]} ({time.monotonic() - start:.0f} s)", highlight=False)
    return 0 if all(isinstance(error, float) and error <= 1e-5 for error in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
