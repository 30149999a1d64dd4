"""Runs are found wherever they lie, and never where tokens differ."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.startup.repeated.repetitions import Repetitions, longest_run


def test_layers_between_others() -> None:
    """The period is the layer's, not twice it; a begun layer is told beside."""
    assert longest_run("pq" + "abc" * 4 + "axy", shortest=2, least=3) == Repetitions(2, 3, 4, 1)


def test_short_periods_are_taken_several_at_once() -> None:
    """A period may have no fewer tokens than asked for."""
    assert longest_run("x" + "ab" * 12, shortest=5, least=3) == Repetitions(1, 6, 4)


def test_nothing_repeats_often_enough() -> None:
    """Twice is not thrice."""
    assert longest_run("abcdabcd", shortest=3, least=3) is None
    assert longest_run("", shortest=1, least=2) is None


@settings(deadline=None)
@given(
    st.text("abcd", max_size=12), st.permutations("abcdefgh"), st.integers(3, 6),
    st.text("wxyz", max_size=12),
)  # fmt: skip
def test_what_is_found_repeats(before: str, layer: list[str], times: int, after: str) -> None:
    """Each period equals the one before it, and the run that was put in is covered."""
    row = before + "".join(layer) * times + after
    run = longest_run(row, shortest=3, least=3)
    assert run is not None
    periods = {row[i : i + run.period] for i in range(run.start, run.end, run.period)}
    assert len(periods) == 1
    assert run.period >= 3 <= run.count
    assert run.end + run.more <= len(row)
    assert run.period * (run.count + 1) + run.period > len(layer) * times
