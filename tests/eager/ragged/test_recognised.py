"""Structures that are recognised: packed and jagged sequences, packed tokens, pictures, lists of boxes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from fxdp import Rows
from tests.eager.ragged.comparing import error_of, refusal_of, trained
from tests.eager.ragged.test_by_hand import DOUBLE, graph_task, graphs, joined


class GraphBatch:
    """What torch_geometric's `Batch` is to fxdp: stores, `__cat_dim__` and `__inc__`."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.stores = [_Store(values)]

    @property
    def num_graphs(self) -> int:
        return len(self["ptr"]) - 1 if "ptr" in self.stores[0] else len(self["y"])

    def __cat_dim__(self, key: str, value: Any, *stores: Any) -> int:
        return -1 if "index" in key else 0

    def __inc__(self, key: str, value: Any, *stores: Any) -> int:
        return self.stores[0].num_nodes if "index" in key else 0

    def __copy__(self) -> GraphBatch:
        return GraphBatch(dict(self.stores[0]))

    def __getitem__(self, key: str) -> Any:
        return self.stores[0][key]


class _Store(UserDict[str, Tensor]):
    @property
    def num_nodes(self) -> int:
        return len(self["x"])


def with_ptr(values: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = torch.bincount(values["batch"], minlength=len(values["y"]))
    return {**values, "ptr": torch.cat([counts.new_zeros(1), counts.cumsum(0)])}


def test_graphs_by_their_own_methods() -> None:
    parts = [graphs(0, [3, 2]), graphs(1, []), graphs(2, [1, 4])]
    full = with_ptr(joined(parts))

    def run(batch: Any) -> dict[str, Any]:
        return {**graph_task("gcn")(batch), "ptr": batch["ptr"]}

    error_of(run, full, [GraphBatch(with_ptr(part)) for part in parts])


def test_edges_to_other_nodes_are_named() -> None:
    bad = graphs(1, [2])
    bad["edge_index"][0, 0] = 2
    text = refusal_of([GraphBatch(graphs(0, [3])), GraphBatch(bad)])
    assert "rank 1, .edge_index: 1 values outside of 'nodes', as 2 at [0, 0]; expected 0 to 1" in text


def sequences(seed: int, lengths: Sequence[int]) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, dtype=DOUBLE, generator=made) for n in lengths]


def packed_task(kind: type[nn.Module]) -> Any:
    def run(batch: tuple[PackedSequence, Tensor]) -> dict[str, Any]:
        model = nn.ModuleDict({"rnn": kind(3, 4), "head": nn.Linear(4, 1)})
        padded, lengths = pad_packed_sequence(model["rnn"](batch[0])[0], batch_first=True)
        last = padded[torch.arange(len(lengths)), lengths.clamp(min=1) - 1]
        return trained(model, F.mse_loss(model["head"](last).squeeze(1), batch[1]), last=last)

    return run


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: type[nn.Module]) -> None:
    lengths = [2, 5], [], [3, 1, 5]
    every = [sequences(i, one) for i, one in enumerate(lengths)]
    y = [torch.arange(len(one), dtype=DOUBLE) for one in lengths]
    none = PackedSequence(torch.empty(0, 3, dtype=DOUBLE), torch.empty(0, dtype=torch.int64))
    parts = [
        (pack_sequence(one, enforce_sorted=False) if one else none, labels)
        for one, labels in zip(every, y, strict=True)
    ]
    full = pack_sequence([one for part in every for one in part], enforce_sorted=False), torch.cat(y)
    error_of(packed_task(kind), full, parts)


