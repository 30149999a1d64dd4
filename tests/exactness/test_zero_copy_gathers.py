"""Sharded parameters whose rows fill pages, which the ranks of one host see where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from tests.exactness.models import part
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool

_WIDTH = 512
"""Of float64: a row is a page, so any number of rows is shown."""


class Pages(nn.Module):
    """Rows that fill pages and others, a tied weight, one that is read twice, and layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, _WIDTH)
        # losses of 2 to 6: with torch's own numbers they are 3,000, of which 1e-12 is two roundings
        nn.init.normal_(self.table.weight, std=_WIDTH**-0.5)
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(7, _WIDTH))
        self.head = nn.Linear(_WIDTH, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        h = self.table(words)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.cross_entropy(self.head(h * self.scale.sum(0) * self.scale.mean()), target)


def _batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 5, (size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _written(compiled: nn.Module, full: Pages, *, elsewhere: bool) -> None:
    """A user writes into a parameter: in place, or by giving all of them other memory."""
    with torch.no_grad():
        full.blocks[1].weight.mul_(1.25)
        own: Any = compiled.get_parameter("blocks.1.weight")
        own.to_local().mul_(1.25)
        if elsewhere:
            for net in (compiled, full):
                net.load_state_dict({n: v.clone() for n, v in net.state_dict().items()}, assign=True)


def _train(split: list[int], options: dict[str, Any], elsewhere: bool = False) -> tuple[float, float, int]:
    """The worst deviation of losses and parameters from one device, and how many windows were made."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Pages()
    torch.manual_seed(0)
    full = Pages()
    compiled = fxdp.compile(model, mesh, strategy="shard", **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    plain = torch.optim.AdamW(full.parameters(), lr=1e-3)
    worst = 0.0
    with no_fallback():
        for step in range(4):
            batch = _batch(step, sum(split))
            own = [part(value, split, dist.get_rank()) for value in batch]
            loss, wanted = compiled(*own), full(*batch)
            worst = max(worst, abs(loss.item() - wanted.item()))
            loss.backward()
            wanted.backward()
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
            _written(compiled, full, elsewhere=elsewhere)
            if elsewhere:
                optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
                plain = torch.optim.AdamW(full.parameters(), lr=1e-3)
            with torch.no_grad():
                worst = max(worst, abs(compiled(*own).item() - full(*batch).item()))
    pairs = [(compiled.get_parameter(name), value) for name, value in full.named_parameters()]
    apart = max((p.full_tensor() - q).abs().max().item() for p, q in pairs)  # type: ignore[attr-defined]
    shown = sum(row.kind == "all_gather_shards" for row in compiled.plan.collectives())
    return worst, apart, shown


@pytest.mark.parametrize(
    ("split", "options"),
    [
        ([3, 5], {"backend": "eager"}),
        ([3, 5], {"backend": "inductor"}),
        ([4, 0, 3], {"backend": "eager", "reshard_after_forward": False}),
        ([2, 1, 3], {"backend": "eager"}),
        ([4, 4], {"backend": "eager", "pipeline": {"microbatches": 2}}),
    ],
)
def test_training_equals_one_device(ranks: RankPool, split: list[int], options: dict[str, Any]) -> None:
    for worst, apart, shown in ranks.run(len(split), _train, split, options):
        assert max(worst, apart) < 1e-12
        assert shown


def test_rows_that_a_user_has_put_elsewhere_are_read(ranks: RankPool) -> None:
    for worst, apart, _ in ranks.run(2, _train, [3, 5], {"backend": "eager"}, True):
        assert max(worst, apart) < 1e-12
