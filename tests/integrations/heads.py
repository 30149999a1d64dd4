"""Heads of transformers, tiny and of random weights, with what their users give Trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.integrations.head_samples import (
    CLASSES,
    TOKENS,
    ParamShard,
    accuracy,
    asked,
    chosen,
    classified,
    collate_dictation,
    collate_pairs,
    collate_speech,
    dictated,
    errors,
    generated,
    grouped,
    image,
    masked,
    pair,
    pixels,
    scene,
    sentence,
    series,
    sound,
    spans,
    spoken,
    tagged,
    tokenizer,
    translated,
    words,
)

SAMPLES, EVALUATED = 13, 7
"""Batches of 4: the last one has a single sample in training, three in evaluation."""
_TWO_LEFT = {"count": 14}
"""Where a batch of a single sample is refused: `squeeze()` of it has no dim, lengths decide on its layout."""

_BERT = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0, "max_position_embeddings": 32,
}  # fmt: skip
_GPT2 = {
    "vocab_size": TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": TOKENS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_WAV2VEC2 = {
    "vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "classifier_proj_size": 16,
    "pad_token_id": 0, "ctc_loss_reduction": "mean",
}  # fmt: skip
_AST = _VIT | {"max_length": 16, "num_mel_bins": 8, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}
_AST.pop("image_size")
_WHISPER = {
    "vocab_size": TOKENS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8,
    "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 4, "image_size": 16}
_CLIP = {"text_config": _BERT | {"eos_token_id": 2}, "vision_config": _VIT, "projection_dim": 8}
_PATCHTST = {
    "context_length": 16, "prediction_length": 4, "num_input_channels": 2, "patch_length": 4,
    "patch_stride": 4, "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 24,
}  # fmt: skip
_ELECTRA = _BERT | {"embedding_size": 16}
_ROBERTA = _BERT | {"pad_token_id": 0}
_DEBERTA = _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}

TEXT = {"input_ids": 0, "attention_mask": 0}
LABELLED = TEXT | {"labels": -100}
SEQ2SEQ = LABELLED | {"decoder_input_ids": 0}


@dataclass(frozen=True)
class Head:
    """What a user gives Trainer.

    `pad`: what `compile_trainer` is given, as batches are padded to the longest text in them.
    """

    model: str
    config: dict[str, Any]
    rows: Callable[[random.Random, int], dict[str, Any]]
    metrics: Callable[[Any], dict[str, float]] | None = None
    collator: Callable[[Any, nn.Module], Any] | None = None
    pad: dict[str, Any] | None = None
    trainer: str = "Trainer"
    arguments: dict[str, Any] = field(default_factory=dict)
    count: int = SAMPLES

    def make(self) -> nn.Module:
        """The model, with the same weights everywhere."""
        torch.manual_seed(0)
        kind = getattr(hf, self.model)
        made: nn.Module = kind(kind.config_class(**self.config))
        return made

    def samples(self) -> ParamShard:
        """What it learns from."""
        draw = random.Random(0)
        return [self.rows(draw, i) for i in range(self.count)]

    def collate(self, model: nn.Module) -> Any:
        """Makes batches of samples; None for Trainer's own."""
        return None if self.collator is None else self.collator(tokenizer(), model)


def _head(
    model: str, config: dict[str, Any], rows: Any, metrics: Any = None, collator: Any = None, **more: Any
) -> Head:
    return Head(model, config, rows, metrics, collator, **more)


def _by(collator: Any, **options: Any) -> Callable[[Any, nn.Module], Any]:
    return lambda words, _: collator(words, **options)


_PADDING = _by(hf.DataCollatorWithPadding)
_TAGS = _by(hf.DataCollatorForTokenClassification)
_LM = _by(hf.DataCollatorForLanguageModeling, mlm=False)
_CHOICES = _by(hf.DataCollatorForMultipleChoice)
_SEQ2SEQ: Any = hf.DataCollatorForSeq2Seq  # makes the decoder's inputs by the model
_ONE = partial(classified, lambda draw: draw.randrange(CLASSES))
_MANY = partial(classified, lambda draw: [float(draw.random() < 0.5) for _ in range(CLASSES)])
_NUMBER = partial(classified, lambda draw: draw.random())
_KINDS = {"num_labels": CLASSES}

