"""The visible zoo over real gloo ranks through the public API, equal to one eager device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxdp
from tests.capture import zoo
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.exactness.models import BY_HAND, counterpart_of, know_by_hand, known, one_seed, step_both
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool

SPLITS = {1: ([4], [5]), 2: ([2, 2], [4, 1]), 4: ([1, 1, 1, 1], [2, 0, 1, 2])}
"""Even, then uneven: the second call is served by the size-generic program."""

TRANSFORMERS = {
    1: ("gpt2", "resnet"),
    2: ("bert", "t5", "vit", "resnet", "mixtral"),
    4: ("gpt2", "llama", "resnet"),
}
"""Each on several ranks, where nothing is sent only two; resnet, whose statistics are of the global batch,
on all. Every node of each is compared on four ranks in `tests/capture/test_zoo.py`."""


@pytest.fixture
def knowing(ranks: RankPool) -> RankPool:
    """Ranks that have captured the models before, for worlds of several."""
    ranks.prepare(know_by_hand)
    ranks.prepare(_know)
    return ranks


def _know() -> None:
    cases = [(name, True) for name in ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral")]
    for name, keep in (*cases, ("llama", False)):
        with zoo.keep_float64() if keep else contextlib.nullcontext():
            capture_ahead((name, keep), zoo.make(name), (), _inputs(name, 4), {"dp": 2})


def _inputs(name: str, batch: int) -> dict[str, Any]:
    with one_seed():
        torch.set_default_dtype(torch.float64)
        inputs = zoo.ZOO[name][1](batch)
        torch.set_default_dtype(torch.float32)
    return inputs


def _run_transformers(
    names: tuple[str, ...], backend: str, keep: bool, splits: list[list[int]]
) -> dict[str, float]:
    rank = dist.get_rank()
    errors = {}
    for name in names:
        model = zoo.make(name)
        twin = counterpart_of(model)
        patches = zoo.keep_float64() if keep else contextlib.nullcontext()
        with no_fallback(), patches, captured_once(KNOWN.setdefault((name, keep), {})):
            compiled = fxdp.compile(model, backend=backend)
            errors[name] = 0.0
            for split in splits:
                found = step_both(compiled, twin, ((), _inputs(name, sum(split))), None, split, rank)
                errors[name] = max(errors[name], found)
    return errors


def _run_by_hand(names: tuple[str, ...], backend: str, splits: list[list[int]]) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    errors = {}
    for name in names:
        build, inputs, dims = BY_HAND[name]
        model = build()
        twin = counterpart_of(model)
        compiled = fxdp.compile(model, batch_dims=dims, backend=backend)
        errors[name] = 0.0
        with no_fallback(), known(name):
            for split in splits:
                with one_seed():
                    full = inputs(sum(split))
                errors[name] = max(errors[name], step_both(compiled, twin, (full, {}), dims, split, rank))
    return errors


def _worst(found: list[dict[str, float]]) -> dict[str, float]:
    worst = {name: max(errors[name] for errors in found) for name in found[0]}
    print({name: f"{error:.1e}" for name, error in worst.items()})
    return worst


@pytest.mark.parametrize("world", SPLITS)
def test_transformers_in_float64(knowing: RankPool, world: int) -> None:
    names = TRANSFORMERS[world]
    found = knowing.run(world, _run_transformers, names, "eager", True, SPLITS[world])
    for name, error in _worst(found).items():
        assert error <= _bound(name, world), name


def _bound(name: str, world: int) -> float:
    if world == 1:
        return 0.0
    return 1e-6 if name == "mixtral" else 1e-9  # mixtral counts its experts in float32


def test_transformers_with_their_own_casts_to_float32(knowing: RankPool) -> None:
    found = knowing.run(2, _run_transformers, ("llama",), "eager", False, SPLITS[2])
    for name, error in _worst(found).items():
        assert error <= 1e-6, name


@pytest.mark.parametrize("world", [2, 4])
def test_models_by_hand(knowing: RankPool, world: int) -> None:
    """One rank: test_training.py. The recurrent one on many ranks: test_splits.py."""
    names = [name for name in BY_HAND if world == 2 or name != "lstm"]
    found = knowing.run(world, _run_by_hand, tuple(names), "eager", SPLITS[world])
    for name, error in _worst(found).items():
        assert error <= 1e-9, name


def test_gpt2_through_inductor(knowing: RankPool) -> None:
    """Parts that are gathered: tests/ir/ops/test_rank_extrema.py."""
    found = knowing.run(2, _run_transformers, ("gpt2",), "inductor", True, SPLITS[2])
    for name, error in _worst(found).items():
        assert error <= 1e-9, name
