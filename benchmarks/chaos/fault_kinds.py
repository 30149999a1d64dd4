"""Which faults there are, what must follow from each, and whether it did."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.chaos.fault_case import Fault
from benchmarks.chaos.fault_strikes import FROM_OUTSIDE, REFUSED, STRIKES
from tests.rank_pool import Outcome

MODES = {"dp": 2, "dp3": 3, "pp": 2, "shard": 2, "inductor": 2, "pp-inductor": 2}
PHASES = (
    "start-up", "compile", "lowering", "first step", "forward", "backward", "optimizer", "between", "saving",
    "loading", "eval",
)  # fmt: skip
TIMEOUT_S = 4.0
"""FXDP_TIMEOUT_S where a rank hangs: after it that is news."""
_LAUNCHED = 12  # one fault of so many is under torchrun; all of start-up are
_MOMENTS = (0.05, 0.3, 0.6, 0.9, 1.3)  # seconds of training
_LATEST_S = 5.0  # for the news

_STOPPED = {  # told by all ranks, the one at fault included, as none can know whose order is the right one
    "another order": "came to a sum in|ran the backward",
    "no backward": "left out|came to a sum in",
    "a step less": "ended its process|ran |left out|expected the same",
    "other weights": "come apart|differ",
    "another lr": "come apart|differ",
    "another model": "given different models or options",
    "another option": "given different models or options",
}
_CAUSES = {
    "SIGKILL": "ended without an error message",
    "SIGABRT": "ended without an error message",
    "os._exit": "ended without an error message",
    "SIGTERM": "ended by SIGTERM",
    "SIGINT": "KeyboardInterrupt",
    "error": "ValueError: the reason",
    "error in a thread": "ValueError: the reason",
    "out of memory": "MemoryError: the reason",
    "recursion": "RecursionError",
    "sys.exit": "ended its process|SystemExit: 3",
    "hang": "did not (come|join|answer)|within",
}
_STOPS = {"a bad label": "out of bounds"}  # no sizes tell of it: the op that reads it fails, half-way
_STATUS = {"SIGKILL": -9, "SIGABRT": -6, "SIGTERM": -15, "SIGINT": -2, "os._exit": 3, "sys.exit": 3}
"""Of a process; of all others 1."""
_NOT_IN_STAGES = {"a bad sample", "other weights", "another lr", "no tensor", "parts of two sizes"}
"""Of which the tests of pipelines say more; there is no data axis with two ranks here."""
_NOT_SHARDED = {"other weights", "another lr"}  # no two ranks hold the same rows
_INDUCTOR_FAILS = {"error", "error in a thread", "out of memory", "recursion"}
"""What Inductor may raise: the program runs without it then."""


@dataclass(frozen=True)
class Verdict:
    """What became of one fault.

    Attributes
    ----------
    number : among those drawn.
    fault : the fault.
    result : ok, hang, silent, unnamed, wrong rank; broken: it did not go on as it should; late: the news took
        longer than 5 s; or not injected.
    seconds : from the fault to the last rank's news; of a hang, less the time that ranks wait for it.
    ended : from the fault to the end of the last other rank.
    words : what the first other rank was told.
    """

    number: int
    fault: Fault
    result: str
    seconds: float | None
    ended: float | None
    words: str


def drawn_faults(seed: int) -> list[Fault]:
    """All faults in an order drawn by a seed, one in twelve under torchrun."""
    found = list(_all_faults())
    random.Random(seed).shuffle(found)
    return [replace(f, launched=f.launched or n % _LAUNCHED == 0) for n, f in enumerate(found)]


def _all_faults() -> Iterator[Fault]:
    """Every kind in every phase and mode, on the first and on the last rank."""
    for mode, ranks in MODES.items():
        for victim in (0, ranks - 1):
            for kind in STRIKES:
                # before ranks have met only what has started them can know of some
                yield from (Fault(kind, p, mode, victim, launched=p == "start-up") for p in PHASES)
            for kind in FROM_OUTSIDE:
                yield from (Fault(kind, "any moment", mode, victim, after) for after in _MOMENTS)
            for kind in (*REFUSED, *_STOPPED):
                stages, sharded = mode.startswith("pp"), mode == "shard"
                unread = stages and not victim and kind in _STOPS  # labels are the last stage's rank's
                undefined_gradients = (stages and kind in _NOT_IN_STAGES) or (
                    sharded and kind in _NOT_SHARDED
                )
                if not (unread or undefined_gradients):
                    yield Fault(kind, "step", mode, victim)


@dataclass(frozen=True)
class Ran:
    """What was seen of a fault's processes: how they ended.

    Attributes
    ----------
    ends : when each rank ended; of those under torchrun, when that did.
    killed : the ranks that had to be.
    output : of torchrun, or of a rank that has no fault.
    """

    ends: dict[int, float]
    killed: frozenset[int]
    output: str


def seen(fault: Fault, outcomes: Sequence[Outcome], begin: float) -> Ran:
    """Of `outcomes` there is one for each rank, or torchrun's alone."""
    each = {rank: outcomes[0 if fault.launched else rank] for rank in range(fault.ranks)}
    killed = frozenset(rank for rank, outcome in each.items() if outcome.status == -9)
    ends = {rank: begin + outcome.seconds for rank, outcome in each.items()}
    shown = 0 if fault.launched or fault.victim else 1
    return Ran(ends, killed, f"status {outcomes[shown].status}: {outcomes[shown].output}")


