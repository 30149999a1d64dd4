"""Detection: DETR with its matcher, losses of RetinaNet and Faster R-CNN as torchvision computes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.conformance.ragged_models.case import BARE, Case, joined
from fxdp import Rows
from tests.zoo.detection import DETECTION

SIDE, CLASSES, CELLS = 16, 3, 4


def anchors() -> Tensor:
    """Squares of half the image's side and of a quarter, around the centre of each cell; x1, y1, x2, y2."""
    at = (torch.arange(CELLS) + 0.5) / CELLS
    centres = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1).flip(-1).view(-1, 1, 2)
    half = torch.tensor([0.25, 0.125])[None, :, None]
    return torch.cat([centres - half, centres + half], -1).view(-1, 4)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of each pair of boxes."""
    least = torch.maximum(a[:, None, :2], b[None, :, :2])
    sides = (torch.minimum(a[:, None, 2:], b[None, :, 2:]) - least).clamp(min=0)
    both = sides.prod(-1)
    return both / (area(a)[:, None] + area(b)[None] - both)


def area(boxes: Tensor) -> Tensor:
    """Return the area of each box."""
    return (boxes[:, 2:] - boxes[:, :2]).prod(-1)


def encoded(boxes: Tensor, of: Tensor) -> Tensor:
    """Offsets of boxes from their anchors: of centres by size, and logarithms of sizes."""
    size, centre = of[:, 2:] - of[:, :2], (of[:, 2:] + of[:, :2]) / 2
    own, middle = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
    return torch.cat([(middle - centre) / size, (own / size).log()], -1)


def focal(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the focal loss of each sigmoid."""
    p = scores.sigmoid()
    wrong = p * (1 - classes) + (1 - p) * classes
    weight = 0.25 * classes + 0.75 * (1 - classes)
    return weight * wrong**2 * F.binary_cross_entropy_with_logits(scores, classes, reduction="none")


