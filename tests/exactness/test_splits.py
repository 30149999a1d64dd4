"""Any split of any batch over any number of ranks: forward, backward and eval."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxdp.options import Options
from fxdp.oracle.verified_capture import capture_for
from fxdp.oracle.virtual_run import Subject
from tests.exactness.models import BY_HAND
from tests.lockstep import subject

LARGEST, WORLDS = 9, (3, 8)

Prepared = tuple[dict[int, Subject], tuple[Any, ...]]


@cache
def prepared(name: str, training: bool) -> Prepared:
    """The programs of a model for some numbers of ranks, and the largest batch."""
    build, inputs, dims = BY_HAND[name]
    torch.manual_seed(0)
    model: nn.Module = build().train(training)
    args, options = inputs(LARGEST), Options(batch_dims=dims)
    found = capture_for(model, args, {}, options)
    return {world: subject(model, found, world, options)[1] for world in WORLDS}, args


def splits() -> st.SearchStrategy[tuple[int, ...]]:
    """Parts of 0 to 4 samples for each rank; BatchNorm needs two in all, on one device too."""

    def parts(world: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(0, 4)] * world)

    return st.sampled_from(WORLDS).flatmap(parts).filter(lambda split: 2 <= sum(split) <= LARGEST)


@pytest.mark.parametrize(
    ("name", "training"), [("mlp", True), ("mlp", False), ("tokens", True), ("tokens", False), ("lstm", True)]
)
def test_any_split(name: str, training: bool) -> None:
    subjects, args = prepared(name, training)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(splits())
    def check(split: tuple[int, ...]) -> None:
        run = subjects[len(split)].run(args, {}, split, seed=0)
        assert run.ok, f"split {split}:\n" + "\n".join(map(str, [*run.faults, *run.wrong]))

    check()
