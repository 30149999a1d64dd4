"""Models of the catalogue as users train them, on ranks that share the work of compiling."""

from __future__ import annotations

from tests.rank_pool import RankPool
from tests.zoo.shared_work import catalogued_error


def test_ranks_that_lower_in_turn_have_one_devices_numbers(ranks: RankPool) -> None:
    found = ranks.run(2, catalogued_error, "mlp", str(ranks.folder), any_size=True, wide=0)
    assert max(found) <= 1e-9
