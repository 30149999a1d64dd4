"""The emitted program of each schedule, as a reader sees it: calls, transfers and sums in their order."""

from __future__ import annotations

import operator
from textwrap import wrap
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.runtime import p2p
from tests.pipeline.cut.cuts import program


class Two(nn.Module):
    """Two layers without biases, which become two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).sum()


def _programs(schedule: str, stages: int | list[str], model: nn.Module | None = None, **options: Any) -> str:
    """What each rank calls, in order, but for taking results apart, events, and waits for what was sent."""
    cut_as = {"stages": stages, "microbatches": 2, "schedule": schedule}
    options["pipeline"] = {**cut_as, **options.get("pipeline", {})}
    cut = program(model or Two(), torch.randn(4, 4), ranks=2, **options)
    layout = MicrobatchSizes.of({"B": 4, "b": 4, "offset": 0, "b_max": 4}, 2)
    lines = []
    for rank in range(2):
        graph = cut.writer(layout, rank).write()
        words = [n.name for n in graph.nodes if n.op != "output" and n.target not in _SMALL]
        lines += [f"rank {rank}:", *wrap(" ".join(words), 100)]
    return "\n".join(lines)


def test_rows_come_from_other_ranks_and_gradients_go_back() -> None:
    cut = program(
        Two(), torch.randn(4, 4), ranks=2, pipeline={"stages": ["b"], "microbatches": 1}, strategy="shard"
    )
    layout = MicrobatchSizes.of({"B": 4, "b": 4, "offset": 0, "b_max": 4}, 1)
    step = cut.writer(layout, 0)
    graph = step.write()
    words = [n.name for n in graph.nodes if n.op != "output" and n.target not in _SMALL]
    words = ["dealt_t_9" if word == "dealt_t_1" else word for word in words]  # a second t_8 in torch 2.11
    assert_expected_inline(
        "\n".join(wrap(" ".join(words), 100)),
        """\
batch rows parameters_to1 send_parameters_to1 receive_parameters_from1 parameters_of1 unpacked_of1
rows_of_a_weight gather_0 forward_0_mb0 send_relu_mb0_to1 receive_mm_3_mb0_from1 mm_3_mb0
backward_0_mb0 dealt_t_8 dealt_t_9 gradients_to1 send_gradients_to1 receive_results_from1
results_of1 unpacked_of1_1 receive_gradients_from1 gradients_of1 unpacked_of1_2""",
    )
    sent = [(s.name, s.values, s.source, s.target, s.bytes) for s in step.step.sent]
    assert sent[0] == ("parameters", ("b.weight",), 0, 1, 16)
    assert sent[-1] == ("gradients", ("t_8",), 0, 1, 2 * 4 * 4)


_SMALL = (operator.getitem, p2p.wait_sent, p2p.microbatch, "record_event", "wait_event")


def test_gpipe() -> None:
    assert_expected_inline(
        _programs("gpipe", ["b"]),
        """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1
receive_mm_3_mb1_from1 sums_0 mm_3_mb0 backward_0_mb0 mm_3_mb1 backward_0_mb1 finish_0 results_of0
send_results_of0_to1 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 sums_1 relu_mb0 forward_1_mb0 relu_mb1
forward_1_mb1 total_sum_1 input_gradient_1_mb0 send_mm_3_mb0_to0 input_gradient_1_mb1
send_mm_3_mb1_to0 weight_gradient_1_mb0 weight_gradient_1_mb1 finish_1 receive_results_from0
results_of0 unpacked_of0 results_of1 send_results_of1_to0""",
    )


def test_1f1b() -> None:
    assert_expected_inline(
        _programs("1f1b", ["b"]),
        """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1 sums_0
mm_3_mb0 backward_0_mb0 receive_mm_3_mb1_from1 mm_3_mb1 backward_0_mb1 finish_0 results_of0
send_results_of0_to1 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 sums_1 relu_mb0 forward_1_mb0
input_gradient_1_mb0 send_mm_3_mb0_to0 relu_mb1 forward_1_mb1 total_sum_1 input_gradient_1_mb1
send_mm_3_mb1_to0 weight_gradient_1_mb0 weight_gradient_1_mb1 finish_1 receive_results_from0
results_of0 unpacked_of0 results_of1 send_results_of1_to0""",
    )


def test_interleaved() -> None:
    assert_expected_inline(
        _programs("interleaved", 4, pipeline={"gradients": "owner"}),
        """\
