"""More encoders of speech and other sounds."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import Entry, Inputs, built
from tests.zoo.sizes import SEQ2SEQ

_WAVES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "pad_token_id": 0,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.1, "ctc_loss_reduction": "mean",
}  # fmt: skip
_SEWED = {**{k: v for k, v in _WAVES.items() if k != "layerdrop"}, "squeeze_factor": 2}


def _speech(batch: int) -> Inputs:
    made = torch.randint(1, 12, (batch, 3))
    made[-1, 2:] = -100
    return {"input_values": torch.randn(batch, 60), "labels": made}


def _speech_classes(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 60), "labels": torch.randint(0, 2, (batch,))}


def _frames(batch: int) -> Inputs:
    made = torch.randint(1, 12, (batch, 3))
    return {"input_features": torch.randn(batch, 12, 8), "labels": made}


SOUNDS: dict[str, Entry] = {
    "data2vec_audio": Entry(built("Data2VecAudioForCTC", **_WAVES, conv_pos_kernel_size=3), _speech),
    "unispeech": Entry(built("UniSpeechForCTC", **_WAVES, num_ctc_classes=12), _speech),
    "unispeech_sat": Entry(
        built("UniSpeechSatForSequenceClassification", **_WAVES, classifier_proj_size=8), _speech_classes
    ),
    "sew": Entry(built("SEWForCTC", **_SEWED, layerdrop=0.0), _speech),
    "sew_d": Entry(built("SEWDForCTC", **_SEWED, position_buckets=4, max_position_embeddings=32), _speech),
    "wav2vec2_conformer": Entry(
        built("Wav2Vec2ConformerForCTC", **_WAVES, max_source_positions=32, conv_depthwise_kernel_size=3),
        _speech,
    ),
    "wav2vec2_conformer_rotary": Entry(
        built(
            "Wav2Vec2ConformerForCTC",
            **_WAVES,
            position_embeddings_type="rotary",
            max_source_positions=32,
            conv_depthwise_kernel_size=3,
        ),
        _speech,
    ),
    "wav2vec2_bert": Entry(
        built(
            "Wav2Vec2BertForCTC",
            **{k: v for k, v in _WAVES.items() if not k.startswith(("conv_", "num_conv"))},
            feature_projection_input_dim=8,
            left_max_position_embeddings=4,
            right_max_position_embeddings=2,
            conv_depthwise_kernel_size=3,
        ),
        _frames,
    ),
    "wav2vec2_masked": Entry(  # spans of frames, drawn by NumPy
        built(
            "Wav2Vec2ForSequenceClassification",
            **{**_WAVES, "mask_time_prob": 0.3, "mask_time_length": 2},
            num_feat_extract_layers=2,
        ),
        _speech_classes,
    ),
    "whisper_classes": Entry(
        built(
            "WhisperForAudioClassification",
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            classifier_proj_size=8,
        ),
        lambda n: {"input_features": torch.randn(n, 8, 20), "labels": torch.randint(0, 2, (n,))},
    ),
    "dac": Entry(
        built(
            "DacModel",
            encoder_hidden_size=4,
            downsampling_ratios=[2, 2],
            decoder_hidden_size=8,
            n_codebooks=2,
            codebook_size=16,
            codebook_dim=4,
            hidden_size=16,
        ),
        lambda n: {"input_values": torch.randn(n, 1, 64)},
    ),
    "parakeet_ctc": Entry(
        built(
            "ParakeetForCTC",
            vocab_size=12,
            pad_token_id=0,
            encoder_config={
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "conv_kernel_size": 3,
                "subsampling_factor": 4,
                "subsampling_conv_channels": 4,
                "num_mel_bins": 8,
                "layerdrop": 0.0,
                "max_position_embeddings": 32,
            },
        ),
        lambda n: {
            "input_features": torch.randn(n, 24, 8),
            "attention_mask": torch.ones(n, 24, dtype=torch.long),
            "labels": torch.randint(1, 12, (n, 2)),
        },
    ),
}
