"""Where random numbers come from: seeds of parts, and generators that are the user's again afterwards."""

from __future__ import annotations

import pytest
import torch

from fxdp.ir.graph.draws import drawn_seed, kept_random_state, own_generator, part_seed, rank_seed


def test_seeds_of_ranks_and_parts_do_not_meet() -> None:
    seeds = {
        part_seed(seed, part, index)
        for seed in (0, 1, 2**62 - 1)
        for part in range(64)
        for index in range(64)
    }
    assert len(seeds) == 3 * 64 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert part_seed(5, 3, 0) == rank_seed(5, 3)


def test_a_block_draws_from_its_seed_and_leaves_the_users_generator() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with own_generator(7):
        assert torch.equal(torch.rand(3), wanted)
    with pytest.raises(ValueError, match="in the block"):
        _fail_in_a_block()
    assert torch.equal(torch.rand(2), expected)


def test_a_seed_is_one_draw() -> None:
    torch.manual_seed(0)
    first, second = drawn_seed(), drawn_seed()
    torch.manual_seed(0)
    assert drawn_seed() == first != second


def _fail_in_a_block() -> None:
    with kept_random_state():
        torch.manual_seed(3)
        raise ValueError("in the block")
