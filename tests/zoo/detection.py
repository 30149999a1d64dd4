"""Detection: boxes and classes of the objects in an image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.zoo.entry import SIDE, Entry, Inputs, built, pixels
from tests.zoo.sizes import IMAGE

_DETR = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 5,
    "num_labels": 3,
}  # fmt: skip


def _backbone() -> Any:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 12], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip


def _detr(model: str, **more: Any) -> nn.Module:
    return built(
        model, **_DETR, use_timm_backbone=False, backbone=None, backbone_config=_backbone(), **more
    )()


def _objects(batch: int) -> Inputs:
    """Images of which each has its own number of boxes."""
    targets = []
    for i in range(batch):
        boxes = torch.rand(1 + i % 3, 4) * 0.4 + 0.2
        targets.append({"class_labels": torch.randint(0, 3, (len(boxes),)), "boxes": boxes})
    return {**pixels(batch, 32), "labels": targets}


DETECTION: dict[str, Entry] = {
    "yolos": Entry(
        built(
            "YolosForObjectDetection",
            **{**IMAGE, "image_size": [SIDE, SIDE]},
            num_detection_tokens=5,
            num_labels=3,
        ),
        pixels,
    ),
    "detr": Entry(partial(_detr, "DetrForObjectDetection"), partial(pixels, side=32)),
    "conditional_detr": Entry(
        partial(_detr, "ConditionalDetrForObjectDetection"),
        partial(pixels, side=32),
    ),
    "detr_loss": Entry(partial(_detr, "DetrForObjectDetection"), _objects),
    "table_transformer": Entry(
        partial(_detr, "TableTransformerForObjectDetection"),
        partial(pixels, side=32),
    ),
}
