"""Ragged batches on virtual ranks: several axes, values that point into one, ranks without rows of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxdp
from fxdp import Rows
from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import tensor_type
from fxdp.ir.types.mesh import mesh_of
from fxdp.ir.types.sizes import Split
from fxdp.options import Options
from fxdp.oracle.verified_capture import capture_for
from fxdp.oracle.verify import prepare_subject
from fxdp.oracle.virtual_run import Subject
from tests.eager.ragged.comparing import error_of

_ROWS = (Rows("nodes"), Rows("edges", dim=1, into="nodes"), Rows("nodes", into="graphs"), Rows("graphs"))


def part_of(nodes: int, edges: int, graphs: int) -> tuple[Tensor, ...]:
    index = torch.randint(0, max(nodes, 1), (2, edges))
    of_graph = torch.arange(nodes) % max(graphs, 1)
    return torch.randn(nodes, 5, dtype=torch.float64), index, of_graph, torch.arange(graphs) % 3


def _joined(parts: Sequence[tuple[Tensor, ...]], rows: Sequence[Rows]) -> tuple[Any, dict[str, list[int]]]:
    """Return the global batch, and the rows of each rank along each axis."""
    sizes = {
        one.axis: [part[i].shape[one.dim or 0] - (one.bounds is not None) for part in parts]
        for i, one in enumerate(rows)
    }
    full = []
    for i, one in enumerate(rows):
        into = one.into or one.starts or one.bounds
        every = [sizes[name] for name in (into if isinstance(into, tuple) else (into,) if into else ())]
        before = [torch.tensor([[sum(of[:rank])] for of in every]) for rank in range(len(parts))]
        more = before if isinstance(into, tuple) else [one.flatten() for one in before]
        moved = [part[i] + more[rank] if into else part[i] for rank, part in enumerate(parts)]
        if one.bounds is not None:
            moved = [moved[0], *(part[1:] for part in moved[1:])]
        full.append(torch.cat(moved, one.dim or 0))
    return tuple(full), sizes


Parts = Sequence[tuple[Tensor, ...]]
"""The inputs of each rank."""


def run_ragged(
    model: nn.Module, parts: Parts, rows: Sequence[Rows], more: Sequence[Parts] = (), **given: Any
) -> fx.Graph:
    """Run a model's program on virtual ranks, compare it with one device, and return the program.

    Further batches are run by the same program.
    """
    full, _ = _joined(parts, rows)
    options, mesh = Options(batch_dims=(tuple(rows), {}), **given), mesh_of({"dp": len(parts)}, "cpu")
    found = capture_for(model, full, {}, options)
    local, reference = prepare_subject(model, found, mesh, options, 4)
    tolerances = dict.fromkeys((node.name for node in local.gm.graph.nodes), 1e-9)
    subject = Subject(model, local.gm, reference, options, tolerances, local.mesh)
    for batch in (parts, *more):
        full, sizes = _joined(batch, rows)
        axes = zip(found.axes.names, found.axes.rows, strict=True)
        named = {name: sizes[one.axis] for name, one in axes if one is not None}
        run = subject.run(full, {}, Split(named.pop(""), named), 0)
        assert run.ok, (run.faults, run.wrong)
    return local.gm.graph


def gathered(graph: fx.Graph) -> list[Any]:
    targets = (redistributions.all_gather, redistributions.reduce_scatter)
    return [tensor_type(node) for node in graph.nodes if node.target in targets]


class _Network(nn.Module):
    """Two graph convolutions and a loss by graph; `read` is how the rows of edges are read and added."""

    def __init__(self, read: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.read = nn.Linear(5, 8).double(), nn.Linear(8, 3).double(), read

    def _convolved(self, layer: nn.Linear, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = layer(x)
        if self.read == "index":
            degree = h.new_ones(len(h)).index_add(0, target, h.new_ones(len(target)))
            scale = degree.rsqrt()[source] * degree.rsqrt()[target]
            return h / degree[:, None] + torch.zeros_like(h).index_add(0, target, h[source] * scale[:, None])
        if self.read == "gather":
            wide = source[:, None].expand(-1, h.shape[1]), target[:, None].expand(-1, h.shape[1])
            top = torch.full_like(h, -1.0).scatter_reduce(0, wide[1], h.gather(0, wide[0]), "amax")
            return top + torch.zeros_like(h).scatter_add(0, wide[1], h.gather(0, wide[0]))
        rows = F.embedding(source, h) + h.index_select(0, target)
        return h + torch.zeros_like(h).index_put((target,), rows, accumulate=True)

    def forward(self, x: Tensor, edges: Tensor, of_graph: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self._convolved(self.second, self._convolved(self.first, x, edges).relu(), edges)
        edge_graphs = torch.zeros(len(y), 3, dtype=h.dtype).index_add(0, of_graph[edges[0]], h[edges[1]])
        pooled = torch.zeros(len(y), 3, dtype=h.dtype).index_add(0, of_graph, h) + edge_graphs
        return h, F.cross_entropy(pooled, y)


@pytest.mark.parametrize("read", ["index", "gather", "embedding"])
def test_a_graph_network_gathers_nothing(read: str) -> None:
    torch.manual_seed(1)
    parts = [part_of(7, 12, 3), part_of(2, 0, 1), part_of(0, 0, 0), part_of(3, 9, 2)]
    for strategy in ("replicate", "shard") if read == "index" else ("replicate",):
        graph = run_ragged(_Network(read), parts, _ROWS, strategy=strategy)
        assert gathered(graph) == []


class _Likes(nn.Module):
    """Messages from users to the items that they like, and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.there, self.back = nn.Linear(5, 4).double(), nn.Linear(4, 5).double()

    def forward(self, users: Tensor, items: Tensor, likes: Tensor) -> Tensor:
        item, user = likes.flip([0])
        h = items + torch.zeros_like(items).index_add(0, item, self.there(users)[user])
        back = torch.zeros_like(users).index_add(0, user, self.back(h)[item])
        return (users + back).square().mean() + h[likes[1]].sin().sum()


