"""More models that detect objects."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf

from tests.zoo.entry import TOKENS, Entry, Flattened, Inputs, built, pixels, tokens
from tests.zoo.sizes import HGNET, IMAGE, TEXT

_WIDE_PIXELS = partial(pixels, side=32)
_HEADS = {
    "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 5, "num_labels": 3,
}  # fmt: skip
_RT = {
    **_HEADS, "encoder_hidden_dim": 16, "encoder_in_channels": [8, 8, 12], "d_model": 16,
    "decoder_in_channels": [16, 16, 16], "num_denoising": 0, "hidden_expansion": 0.5,
    "freeze_backbone_batch_norms": False,
}  # fmt: skip


def _resnet(*features: str) -> Any:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 12], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=list(features or ["stage4"]),
    )  # fmt: skip


def _rt_resnet() -> Any:
    return hf.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 12], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _hgnet() -> Any:
    return hf.HGNetV2Config(**HGNET, out_features=["stage2", "stage3", "stage4"])


def _owlvit() -> Any:
    config = hf.OwlViTConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)
    return Flattened(hf.OwlViTForObjectDetection(config), "input_ids", "attention_mask")


def _queries(batch: int) -> Inputs:
    """Two texts for each image."""
    return {
        "input_ids": tokens(2 * batch).unflatten(0, (batch, 2)),
        "attention_mask": torch.ones(batch, 2, 6, dtype=torch.long),
        **pixels(batch),
    }


def _phrases(batch: int) -> Inputs:
    """No word twice: their logits would be equal, and the largest one's place a matter of rounding."""
    words = torch.stack([torch.randperm(TOKENS - 3)[:6] + 3 for _ in range(batch)])
    return {"input_ids": words, **pixels(batch, 32)}


BOXES: dict[str, Entry] = {
    "deformable_detr": Entry(
        lambda: hf.DeformableDetrForObjectDetection(
            hf.DeformableDetrConfig(
                **_HEADS,
                d_model=32,
                backbone_config=_resnet("stage3", "stage4"),
                use_timm_backbone=False,
                backbone=None,
                num_feature_levels=3,
                encoder_n_points=2,
                decoder_n_points=2,
                with_box_refine=True,
            )
        ),
        _WIDE_PIXELS,
    ),
    "rt_detr": Entry(
        lambda: hf.RTDetrForObjectDetection(hf.RTDetrConfig(**_RT, backbone_config=_rt_resnet())),
        _WIDE_PIXELS,
    ),
    "rt_detr_v2": Entry(
        lambda: hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(**_RT, backbone_config=_rt_resnet())),
        _WIDE_PIXELS,
    ),
    "d_fine": Entry(
        lambda: hf.DFineForObjectDetection(
            hf.DFineConfig(
                **{**_RT, "hidden_expansion": 1.0}, backbone_config=_hgnet(), lqe_hidden_dim=8, max_num_bins=8
            )
        ),
        _WIDE_PIXELS,
    ),
    "dab_detr": Entry(
        lambda: hf.DabDetrForObjectDetection(
            hf.DabDetrConfig(
                **_HEADS, hidden_size=16, backbone_config=_resnet(), use_timm_backbone=False, backbone=None
            )
        ),
        _WIDE_PIXELS,
    ),
    "owlvit": Entry(_owlvit, _queries),
    "owlv2": Entry(
        built("Owlv2Model", text_config=TEXT, vision_config=IMAGE, projection_dim=8),
        lambda n: {"input_ids": tokens(n), **pixels(n), "return_loss": True},
    ),
    "grounding_dino": Entry(
        lambda: hf.GroundingDinoForObjectDetection(
            hf.GroundingDinoConfig(
                **{k: v for k, v in _HEADS.items() if k != "num_labels"},
                d_model=32,
                backbone_config=hf.SwinConfig(
                    image_size=32,
                    patch_size=2,
                    embed_dim=8,
                    depths=[1, 1, 1],
                    num_heads=[1, 1, 2],
                    window_size=2,
                    out_indices=[2, 3],
                ),
                text_config=hf.BertConfig(**TEXT),
                num_feature_levels=3,
                encoder_n_points=2,
                decoder_n_points=2,
                max_text_len=8,
            )
        ),
        _phrases,
    ),
}