class Head(nn.Module):
    """Scores and offsets of each anchor."""

    def __init__(self, scores: int) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.score, self.offset = nn.Conv2d(8, 2 * scores, 1), nn.Conv2d(8, 8, 1)
        self.scores = scores

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, and scores and offsets, a row for each anchor."""
        seen = self.see(images)
        scores, offsets = (layer(seen).permute(0, 2, 3, 1) for layer in (self.score, self.offset))
        return seen, scores.reshape(len(images), -1, self.scores), offsets.reshape(len(images), -1, 4)


class ListedRetinaNet(nn.Module):
    """Image by image, as torchvision: matched at 0.5, ignored from 0.4, by the number of positive anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(CLASSES)

    def forward(self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> Tensor:
        """Return the loss of classes and of boxes, a mean over images."""
        _, scores, offsets = self.head(torch.stack(list(images)))
        at, losses = anchors(), []
        for score, offset, target in zip(scores, offsets, targets, strict=True):
            classes = torch.zeros_like(score)
            positive = ignored = torch.zeros(len(at), dtype=torch.bool)
            matched = torch.zeros(len(at), dtype=torch.int64)
            if len(target["boxes"]):
                best, matched = overlap(at, target["boxes"]).max(1)
                positive, ignored = best >= 0.5, (best >= 0.4) & (best < 0.5)
                classes[positive, target["labels"][matched[positive]]] = 1.0
            count = max(1, int(positive.sum()))
            losses.append(focal(score[~ignored], classes[~ignored]).sum() / count)
            if len(target["boxes"]):
                wanted = encoded(target["boxes"][matched[positive]], at[positive])
                losses.append(F.l1_loss(offset[positive], wanted, reduction="sum") / count)
        return torch.stack(losses).sum() / max(1, len(targets))


class RetinaNet(nn.Module):
    """The same with the boxes of all images in one tensor; each anchor's best box by maxima of images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(CLASSES)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor, image: Tensor) -> Tensor:
        """Return the loss of classes and of boxes, a mean over images."""
        _, scores, offsets = self.head(images)
        at = anchors()
        overlaps = overlap(boxes, at)
        best = torch.zeros(len(images), len(at)).index_reduce(0, image, overlaps, "amax")
        ignored = (best >= 0.4) & (best < 0.5)
        matched = ((overlaps == best[image]) & (overlaps >= 0.5)).double()
        positive = best >= 0.5
        count = positive.sum(1).clamp(min=1)
        hits = matched[..., None] * F.one_hot(labels, CLASSES).double()[:, None]
        classes = torch.zeros_like(scores).index_add(0, image, hits).clamp(max=1)
        each = focal(scores, classes).sum(-1) * ~ignored
        wanted = encoded_all(boxes, at)
        apart = (offsets[image] - wanted).abs().sum(-1) * matched
        summed = each.sum(1) + torch.zeros(len(images)).index_add(0, image, apart.sum(1))
        return (summed / count).mean()


def encoded_all(boxes: Tensor, at: Tensor) -> Tensor:
    """Offsets of each box from each anchor."""
    size, centre = at[:, 2:] - at[:, :2], (at[:, 2:] + at[:, :2]) / 2
    own, middle = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
    return torch.cat([(middle[:, None] - centre) / size, (own[:, None] / size).log()], -1)


class FasterRCNN(nn.Module):
    """Both stages of Faster R-CNN: anchors by objectness, then a class and offsets of regions with boxes.

    Few enough anchors and regions that torchvision's random samples of them are all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head, self.region = Head(1), nn.Linear(8, 16)
        self.label, self.box = nn.Linear(16, CLASSES + 1), nn.Linear(16, 4)

    def forward(self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> Tensor:
        """Return the sum of the four losses."""
        seen, scores, offsets = self.head(torch.stack(list(images)))
        at, terms, regions = anchors(), [], []
        counted = 0
        for score, offset, target in zip(scores, offsets, targets, strict=True):
            boxes = target["boxes"]
            best = overlap(at, boxes).max(1).values if len(boxes) else torch.zeros(len(at))
            positive, used = best >= 0.5, (best >= 0.5) | (best < 0.3)
            counted += int(used.sum())
            objects = F.binary_cross_entropy_with_logits(
                score[used, 0], positive[used].to(score.dtype), reduction="sum"
            )
            terms.append(objects)
            if bool(positive.any()):
                nearest = overlap(at, boxes).argmax(1)[positive]
                apart = F.smooth_l1_loss(
                    offset[positive], encoded(boxes[nearest], at[positive]), beta=1 / 9, reduction="sum"
                )
                terms.append(apart)
        first = torch.stack(terms).sum() / max(1, counted)
        pooled, labels = [], []
        for features, target in zip(seen, targets, strict=True):
            proposals = torch.cat([target["boxes"], at[::5]])
            pooled.append(pool(features, proposals))
            own = torch.full((len(proposals),), CLASSES)
            if len(target["boxes"]):
                best, nearest = overlap(proposals, target["boxes"]).max(1)
                own = torch.where(best >= 0.5, target["labels"][nearest], own)
                regions.append((best >= 0.5, encoded(target["boxes"][nearest], proposals)))
            else:
                none = torch.zeros(len(proposals), dtype=torch.bool)
                regions.append((none, torch.zeros(len(proposals), 4)))
            labels.append(own)
        h = self.region(torch.cat(pooled)).relu()
        every = torch.cat(labels)
        hit, goal = torch.cat([r[0] for r in regions]), torch.cat([r[1] for r in regions])
        moved = F.smooth_l1_loss(self.box(h)[hit], goal[hit], beta=1 / 9, reduction="sum") / every.numel()
        return first + F.cross_entropy(self.label(h), every) + moved


def pool(features: Tensor, boxes: Tensor) -> Tensor:
    """RoIAlign of one bin with 2 by 2 samples: bilinear reads, and their mean."""
    at = torch.tensor([0.25, 0.75])
    size = boxes[:, 2:] - boxes[:, :2]
    x = boxes[:, 0, None] + size[:, 0, None] * at
    y = boxes[:, 1, None] + size[:, 1, None] * at
    grid = torch.stack([x[:, None].expand(-1, 2, -1), y[:, :, None].expand(-1, -1, 2)], -1) * 2 - 1
    read = F.grid_sample(features[None].expand(len(boxes), -1, -1, -1), grid, align_corners=False)
    return read.mean((2, 3))


class Detr(nn.Module):
    """transformers' DETR, with its Hungarian matcher (scipy) and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DETECTION["detr_loss"].build()

    def forward(self, pixel_values: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


def _image(i: int, made: Generator, side: int = SIDE) -> tuple[Tensor, Tensor, Tensor]:
    count = 0 if i in BARE else 1 + i % 3
    centres = torch.rand(count, 2, dtype=torch.float64, generator=made) * 0.4 + 0.3
    half = torch.rand(count, 2, dtype=torch.float64, generator=made) * 0.1 + 0.15
    image = torch.randn(3, side, side, dtype=torch.float64, generator=made)
    labels = torch.randint(0, CLASSES, (count,), generator=made)
    return image, torch.cat([centres - half, centres + half], 1), labels


def _listed(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Any:
    return [s[0] for s in samples], [{"boxes": s[1], "labels": s[2]} for s in samples]


def _flat(i: int, made: Generator) -> dict[str, Tensor]:
    image, boxes, labels = _image(i, made)
    return {
        "images": image[None], "boxes": boxes, "labels": labels,
        "image": torch.zeros(len(boxes), dtype=torch.int64),
    }  # fmt: skip


def _labelled(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    targets = []
    for _, boxes, labels in samples:
        sides = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
        targets.append({"class_labels": labels, "boxes": sides})
    pixels = [torch.empty(0, 3, 32, 32, dtype=torch.float64), *(s[0][None] for s in samples)]
    return {"pixel_values": torch.cat(pixels), "labels": targets}


def _named(batch: Any) -> dict[str, Any]:
    return {"images": batch[0], "targets": batch[1]}


_ROWS = {
    "images": Rows("images"), "boxes": Rows("boxes"), "labels": Rows("boxes"),
    "image": Rows("boxes", into="images"),
}  # fmt: skip
_LISTS = {"images": Rows("images", dim=None), "targets": Rows("images", dim=None)}
_LIKE: dict[str, tuple[int, ...]] = {
    "images": (0, 3, SIDE, SIDE), "boxes": (0, 4), "labels": (0,), "image": (0,)
}  # fmt: skip

CASES = {
    "RetinaNet": Case("images, boxes", RetinaNet, _flat, partial(joined, like=_LIKE, rows=_ROWS), _ROWS),
    "RetinaNet, lists": Case(
        "images, boxes", ListedRetinaNet, _image, _listed, _LISTS, _named, recognised=True
    ),
    "Faster R-CNN, lists": Case(
        "images, boxes", FasterRCNN, _image, _listed, _LISTS, _named, recognised=True
    ),
    "DETR": Case(
        "images, boxes", Detr, partial(_image, side=32), _labelled,
        {"pixel_values": 0, "labels": Rows("images", dim=None)}, recognised=True,
    ),
}  # fmt: skip