rank 0:
batch forward_0_mb0 send_mm_mb0_to1 forward_0_mb1 send_mm_mb1_to1 receive_relu_mb0_from1 sums_2
relu_mb0 forward_2_mb0 send_mm_1_mb0_to1 receive_relu_mb1_from1 relu_mb1 forward_2_mb1
send_mm_1_mb1_to1 input_gradient_2_mb0 send_mm_3_mb0_to1 input_gradient_2_mb1 send_mm_3_mb1_to1
receive_threshold_backward_mb0_from1 weight_gradient_2_mb0 weight_gradient_2_mb1
receive_threshold_backward_mb1_from1 sums_0 threshold_backward_mb0 backward_0_mb0
threshold_backward_mb1 backward_0_mb1 finish_2 finish_0 receive_results_from1 results_of1
unpacked_of1
rank 1:
batch receive_mm_mb0_from0 receive_mm_mb1_from0 mm_mb0 forward_1_mb0 send_relu_mb0_to0
receive_mm_1_mb0_from0 mm_mb1 forward_1_mb1 send_relu_mb1_to0 receive_mm_1_mb1_from0 mm_1_mb0
forward_3_mb0 receive_mm_3_mb0_from0 mm_1_mb1 forward_3_mb1 total_sum_1 receive_mm_3_mb1_from0
mm_3_mb0 backward_1_mb0 send_threshold_backward_mb0_to0 mm_3_mb1 backward_1_mb1
send_threshold_backward_mb1_to0 finish_3 results_of1 send_results_of1_to0""",
    )


def test_zero_bubble() -> None:
    assert_expected_inline(
        _programs("zero-bubble", ["b"], pipeline={"gradients": "owner"}),
        """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_mm_3_mb0_from1 sums_0
mm_3_mb0 input_gradient_0_mb0 weight_gradient_0_mb0 receive_mm_3_mb1_from1 mm_3_mb1
input_gradient_0_mb1 weight_gradient_0_mb1 finish_0 receive_results_from1 results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 sums_1 relu_mb0 forward_1_mb0
input_gradient_1_mb0 send_mm_3_mb0_to0 relu_mb1 forward_1_mb1 total_sum_1 input_gradient_1_mb1
send_mm_3_mb1_to0 weight_gradient_1_mb0 weight_gradient_1_mb1 finish_1 results_of1
send_results_of1_to0""",
    )


def test_recomputation() -> None:
    """The first micro-batch runs forward again right before its backward, while the gradient is under way."""
    words = _programs("gpipe", ["b"], activation_checkpointing="except_last").split()
    assert [w for w in words if w.startswith("recompute")] == ["recompute_0_mb0", "recompute_1_mb0"]
    at = words.index("recompute_0_mb0")
    assert words[at - 1].startswith("receive_mm_3_mb0")
    assert words[at + 1 : at + 4] == ["sums_0", "mm_3_mb0", "backward_0_mb0"]


class Frozen(Two):
    """Only the second layer learns."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


def test_a_frozen_first_stage_has_no_backward() -> None:
    """Nothing is kept for one, and nothing is computed again."""
    found = _programs(
        "1f1b", ["b"], Frozen(), pipeline={"gradients": "owner"}, activation_checkpointing="always"
    )
    assert_expected_inline(
        found,
        """\
rank 0:
batch forward_0_mb0 send_relu_mb0_to1 forward_0_mb1 send_relu_mb1_to1 receive_results_from1
results_of1 unpacked_of1
rank 1:
batch receive_relu_mb0_from0 receive_relu_mb1_from0 sums_1 relu_mb0 forward_1_mb0 recompute_1_mb0
backward_1_mb0 relu_mb1 forward_1_mb1 total_sum_1 recompute_1_mb1 backward_1_mb1 finish_1
results_of1 send_results_of1_to0""",
    )


def _text(graph: fx.Graph) -> str:
    """One call per line, as `print_readable()` shows it."""
    lines = []
    for node in graph.nodes:
        if node.op in ("call_module", "call_function"):
            words = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
            target = node.target if isinstance(node.target, str) else node.target.__name__
            lines.append(f"{node} = {target}({', '.join(words)})")
    return "\n".join(lines)


