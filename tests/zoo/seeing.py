"""Language models that read patches of images among their tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import SIDE, TOKENS, Entry, Inputs, built, labels, mask, pixels
from tests.zoo.sizes import GROUPED, IMAGE

_MARK = 3
_CLIP = {"model_type": "clip_vision_model", **IMAGE}
_SIGLIP = {"model_type": "siglip_vision_model", **IMAGE, "vision_use_head": False}
_LLAMA = {"model_type": "llama", **GROUPED}
_QWEN = {"model_type": "qwen2", **GROUPED}


def marked(batch: int, marks: int, length: int = 8) -> torch.Tensor:
    """Texts with this many places for patches of images."""
    ids = torch.randint(7, TOKENS, (batch, length))
    ids[:, 1 : 1 + marks] = _MARK
    return ids


def seen(marks: int, length: int = 8, side: int = SIDE) -> Any:
    """Images, and texts with this many places for each."""

    def inputs(batch: int) -> Inputs:
        ids = marked(batch, marks, length)
        return {**pixels(batch, side), "input_ids": ids, "labels": labels(batch, length)}

    return inputs


def _typed(batch: int) -> Inputs:
    made = seen(4)(batch)
    return {**made, "token_type_ids": (made["input_ids"] == _MARK).long()}


def _several(marks: int, images: int = 1) -> Any:
    """Images with a dim for how many there are in a sample."""

    def inputs(batch: int) -> Inputs:
        ids = marked(batch, marks)
        return {
            "pixel_values": torch.randn(batch, images, 3, SIDE, SIDE),
            "input_ids": ids,
            "attention_mask": mask(batch, 8),
            "labels": labels(batch, 8),
        }

    return inputs


SEEING: dict[str, Entry] = {
    "paligemma": Entry(
        built(
            "PaliGemmaForConditionalGeneration",
            vision_config=_SIGLIP,
            projection_dim=16,
            image_token_index=_MARK,
            text_config={"model_type": "gemma", **GROUPED, "head_dim": 8},
        ),
        _typed,
    ),
    "gemma3_images": Entry(
        built(
            "Gemma3ForConditionalGeneration",
            vision_config=_SIGLIP,
            image_token_index=_MARK,
            mm_tokens_per_image=4,
            text_config={**GROUPED, "head_dim": 8, "sliding_window": 4},
            boi_token_index=5,
            eoi_token_index=6,
        ),
        _typed,
    ),
    "vipllava": Entry(
        built(
            "VipLlavaForConditionalGeneration",
            vision_config=_CLIP,
            text_config=_LLAMA,
            image_token_index=_MARK,
            vision_feature_layer=[-2, -1],
        ),
        seen(4),
    ),
    "llava_next": Entry(
        built(
            "LlavaNextForConditionalGeneration",
            vision_config=_CLIP,
            text_config=_LLAMA,
            image_token_index=_MARK,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[16, 16]],
        ),
        lambda n: {
            **seen(10, 14)(n),
            "pixel_values": torch.randn(n, 2, 3, SIDE, SIDE),
            "image_sizes": torch.tensor([[16, 16]] * n),
        },
    ),
    "llava_onevision": Entry(
        built(
            "LlavaOnevisionForConditionalGeneration",
            vision_config=_SIGLIP,
            text_config=_QWEN,
            image_token_index=_MARK,
            video_token_index=4,
            image_grid_pinpoints=[[16, 16]],
        ),
        lambda n: {
            **seen(10, 14)(n),
            "pixel_values": torch.randn(n, 2, 3, SIDE, SIDE),
            "image_sizes": torch.tensor([[16, 16]] * n),
        },
    ),
    "internvl": Entry(
        built(
            "InternVLForConditionalGeneration",
            text_config=_QWEN,
            image_token_id=_MARK,
            image_seq_length=1,
            vision_config={**IMAGE, "image_size": [16, 16], "patch_size": [8, 8], "hidden_dropout_prob": 0.1},
        ),
        seen(1),
    ),
    "aya_vision": Entry(
        built(
            "AyaVisionForConditionalGeneration",
            vision_config=_SIGLIP,
            image_token_index=_MARK,
            text_config={"model_type": "cohere2", **GROUPED, "sliding_window": 4},
        ),
        seen(1),
    ),
    "idefics2": Entry(
        built(
            "Idefics2ForConditionalGeneration",
            vision_config=IMAGE,
            text_config={"model_type": "mistral", **GROUPED},
            perceiver_config={
                "hidden_size": 16,
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
            image_token_id=_MARK,
        ),
        _several(2),
    ),
    "idefics3": Entry(
        built(
            "Idefics3ForConditionalGeneration",
            vision_config=IMAGE,
            text_config=_LLAMA,
            image_token_id=_MARK,
            scale_factor=2,
        ),
        _several(1),
    ),
    "smolvlm": Entry(
        built(
            "SmolVLMForConditionalGeneration",
            vision_config=IMAGE,
            text_config=_LLAMA,
            image_token_id=_MARK,
            scale_factor=2,
        ),
        _several(1),
    ),
}
