"""Compiled calls that are ragged by the keys of their inputs, without `batch_dims=`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.eager.ragged.test_by_hand import graphs, joined
from tests.eager.ragged.test_recognised import GraphBatch, with_ptr
from tests.rank_pool import RankPool


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor], y: Tensor) -> Tensor:
        h = self.table(batch["input"], batch["offsets"])
        return F.mse_loss(self.head(h).squeeze(1), y)


class _Pictures(nn.Module):
    """An image is a sum of patches, and takes the place of a token of 1; without any the tower rests."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed, self.head = nn.Linear(3, 4), nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        h = self.embed(input_ids)
        if pixel_values is not None and image_grid_thw is not None:
            images = self._see(pixel_values, image_grid_thw)
            h = h.masked_scatter((input_ids == 1)[..., None], images)
        each = F.cross_entropy(self.head(h).flatten(0, 1), input_ids.flatten(), reduction="none")
        return (each * attention_mask.flatten()).sum() / attention_mask.sum()

    def _see(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        of = torch.repeat_interleave(image_grid_thw.prod(1), output_size=pixel_values.shape[0])
        sums = pixel_values.new_zeros(image_grid_thw.shape[0], 3).index_add(0, of, pixel_values)
        images: Tensor = self.tower(sums)
        return images


class _SplitPictures(_Pictures):
    """The same by Python's own numbers, which capture refuses."""

    def _see(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        parts = pixel_values.split(image_grid_thw.prod(1).tolist())
        return torch.stack([self.tower(part.sum(0)) for part in parts])


class _Listed(nn.Module):
    """Image by image, as detection: losses of boxes, by their number in all."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Linear(3, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        pairs = zip(images, targets, strict=True)
        away = [(self.see(image.mean((1, 2))) - target["boxes"]).abs().sum() for image, target in pairs]
        return torch.stack(away).sum() / max(1, sum(len(target["boxes"]) for target in targets))


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(9, 4), nn.Linear(4, 12)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        of = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        query, key, value = self.project(self.embed(input_ids)).chunk(3, -1)
        mask = (of[:, :, None] == of[:, None]) & (position_ids[:, :, None] >= position_ids[:, None])
        return F.scaled_dot_product_attention(query, key, value, mask).square().mean()


class _Graphs(nn.Module):
    """A loss of graphs, whose targets are in the batch, and of nodes, whose targets are beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, batch: Any, target: Tensor) -> Tensor:
        source, to = batch["edge_index"]
        h = self.linear(batch["x"])
        h = h.relu() + torch.zeros_like(h).index_add(0, to, h[source])
        pooled = h.new_zeros(batch.num_graphs, 3).index_add(0, batch["batch"], h)
        return F.mse_loss(self.head(pooled).squeeze(1), batch["y"]) + F.mse_loss(h.sum(1), target)


def _graphs(nodes: list[int]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    return _graph_call(graphs(len(nodes), nodes))


def _graph_call(values: dict[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    return (GraphBatch(with_ptr(values)),), {"target": values["x"][:, 0].cos()}


def _bags(lengths: list[int]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    counts = torch.tensor(lengths, dtype=torch.int64)
    words = torch.arange(sum(lengths)) * 5 % 9
    batch = {"input": words, "offsets": counts.cumsum(0) - counts}
    return (batch, counts.double().sin()), {}


def _pictures(patches: list[int]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """As a processor makes them: texts as long as the rank's longest; without any image no keys of images."""
    ids = (2 + torch.arange(10) % 4).view(2, 5)[:, sum(patches) % 2 :].clone()
    ids[0, : len(patches)] = 1
    ids[1, -1] = 0
    text = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if not patches:
        return (), text
    grid = torch.tensor([[1, 1, n] for n in patches], dtype=torch.int64)
    pixels = torch.arange(3.0 * sum(patches)).view(-1, 3).sin().double()
    return (), {"pixel_values": pixels, "image_grid_thw": grid, **text}


def _listed(boxes: list[int]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    images = [torch.arange(3.0 * n + 12).view(3, -1, 1).sin().double() for n in boxes]
    return (images, [{"boxes": torch.arange(4.0 * n).view(n, 4).cos().double()} for n in boxes]), {}


def _packed(lengths: list[int]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return (), {"input_ids": positions * 7 % 8 + len(lengths) % 2, "position_ids": positions}


KINDS: dict[str, tuple[type[nn.Module], Any, list[list[list[int]]]]] = {
    # of each call, the samples of each rank
    "bags": (_Bags, _bags, [[[2, 0, 1], [4]], [[1, 1], []]]),
    # a rank without any image, one whose sizes may be those of texts, and a call without any image
    "pictures": (_Pictures, _pictures, [[[3], []], [[1, 1], [3]], [[], [1, 2]], [[], []], [[1], [4]]]),
    "pictures op by op": (_SplitPictures, _pictures, [[[2, 1], []], [[], [3]]]),
    "lists op by op": (_Listed, _listed, [[[2, 0], []], [[1], [3, 1]]]),
    # of the first call's rank 1 a graph has a node: only rank 0 tells targets of graphs from those of nodes
    "graphs": (_Graphs, _graphs, [[[3, 2], [1]], [[4], [2, 0, 2]]]),
    "packed": (_Packed, _packed, [[[2, 3], [4, 1]], [[3], [1, 2, 4]], [[6], [6]]]),  # rows of one size, first
}


def _losses(kind: str, rank: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    make, batch, calls = KINDS[kind]
    model: Any = make().double()
    fallback: Any = "eager" if kind.endswith("op by op") else None
    called = model if rank is None else fxdp.compile(model, backend="eager", fallback=fallback)
    found: list[Tensor] = []
    for samples in calls:
        args, kwargs = _joined(batch, samples) if rank is None else batch(samples[rank])
        model.zero_grad()
        loss = called(*args, **kwargs)
        loss.backward()
        found += [loss.detach(), *(_gradient(parameter) for parameter in model.parameters())]
    return found


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient; nothing at all of a layer that was not called."""
    return torch.empty(0) if parameter.grad is None else parameter.grad.clone()


def _joined(batch: Any, samples: list[list[int]]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The batch of one device, in which positions and starts are those of both ranks."""
    first, second = (batch(one) for one in samples)
    if batch is _graphs:
        return _graph_call(joined([graphs(len(nodes), nodes) for nodes in samples]))
    if batch is _listed:
        return tuple(a + b for a, b in zip(first[0], second[0], strict=True)), {}
    if batch is _bags:
        return _bags_of(first[0], second[0])
    dim, parts = 1 if batch is _packed else 0, [one[1] for one in (first, second)]
    if batch is _pictures:
        longest = max(part["input_ids"].shape[1] for part in parts)
        for part in parts:
            for key in ("input_ids", "attention_mask"):
                part[key] = F.pad(part[key], (0, longest - part[key].shape[1]))
    keys = {**parts[0], **parts[1]}
    return (), {key: torch.cat([part[key] for part in parts if key in part], dim) for key in keys}


def _bags_of(first: Any, second: Any) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    moved = second[0]["offsets"] + len(first[0]["input"])
    words, offsets = (first[0]["input"], second[0]["input"]), (first[0]["offsets"], moved)
    return ({"input": torch.cat(words), "offsets": torch.cat(offsets)}, torch.cat([first[1], second[1]])), {}


def _on_ranks() -> dict[str, list[Tensor]]:
    found = {kind: _losses(kind, dist.get_rank()) for kind in KINDS}
    compiled = fxdp.compile(_Packed().double(), backend="eager")
    rows = {name: value.view(1 + dist.get_rank(), -1) for name, value in _packed([3, 3])[1].items()}
    with pytest.raises(fxdp.InputError, match="differ in sizes other than the batch"):  # [1, 6] and [2, 3]
        compiled(**rows)
    return found


def test_keys_tell_of_a_ragged_batch(ranks: RankPool) -> None:
    for found in ranks.run(2, _on_ranks):
        for kind, values in found.items():
            for got, expected in zip(values, _losses(kind), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=kind)


def test_lists_are_run_op_by_op() -> None:
    args, _ = _listed([2, 1])
    with pytest.raises(fxdp.InputError, match=r"a list with a dict of each sample.*fallback='eager'"):
        fxdp.compile(_Listed().double())(*args)
    rows = fxdp.Rows("images", dim=None)
    with pytest.raises(fxdp.InputError, match=r"of a list with an element for each row.*fallback='eager'"):
        fxdp.compile(_Listed().double(), batch_dims=((rows, rows), {}))(*args)


def test_verify_reads_the_keys() -> None:
    args, kwargs = _packed([3, 1, 2])
    assert fxdp.verify(_Packed(), args, kwargs, splits=((2, 1),), mesh={"dp": 2}).ok


def test_axes_that_no_size_tells_apart_are_asked_for() -> None:
    args, kwargs = _graphs([1, 1])
    words = r"y: 'nodes of args\[0\]' or 'graphs of args\[0\]'.*\n.*batch_dims=\(\(\{'x': Rows\('nodes of"
    with pytest.raises(fxdp.InputError, match="(?s)" + words):
        fxdp.compile(_Graphs().double(), backend="eager")(*args, **kwargs)
    assert fxdp.verify(_Graphs(), *_graphs([3, 0, 2]), mesh={"dp": 2}, splits=[[1, 2]]).ok