HEADS: dict[str, Head] = {
    "single label": _head(
        "BertForSequenceClassification", _BERT | _KINDS, _ONE, accuracy, _PADDING, pad=TEXT
    ),
    "multi label": _head(
        "DistilBertForSequenceClassification",
        _DISTILBERT | _KINDS | {"problem_type": "multi_label_classification"},
        _MANY,
        errors,
        _PADDING,
        pad=TEXT,
    ),
    "multi label, unsaid": _head(
        "ElectraForSequenceClassification", _ELECTRA | _KINDS, _MANY, errors, _PADDING, pad=TEXT
    ),
    "regression": _head(
        "RobertaForSequenceClassification",
        _ROBERTA | {"num_labels": 1},
        _NUMBER,
        errors,
        _PADDING,
        pad=TEXT,
        **_TWO_LEFT,
    ),
    "gpt2 classifier": _head(
        "GPT2ForSequenceClassification", _GPT2 | _KINDS, _ONE, accuracy, _PADDING, pad=TEXT
    ),
    "deberta classifier": _head(
        "DebertaV2ForSequenceClassification", _DEBERTA | _KINDS, _ONE, accuracy, _PADDING, pad=TEXT
    ),
    "tokens": _head("BertForTokenClassification", _BERT | _KINDS, tagged, accuracy, _TAGS, pad=LABELLED),
    "answers": _head("DistilBertForQuestionAnswering", _DISTILBERT, asked, spans),
    "masked LM": _head("RobertaForMaskedLM", _ROBERTA, masked, accuracy, _TAGS, pad=LABELLED),
    "causal LM gpt2": _head("GPT2LMHeadModel", _GPT2, sentence, None, _LM, pad=LABELLED),
    "causal LM llama": _head("LlamaForCausalLM", _LLAMA, grouped, accuracy),
    "choices": _head("BertForMultipleChoice", _BERT, chosen, accuracy, _CHOICES, pad=TEXT),
    "seq2seq t5": _head(
        "T5ForConditionalGeneration",
        _T5,
        translated,
        None,
        _SEQ2SEQ,
        pad=SEQ2SEQ,
        trainer="Seq2SeqTrainer",
        arguments={"label_smoothing_factor": 0.1},
    ),
    "seq2seq bart": _head(
        "BartForConditionalGeneration",
        _BART,
        translated,
        generated,
        _SEQ2SEQ,
        pad=SEQ2SEQ,
        trainer="Seq2SeqTrainer",
        arguments={"predict_with_generate": True, "generation_max_length": 6},
    ),
    "vit": _head("ViTForImageClassification", _VIT | _KINDS, image, accuracy),
    "resnet": _head("ResNetForImageClassification", _RESNET | _KINDS, image, accuracy),
    "convnext": _head("ConvNextForImageClassification", _CONVNEXT | _KINDS, image, accuracy),
    "segformer": _head("SegformerForSemanticSegmentation", _SEGFORMER | _KINDS, scene, pixels),
    "wav2vec2 classifier": _head("Wav2Vec2ForSequenceClassification", _WAV2VEC2 | _KINDS, sound, accuracy),
    "ast": _head("ASTForAudioClassification", _AST | _KINDS, partial(sound, size=(16, 8)), accuracy),
    "wav2vec2 ctc": _head(
        "Wav2Vec2ForCTC",
        _WAV2VEC2,
        spoken,
        words,
        lambda *_: collate_speech,
        pad={"input_values": 0.0, "attention_mask": 0, "labels": -100},
        **_TWO_LEFT,
    ),
    "whisper": _head(
        "WhisperForConditionalGeneration",
        _WHISPER,
        dictated,
        None,
        lambda *_: collate_dictation,
        pad={"labels": -100},
        trainer="Seq2SeqTrainer",
    ),
    "clip": _head("CLIPModel", _CLIP, pair, None, lambda *_: collate_pairs, pad=TEXT),
    "series": _head("PatchTSTForPrediction", _PATCHTST, series),
}
"""By what their users call them."""
