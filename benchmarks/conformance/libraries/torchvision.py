"""A family of torchvision is a module of its registry; the smallest is the one with the fewest parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.video.mvit import MSBlockConfig

from benchmarks.conformance.libraries.entries import (
    CLASSES,
    Families,
    Member,
    WithLoss,
    first_that_runs,
    parameters,
)
from tests.zoo.entry import Entry

VIDEOS = ("mc3", "mvit", "r2plus1d", "r3d", "s3d", "swin3d")
LEAST_SHAPES = {"s3d": (13, 209)}
"""Frames and side of the smallest inputs that a model of fixed shape takes."""
RESIZING = ("rcnn", "fcos", "retinanet")
DETECTORS = (*RESIZING, "ssd")
SIDES = (64, 128, 224, 299)
FRAMES = 8


def families() -> Families:
    """All modules of the registry; those of quantized models do not train."""
    by_module: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        if not module.startswith("quantization."):
            by_module.setdefault(module, []).append(name)
    return {module: partial(_smallest, names) for module, names in by_module.items()}


def _smallest(names: list[str]) -> Member:
    """Of the smallest images that any of them takes, the smallest model."""
    names = sorted(names, key=_parameters)
    return first_that_runs(entry for side in SIDES for name in names for entry in _entries(name, side))


def _parameters(name: str) -> int:
    try:
        return parameters(partial(_make, name, {}))
    except NotImplementedError:  # it reads numbers of tensors while it is built
        return int(next(iter(torchvision.models.get_model_weights(name))).meta["num_params"])


def _make(name: str, sizes: dict[str, Any]) -> nn.Module:
    detects = any(word in name for word in DETECTORS)
    regions = any(word in name for word in ("deeplab", "fcn_", "lraspp"))
    classes = {} if "raft" in name else {"num_classes": CLASSES}
    backbone = {"weights_backbone": None} if detects or regions else {}
    if name in _SMALLER:
        return _SMALLER[name][1](**classes, **sizes)
    return torchvision.models.get_model(name, weights=None, **classes, **backbone, **sizes)


def _maxvit(**sizes: Any) -> nn.Module:
    """`maxvit_t`, whose windows of 7 take images of 224 only, with windows of 2."""
    return torchvision.models.MaxVit(
        **{"input_size": (64, 64)} | sizes,
        stem_channels=64,
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        partition_size=2,
    )


def _mvit(**sizes: Any) -> nn.Module:
    """`mvit_v2_s`, whose videos are 16 x 224 x 224, of another size, with its first four blocks."""
    heads, channels, query, key = [1, 2, 2, 4], [96, 96, 192, 192, 384], [1, 2, 1, 2], [8, 4, 4, 2]
    kernel = [3, 3, 3]
    blocks = [
        MSBlockConfig(heads[i], channels[i], channels[i + 1], kernel, kernel, [1, q, q], [1, k, k])
        for i, (q, k) in enumerate(zip(query, key, strict=True))
    ]
    return torchvision.models.video.MViT(
        **{"spatial_size": (64, 64), "temporal_size": FRAMES} | sizes,
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        stochastic_depth_prob=0.2,
    )


_SMALLER = {"maxvit_t": ("partition_size=2", _maxvit), "mvit_v2_s": ("its first 4 blocks", _mvit)}
"""Models whose builders let nobody choose what makes them large: what is smaller, and the builder."""


def _entries(name: str, side: int) -> Iterator[tuple[str, Entry]]:
    frames, side = LEAST_SHAPES.get(name, (FRAMES, side))
    sizes = _sizes(name, side)
    label = ", ".join([f"{name}@{side}", *_SMALLER.get(name, ())[:1]])
    for given in (sizes, {}) if sizes else ({},):
        yield label, Entry(partial(_build, name, given), partial(_inputs, name, side, frames))


def _sizes(name: str, side: int) -> dict[str, Any]:
    """How the model is told how large its images are; a detector makes them so itself."""
    if name.startswith("vit"):
        return {"image_size": side}
    if name.startswith("maxvit"):
        return {"input_size": (side, side)}
    if name == "mvit_v2_s":
        return {"spatial_size": (side, side), "temporal_size": FRAMES}
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


def _inputs(name: str, side: int, frames: int, batch: int) -> dict[str, Any]:
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
    video = (frames,) if name.startswith(VIDEOS) else ()
    return {"x": torch.randn(batch, 3, *video, side, side), "target": torch.randint(0, CLASSES, (batch,))}
