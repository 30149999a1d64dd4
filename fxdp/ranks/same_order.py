"""Check that all ranks have made the same calls and run their backwards in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fxdp.errors import AgreementError
from fxdp.ranks.agreement import Agreement, agree, gather_objects
from fxdp.ranks.comms.sequence_log import SAME_ORDER, SequenceLog, differing
from fxdp.ranks.liveness.departure import ALONE
from fxdp.ranks.process_mesh import ProcessMesh

_REMEDY = f"{SAME_ORDER}. Gradients are no longer those of one device: start again from the last checkpoint"


def check_order(process_mesh: ProcessMesh) -> None:
    """Raise if the ranks' sequence logs differ; all ranks call this together.

    Raises
    ------
    AgreementError : names the first call or backward that differs, and the ranks.
    """
    comms = process_mesh.comms
    assert comms is not None
    histories = Agreement(process_mesh).exchange(comms.sequence_log.recent())
    text = f"{_difference(histories, comms.sequence_log, comms.ranks)}; {_REMEDY}"
    comms.liveness.fail(text)
    raise AgreementError(text)


def agree_on_call(process_mesh: ProcessMesh, lines: Sequence[str]) -> None:
    """Check that all ranks have equal `lines` about their call; all ranks call this together.

    Raises
    ------
    AgreementError : the first line that differs; if the ranks are at different lines of code, these, too.
    """
    try:
        agree(process_mesh, lines, "calls")
    except AgreementError as error:
        comms = process_mesh.comms
        assert comms is not None
        sequence_log = comms.sequence_log
        places = gather_objects(process_mesh, sequence_log.words(sequence_log.now))
        if len(set(places)) == 1:
            raise
        where = {place: [rank for rank, other in enumerate(places) if other == place] for place in places}
        found = ", ".join(f"{_named(ranks, comms.ranks)} is in {place}" for place, ranks in where.items())
        raise AgreementError(f"{found}: {error}; {ALONE}") from None


def exchange_in_backward(
    process_mesh: ProcessMesh, values: Sequence[int]
) -> Callable[[], list[tuple[int, ...]]]:
    """Send this rank's integers; return a function that waits for all ranks' integers, in the same backward.

    Raises
    ------
    AgreementError : (from the returned function) a rank is in a different call or backward.
    """
    comms = process_mesh.comms
    assert comms is not None
    agreement, moment = Agreement(process_mesh), comms.sequence_log.now
    agreement.start((moment, *values))

    def finish() -> list[tuple[int, ...]]:
        rows = agreement.finish()
        if any(row[0] != moment or len(row) != len(values) + 1 for row in rows):
            raise apart(process_mesh)
        return [row[1:] for row in rows]

    return finish


def apart(process_mesh: ProcessMesh) -> AgreementError:
    """Return the error for ranks in different exchanges, and close the connections.

    Otherwise ranks would wait for an answer that never comes.
    """
    comms = process_mesh.comms
    assert comms is not None
    here = f"rank {comms.ranks[comms.rank]} is in {comms.sequence_log.words(comms.sequence_log.now)}"
    text = f"{here}, while other ranks are in another call or backward; {_REMEDY}"
    comms.liveness.fail(text)
    return AgreementError(text)


def _difference(histories: Sequence[Sequence[int]], known: SequenceLog, ranks: Sequence[int]) -> str:
    found = differing(histories)
    if found is None:
        return "the ranks ran other calls and backwards than one another, long ago"
    counts = Counter(found.values())
    # two ranks have no majority: a rank that left out a backward is in its next call
    usual = max(counts, key=lambda moment: (counts[moment], known.is_backward(moment)))
    others = {place: moment for place, moment in found.items() if moment != usual}
    if known.is_backward(usual) and not any(usual in histories[place][1:] for place in others):
        return f"{_named(others, ranks)} left out {known.words(usual)}"
    branches = {moment: [place for place, other in found.items() if other == moment] for moment in counts}
    return ", ".join(f"{_named(places, ranks)} ran {known.words(m)}" for m, places in branches.items())


def _named(places: Sequence[int] | dict[int, int], ranks: Sequence[int]) -> str:
    named = ", ".join(str(ranks[place]) for place in places)
    return f"rank {named}" if len(places) == 1 else f"ranks {named}"