def test_events() -> None:
    """Two data ranks: another stream waits before a send, a receive or a reduction, and compute after it."""
    cut = program(Two(), torch.randn(4, 4), ranks=2, dp=2, pipeline={"stages": ["b"], "gradients": "owner"})
    sizes = {"B": 8, "b": 4, "offset": 0, "b_max": 4}
    assert_expected_inline(
        _text(cut.writer(MicrobatchSizes.of(sizes, 1), 0).write()),
        """\
microbatch_0 = microbatch(batch, 0, 0, 4, [0])
forward_0_mb0 = forward_0(microbatch_0)
relu_mb0 = getitem(forward_0_mb0, 0)
saved_0_mb0 = getitem(forward_0_mb0, 1)
after_forward_0_mb0 = record_event(compute)
p2p_forward_waits = wait_event(p2p_forward, after_forward_0_mb0)
send_relu_mb0_to1 = send_forward(relu_mb0, 1, 0, stream=p2p_forward)
p2p_backward_waits = wait_event(p2p_backward, after_forward_0_mb0)
receive_mm_3_mb0_from1 = receive_backward([4, 4], torch.float32, 1, 1, stream=p2p_backward)
mm_3_mb0 = wait(receive_mm_3_mb0_from1)
sent = wait_sent(send_relu_mb0_to1)
backward_0_mb0 = backward_0(saved_0_mb0, (), mm_3_mb0)
t_8_mb0 = getitem(backward_0_mb0, 0)
after_backward_0_mb0 = record_event(compute)
reduce_waits = wait_event(reduce, after_backward_0_mb0)
finish_0 = finish_0(batch, t_8_mb0, stream=reduce)
wait_1 = getitem(finish_0, 0)
p2p_forward_waits_1 = wait_event(p2p_forward, after_backward_0_mb0)
receive_results_from1 = receive_forward([4], torch.uint8, 1, 3, stream=p2p_forward)
results_of1 = wait(receive_results_from1)
unpacked_of1 = unpack(results_of1, [[]], [torch.float32])
wait = getitem(unpacked_of1, 0)
after_finish_0 = record_event(reduce)
compute_waits = wait_event(compute, after_finish_0, batch, t_8_mb0)""",
    )
    assert_expected_inline(
        _text(cut.writer(MicrobatchSizes.of(sizes, 1), 1).write()),
        """\
after_batch = record_event(compute)
p2p_forward_waits = wait_event(p2p_forward, after_batch)
receive_relu_mb0_from0 = receive_forward([4, 4], torch.float32, 0, 0, stream=p2p_forward)
microbatch_0 = microbatch(batch, 0, 0, 4, [0])
relu_mb0 = wait(receive_relu_mb0_from0)
forward_1_mb0 = forward_1(microbatch_0, relu_mb0)
sum_1_mb0 = getitem(forward_1_mb0, 0)
saved_1_mb0 = getitem(forward_1_mb0, 1)
input_gradient_1_mb0 = input_gradient_1(saved_1_mb0)
mm_3_mb0 = getitem(input_gradient_1_mb0, 0)
rest_1_mb0 = getitem(input_gradient_1_mb0, 1)
after_input_gradient_1_mb0 = record_event(compute)
p2p_backward_waits = wait_event(p2p_backward, after_input_gradient_1_mb0)
send_mm_3_mb0_to0 = send_backward(mm_3_mb0, 0, 1, stream=p2p_backward)
weight_gradient_1_mb0 = weight_gradient_1(rest_1_mb0, ())
t_5_mb0 = getitem(weight_gradient_1_mb0, 0)
after_weight_gradient_1_mb0 = record_event(compute)
reduce_waits = wait_event(reduce, after_weight_gradient_1_mb0)
finish_1 = finish_1(batch, sum_1_mb0, t_5_mb0, stream=reduce)
wait = getitem(finish_1, 0)
wait_2 = getitem(finish_1, 1)
after_finish_1 = record_event(reduce)
compute_waits = wait_event(compute, after_finish_1, batch, sum_1_mb0, t_5_mb0)
results_of1 = pack([wait])
after_results_of1 = record_event(compute)
p2p_forward_waits_1 = wait_event(p2p_forward, after_results_of1)
send_results_of1_to0 = send_forward(results_of1, 0, 3, stream=p2p_forward)
sent = wait_sent(send_mm_3_mb0_to0)
sent_1 = wait_sent(send_results_of1_to0)""",
    )
