"""A family of torchvision is a module of its registry; the smallest is the one with the fewest parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torchvision
from library_entries import CLASSES, Families, Member, WithLoss, first_that_runs, parameters
from torch import Tensor, nn

from tests.zoo.entry import Entry

VIDEOS = ("mc3", "mvit", "r2plus1d", "r3d", "s3d", "swin3d")
LONG = ("mvit", "s3d")
RESIZING = ("rcnn", "fcos", "retinanet")
DETECTORS = (*RESIZING, "ssd")


def families() -> Families:
    """All modules of the registry; those of quantized models do not train."""
    by_module: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        if not module.startswith("quantization."):
            by_module.setdefault(module, []).append(name)
    return {module: partial(_smallest, names) for module, names in by_module.items()}


def _smallest(names: list[str]) -> Member:
    return first_that_runs(entry for name in sorted(names, key=_parameters) for entry in _entries(name))


def _parameters(name: str) -> int:
    try:
        return parameters(partial(_make, name, {}))
    except NotImplementedError:  # it reads numbers of tensors while it is built
        return int(next(iter(torchvision.models.get_model_weights(name))).meta["num_params"])


def _make(name: str, sizes: dict[str, Any]) -> nn.Module:
    detects = any(word in name for word in DETECTORS)
    segments = any(word in name for word in ("deeplab", "fcn_", "lraspp"))
    classes = {} if "raft" in name else {"num_classes": CLASSES}
    backbone = {"weights_backbone": None} if detects or segments else {}
    return torchvision.models.get_model(name, weights=None, **classes, **backbone, **sizes)


def _entries(name: str) -> Iterator[tuple[str, Entry]]:
    for side in (64, 128, 224, 299):
        sizes = _sizes(name, side)
        for given in (sizes, {}) if sizes else ({},):
            yield f"{name}@{side}", Entry(partial(_build, name, given), partial(_inputs, name, side))


def _sizes(name: str, side: int) -> dict[str, Any]:
    """How the model is told how large its images are; a detector makes them so itself."""
    if name.startswith("vit"):
        return {"image_size": side}
    if name.startswith("maxvit"):
        return {"input_size": (side, side)}
    if name.startswith("mvit_v1"):
        return {"spatial_size": (side, side)}
    return {"min_size": side, "max_size": side} if any(word in name for word in RESIZING) else {}


def _build(name: str, sizes: dict[str, Any]) -> nn.Module:
    if any(word in name for word in DETECTORS):
        return _Detector(_make(name, sizes))
    return WithLoss(_Positional(_make(name, sizes)))


class _Positional(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(*inputs.values())


class _Detector(nn.Module):
    """As many boxes in each image, so that a batch is a tensor; what a detector does with them is its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        targets = [{"boxes": b, "labels": l} for b, l in zip(boxes, labels, strict=True)]  # noqa: E741
        losses = self.model(list(x), targets)
        return torch.stack(list(losses.values())).sum()


def _inputs(name: str, side: int, batch: int) -> dict[str, Any]:
    if any(word in name for word in DETECTORS):
        corners = torch.rand(batch, 2, 2) * side / 3
        boxes = torch.cat([corners, corners + side / 3], -1)
        return {
            "x": torch.rand(batch, 3, side, side),
            "boxes": boxes,
            "labels": torch.randint(1, 4, (batch, 2)),
        }
    if "raft" in name:
        return {"x": torch.randn(batch, 3, side, side), "y": torch.randn(batch, 3, side, side)}
    frames = (16 if name.startswith(LONG) else 8,) if name.startswith(VIDEOS) else ()
    return {"x": torch.randn(batch, 3, *frames, side, side), "target": torch.randint(0, CLASSES, (batch,))}
