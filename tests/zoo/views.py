"""Still more models of images: features, depth, masks, boxes, letters."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import SIDE, Entry, Inputs, built, images, pixels
from tests.zoo.sizes import IMAGE

_DINO: dict[str, Any] = {
    "model_type": "dinov2", **IMAGE, "mlp_ratio": 2, "out_indices": [1, 2], "reshape_hidden_states": False,
}  # fmt: skip
_FUSION: dict[str, Any] = {"reassemble_factors": [2, 1], "neck_hidden_sizes": [8, 8], "fusion_hidden_size": 8}


def _pointed(batch: int) -> Inputs:
    return {**pixels(batch, 32), "input_points": torch.rand(batch, 1, 2, 2) * 32}


def _prompted(batch: int) -> Inputs:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
    return {name: torch.randn(batch, 3, SIDE, SIDE) for name in names}


VIEWS: dict[str, Entry] = {
    "pixio": Entry(
        built(
            "PixioModel",
            **{k: v for k, v in IMAGE.items() if k != "intermediate_size"},
            mlp_ratio=2,
            n_cls_tokens=2,
            hidden_dropout_prob=0.1,
            drop_path_rate=0.1,
        ),
        pixels,
    ),
    "siglip_classes": Entry(built("SiglipForImageClassification", vision_config=IMAGE), images),
    "clip_classes": Entry(built("CLIPForImageClassification", vision_config=IMAGE), images),
    "mgp_str": Entry(
        built(
            "MgpstrForSceneTextRecognition",
            image_size=[8, 16],
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            mlp_ratio=2.0,
            max_token_length=5,
            num_character_labels=8,
            num_bpe_labels=12,
            num_wordpiece_labels=12,
        ),
        lambda n: {"pixel_values": torch.randn(n, 3, 8, 16)},
    ),
    "prompt_depth_anything": Entry(
        built(
            "PromptDepthAnythingForDepthEstimation",
            backbone_config=_DINO,
            **_FUSION,
            patch_size=8,
            reassemble_hidden_size=16,
            head_hidden_size=8,
        ),
        lambda n: {**pixels(n), "prompt_depth": torch.rand(n, 1, 4, 4)},
    ),
    "sam_hq": Entry(
        built(
            "SamHQModel",
            vision_config={
                **IMAGE,
                "output_channels": 8,
                "image_size": 32,
                "window_size": 2,
                "global_attn_indexes": [1],
                "num_pos_feats": 4,
                "mlp_dim": 24,
            },
            prompt_encoder_config={
                "hidden_size": 8,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            mask_decoder_config={
                "hidden_size": 8,
                "mlp_dim": 16,
                "num_attention_heads": 2,
                "attention_downsample_rate": 1,
                "iou_head_hidden_dim": 8,
                "vit_dim": 16,
            },
        ),
        _pointed,
    ),
    "seggpt": Entry(
        built(
            "SegGptForImageSegmentation",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=[32, 16],
            patch_size=8,
            mlp_dim=24,
            pretrain_image_size=16,
            decoder_hidden_size=8,
            merge_index=0,
            intermediate_hidden_state_indices=[0, 1],
        ),
        _prompted,
    ),
    "rf_detr": Entry(
        built(
            "RfDetrForObjectDetection",
            backbone_config={
                **{k: v for k, v in IMAGE.items() if k != "intermediate_size"},
                "model_type": "rf_detr_dinov2",
                "mlp_ratio": 2,
                "image_size": 32,
                "num_windows": 1,
                "out_indices": [1, 2],
            },
            d_model=16,
            decoder_ffn_dim=24,
            decoder_layers=1,
            decoder_self_attention_heads=2,
            decoder_cross_attention_heads=2,
            decoder_n_points=2,
            num_queries=4,
            group_detr=1,
            c2f_num_blocks=1,
            intermediate_size=24,
        ),
        lambda n: pixels(n, 32),
    ),
}
