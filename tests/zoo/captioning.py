"""Language models that are shown images in other ways."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.zoo.entry import SIDE, TOKENS, Entry, Inputs, built, labels, pixels, tokens
from tests.zoo.seeing import marked, seen
from tests.zoo.sizes import GROUPED, IMAGE, SEQ2SEQ, TEXT

_MARK = 3
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1]}}
_QWEN_MARKS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_QFORMER = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "encoder_hidden_size": 16,
}
_OPT = {
    "model_type": "opt",
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "word_embed_proj_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.1,
}


def _grids(batch: int) -> Inputs:
    """Patches of all images in one row, and each image's size in patches: the way of Qwen."""
    ids = marked(batch, 1)
    ids[:, 0] = 5
    return {
        "pixel_values": torch.randn(batch * 4, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * batch),
        "input_ids": ids,
        "labels": labels(batch, 8),
        "attention_mask": torch.ones(batch, 8, dtype=torch.long),
        "mm_token_type_ids": (ids == _MARK).int(),
    }


def _questions(batch: int) -> Inputs:
    return {
        **seen(2)(batch), "qformer_input_ids": tokens(batch),
        "qformer_attention_mask": torch.ones(batch, 6, dtype=torch.long),
    }  # fmt: skip


def _idefics(batch: int) -> Inputs:
    return {
        "pixel_values": torch.randn(batch, 1, 3, SIDE, SIDE),
        "input_ids": tokens(batch),
        "labels": labels(batch),
        "attention_mask": torch.ones(batch, 6, dtype=torch.long),
        "image_attention_mask": torch.ones(batch, 6, 1, dtype=torch.long),
    }


def _tiles(batch: int) -> Inputs:
    return {
        "pixel_values": torch.randn(batch, 1, 2, 3, SIDE, SIDE),
        "input_ids": tokens(batch),
        "labels": labels(batch),
        "attention_mask": torch.ones(batch, 6, dtype=torch.long),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, 6, 1, 2, dtype=torch.long),
    }


def _kosmos(batch: int) -> Inputs:
    places = torch.zeros(batch, 8, dtype=torch.long)
    places[:, 1:5] = 1
    return {
        **pixels(batch),
        "input_ids": tokens(batch, 8),
        "image_embeds_position_mask": places,
        "labels": labels(batch, 8),
    }


def _trocr() -> Any:
    decoder = {k: v for k, v in SEQ2SEQ.items() if not k.startswith("encoder")}
    return hf.VisionEncoderDecoderModel(
        hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            hf.DeiTConfig(**IMAGE), hf.TrOCRConfig(**decoder, cross_attention_hidden_size=16), pad_token_id=0,
            decoder_start_token_id=1,
        )
    )  # fmt: skip


CAPTIONING: dict[str, Entry] = {
    "blip_2": Entry(
        built(
            "Blip2ForConditionalGeneration",
            vision_config=IMAGE,
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=2,
            image_token_index=_MARK,
        ),
        seen(2),
    ),
    "instructblip": Entry(
        built(
            "InstructBlipForConditionalGeneration",
            vision_config=IMAGE,
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=2,
            image_token_index=_MARK,
        ),
        _questions,
    ),
    "idefics": Entry(
        built(
            "IdeficsForVisionText2Text",
            **TEXT,
            cross_layer_interval=1,
            dropout=0.1,
            vision_config={**{k: v for k, v in IMAGE.items() if k != "hidden_size"}, "embed_dim": 16},
        ),
        _idefics,
    ),
    "mllama": Entry(
        built(
            "MllamaForConditionalGeneration",
            text_config={**GROUPED, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            image_token_index=_MARK,
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_size": 24,
                "vision_output_dim": 32,
                "image_size": SIDE,
                "patch_size": 8,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
        ),
        _tiles,
    ),
    "kosmos2": Entry(
        built(
            "Kosmos2ForConditionalGeneration",
            vision_config=IMAGE,
            latent_query_num=4,
            text_config={
                "vocab_size": TOKENS,
                "embed_dim": 16,
                "layers": 2,
                "ffn_dim": 24,
                "attention_heads": 2,
                "max_position_embeddings": 32,
            },
        ),
        _kosmos,
    ),
    "trocr": Entry(_trocr, lambda n: {**pixels(n), "labels": labels(n)}),
    "qwen2_vl": Entry(
        built(
            "Qwen2VLForConditionalGeneration",
            **_QWEN_MARKS,
            text_config={**GROUPED, **_ROPE},
            vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        ),
        _grids,
    ),
    "qwen2_5_vl": Entry(
        built(
            "Qwen2_5_VLForConditionalGeneration",
            **_QWEN_MARKS,
            text_config={**GROUPED, **_ROPE},
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 16,
                "fullatt_block_indexes": [1],
                "window_size": 16,
            },
        ),
        _grids,
    ),
}
