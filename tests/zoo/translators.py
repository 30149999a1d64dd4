"""More models that turn one text, or a document, into another."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, masked, tokens
from tests.zoo.sizes import GROUPED, SEQ2SEQ

_LONG = 16
_T5 = {"vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
_SEQUENCES = {**_T5, "decoder_start_token_id": 0}


def _corners(batch: int, highest: int = 50) -> Tensor:
    corner = torch.randint(0, highest, (batch, LENGTH, 2))
    return torch.cat([corner, corner + highest // 2], -1)


def _document(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch),
        "bbox": _corners(batch) / 100.0,
        "pixel_values": torch.randn(batch, 3, 16, 16),
        "labels": labels(batch),
    }


def _flat(batch: int) -> Inputs:
    """Patches with their places in the image before them."""
    places = torch.arange(4).repeat(batch, 1)
    rows = torch.stack([places // 2 + 1, places % 2 + 1], -1).double()
    return {
        "flattened_patches": torch.cat([rows, torch.randn(batch, 4, 48)], -1),
        "attention_mask": torch.ones(batch, 4), "labels": labels(batch),
    }  # fmt: skip


def _bart(model: str, **more: Any) -> Entry:
    return Entry(built(model, **{**SEQ2SEQ, **more}), masked)


TRANSLATORS: dict[str, Entry] = {
    "bigbird_pegasus": Entry(
        built(
            "BigBirdPegasusForConditionalGeneration",
            **SEQ2SEQ,
            attention_type="block_sparse",
            block_size=2,
            num_random_blocks=1,
        ),
        lambda n: {"input_ids": tokens(n, _LONG), "attention_mask": mask(n, _LONG), "labels": labels(n)},
    ),
    "blenderbot_small": _bart("BlenderbotSmallForConditionalGeneration"),
    "plbart": _bart("PLBartForConditionalGeneration"),
    "mvp": _bart("MvpForConditionalGeneration", use_prompt=True, prompt_length=3, prompt_mid_dim=8),
    "bart_classes": Entry(
        built("BartForSequenceClassification", **SEQ2SEQ),
        lambda n: {
            "input_ids": torch.cat([tokens(n, 5), torch.full((n, 1), 2)], 1),
            "labels": torch.randint(0, 3, (n,)),
        },
    ),
    "fsmt": Entry(
        built(
            "FSMTForConditionalGeneration",
            **{k: v for k, v in SEQ2SEQ.items() if k != "vocab_size"},
            src_vocab_size=TOKENS,
            tgt_vocab_size=TOKENS,
            langs=["en", "de"],
        ),
        masked,
    ),
    "nllb_moe": _bart(
        "NllbMoeForConditionalGeneration",
        num_experts=4,
        expert_capacity=8,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        output_router_logits=True,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "pegasus_x": _bart("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    "umt5": Entry(built("UMT5ForConditionalGeneration", **_SEQUENCES), masked),
    "t5_classes": Entry(
        built("T5ForSequenceClassification", **_SEQUENCES, eos_token_id=2, pad_token_id=0),
        lambda n: {
            "input_ids": torch.cat([tokens(n, 5), torch.full((n, 1), 2)], 1),
            "labels": torch.randint(0, 2, (n,)),
        },
    ),
    "t5gemma": Entry(
        lambda: hf.T5GemmaForConditionalGeneration(
            hf.T5GemmaConfig(
                encoder={**GROUPED, "head_dim": 8, "sliding_window": 4},
                decoder={**GROUPED, "head_dim": 8, "sliding_window": 4},
                vocab_size=TOKENS,
                dropout_rate=0.1,
            )
        ),
        masked,
    ),
    "udop": Entry(
        built(
            "UdopForConditionalGeneration",
            **_SEQUENCES,
            image_size=16,
            patch_size=8,
            max_2d_position_embeddings=101,
        ),
        _document,
    ),
    "pix2struct": Entry(
        built(
            "Pix2StructForConditionalGeneration",
            text_config={
                "vocab_size": TOKENS,
                "hidden_size": 16,
                "d_kv": 8,
                "d_ff": 24,
                "num_layers": 2,
                "num_heads": 2,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
            },
            vision_config={
                "hidden_size": 16,
                "patch_embed_hidden_size": 48,
                "d_ff": 24,
                "d_kv": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "seq_len": 8,
                "dropout_rate": 0.1,
            },
        ),
        _flat,
    ),
}