def test_values_that_point_into_two_axes() -> None:
    torch.manual_seed(1)
    rows = Rows("users"), Rows("items"), Rows("likes", dim=1, into=("users", "items"))

    def part(users: int, items: int, likes: int) -> tuple[Tensor, ...]:
        ends = [torch.randint(0, max(n, 1), (likes,)) for n in (users, items)]
        return torch.randn(users, 5).double(), torch.randn(items, 4).double(), torch.stack(ends)

    parts = [part(2, 7, 9), part(0, 1, 0), part(5, 1, 3)]
    assert gathered(run_ragged(_Likes(), parts, rows)) == []
    three = Rows("likes", dim=1, into=("users", "items", "items"))
    with pytest.raises(fxdp.InputError, match=r"shape \(2, 9\); expected 3 in dim 0, one for each axis"):
        fxdp.plan(_Likes(), parts[0], batch_dims=((*rows[:2], three), {}))


def _bags(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return words of bags of these lengths, weights, starts, bounds, lengths, and values of each bag."""
    count, of_bag = sum(lengths), torch.tensor(lengths, dtype=torch.int64)
    bounds = F.pad(of_bag.cumsum(0), (1, 0))
    words, weights = torch.randint(1, 6, (count,)), torch.randn(count).double()
    return words, weights, bounds[:-1], bounds, of_bag, torch.randn(len(lengths), 9, 6).double()


_BAGS = (
    Rows("words"), Rows("words"), Rows("bags", starts="words"), Rows("bags", bounds="words"),
    Rows("bags", lengths="words"), Rows("bags"),
)  # fmt: skip


class _Bags(nn.Module):
    """Reads rows of a table, and reduces over the rows of each bag; `by` is how."""

    def __init__(self, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.by = nn.Embedding(6, 6).double(), by

    def _by_lengths(self, words: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
        """Compute by the number of each word's bag, found in two ways."""
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=len(words))
        h = self.table(words)
        found = torch.zeros(len(lengths), 6).double().index_add(0, bag, h)
        again = torch.bucketize(torch.arange(len(words)), ends, right=True)
        return found + torch.zeros_like(found).index_add(0, again, h * found[bag])

    def forward(
        self, words: Tensor, weights: Tensor, starts: Tensor, bounds: Tensor, lengths: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        table = self.table.weight
        if self.by == "bags":
            h = F.embedding_bag(words, table, starts, mode="sum", per_sample_weights=weights, padding_idx=2)
            h = h + F.embedding_bag(words, table, bounds, mode="mean", include_last_offset=True)
            h = h + F.embedding_bag(words, table, starts, mode="max", padding_idx=3)
        elif self.by == "lengths":
            h = self._by_lengths(words, bounds[1:], lengths) + self._by_lengths(
                words, bounds[:-1] + bounds.diff(), bounds.diff()
            )
        elif self.by == "segments":
            rows = self.table(words)
            h = torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0)
            h = h + torch.segment_reduce(rows, "max", offsets=bounds, axis=0, initial=-9)
        else:
            frames = (x @ table.t()).log_softmax(-1).transpose(0, 1)
            h = F.ctc_loss(frames, words, torch.full_like(lengths, 9), lengths, reduction="none")
        return h, h.sin().mean()


