"""Models of the catalogue with `fxdp.Bitwise` on real ranks: are all bits of a training those of one device?

    python -m benchmarks.conformance.bitwise  # all models in all ways
    python -m benchmarks.conformance.bitwise gpt2 llama --ways "2 ranks"  # some
    python -m benchmarks.conformance.bitwise --missing  # go on where a sweep was stopped

Losses, norms and clipped gradients of each step, and parameters and states of the optimizer after the last,
are hashed: on one device, and on real ranks, with dropout: op by op and by Inductor, in float32 and bfloat16,
with several backwards a step, and with a rank killed in a random step. A model that cannot have the same bits
must be refused. Results gather in a JSON file: a line a model, with the first step that differs, if any.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.zoo_suites import error_line, zoo_arguments
from tests.rank_pool import RankError, RankPool
from tests.zoo.bitwise import STEPS, Mode, Training, curve, killed_in, learn, resumed

RESULTS = Path(__file__).with_name("results") / "bitwise.json"
CONSOLE = Console()
RESUMED = 7
MODELS = (
    "gpt2", "llama", "bert", "roberta", "distilbert", "electra", "albert", "deberta",
    "gpt_neo", "gpt_neox", "opt", "mistral", "qwen2", "phi", "gemma", "bloom", "falcon", "mamba", "t5",
    "bart", "pegasus", "marian", "vit", "deit", "swin", "convnext", "clip", "mixtral", "unet",
    "resnet", "gan", "packed_llama", "gcn", "gat",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """The samples of each rank; `then` are those of the ranks that resume after `RESUMED` steps, if any.

    With `kills` a rank is killed in a random step, and those that resume go on from the last checkpoint.
    """

    parts: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    then: tuple[int, ...] = ()
    mode: Mode = field(default_factory=Mode)
    kills: bool = False
    stages: int = 1
    """Pipeline ranks; `then_stages` are those of the ranks that resume."""
    then_stages: int = 1


ALONE = (7,)
SHARD = {"strategy": "shard"}
WAYS: dict[str, Way] = {
    "2 ranks": Way((4, 3)),
    "3 ranks, shard": Way((2, 4, 1), SHARD),
    "4 ranks": Way((2, 2, 0, 3)),
    "3 ranks, shard, resumed by 2": Way((2, 4, 1), SHARD, (6, 1)),
    "3 ranks, shard, bfloat16": Way((4, 0, 3), SHARD, mode=Mode(autocast=True)),
    "2 ranks, accumulation": Way((2, 5), mode=Mode(accumulate=2)),
    "2 ranks, Inductor": Way((4, 3), mode=Mode("inductor")),
    "3 ranks, shard, killed, resumed by 2": Way((2, 4, 1), SHARD, (6, 1), kills=True),
    "4 ranks, killed, resumed by 3": Way((2, 2, 0, 3), {}, (2, 4, 1), kills=True),
    "4 ranks, shard, bfloat16, accumulation, killed, resumed by 3": Way(
        (2, 2, 2, 1), SHARD, (4, 0, 3), Mode(autocast=True, accumulate=2), kills=True
    ),
    "2 ranks, Inductor, bfloat16": Way((4, 3), mode=Mode("inductor", autocast=True)),
    "2 stages": Way(ALONE, stages=2),
    "3 stages": Way(ALONE, stages=3),
    "2 stages x 2, shard": Way((2, 5), SHARD, stages=2),
    "2 stages, Inductor": Way(ALONE, mode=Mode("inductor", cut=2), stages=2),
    "2 stages x 2, Inductor": Way((2, 5), mode=Mode("inductor", cut=2), stages=2),
    "2 stages x 2, shard, killed, resumed by 3": Way((2, 5), SHARD, (4, 2, 1), kills=True, stages=2),
    "3 ranks, shard, killed, resumed by 2 stages x 2": Way(
        (2, 4, 1), SHARD, (2, 5), kills=True, then_stages=2
    ),
}


def main() -> int:
    """Train what is asked for; 1 if any bit differs, or a training fails that is not refused."""
    asked = zoo_arguments(__doc__, WAYS, models="34 of many kinds", timeout=300.0)
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pool = RankPool()
    for name in asked.models or MODELS:
        row = found.setdefault(name, {})
        ways = [way for way in asked.ways if not (asked.missing and way in row)]
        alone = dict[Mode, list[str]]()
        for way in ways:
            start, mode = time.monotonic(), WAYS[way].mode
            try:
                if mode not in alone:
                    pool.prepare(learn, Training(name, ALONE, Mode(autocast=mode.autocast)))
                    alone[mode] = _curve(pool, name, Way(ALONE, mode=mode), asked.timeout)
                row[way] = _result(pool, name, WAYS[way], alone[mode], asked.timeout)
            except RankError as error:
                row[way] = error_line(error)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            seconds = time.monotonic() - start
            CONSOLE.print(f"{name}, {way}: {row[way]} ({seconds:.0f} s)", soft_wrap=True)
    pool.close()
    for way in WAYS:
        given = [row[way] for row in found.values() if way in row]
        equal = sum(result.startswith("equal bits") for result in given)
        CONSOLE.print(f"{way}: {equal} of {len(given)} equal, {len(found) - len(given)} not run")
    results = [result for row in found.values() for result in row.values()]
    refused = "fxdp.errors.StageError"
    return int(not all(result.startswith("equal bits") or refused in result for result in results))


def _result(pool: RankPool, name: str, way: Way, alone: list[str], timeout: float) -> str:
    """Train in a way, and return whether all bits are those of one device."""
    if not way.kills:
        return _compared(alone, _curve(pool, name, way, timeout))
    choice = random.SystemRandom()
    first = Training(name, way.parts, way.mode, way.options, way.stages)
    then = Training(name, way.then, way.mode, way.options, way.then_stages)
    rank, step = choice.randrange(first.ranks), choice.randrange(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/run"
        ended = pool.spawn(first.ranks, killed_in, first, rank, step, where, timeout=timeout)
        if ended[rank].status != -signal.SIGKILL:
            raise RankError(f"rank {rank} was not killed:\n{ended[rank].output}")
        (start, found), *others = pool.run(then.ranks, resumed, then, where, timeout=timeout)
    assert all(other == (start, found) for other in others), f"{name}: ranks with different gradients"
    told = f"rank {rank} killed in step {step}, resumed from {start}"
    return f"{_compared(alone[start:], found, start)} ({told})"


def _curve(pool: RankPool, name: str, way: Way, timeout: float) -> list[str]:
    """Return the digests of all steps; all ranks must have the same."""
    last = RESUMED if way.then else STEPS
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/run"
        parts = [(way.parts, way.stages, range(last))]
        parts += [(way.then, way.then_stages, range(last, STEPS))] if way.then else []
        found = []
        for split, stages, steps in parts:
            training = Training(name, split, way.mode, way.options, stages)
            ranks = pool.run(training.ranks, curve, training, steps, where, timeout=timeout)
            assert all(rank == ranks[0] for rank in ranks), f"{name}: ranks with different gradients"
            found += ranks[0]
    return found


def _compared(alone: list[str], found: list[str], start: int = 0) -> str:
    pairs = enumerate(zip(alone, found, strict=True), start)
    differs = [step for step, (own, other) in pairs if own != other]
    return f"differs from step {differs[0]} on" if differs else "equal bits"


if __name__ == "__main__":
    sys.exit(main())
