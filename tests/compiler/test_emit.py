"""Where Inductor cannot compile a program, all ranks go on without it and say so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fxdp
from fxdp.lowering.inductor import compile as inductor
from tests.exactness.models import counterpart_of, step_both
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


@contextmanager
def broken_inductor(name: str, broken: bool = True) -> Iterator[None]:
    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("u4 -> u1")

    with mock.patch.object(inductor, name, fails) if broken else nullcontext():
        yield


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.texts.append(record.getMessage())


@contextmanager
def effects() -> Iterator[list[str]]:
    """What fxdp says."""
    handler = _Heard()
    logging.getLogger("fxdp").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("fxdp").removeHandler(handler)


class _Mean(torch.nn.Module):
    """A loss of a layer, whose sum over ranks is in its program."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).tanh().mean()  # type: ignore[no-any-return]


def _error(name: str, failing: tuple[int, ...], split: list[int]) -> tuple[float, list[str]]:
    torch.set_default_dtype(torch.float64)
    rank, model = dist.get_rank(), _Mean()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="inductor")
    with effects() as texts, broken_inductor(name, rank in failing):
        return step_both(compiled, twin, ((torch.randn(sum(split), 3),), {}), None, split, rank), texts


@pytest.mark.parametrize("name", ["cut", "compile_with_inductor"])
def test_all_ranks_go_on_without_inductor_where_one_cannot_compile(ranks: RankPool, name: str) -> None:
    """Before the ranks wait for one another, or while they do."""
    for error, texts in ranks.run(2, _error, name, (1,), [3, 2]):
        assert error <= 1e-9
        (text,) = texts
        assert "Inductor cannot compile this program (rank 1: AssertionError: u4 -> u1)" in text
        assert 'as with backend="eager"' in text


def test_a_fallback_is_noticed_by_tests_that_want_none() -> None:
    compiled = fxdp.compile(torch.nn.Linear(2, 2), backend="inductor")
    with (
        broken_inductor("cut"), no_fallback(),
        pytest.raises(AssertionError, match="u4 -> u1"),
    ):  # fmt: skip
        compiled(torch.randn(3, 2))
