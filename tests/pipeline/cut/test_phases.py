"""When each op of a step runs."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxdp.errors import StageError
from fxdp.ir import redistributions
from fxdp.pipeline.cut.phases import recall_phases
from tests.pipeline.cut.cuts import staged


class Masked(nn.Module):
    """A mean over the targets that count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), y)


def _phases(microbatches: int) -> str:
    """The ops of each phase; of those that any part may compute, only how many there are."""
    gm = staged(
        Masked(), torch.randn(8, 4), torch.randint(3, (8,)), dp=2, pipeline={"microbatches": microbatches}
    )
    phases = recall_phases(gm.graph, several=microbatches > 1)
    ops = [n for n in gm.graph.nodes if n.op == "call_function"]
    own = [n for n in ops if phases.is_own(n)]
    lines = {
        "prologue": phases.prologue,
        "forward": [n for n in own if n not in phases.backward],
        "backward": [n for n in own if n in phases.backward],
        "epilogue": [n for n in ops if n in phases.epilogue],
    }
    return "\n".join(f"{phase}: {' '.join(n.name for n in nodes)}" for phase, nodes in lines.items())


def test_a_count_comes_first_and_sums_last() -> None:
    assert_expected_inline(
        _phases(2),
        """\
prologue: wait_1
forward: mm _log_softmax nll_loss_forward getitem getitem_1
backward: div_1 nll_loss_backward _log_softmax_backward_data t_1 mm_1 t_2 t_3
epilogue: all_reduce wait div all_reduce_2 wait_2""",
    )


def test_one_micro_batch_needs_no_prologue() -> None:
    """The count is reduced where it is used, beside the loss."""
    assert _phases(1).splitlines()[0] == "prologue: "


def test_collectives_are_in_prologue_or_epilogue() -> None:
    gm = staged(Masked(), torch.randn(8, 4), torch.randint(3, (8,)), dp=2, pipeline={"microbatches": 2})
    phases = recall_phases(gm.graph, several=True)
    collectives: list[fx.Node] = [n for n in gm.graph.nodes if n.target in redistributions.COLLECTIVES]
    assert len(collectives) == 3  # count, loss, gradient
    assert [n in phases.epilogue for n in collectives] == [n not in phases.free for n in collectives]


def test_a_backward_that_draws_is_refused() -> None:
    class Noisy(Masked):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.linear(x)
            z.register_hook(lambda grad: grad + torch.randn_like(grad))
            return F.cross_entropy(z, y)

    with pytest.raises(StageError, match=r"test_phases.py:\d+ .*the backward draws random numbers"):
        staged(Noisy(), torch.randn(8, 4), torch.randint(3, (8,)), dp=2, pipeline={"microbatches": 2})
