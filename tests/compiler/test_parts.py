"""Stages and micro-batches are lowered as one program is: the same fallback, agreement and sizes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.compiler import lowered_parts
from fxdp.compiler.emit import Lowered, WantedPart, lower_part
from fxdp.lowering.shapes import SizesFixedError
from tests.compiler.test_emit import broken_inductor, effects
from tests.exactness.models import counterpart_of, step_both
from tests.rank_pool import RankPool

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class Net(nn.Module):
    """Two stages; `norm` reduces in the midst of the first one, so it forbids micro-batches."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh()).square().mean()  # type: ignore[no-any-return]


def _net(norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


def _mesh(pp: int) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def _step(compiled: Any, model: nn.Module, batches: list[int], rank: int = 0) -> float:
    torch.manual_seed(1)
    x = torch.randn(sum(batches), 4, dtype=torch.float64)
    return step_both(compiled, model, ((x,), {}), None, batches, rank)


# ---- Inductor that cannot compile ------------------------------------------------------------------------


def test_micro_batches_run_without_inductor_where_it_fails() -> None:
    model = _net()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, pipeline={"microbatches": 2}, backend="inductor")
    with effects() as texts, broken_inductor("cut"):
        assert _step(compiled, twin, [4]) <= 1e-12
    (text,) = texts
    assert text.startswith("Inductor cannot compile stage 0 (rank 0: AssertionError: u4 -> u1)")
    assert 'as with backend="eager"' in text


def _fallback(pp: int, failing: int, batches: list[int]) -> tuple[float, list[str]]:
    """Another rank than the failing one may have compiled the part, or other parts."""
    torch.set_default_dtype(torch.float64)
    model = _net()
    twin = counterpart_of(model)
    stages = ["b"] if pp > 1 else None
    compiled = fxdp.compile(model, _mesh(pp), pipeline={"microbatches": 2, "stages": stages})
    rank = dist.get_rank()
    place = rank % len(batches)
    with effects() as texts, broken_inductor("cut", rank == failing):
        return _step(compiled, twin, batches, place), texts


@pytest.mark.parametrize(("pp", "part"), [(1, "stage 0"), (2, "stage 1")])
def test_all_ranks_hear_of_a_part_that_one_cannot_compile(ranks: RankPool, pp: int, part: str) -> None:
    """Data ranks (of uneven micro-batches) share the part and run it alike; pipeline ranks are told."""
    batches = [4, 3] if pp == 1 else [4]
    for error, texts in ranks.run(2, _fallback, pp, 1, batches):
        assert error <= 1e-9
        (text,) = texts
        assert text.startswith(f"Inductor cannot compile {part} (rank 1: AssertionError: u4 -> u1)")


# ---- the order of collectives ----------------------------------------------------------------------------


def _disordered(pp: int, at: int) -> tuple[str, float]:
    """One rank would start the collectives of its stage in another order: refused, and the next call runs."""
    torch.set_default_dtype(torch.float64)
    model = _net(norm=True)
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, _mesh(pp), pipeline={"stages": ["b"]}, backend="eager")
    rank = dist.get_rank()
    batches = [3, 2]

    def order_lines(pair: Any) -> list[str]:
        """As of a stage that Inductor compiled."""
        lines = ["forward: all_reduce", "backward: all_reduce_1"]
        return lines[::-1] if rank == at else lines

    error = ""
    with mock.patch.object(lowered_parts, "order_lines", order_lines):
        try:
            _step(compiled, twin, batches, rank % 2)
        except fxdp.AgreementError as refused:
            error = str(refused)
    return error, _step(compiled, twin, batches, rank % 2)


def test_data_ranks_of_a_stage_start_collectives_in_one_order(ranks: RankPool) -> None:
    """Ranks of another stage have other parts, and are not compared with them."""
    for message, error in ranks.run(4, _disordered, 2, 1):
        assert "different compiled programs: line 1: rank 0 has `stage 0, micro-batch 0 forward: " in message
        assert "; rank 1 has `stage 0, micro-batch 0 backward: " in message
        assert "rank 2" not in message
        assert error <= 1e-9


def _disordered_at_own_sizes() -> tuple[float, Counter[str]]:
    """Code for a rank's own sizes would sum in an order of its own, that for any size would not."""
    torch.set_default_dtype(torch.float64)
    model = _net(norm=True)
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, _mesh(1), backend="eager")
    rank = dist.get_rank()

    def order_lines(pair: Any) -> list[str]:
        return ["forward: all_reduce"] if counts["any size"] else [f"of rank {rank}: all_reduce"]

    with _counted() as counts, mock.patch.object(lowered_parts, "order_lines", order_lines):
        return _step(compiled, twin, [3, 2], rank), counts


def test_uneven_parts_that_would_sum_in_other_orders_share_code_for_any_size(ranks: RankPool) -> None:
    for error, counts in ranks.run(2, _disordered_at_own_sizes):
        assert error <= 1e-9
        assert counts == {"exact": 1, "any size": 1}


# ---- sizes -----------------------------------------------------------------------------------------------


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()

    def counting(wanted: WantedPart, *args: Any, generic: bool, **rest: Any) -> Lowered:
        found["any size" if generic else "exact"] += wanted.name in ("this program", "stage 0")
        return lower_part(wanted, *args, generic=generic, **rest)

    with mock.patch.object(lowered_parts, "lower_part", counting):
        yield found


@pytest.mark.parametrize("options", [{}, {"pipeline": {"microbatches": 2}}], ids=["full", "microbatches"])
def test_other_sizes_than_the_first_are_served_by_one_program(options: dict[str, Any]) -> None:
    model = _net()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager", **options)
    found = []
    with _counted() as counts:
        for batch in (4, 6, 10, 14, 4):
            assert _step(compiled, twin, [batch]) <= 1e-12
            found.append((counts["exact"], counts["any size"]))
    assert found == [(1, 0), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_a_part_that_fixes_its_sizes_is_lowered_for_each(caplog: pytest.LogCaptureFixture) -> None:
    model = _net()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager", pipeline={"microbatches": 2})

    def fixing(wanted: WantedPart, *args: Any, generic: bool, **rest: Any) -> Lowered:
        if generic and wanted.name == "stage 0":
            raise SizesFixedError("b")
        return lower_part(wanted, *args, generic=generic, **rest)

    with mock.patch.object(lowered_parts, "lower_part", fixing), caplog.at_level(logging.WARNING, "fxdp"):
        for batch in (4, 6, 8, 4):
            assert _step(compiled, twin, [batch]) <= 1e-12
    assert [r.getMessage() for r in caplog.records] == [
        "stage 0 fixes the sizes b: it is compiled anew for each size"
    ]
