"""More language models that read patches of images or videos among their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.entry import SIDE, TOKENS, Entry, Inputs, built, labels, pixels, tokens
from tests.zoo.sizes import GROUPED, IMAGE, SEQ2SEQ

_MARK = 3
_SIGLIP = {"model_type": "siglip_vision_model", **IMAGE, "vision_use_head": False}
_LLAMA = {"model_type": "llama", **GROUPED}
_QWEN = {"model_type": "qwen2", **GROUPED}
_CODES = {
    "embed_dim": 4, "num_embeddings": 16, "latent_channels": 4, "base_channels": 32,
    "channel_multiplier": [1, 1], "num_res_blocks": 1,
}  # fmt: skip
_DAVIT = {
    "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
    "patch_prenorm": [False, True], "embed_dim": [8, 16], "num_heads": [2, 2], "num_groups": [2, 2],
    "window_size": 2, "projection_dim": 16, "max_temporal_embeddings": 4, "max_position_embeddings": 8,
    "mlp_ratio": 2.0,
}  # fmt: skip


def _marked(batch: int, marks: int, length: int, mark: int = _MARK) -> torch.Tensor:
    ids = torch.randint(12, TOKENS, (batch, length))
    ids[:, 1 : 1 + marks] = mark
    return ids


def _seen(marks: int, length: int = 8, side: int = SIDE, *, sized: bool = False) -> Callable[[int], Inputs]:
    """Images, and texts with this many places for each."""

    def inputs(batch: int) -> Inputs:
        ids = _marked(batch, marks, length)
        made: dict[str, Any] = {**pixels(batch, side), "input_ids": ids, "labels": labels(batch, length)}
        return made | ({"image_sizes": torch.tensor([[side, side]] * batch)} if sized else {})

    return inputs


def _videos(batch: int) -> Inputs:
    return {
        "input_ids": _marked(batch, 10, 14, 4), "pixel_values_videos": torch.randn(batch, 2, 3, SIDE, SIDE),
        "labels": labels(batch, 14),
    }  # fmt: skip


def _few_labels(batch: int) -> Inputs:
    """No label is the code of an image, to which the model gives no chance."""
    return {"input_ids": tokens(batch), "labels": torch.randint(4, 10, (batch, 6))}


LOOKING: dict[str, Entry] = {
    "florence2": Entry(
        built(
            "Florence2ForConditionalGeneration",
            vision_config=_DAVIT,
            text_config={"model_type": "bart", **SEQ2SEQ},
            image_token_id=_MARK,
        ),
        _seen(5),
    ),
    "janus": Entry(
        built(
            "JanusForConditionalGeneration",
            vision_config={
                **{k: v for k, v in IMAGE.items() if k != "intermediate_size"},
                "mlp_ratio": 2.0,
                "projection_dim": 16,
                "num_image_tokens": 4,
            },
            vq_config={**_CODES, "projection_dim": 16, "image_token_embed_dim": 16, "num_patches": 4},
            text_config=_LLAMA,
            image_token_id=_MARK,
        ),
        _seen(4),
    ),
    "chameleon": Entry(
        built(
            "ChameleonForConditionalGeneration",
            **GROUPED,
            vq_config={**_CODES, "resolution": 16, "attn_resolutions": []},
            vocabulary_map={"<image>": 3} | {f"IMGIMG{c}Z": 10 + i for i, c in enumerate("ABCDEFGHIJKLMNOP")},
        ),
        _few_labels,
    ),
    "video_llava": Entry(
        built(
            "VideoLlavaForConditionalGeneration",
            vision_config={"model_type": "clip_vision_model", **IMAGE},
            text_config=_LLAMA,
            image_token_index=_MARK,
            video_token_index=4,
            vision_feature_layer=-1,
        ),
        _videos,
    ),
    "cohere2_vision": Entry(
        built(
            "Cohere2VisionForConditionalGeneration",
            vision_config=_SIGLIP,
            text_config={"model_type": "cohere2", **GROUPED, "sliding_window": 4},
            image_token_id=_MARK,
            alignment_intermediate_size=32,
        ),
        _seen(1),
    ),
    "deepseek_vl": Entry(
        built(
            "DeepseekVLForConditionalGeneration",
            vision_config=_SIGLIP,
            text_config=_LLAMA,
            image_token_id=_MARK,
        ),
        _seen(4),
    ),
    "got_ocr2": Entry(
        built(
            "GotOcr2ForConditionalGeneration",
            vision_config={
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 4,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 24,
            },
            text_config=_QWEN,
            image_token_index=_MARK,
        ),
        _seen(16, 18, 64),
    ),
    "mistral3": Entry(  # each image's size is read in Python
        built(
            "Mistral3ForConditionalGeneration",
            vision_config={"model_type": "pixtral", **IMAGE},
            text_config={"model_type": "mistral", **GROUPED},
            image_token_index=_MARK,
            spatial_merge_size=2,
        ),
        _seen(1, sized=True),
    ),
    "ovis2": Entry(  # `if mask.any()`
        built(
            "Ovis2ForConditionalGeneration",
            vision_config={
                **IMAGE,
                "patch_size": 4,
                "vocab_size": 24,
                "hidden_stride": 2,
                "num_visual_indicator_tokens": 5,
            },
            text_config=_QWEN,
            image_token_id=_MARK,
            visual_indicator_token_ids=[7, 8, 9, 10, 11],
            vocab_size=TOKENS,
            hidden_size=16,
        ),
        _seen(4),
    ),
}