def test_jagged_tensors() -> None:
    every = [sequences(0, [2, 5]), sequences(1, [1]), sequences(2, [3, 4])]

    def nested(part: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(part, layout=torch.jagged)

    def run(batch: Tensor) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        out = model(batch)
        sums = torch.zeros(out.size(0), 2, dtype=DOUBLE)
        of = torch.repeat_interleave(torch.arange(out.size(0)), out.offsets().diff())
        return trained(model, sums.index_add(0, of, out.values()).square().mean(), out=out.values())

    error_of(run, nested([one for part in every for one in part]), [nested(part) for part in every])


class Attention(nn.Module):
    """Attention inside of documents, by a mask from their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        document = (positions == 0).cumsum(1)
        h = self.embed(ids) + positions[..., None]
        mask = document[:, :, None] == document[:, None, :]
        return self.out(F.scaled_dot_product_attention(h, h, h, attn_mask=mask))


def tokens(lengths: Sequence[int]) -> dict[str, Any]:
    ids = torch.arange(sum(lengths))[None] * 7 % 11
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": ids,
        "labels": ids.flip(1),
        "position_ids": torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])[None],
        "cu_seq_lens_q": bounds,
        "max_length_q": max(lengths, default=0),
    }


def token_task(batch: dict[str, Any]) -> dict[str, Any]:
    model = Attention()
    out = model(batch["input_ids"], batch["position_ids"])
    loss = F.cross_entropy(out[0], batch["labels"][0])
    bounds = torch.as_tensor(batch["cu_seq_lens_q"])
    return trained(model, loss, bounds=bounds, longest=batch["max_length_q"])


def test_packed_tokens_of_transformers() -> None:
    lengths = [3, 2], [], [6]
    parts = [tokens(one) for one in lengths]
    full = tokens([n for one in lengths for n in one])
    full["input_ids"] = torch.cat([p["input_ids"] for p in parts], 1)
    full["labels"] = torch.cat([p["labels"] for p in parts], 1)
    error_of(token_task, full, parts)


def pictures(seed: int, grids: Sequence[tuple[int, int, int]], samples: int) -> UserDict[str, Any]:
    """Inputs of a vision-language model; without any image also without the keys of images."""
    made = torch.Generator().manual_seed(seed)
    found: UserDict[str, Any] = UserDict(input_ids=torch.randint(1, 9, (samples, 4), generator=made))
    if grids:
        found["image_grid_thw"] = torch.tensor(grids)
        patches = int(found["image_grid_thw"].prod(1).sum())
        found["pixel_values"] = torch.randn(patches, 3, dtype=DOUBLE, generator=made)
        found["input_ids"].view(-1)[:patches] = 0  # places for patches
    return found


def picture_task(batch: Any) -> dict[str, Any]:
    model = nn.ModuleDict({"text": nn.Embedding(9, 3), "see": nn.Linear(3, 3)})
    h = model["text"](batch["input_ids"])
    places = (batch["input_ids"] == 0)[..., None].expand_as(h)
    h = h.masked_scatter(places, model["see"](batch["pixel_values"]))
    return trained(model, h.square().sum(-1).mean(), images=len(batch["image_grid_thw"]), out=h)


def test_a_rank_without_any_image() -> None:
    parts = [pictures(0, [(1, 2, 2), (1, 1, 1)], 2), pictures(1, [], 3), pictures(2, [(1, 1, 3)], 1)]
    keys = "input_ids", "image_grid_thw", "pixel_values"
    full = {key: torch.cat([part[key] for part in parts if key in part]) for key in keys}
    error_of(picture_task, full, parts)


def test_grids_that_disagree_with_the_patches() -> None:
    good, bad = pictures(0, [(1, 2, 2)], 1), pictures(1, [(1, 2, 2)], 1)
    bad["pixel_values"] = bad["pixel_values"][:3]
    assert "rank 1, ['image_grid_thw']: lengths that add up to 4; expected 3" in refusal_of([good, bad])


def detected(seed: int, boxes: Sequence[int]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    made = torch.Generator().manual_seed(seed)
    return (
        [torch.randn(3, 4 + n, 5, dtype=DOUBLE, generator=made) for n in boxes],
        [
            {
                "boxes": torch.rand(n, 4, dtype=DOUBLE, generator=made),
                "labels": torch.randint(0, 3, (n,), generator=made),
            }
            for n in boxes
        ],
    )


def detection_task(batch: Any) -> dict[str, Any]:
    """As DETR: queries for each image, matched with its boxes, losses over all boxes."""
    images, targets = batch
    model = nn.ModuleDict({"see": nn.Conv2d(3, 4, 3), "box": nn.Linear(4, 8), "label": nn.Linear(2, 3)})
    seen = torch.stack([model["see"](image).mean((1, 2)) for image in images])
    queries = model["box"](seen).view(len(images), 4, 2)
    logits, total = model["label"](queries), sum(len(t["labels"]) for t in targets)
    losses = [logits.new_zeros(())]
    for scores, target in zip(logits, targets, strict=True):
        if len(target["labels"]):
            cost = -scores.softmax(-1)[:, target["labels"]]
            found = cost.argmin(0)
            losses.append(F.cross_entropy(scores[found], target["labels"], reduction="sum"))
            losses.append((queries.mean() - target["boxes"]).abs().sum())
    return trained(model, torch.stack(losses).sum() / max(total, 1), total=total)


def test_lists_of_images_and_boxes() -> None:
    parts: list[Any] = [detected(0, [2, 0]), ([], []), detected(2, [1])]
    full = sum((p[0] for p in parts), []), sum((p[1] for p in parts), [])  # noqa: RUF017
    error_of(detection_task, full, parts)


@dataclass(frozen=True)
class Samples:
    """A batch of a class of one's own."""

    x: Tensor
    more: dict[str, Tensor]
    name: str = "train"


def test_objects_with_tensors() -> None:
    def run(batch: Samples) -> dict[str, Any]:
        return {"count": len(batch.x), "mean": (batch.x * batch.more["weight"]).mean(), "name": batch.name}

    x, weight = torch.randn(5, dtype=DOUBLE), torch.rand(5, dtype=DOUBLE)
    parts = [
        Samples(one, {"weight": w})
        for one, w in zip(x.split([2, 0, 3]), weight.split([2, 0, 3]), strict=True)
    ]
    error_of(run, Samples(x, {"weight": weight}), parts)


def test_what_is_not_recognised_stays() -> None:
    held = SimpleNamespace(name="a")
    for other in ({"held": held, "x": torch.ones(2)}, [held, torch.ones(2)], (torch.ones(2), "text")):
        error_of(lambda batch: {"count": torch.tensor(float(len(batch)))}, other, [other, other])


@pytest.mark.parametrize("dims", [None, {"x": Rows("images")}])
def test_lists_of_text_and_numbers_have_those_of_all_samples(dims: Any) -> None:
    """Captions of a collator are one device's, and what all ranks pass alike stays as it is."""
    every = [("ab", "c", "def"), (), ("gh",)]

    def batch(*texts: str) -> dict[str, Any]:
        infos = [{"size": (len(text), 1.5)} for text in texts]
        return {"x": torch.ones(len(texts), 2), "of": (list(texts), infos), "classes": ["a", "b", "c"]}

    def run(batch: dict[str, Any]) -> dict[str, Any]:
        (texts, infos), classes = batch["of"], batch["classes"]
        return {"texts": "".join(texts), "sizes": str(infos), "classes": "".join(classes)}

    full = batch(*(text for texts in every for text in texts))
    error_of(run, full, [batch(*texts) for texts in every], dims)
