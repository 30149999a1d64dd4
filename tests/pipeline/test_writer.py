"""The emitted program of each schedule, as a reader sees it: calls, transfers and sums in their order."""

from __future__ import annotations

import operator
from textwrap import wrap
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxdp.pipeline.layout import Layout
from fxdp.runtime import transport
from tests.staging.cuts import program


class Two(nn.Module):
    """Two layers without biases, which become two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).sum()


def _programs(schedule: str, stages: int | list[str], **options: Any) -> str:
    """What each rank calls, in order, but for taking results apart and waiting for what was sent."""
    cut = program(
        Two(), torch.randn(4, 4), ranks=2, stages=stages, microbatches=2, schedule=schedule, **options
    )
    layout = Layout.of({"B": 4, "b": 4, "offset": 0, "b_max": 4}, 2)
    lines = []
    for rank in range(2):
        graph = cut.writer(layout, rank).write()
        words = [n.name for n in graph.nodes if n.op != "output" and n.target not in _SMALL]
        lines += [f"rank {rank}:", *wrap(" ".join(words), 100)]
    return "\n".join(lines)


_SMALL = (operator.getitem, transport.wait_sent, transport.microbatch)


def test_gpipe() -> None:
    assert_expected_inline(_programs("gpipe", ["b"]), """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1
mm_3_mb0 sums_0 backward_0_mb0 receive_mm_3_mb1_from1 mm_3_mb1 backward_0_mb1 finish_0 results_of0
send_results_of0_to1 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 relu_mb0 forward_1_mb0 relu_mb1 forward_1_mb1
total_sum_1 sums_1 backward_1_mb0 send_mm_3_mb0_to0 backward_1_mb1 send_mm_3_mb1_to0 finish_1
receive_results_from0 results_of0 unpacked_of0 results_of1 send_results_of1_to0""")


def test_1f1b() -> None:
    assert_expected_inline(_programs("1f1b", ["b"]), """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1
mm_3_mb0 sums_0 backward_0_mb0 receive_mm_3_mb1_from1 mm_3_mb1 backward_0_mb1 finish_0 results_of0
send_results_of0_to1 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 relu_mb0 forward_1_mb0 sums_1 backward_1_mb0
send_mm_3_mb0_to0 relu_mb1 forward_1_mb1 total_sum_1 backward_1_mb1 send_mm_3_mb1_to0 finish_1
receive_results_from0 results_of0 unpacked_of0 results_of1 send_results_of1_to0""")


def test_interleaved() -> None:
    assert_expected_inline(_programs("interleaved", 4, gradients="owner"), """\
rank 0:
batch forward_0_mb0 send_mm_mb0_to1 forward_0_mb1 send_mm_mb1_to1 receive_relu_mb0_from1 relu_mb0
forward_2_mb0 send_mm_1_mb0_to1 receive_relu_mb1_from1 relu_mb1 forward_2_mb1 send_mm_1_mb1_to1
sums_2 backward_2_mb0 send_mm_3_mb0_to1 backward_2_mb1 send_mm_3_mb1_to1
receive_threshold_backward_mb0_from1 threshold_backward_mb0 sums_0 backward_0_mb0
receive_threshold_backward_mb1_from1 threshold_backward_mb1 backward_0_mb1 finish_2 finish_0
receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_mm_mb0_from0 receive_mm_mb1_from0 mm_mb0 forward_1_mb0 send_relu_mb0_to0
receive_mm_1_mb0_from0 mm_mb1 forward_1_mb1 send_relu_mb1_to0 receive_mm_1_mb1_from0 mm_1_mb0
forward_3_mb0 backward_3_mb0 mm_1_mb1 forward_3_mb1 total_sum_1 receive_mm_3_mb0_from0
backward_3_mb1 receive_mm_3_mb1_from0 mm_3_mb0 backward_1_mb0 send_threshold_backward_mb0_to0
mm_3_mb1 backward_1_mb1 send_threshold_backward_mb1_to0 finish_3 results_of1 send_results_of1_to0""")


def test_zero_bubble() -> None:
    assert_expected_inline(_programs("zero-bubble", ["b"], gradients="owner"), """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1
mm_3_mb0 input_gradient_0_mb0 sums_0 weight_gradient_0_mb0 receive_mm_3_mb1_from1 mm_3_mb1
input_gradient_0_mb1 weight_gradient_0_mb1 finish_0 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 relu_mb0 forward_1_mb0 input_gradient_1_mb0
send_mm_3_mb0_to0 relu_mb1 forward_1_mb1 total_sum_1 input_gradient_1_mb1 send_mm_3_mb1_to0 sums_1
weight_gradient_1_mb0 weight_gradient_1_mb1 finish_1 results_of1 send_results_of1_to0""")


def test_recomputation() -> None:
    """The first micro-batch runs forward again right before its backward, while the gradient is under way."""
    words = _programs("gpipe", ["b"], checkpoint="except_last").split()
    assert [w for w in words if w.startswith("recompute")] == ["recompute_0_mb0", "recompute_1_mb0"]
    at = words.index("recompute_0_mb0")
    assert words[at - 1].startswith("receive_mm_3_mb0")
    assert words[at + 1 : at + 4] == ["mm_3_mb0", "sums_0", "backward_0_mb0"]
