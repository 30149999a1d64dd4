"""Programs of one device on uneven ranks, one of them empty: every number is one device's."""

from __future__ import annotations

import pytest

from tests.eager.programs import PROGRAMS
from tests.eager.running import EXACT, errors
from tests.rank_pool import RankPool


@pytest.mark.parametrize("split", [(5, 3), (5, 0, 3)], ids=str)
def test_programs_are_exact(ranks: RankPool, split: tuple[int, ...]) -> None:
    for found in ranks.run(len(split), errors, split, tuple(PROGRAMS)):
        wrong = {name: where for name, (error, where) in found.items() if error > EXACT}
        assert not wrong, "\n".join(f"{name}: {where}" for name, where in wrong.items())
        assert found.keys() == PROGRAMS.keys()
