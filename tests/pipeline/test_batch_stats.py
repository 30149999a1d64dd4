"""`Pipeline(batch_stats="microbatch")`: each micro-batch by its own, running ones by the global batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from tests.exactness.models import counterpart_of, worst_error
from tests.pipeline.own_statistics import Net, Run, errors_of, inputs, set_parts
from tests.rank_pool import RankPool

ALONE = (
    Run(4, batches=((8,), (7,), (5,), (2,)), checkpoint="always"),  # 5: 2, 2, 1, none; 2: 1, 1, none, none
    Run(2, momentum=None, batches=((8,), (7,), (3,))),
)
TWO = (
    Run(2, dp=2, batches=((4, 3), (5, 0), (1, 2))),
    Run(1, dp=2, batches=((4, 3),)),
    Run(4, pp=2, schedule="zero-bubble", batches=((7,),)),
)
FOUR = (Run(2, pp=2, dp=2, batches=((4, 3), (5, 0))),)


def _cubes(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).pow(3).mean()


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_one_rank(run: Run) -> None:
    assert errors_of((run,))[0] <= 1e-9


def test_compiled_by_inductor() -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(3).double(), torch.randn(4, 3, dtype=torch.float64)
    twin = counterpart_of(norm)
    set_parts(twin, [2, 2])
    compiled = fxdp.compile(norm, loss_fn=_cubes, pipeline={"microbatches": 2, "batch_stats": "microbatch"})
    loss, expected = compiled(x, target=x), _cubes(twin(x), x)
    loss.backward()
    expected.backward()
    assert worst_error(norm, loss, twin, expected, [4], 0) <= 1e-9


@pytest.mark.parametrize(("world", "runs"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_ranks(ranks: RankPool, world: int, runs: tuple[Run, ...]) -> None:
    found = ranks.run(world, errors_of, runs)
    for run, errors in zip(runs, zip(*found, strict=True), strict=True):
        assert max(errors) <= 1e-9, f"{run}: {errors}"


def test_statistics_differ_from_those_of_the_whole_batch() -> None:
    """So that the tests above do not pass by comparing one with the other."""
    model, batch = Net().double(), inputs(8)
    own = fxdp.compile(model, pipeline={"microbatches": 2, "batch_stats": "microbatch"}, backend="eager")(
        **batch
    )["loss"]
    assert abs(own - model(**batch)["loss"]) > 1e-3


def test_evaluation_uses_the_running_statistics() -> None:
    model, batch = Net().double().eval(), inputs(7)
    model.last = nn.Identity()  # without running statistics it would need those of the batch
    compiled = fxdp.compile(
        model, pipeline={"microbatches": 3, "batch_stats": "microbatch"}, backend="eager"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(compiled(**batch)["logits"], model(**batch)["logits"], rtol=1e-12)


def test_refused_by_default_with_the_way_out() -> None:
    compiled = fxdp.compile(Net().double(), pipeline={"microbatches": 2}, backend="eager")
    words = r"in images: all_reduce for (.|\n)*or fxdp.Pipeline\(batch_stats=\"microbatch\"\): "
    with pytest.raises(fxdp.StageError, match=words) as raised:
        compiled(**inputs(4))
    places = [line.partition(": ")[0] for line in str(raised.value).splitlines() if line.startswith("  at ")]
    assert len(places) == len(set(places)) > 0
    assert all(line.count("`") == 2 for line in places)


def test_running_statistics_cost_one_reduction_each() -> None:
    """Nothing in the midst of forward or backward: the loss, its count, moments of the two tracked norms."""
    model, batch = Net().double(), inputs(4)
    plan = fxdp.plan(model, (), batch, {"dp": 2}, pipeline={"batch_stats": "microbatch", "microbatches": 2})
    rows = [row for row in plan.communication if not row.gradient]
    assert sorted(row.bytes for row in rows) == [8, 8, 3 * 4 * 8, 3 * 6 * 8]


def test_verify_refuses_what_is_not_one_device() -> None:
    with pytest.raises(fxdp.InputError, match="batch_stats"):
        fxdp.verify(Net(), (), inputs(4), {"dp": 2}, pipeline={"batch_stats": "microbatch"})


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    class Differences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[1:] - x[:-1]).square().mean()

    with pytest.raises(fxdp.PlacementError, match=r"return self\.norm.* needs a batch in parts"):
        fxdp.plan(Differences(), (torch.randn(4, 3),), mesh={"dp": 2}, pipeline={"batch_stats": "microbatch"})
