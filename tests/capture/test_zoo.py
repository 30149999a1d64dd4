"""Unmodified transformers models, captured at one batch size and compared at another, entire and on ranks."""

from __future__ import annotations

import pytest
import torch

from fxdp.compiler.planning import Planning
from fxdp.compiler.program import Program
from fxdp.options import Options
from fxdp.reports.plan_data.collective_rows import communication
from tests.lockstep import subject

from . import zoo
from .oracle import check


@pytest.mark.parametrize("name", zoo.ZOO)
def test_equals_eager(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make(name)
    torch.set_default_dtype(torch.float64)
    inputs = zoo.ZOO[name][1]
    with zoo.keep_float64():
        captured = check(model, (), inputs(3), ((), inputs(4)), differentiable="all")
        local, ranks = subject(model, captured, 4, Options())
        run = ranks.run((), inputs(5), (2, 0, 1, 2), seed=0)
    assert run.ok, "\n".join(map(str, [*run.faults, *run.wrong]))
    assert not captured.static
    assert not captured.conditions
    assert travelling(local) == ACROSS_SAMPLES.get(name, set())


ACROSS_SAMPLES = {"clip": {"aten.mm", "aten._log_softmax", "the result"}}
"""What relates samples to one another and so does not split: CLIP sets every text beside every image."""


def travelling(local: Program) -> set[str]:
    """The ops of the forward that read other ranks' samples, or run replicated.

    Where there are none, nothing that is sent grows with the batch.
    """
    sent = communication(local.causes, {"B": 8})
    if {row.op for row in sent} == {"all_reduce"}:
        assert sent == communication(local.causes, {"B": 8000})
    return {row.op for row in Planning(local, {"B": 4}).plan().coverage() if row.phase == "forward"}


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_without_couplings_bit_equal(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make(name).float()
    inputs = zoo.ZOO[name][1](4)
    inputs = {key: v.float() if v.is_floating_point() else v for key, v in inputs.items()}
    check(model, (), inputs, couple=False, tol=0.0)


def test_dynamic_length() -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make("gpt2")
    torch.set_default_dtype(torch.float64)
    wide = {"input_ids": torch.randint(1, 40, (3, 9)), "labels": torch.randint(1, 40, (3, 9))}
    with zoo.keep_float64():
        captured = check(model, (), wide, ((), zoo.ZOO["gpt2"][1](4)), dynamic=True)
    assert captured.symbols == {"s0": (0, 1)}


def test_single_sample() -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make("gpt2")
    torch.set_default_dtype(torch.float64)
    inputs = zoo.ZOO["gpt2"][1]
    with zoo.keep_float64():
        check(model, (), inputs(1), ((), inputs(4)))
