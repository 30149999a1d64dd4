"""Which faults there are, what must follow from each, and whether it did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_rank import Fault
from benchmarks.fault_strikes import REFUSED, STRIKES
from tests.rank_pool import Outcome

PHASES = ("start-up", "compile", "first step", "forward", "backward", "between", "saving", "loading", "eval")
TIMEOUT_S = 6.0
"""FXDP_TIMEOUT_S: after it a rank that hangs is news."""

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
_NOT_IN_STAGES = {"a bad sample", "other weights", "another lr", "no tensor", "parts of two sizes"}
"""Of which the tests of pipelines say more; there is no data axis with two ranks here."""
UNHEARD = {"SIGKILL", "SIGTERM", "SIGABRT", "os._exit", "sys.exit"}
"""By which a process says nothing: before it has met the others, only what started them can know."""


@dataclass(frozen=True)
class Verdict:
    """What became of one fault.

    Attributes
    ----------
    fault : the fault.
    result : ok, hang, silent, unnamed, broken: it did not go on as it should; or launcher: a process that
        ended before it had met the others, which is for torchrun to see.
    seconds : from the fault to the last rank's news; None where there is none.
    ended : from the fault to the end of the last other rank.
    words : what the first other rank was told.
    """

    fault: Fault
    result: str
    seconds: float | None
    ended: float | None
    words: str


def all_faults() -> Iterator[Fault]:
    """Every kind in every phase and mode, on the first and on the last rank."""
    for mode, ranks in (("dp", 2), ("dp3", 3), ("pp", 2), ("inductor", 2)):
        for victim in (0, ranks - 1):
            for kind in (kind for kind in STRIKES if kind != "nothing"):
                yield from (Fault(kind, phase, mode, victim) for phase in PHASES)
            for kind in (*REFUSED, *_STOPPED):
                if mode != "pp" or kind not in _NOT_IN_STAGES:
                    yield Fault(kind, "step", mode, victim)


def judged(fault: Fault, folder: Path, outcomes: Sequence[Outcome], begin: float) -> Verdict:
    """Whether all ranks heard of it, or went on, as they should."""
    notes = {rank: _notes(folder / f"{rank}.notes") for rank in range(fault.ranks)}
    others = [rank for rank in notes if rank != fault.victim]
    at = next((when for when, what, _ in notes[fault.victim] if what == "fault"), None)
    if at is None:
        return Verdict(fault, "not injected", None, None, outcomes[fault.victim].output[-500:])
    ended = max(begin + outcomes[rank].seconds for rank in others) - at
    heard = {rank: next(iter(_of(notes[rank], "news", "refused")), None) for rank in others}
    waited = TIMEOUT_S if fault.kind == "hang" else 0.0
    seconds = max((when - at - waited for when, _ in filter(None, heard.values())), default=None)
    words = next((text for _, text in filter(None, heard.values())), "")
    if any(outcomes[rank].status == -9 for rank in others):
        if fault.phase == "start-up" and fault.kind in UNHEARD:
            return Verdict(fault, "launcher", None, None, "")
        return Verdict(fault, "hang", None, None, words or outcomes[others[0]].output[-500:])
    result = _result(fault, notes, [item and item[1] for item in heard.values()])
    return Verdict(fault, result, seconds, ended, words)


def _result(fault: Fault, notes: dict[int, list[tuple[float, str, str]]], heard: Sequence[str | None]) -> str:
    went_on = {rank: bool(_of(found, "done")) for rank, found in notes.items()}
    if fault.kind in ("pause", "nothing"):
        return "ok" if all(went_on.values()) else "broken"
    if any(text is None for text in heard):
        last = fault.phase == "eval" and fault.kind in ("sys.exit",)
        return "ok" if last and all(went_on[r] for r in went_on if r != fault.victim) else "silent"
    if fault.kind in REFUSED and not all(went_on.values()):
        return "broken"
    cause = _CAUSES.get(fault.kind) or _STOPPED.get(fault.kind) or ""
    named = rf"ranks? ([\d, ]*\b)?{fault.victim}\b"
    return "ok" if all(re.search(named, t or "") and re.search(cause, t or "") for t in heard) else "unnamed"


def _of(notes: Sequence[tuple[float, str, str]], *wanted: str) -> list[tuple[float, str]]:
    return [(when, text) for when, what, text in notes if what in wanted]


def _notes(file: Path) -> list[tuple[float, str, str]]:
    if not file.exists():
        return []
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]
