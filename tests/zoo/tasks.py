"""Other tasks of text models than their catalogue entry has: classes, tags, answers."""

from __future__ import annotations

import torch

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, masked, tokens
from tests.zoo.newest import small
from tests.zoo.sizes import GROUPED, IMAGE, TEXT


def _classes(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch),
        "attention_mask": mask(batch),
        "labels": torch.randint(0, 2, (batch,)),
    }


def _tags(batch: int) -> Inputs:
    made = torch.randint(0, 2, (batch, LENGTH))
    made[torch.rand(made.shape) < 0.3] = -100
    return {"input_ids": tokens(batch), "attention_mask": mask(batch), "labels": made}


def _replaced(batch: int) -> Inputs:
    return {**_tags(batch), "labels": torch.randint(0, 2, (batch, LENGTH))}


def _ordered(batch: int) -> Inputs:
    return {**masked(batch), "sentence_order_label": torch.randint(0, 2, (batch,))}


def _answers(batch: int) -> Inputs:
    places = {name: torch.randint(0, LENGTH, (batch,)) for name in ("start_positions", "end_positions")}
    return {"input_ids": tokens(batch), **places}


_WINDOWED = {**GROUPED, "head_dim": 8, "sliding_window": 4}
_GPT2 = {"vocab_size": TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}

TASKS: dict[str, Entry] = {
    "gpt2_classes": Entry(built("GPT2ForSequenceClassification", **_GPT2), _classes),
    "qwen2_classes": Entry(built("Qwen2ForSequenceClassification", **GROUPED), _classes),
    "electra_tags": Entry(built("ElectraForTokenClassification", **TEXT, embedding_size=16), _tags),
    "electra_pretraining": Entry(built("ElectraForPreTraining", **TEXT, embedding_size=16), _replaced),
    "albert_pretraining": Entry(built("AlbertForPreTraining", **TEXT, embedding_size=16), _ordered),
    "roberta_questions": Entry(built("RobertaForQuestionAnswering", **TEXT), _answers),
    "ultrabert": Entry(small("UltrabertForMaskedLM", prediction_head_size=16), masked),
    "esmc": Entry(small("EsmcForMaskedLM", num_key_value_heads=4, head_dim=4), masked),
    "openai_privacy_filter": Entry(small("OpenAIPrivacyFilterForTokenClassification"), _tags),
    "t5gemma2": Entry(
        built(
            "T5Gemma2ForConditionalGeneration",
            encoder={
                "text_config": _WINDOWED,
                "vision_config": {"model_type": "siglip_vision_model", **IMAGE},
                "mm_tokens_per_image": 4,
                "boi_token_index": 5,
                "eoi_token_index": 6,
                "image_token_index": 3,
            },
            decoder=_WINDOWED,
            image_token_index=3,
            eoi_token_index=6,
        ),
        lambda n: {"input_ids": torch.randint(8, TOKENS, (n, LENGTH)), "labels": labels(n)},
    ),
}
