"""What errors of a step say: the rank, the call, whether forward or backward, and the line of the model."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.ranks.liveness.failure import report_errors
from tests.captures import captured_once
from tests.rank_pool import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.same = self.first
        self.first.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "a bad sample"
        return F.cross_entropy(self.last(self.first(x)), y)


def _said(action: Callable[[], Any]) -> str:
    """The traceback of an action's error, and its notes."""
    try:
        action()
    except Exception:
        return traceback.format_exc()
    return "no error"


def _compiled(**options: Any) -> fxdp.CompiledModule:
    compiled = fxdp.compile(Net(), backend="eager", **options)
    compiled(torch.ones(4, 4), torch.zeros(4, dtype=torch.long)).backward()
    return compiled


def _label(**options: Any) -> str:
    """Rank 1 has a label that is out of range; in stages all ranks of the pipeline have it."""
    y = torch.zeros(4, dtype=torch.long)
    y[0] = 17 * (dist.get_rank() or "mesh" in options)
    compiled = _compiled(**options)
    return _said(lambda: compiled(torch.ones(4, 4), y))


def _check() -> tuple[str, str]:
    """The samples of rank 1 are not finite; the next call works."""
    compiled = _compiled()
    y, seen = torch.zeros(4, dtype=torch.long), compiled.get_buffer("first.seen")
    bad = _said(lambda: compiled(torch.ones(4, 4) / (1 - dist.get_rank()), y))
    assert compiled.get_buffer("first.seen") is seen
    return bad, _said(lambda: compiled(torch.ones(4, 4), y).backward())


def _between() -> str:
    """Rank 1 fails in its own loop, when the other has finished the step before."""
    compiled = _compiled()
    dist.barrier()

    def step() -> None:
        with report_errors():
            if dist.get_rank():
                raise KeyError("the loader's")
            compiled(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))

    return _said(step)


def _two_threads() -> str:
    """A second thread calls while the first one is inside; the others are not disturbed."""
    compiled, found = _compiled(), []
    y = torch.zeros(4, dtype=torch.long)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(_said(lambda: compiled(torch.ones(4, 4), y))))
        thread.start()
        thread.join()

    comms = compiled._process_mesh.comms
    assert comms is not None
    explain, comms.control.start = comms.control.start, lambda data: (hook(), explain(data))[1]  # type: ignore[method-assign]
    compiled(torch.ones(4, 4), y)
    comms.control.start = explain  # type: ignore[method-assign]
    compiled(torch.ones(4, 4), y).backward()
    return found[0]


def _faults() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with captured_once():
        return {
            "two threads": _two_threads(),
            "check": _check(),
            "label": _label(),
            "label in stages": _label(mesh=mesh, pipeline={"microbatches": 2}),
            "between": _between(),
        }


@pytest.fixture(scope="module")
def said(ranks: RankPool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks.run(2, _faults)
    ranks.renew()
    return found


_LINE = Net.forward.__code__.co_firstlineno + 2


def test_an_error_inside_of_a_program_has_the_line_of_the_model(said: list[dict[str, Any]]) -> None:
    line = f'File "{__file__}", line {_LINE}, in forward'
    for case in ("label", "label in stages"):
        texts = [found[case] for found in said]
        for text in texts:
            assert "IndexError: Target 17 is out of bounds" in text
            assert line in text, text
            assert "<eval_with_key>" not in text
            assert ", in call 2 of Net" in text
            assert f"(called at {__file__}:" in text
    own, others = said[1]["label"], said[0]["label"]
    assert "(on rank 1, host " in own
    assert "RankFailedError: rank 1 failed: IndexError" in others
    assert "(on rank 1, host " in others


def test_a_check_of_data_names_the_rank_whose_part_is_bad(said: list[dict[str, Any]]) -> None:
    for found in said:
        bad, afterwards = found["check"]
        assert "InputError: the model refuses this batch" in bad
        assert f"{__file__}:{_LINE - 1}" in bad
        assert "By rank, for its own part:\n  rank 1: AssertionError: a bad sample\n" in bad, bad
        assert "rank 0:" not in bad
        assert afterwards == "no error"


def test_an_error_between_calls_says_after_which(said: list[dict[str, Any]]) -> None:
    assert f"after the backward of call 1 of Net (called at {__file__}:" in said[1]["between"]
    assert "RankFailedError: rank 1 failed: KeyError: " in said[0]["between"]
    assert "(on rank 1, host" in said[0]["between"]


def test_one_thread_at_a_time(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert "StateError: another thread of this process is in a compiled forward" in found["two threads"]
        assert "expected one thread at a time" in found["two threads"]
