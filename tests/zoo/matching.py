"""Images or sounds beside texts: which belong together."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.zoo.entry import SIDE, Entry, Inputs, built, pairs, pixels, tokens
from tests.zoo.sizes import IMAGE, TEXT


def _patched(batch: int) -> Inputs:
    """Images as rows of patches, with their shapes: the way of SigLIP 2."""
    return {
        "input_ids": tokens(batch), "pixel_values": torch.randn(batch, 4, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(batch, 4, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2]] * batch), "return_loss": True,
    }  # fmt: skip


def _sounds(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch), "input_features": torch.randn(batch, 1, 16, 16),
        "is_longer": torch.zeros(batch, 1, dtype=torch.bool), "return_loss": True,
    }  # fmt: skip


def _bridge(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), **pixels(batch), "labels": torch.randint(0, 2, (batch,))}


def _dual() -> Any:
    return hf.VisionTextDualEncoderModel(
        hf.VisionTextDualEncoderConfig.from_vision_text_configs(
            hf.ViTConfig(**IMAGE), hf.BertConfig(**TEXT), projection_dim=8
        )
    )


MATCHING: dict[str, Entry] = {
    "siglip2": Entry(
        built(
            "Siglip2Model",
            text_config=TEXT,
            vision_config={**{k: v for k, v in IMAGE.items() if k != "image_size"}, "num_patches": 4},
        ),
        _patched,
    ),
    "bridgetower": Entry(
        built(
            "BridgeTowerForImageAndTextRetrieval",
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            text_config=TEXT,
            vision_config={"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": SIDE},
        ),
        _bridge,
    ),
    "vision_text_dual_encoder": Entry(_dual, pairs),
    "align": Entry(
        built(
            "AlignModel",
            text_config=TEXT,
            projection_dim=8,
            vision_config={
                "image_size": 32,
                "width_coefficient": 0.25,
                "hidden_dim": 64,
                "kernel_sizes": [3, 5],
                "in_channels": [8, 8],
                "out_channels": [8, 12],
                "depthwise_padding": [],
                "strides": [1, 2],
                "num_block_repeats": [1, 1],
                "expand_ratios": [1, 2],
                "depth_coefficient": 1.0,
            },
        ),
        lambda n: {"input_ids": tokens(n), **pixels(n, 32), "return_loss": True},
    ),
    "x_clip": Entry(
        built(
            "XCLIPModel",
            text_config=TEXT,
            projection_dim=16,
            prompt_num_attention_heads=2,
            vision_config={
                **IMAGE,
                "mit_hidden_size": 16,
                "mit_intermediate_size": 24,
                "mit_num_attention_heads": 2,
                "num_frames": 2,
            },
        ),
        lambda n: {
            "input_ids": tokens(n),
            "pixel_values": torch.randn(n, 2, 3, SIDE, SIDE),
            "return_loss": True,
        },
    ),
    "clap": Entry(
        built(
            "ClapModel",
            text_config=TEXT,
            projection_dim=8,
            audio_config={
                "window_size": 2,
                "num_mel_bins": 16,
                "spec_size": 32,
                "depths": [1, 1],
                "num_attention_heads": [2, 2],
                "patch_embeds_hidden_size": 8,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "projection_dim": 8,
            },
        ),
        _sounds,
    ),
}
