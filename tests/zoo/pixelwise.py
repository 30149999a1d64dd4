"""A value for each pixel: segments, depth, masks, key points."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf

from tests.zoo.entry import SIDE, Entry, Inputs, built, pixels, tokens
from tests.zoo.sizes import IMAGE, TEXT

_WIDE_PIXELS = partial(pixels, side=32)
_DEEP = {**IMAGE, "num_hidden_layers": 4}
_HEADS = {
    "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 5, "num_labels": 3,
}  # fmt: skip
_SAM_HEADS = {
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 24,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
}


def _resnet(*features: str) -> Any:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 12], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=list(features or ["stage4"]),
    )  # fmt: skip


def _swin() -> Any:
    return hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def _segments(batch: int, side: int = 32) -> Inputs:
    made = torch.randint(0, 3, (batch, side, side))
    made[0, 4:] = 255
    return {**pixels(batch, side), "labels": made}


def _points(batch: int) -> Inputs:
    """One point per image, and which of them belong to the object."""
    return {
        **pixels(batch, 32), "input_points": torch.rand(batch, 1, 2, 2) * 32,
        "input_labels": torch.randint(0, 2, (batch, 1, 2)),
    }  # fmt: skip


def _prompts(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), **pixels(batch), "labels": torch.rand(batch, SIDE, SIDE)}


PIXELWISE: dict[str, Entry] = {
    "upernet": Entry(
        lambda: hf.UperNetForSemanticSegmentation(
            hf.UperNetConfig(
                backbone_config=_resnet("stage1", "stage2", "stage3", "stage4"),
                hidden_size=8,
                num_labels=3,
                auxiliary_in_channels=8,
                auxiliary_channels=8,
                pool_scales=[1, 2],
            )
        ),
        _segments,
    ),
    "mobilevitv2_segments": Entry(
        built(
            "MobileViTV2ForSemanticSegmentation",
            image_size=64,
            width_multiplier=0.125,
            n_attn_blocks=[1, 1, 1],
            base_attn_unit_dims=[64, 64, 64],
            aspp_out_channels=8,
            num_labels=3,
            atrous_rates=[1, 2, 3],
        ),
        partial(_segments, side=64),
    ),
    "beit_segments": Entry(
        built(
            "BeitForSemanticSegmentation",
            **{**_DEEP, "image_size": 32, "patch_size": 16},
            out_indices=[1, 2, 3, 4],
            num_labels=3,
            pool_scales=[1, 2],
            auxiliary_channels=8,
        ),
        _segments,
    ),
    "glpn": Entry(
        built(
            "GLPNForDepthEstimation",
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            sr_ratios=[4, 2, 1, 1],
            decoder_hidden_size=8,
            mlp_ratios=[2, 2, 2, 2],
        ),
        lambda n: {**pixels(n, 32), "labels": torch.rand(n, 32, 32) + 0.1},
    ),
    "depth_anything": Entry(
        lambda: hf.DepthAnythingForDepthEstimation(
            hf.DepthAnythingConfig(
                backbone_config=hf.Dinov2Config(
                    **_DEEP,
                    mlp_ratio=2,
                    out_indices=[1, 2, 3, 4],
                    apply_layernorm=True,
                    reshape_hidden_states=False,
                ),
                patch_size=8,
                reassemble_hidden_size=16,
                neck_hidden_sizes=[4, 4, 8, 8],
                fusion_hidden_size=8,
                head_hidden_size=4,
            )
        ),
        pixels,
    ),
    "vitmatte": Entry(
        lambda: hf.VitMatteForImageMatting(
            hf.VitMatteConfig(
                backbone_config=hf.VitDetConfig(
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    image_size=32,
                    patch_size=16,
                    pretrain_image_size=32,
                    num_channels=4,
                    mlp_ratio=2,
                    out_features=["stage2"],
                ),
                hidden_size=16,
                convstream_hidden_sizes=[4, 4, 8],
                fusion_hidden_sizes=[8, 8, 4, 4],
            )
        ),
        lambda n: {"pixel_values": torch.randn(n, 4, 32, 32)},
    ),
    "vitpose": Entry(
        lambda: hf.VitPoseForPoseEstimation(
            hf.VitPoseConfig(
                backbone_config=hf.VitPoseBackboneConfig(
                    image_size=[32, 32],
                    patch_size=[8, 8],
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    mlp_ratio=2,
                    out_features=["stage2"],
                ),
                num_labels=3,
            )
        ),
        _WIDE_PIXELS,
    ),
    "maskformer": Entry(
        lambda: hf.MaskFormerForInstanceSegmentation(
            hf.MaskFormerConfig(
                backbone_config=_swin(),
                fpn_feature_size=32,
                mask_feature_size=8,
                num_labels=3,
                decoder_config=hf.DetrConfig(
                    **_HEADS, d_model=16, backbone_config=_resnet(), use_timm_backbone=False, backbone=None
                ),
            )
        ),
        _WIDE_PIXELS,
    ),
    "mask2former": Entry(
        lambda: hf.Mask2FormerForUniversalSegmentation(
            hf.Mask2FormerConfig(
                backbone_config=_swin(),
                feature_size=32,
                mask_feature_size=32,
                hidden_dim=32,
                encoder_feedforward_dim=24,
                encoder_layers=1,
                decoder_layers=2,
                num_attention_heads=2,
                dim_feedforward=24,
                num_queries=5,
                num_labels=3,
            )
        ),
        partial(pixels, side=64),
    ),
    "eomt": Entry(
        built(
            "EomtForUniversalSegmentation",
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            num_upscale_blocks=1,
            num_blocks=2,
            num_queries=5,
            num_register_tokens=2,
            num_labels=3,
        ),
        _WIDE_PIXELS,
    ),
    "sam": Entry(
        built(
            "SamModel",
            **_SAM_HEADS,
            vision_config={
                "hidden_size": 16,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "window_size": 3,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
                "mlp_dim": 24,
            },
            prompt_encoder_config={
                "hidden_size": 16,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
        ),
        _points,
    ),
    "clipseg": Entry(
        built(
            "CLIPSegForImageSegmentation",
            text_config=TEXT,
            vision_config=IMAGE,
            projection_dim=16,
            reduce_dim=8,
            extract_layers=[0, 1],
            decoder_num_attention_heads=2,
            decoder_intermediate_size=16,
        ),
        _prompts,
    ),
    "groupvit": Entry(
        built(
            "GroupViTModel",
            text_config=TEXT,
            projection_dim=8,
            projection_intermediate_dim=16,
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 24,
                "depths": [1, 1],
                "num_hidden_layers": 2,
                "num_group_tokens": [4, 0],
                "num_output_groups": [4, 2],
                "num_attention_heads": 2,
                "image_size": SIDE,
                "patch_size": 4,
            },
        ),
        lambda n: {"input_ids": tokens(n), **pixels(n), "return_loss": True},
    ),
}
