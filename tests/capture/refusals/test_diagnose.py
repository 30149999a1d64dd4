"""What torch says is shown where it tells a user anything."""

from __future__ import annotations

import pytest

from fxdp.capture.refusals.diagnose import capture_error


@pytest.mark.parametrize(
    "said",
    [
        "4*u1 (<class 'torch.SymInt'>, 14)is not tracked with proxy for <x.PythonKeyTracer object at 0x7f>",
        "unhashable type: non-nested SymInt",
    ],
)
def test_names_of_torchs_own_parts_are_not_shown(said: str) -> None:
    message = str(capture_error(RuntimeError(said)))
    assert "data-dependent control flow" in message
    assert not any(word in message for word in ("SymInt", "Tracer", "torch:"))


def test_sizes_by_the_names_of_a_trace_are_not_shown() -> None:
    error = RuntimeError("Constraints violated (L['tensors'][0].size()[0])! Run with TORCH_LOGS")
    message = str(capture_error(error, "the number of results depends on the batch size"))
    assert "the number of results" in message
    assert "TORCH_LOGS" not in message


def test_an_expression_of_the_data_is_shown() -> None:
    error = RuntimeError("Could not guard on data-dependent expression u0 > 1 (unhinted: u0 > 1)")
    assert "\ntorch: Could not guard on data-dependent expression u0 > 1" in str(capture_error(error))
