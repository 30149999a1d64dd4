"""Four real ranks as a tree: training is exact, and whichever of them ends, all others know it at once.

FXDP_TREE_ABOVE=2     0 ─┬─ 1 ── 3       a root, an inner rank, two leaves
                         └─ 2
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.errors import FxdpError, RankFailedError
from fxdp.ranks.comms import live_comms
from fxdp.ranks.hooks import install_hook
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.tree.tree_control import TreeControl
from fxdp.ranks.tree.tree_messages import TreeMessages
from tests.captures import captured_once
from tests.limits import SOON_S
from tests.rank_pool import Outcome, RankPool

_TREE = {"FXDP_TREE_ABOVE": "2"}
_SPLITS = ((3, 0, 1, 4), (2, 2, 2, 2), (0, 0, 0, 1), (1, 7, 0, 2), (0, 5, 5, 0))


class Net(nn.Sequential):
    """Its statistics and small gradients are summed by the tree."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
        self.double()


def _batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    shape = (max(size, 2), 4)  # a batch of one sample has no statistics
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x, torch.randn(shape[0], 2, dtype=torch.float64, generator=generator)


def _errors(**options: Any) -> tuple[str, list[float]]:
    """How the ranks are joined, and how far losses and, at the end, the state are from one device's."""
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    with captured_once():
        compiled = fxdp.compile(model, loss_fn=F.mse_loss, backend="eager", **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (compiled, twin)]
        errors = []
        for split in _SPLITS:
            x, y = _batch(sum(split))
            wanted = F.mse_loss(twin(x), y)
            sizes = [*split[:-1], len(x) - sum(split[:-1])]
            here, there = (part.split(sizes)[dist.get_rank()] for part in (x, y))
            loss = compiled(here, target=there)
            for each, optimizer in zip((loss, wanted), optimizers, strict=True):
                optimizer.zero_grad()
                each.backward()
                optimizer.step()
            errors.append((loss - wanted).abs().item())
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    (comms,) = live_comms()
    process_mesh = (
        f"{type(comms.control).__name__} {len(comms.control.peers)} {type(comms.messages).__name__}"
    )
    return process_mesh, [*errors, max((a - b).abs().max().item() for a, b in pairs)]


def test_uneven_and_empty_batches_are_those_of_one_device(ranks: RankPool) -> None:
    outcomes = ranks.spawn(4, _errors, environment={**_TREE, "FXDP_SHARED_MEMORY": "0"})
    for outcome, neighbours in zip(outcomes, (2, 2, 1, 1), strict=True):
        assert outcome.status == 0, outcome.output
        process_mesh, errors = outcome.result
        assert process_mesh == f"{TreeControl.__name__} {neighbours} {TreeMessages.__name__}"
        assert max(errors) < 1e-12


def _in_stages() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x, y = _batch(8)
    wanted = F.mse_loss(model(x), y).item()
    compiled = fxdp.compile(model, mesh, loss_fn=F.mse_loss, backend="eager", pipeline={"microbatches": 2})
    place = compiled.mesh.rank
    loss = compiled(x[4 * place :][:4], target=y[4 * place :][:4])
    loss.backward()
    return [loss.item() - wanted]


def test_a_mesh_with_stages_whose_rows_are_small(ranks: RankPool) -> None:
    """All ranks are a tree, the two of a row are joined as they always are."""
    for outcome in ranks.spawn(4, _in_stages, environment=_TREE):
        assert outcome.status == 0, outcome.output
        assert abs(outcome.result[0]) < 1e-12


def _until_told(guilty: int, how: str) -> tuple[str, float]:
    """The error that a rank gets, and when; the guilty one writes when it ends."""
    install_hook()
    compiled = fxdp.compile(Net(), loss_fn=F.mse_loss, backend="eager")
    x, y = _batch(2)
    try:
        for step in range(1_000_000):
            compiled(x, target=y).backward()
            if step == 20 and dist.get_rank() == guilty:
                print("at", time.time(), flush=True)
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the reason")
    except FxdpError as error:
        return f"{type(error).__name__}: {error}", time.time()
    raise AssertionError("nobody was told")


def _check(outcomes: list[Outcome], guilty: int, words: str) -> None:
    began = float(next(line[3:] for line in outcomes[guilty].output.splitlines() if line[:3] == "at "))
    for rank, outcome in enumerate(outcomes):
        if rank != guilty:
            assert outcome.result is not None, outcome.output
            text, at = outcome.result
            assert text.startswith(f"{RankFailedError.__name__}: rank {guilty} {words}"), text
            assert at - began < SOON_S


@pytest.mark.parametrize("guilty", [0, 1, 3])
def test_a_killed_root_inner_rank_or_leaf_is_named_on_all_others(ranks: RankPool, guilty: int) -> None:
    environment = {**_TREE, "FXDP_SHARED_MEMORY": "0"}
    outcomes = ranks.spawn(4, _until_told, guilty, "killed", environment=environment)
    _check(outcomes, guilty, "ended without an error message (killed?")


def test_an_error_of_a_leaf_reaches_all_others(ranks: RankPool) -> None:
    outcomes = ranks.spawn(4, _until_told, 3, "raised", environment=_TREE)
    _check(outcomes, 3, "failed: ValueError: the reason")


def _other_settings() -> str:
    os.environ["FXDP_TREE_ABOVE"] = "1" if dist.get_rank() else "16"
    try:
        init_mesh(None, "cpu")
    except FxdpError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_settings_are_told_at_once(ranks: RankPool) -> None:
    for outcome in ranks.spawn(2, _other_settings):
        assert "FXDP_TREE_ABOVE is 1 on this rank and 16 on the first rank of the mesh" in outcome.result