@pytest.mark.parametrize("by", ["bags", "lengths", "segments", "ctc"])
def test_rows_that_are_counted_stay_on_their_rank(by: str) -> None:
    torch.manual_seed(1)
    lengths = [[2, 0, 3], [], [0], [4, 1, 2, 1]] if by != "ctc" else [[2, 1, 3], [], [1], [4, 1, 2, 1]]
    graph = run_ragged(_Bags(by), [_bags(one) for one in lengths], _BAGS)
    assert not any(type_.dtype.is_floating_point for type_ in gathered(graph))


class _Lost(nn.Module):
    """Reads at row numbers of the global batch that arithmetic has made, and along two axes at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4).double()

    def forward(self, x: Tensor, edges: Tensor, of_graph: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        back = h[len(h) - 1 - edges[0]]
        pairs = h @ back.t()
        both = torch.cat([h, back]).softmax(0)
        return pairs.cumsum(1).sum(0) + of_graph.max(), both.std() + (y[of_graph] * h[:, 0]).mean()


def test_without_a_rule_values_are_gathered() -> None:
    torch.manual_seed(1)
    two, three = [(4, 6, 2), (2, 3, 1)], [(0, 0, 0), (5, 0, 2), (3, 7, 1)]
    for parts in ([part_of(*sizes) for sizes in of] for of in (two, three)):
        assert gathered(run_ragged(_Lost(), parts, _ROWS))


class _Distinct(_Lost):
    """Distinct values and counts of each are those of all ranks; `x` is read at them."""

    def forward(self, x: Tensor, edges: Tensor, of_graph: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        nodes, place, counts = torch.unique(edges[0], return_inverse=True, return_counts=True)
        sums = h.new_zeros(len(nodes), 4).index_add(0, place, h[edges[1]])
        runs, lengths = torch.unique_consecutive(of_graph, return_counts=True)
        degree = torch.bincount(edges[1], minlength=len(h))
        every = torch.bincount(of_graph)
        return (h[nodes] * counts[:, None] + sums.sin()).sum(0), runs, lengths, h * degree[:, None], every


def test_distinct_values_and_counts_are_those_of_all_ranks() -> None:
    torch.manual_seed(1)
    parts = [part_of(*sizes) for sizes in ((5, 9, 3), (0, 0, 0), (2, 0, 1), (3, 4, 2))]
    run_ragged(_Distinct(), parts, _ROWS)
    full, _ = _joined(parts, _ROWS)

    def run(batch: Sequence[Tensor]) -> dict[str, Tensor]:
        return {str(i): value for i, value in enumerate(_Distinct()(*batch))}

    error_of(run, full, parts, _ROWS)


class _Added(nn.Module):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x[:, 0] + edges[0]


def test_axes_of_equal_size_are_not_one() -> None:
    with pytest.raises(fxdp.CaptureError, match=r"test_ragged_axes.*x\[:, 0\] \+ edges\[0\]"):
        run_ragged(_Added(), [part_of(3, 3, 1)[:2]], _ROWS[:2])
