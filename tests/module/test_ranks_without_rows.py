"""A rank without an image, a positive anchor, a document or an edge: none hangs, compiled or not.

step       0        1        2      3      a timeout ends what hangs, and says the last line of each rank:
rank 0     none     some     none   none   `images, compiled, step 1: rank 1 has none`
rank 1     some     none     some   none
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp import Rows
from tests.limits import HANG_S
from tests.rank_pool import RankPool

STEPS, TEXT, IMAGE = 4, 4, 0
Parts = tuple[Tensor, ...]


class _Images(nn.Module):
    """Rows of images take the places of a token in texts; a tower that a rank without images does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed, self.head = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        places = (ids == IMAGE)[..., None]
        h = self.embed(ids).masked_scatter(places, self.tower(pixels))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class _Anchors(nn.Module):
    """The boxes' loss of positive anchors alone, by their number in all."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.box = nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, anchors: Tensor, is_positive: Tensor, boxes: Tensor) -> Tensor:
        scores = self.score(anchors).squeeze(1)
        positive = is_positive > 0
        away = (self.box(anchors[positive]) - boxes).abs().sum() / positive.sum().clamp(min=1)
        return away + F.binary_cross_entropy_with_logits(scores, is_positive.to(scores))


class _Documents(nn.Module):
    """Attention of packed documents to themselves, and a mean of the documents' means."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        of = torch.repeat_interleave(lengths, output_size=tokens.shape[0])
        query, key, value = self.project(tokens).view(1, -1, 3, 4).unbind(2)
        h = F.scaled_dot_product_attention(query, key, value, (of[:, None] == of)[None])[0]
        sums = h.new_zeros(lengths.shape[0], 4).index_add(0, of, h)
        return (sums / lengths.clamp(min=1)[:, None]).square().mean()


class _Edges(nn.Module):
    """One convolution over edges, of which those within a node do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.message = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, edges[0] != edges[1]]
        h = self.layer(x).index_add(0, target, self.message(x)[source])
        return h.sin().mean()


def _images(some: bool, seed: int) -> Parts:
    ids = 1 + torch.arange(2 * TEXT).view(2, TEXT) % 4
    if some:
        ids[0, 1] = ids[1, 2] = ids[1, 3] = IMAGE
    return ids, _values(3 if some else 0, 3, seed)


def _anchors(some: bool, seed: int) -> Parts:
    is_positive = torch.tensor([0, 1, 0, 1, 1]) * some
    return _values(5, 4, seed), is_positive, _values(3 * some, 4, seed + 1)


def _documents(some: bool, seed: int) -> Parts:
    empty = [0] * (seed >= 7 * (STEPS - 1))  # of the step in which no rank has a token
    lengths = torch.tensor([3, 1, 2] if some else empty, dtype=torch.int64)
    return _values(int(lengths.sum()), 4, seed), lengths


def _edges(some: bool, seed: int) -> Parts:
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]])
    return _values(4, 4, seed), edges[:, : 4 * some]


def _values(rows: int, columns: int, seed: int) -> Tensor:
    return (torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + seed).sin()


CASES: dict[str, tuple[type[nn.Module], Callable[[bool, int], Parts], tuple[Rows, ...]]] = {
    "images": (_Images, _images, (Rows("texts"), Rows("images"))),
    "anchors": (_Anchors, _anchors, (Rows("anchors"), Rows("anchors"), Rows("positive"))),
    "documents": (_Documents, _documents, (Rows("tokens"), Rows("documents", lengths="tokens"))),
    "edges": (_Edges, _edges, (Rows("nodes"), Rows("edges", dim=1, into="nodes"))),
}


def _part(case: str, step: int, rank: int) -> Parts:
    return CASES[case][1]((step + rank) % 2 == 1 and step < STEPS - 1, 7 * step + rank)


def _whole(case: str, step: int) -> Parts:
    """The parts of both ranks in order; edges of the second one count from its first node."""
    first, second = (_part(case, step, rank) for rank in range(2))
    before = len(first[0]) if case == "edges" else 0
    moved = (part + before if rows.into else part for part, rows in zip(second, CASES[case][2], strict=True))
    return tuple(
        torch.cat([a, b], rows.dim or 0) for a, b, rows in zip(first, moved, CASES[case][2], strict=True)
    )


def _trained(case: str, how: str, rank: int | None = None) -> list[Tensor]:
    """The losses of all steps, and the parameters after them; without a rank those of one device."""
    torch.manual_seed(0)
    make, _, rows = CASES[case]
    model: Any = make().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if how == "compiled":
        model = fxdp.compile(model, batch_dims=(rows, {}), backend="eager")
    losses: list[Tensor] = []
    for step in range(STEPS):
        print(f"{case}, {how}, step {step}: rank {step % 2} has none", flush=True)
        part = _whole(case, step) if rank is None else _part(case, step, rank)
        optimizer.zero_grad()
        loss = model(*(fxdp.global_batch(part, batch_dims=rows) if how == "op by op" else part))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().full() if isinstance(loss, fxdp.GlobalTensor) else loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def _on_ranks() -> dict[tuple[str, str], list[Tensor]]:
    ways = [(case, how) for case in CASES for how in ("compiled", "op by op")]
    return {way: _trained(*way, dist.get_rank()) for way in ways}


def test_a_rank_without_rows_trains_on(ranks: RankPool) -> None:
    for found in ranks.run(2, _on_ranks, timeout=HANG_S / 2):
        for (case, how), values in found.items():
            for got, expected in zip(values, _trained(case, "one device"), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=f"{case}, {how}")