def judged(number: int, fault: Fault, folder: Path, ran: Ran) -> Verdict:
    """Whether all ranks heard of it, or went on, as they should."""
    metadata = {rank: _notes(folder / f"{rank}.notes") for rank in range(fault.ranks)}
    others = [rank for rank in metadata if rank != fault.victim]
    at = next((when for when, what, _ in metadata[fault.victim] if what == "fault"), None)
    if at is None:
        return Verdict(number, fault, "not injected", None, None, ran.output[-800:])
    ended = max(ran.ends[rank] for rank in others) - at
    effects = {rank: next(iter(_of(metadata[rank], "news", "refused")), None) for rank in others}
    root = _root_cause(ran.output) if fault.launched else None
    if root is not None and any(item is None for item in effects.values()):  # torchrun has ended them
        words = f"torchrun: rank {root[0]} is the root cause, exit code {root[1]}"
        effects = {rank: item or (at + ended, words) for rank, item in effects.items()}
    told = [item for item in effects.values() if item is not None]
    waited = TIMEOUT_S if fault.is_waited_for else 0.0
    seconds = max((when - at - waited for when, _ in told), default=None)
    words = told[0][1] if told else ran.output[-800:]
    if any(rank in ran.killed for rank in others):
        return Verdict(number, fault, "hang", None, None, words)
    result = _result(fault, metadata, [item and item[1] for item in effects.values()])
    if result == "ok" and seconds is not None and seconds > _LATEST_S:
        result = "late"
    return Verdict(number, fault, result, seconds, ended, "" if result == "ok" else words)


def _result(
    fault: Fault, metadata: dict[int, list[tuple[float, str, str]]], effects: Sequence[str | None]
) -> str:
    went_on = {rank: bool(_of(found, "done")) for rank, found in metadata.items()}
    alone = fault.phase == "lowering" and fault.compiled and fault.kind in _INDUCTOR_FAILS
    if fault.kind == "pause" or alone:
        return "ok" if all(went_on.values()) else "broken"
    if any(text is None for text in effects):
        last = fault.phase == "eval" and fault.kind == "sys.exit"
        return "ok" if last and all(went_on[r] for r in went_on if r != fault.victim) else "silent"
    if fault.kind in REFUSED and fault.kind not in _STOPS and not all(went_on.values()):
        return "broken"
    results = [_named(fault, text or "") for text in effects]
    return next((result for result in results if result != "ok"), "ok")


def _named(fault: Fault, text: str) -> str:
    """Whether a text names the rank and the cause."""
    by_torchrun = re.match(r"torchrun: rank (\d+) is the root cause, exit code (-?\d+)", text)
    if by_torchrun:
        right = (fault.victim, _STATUS.get(fault.kind, 1))
        return "ok" if tuple(map(int, by_torchrun.groups())) == right else "wrong rank"
    known = _CAUSES | _STOPPED | _STOPS
    cause = known["hang" if fault.is_waited_for else fault.kind] if fault.kind in known else ""
    if not re.search(cause, text):
        return "unnamed"
    # who is told by another rank what that was told, reads of both
    text = re.sub(r"^(\w+: rank \d+ failed: ([\w.]+: )?(?=rank \d))+", "", text)
    lists = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text)
    found = [set(re.findall(r"\d+", each)) for each in lists]
    if not found:
        return "unnamed"
    # none knows whose is the right one
    both = fault.kind in _STOPPED or (fault.kind in REFUSED and fault.kind not in _STOPS)
    named = set().union(*found) if both else found[0]
    return "ok" if str(fault.victim) in named else "wrong rank"


def _root_cause(output: str) -> tuple[int, int] | None:
    """Of torchrun's summary: the rank, and its exit code."""
    _, there, summary = output.rpartition("Root Cause (first observed failure)")
    found = there and re.search(r"rank\s*: (\d+).*?exitcode\s*: (-?\d+)", summary, re.DOTALL)
    return (int(found[1]), int(found[2])) if found else None


def _of(metadata: Sequence[tuple[float, str, str]], *wanted: str) -> list[tuple[float, str]]:
    return [(when, text) for when, what, text in metadata if what in wanted]


def _notes(file: Path) -> list[tuple[float, str, str]]:
    if not file.exists():
        return []
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]
