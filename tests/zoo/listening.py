"""Models that turn speech into text, and text into sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, tokens
from tests.zoo.sizes import GROUPED, SEQ2SEQ, TEXT

_WAVES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "pad_token_id": 0,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.1, "ctc_loss_reduction": "mean",
}  # fmt: skip
_SPEECHT5 = {
    **{
        k: v
        for k, v in _WAVES.items()
        if not k.startswith(("num_hidden", "num_att", "inter", "ctc", "layerdrop"))
    },
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "vocab_size": TOKENS,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 8,
    "speech_decoder_postnet_units": 8,
    "speech_decoder_postnet_layers": 2,
    "speaker_embedding_dim": 4,
    "max_speech_positions": 64,
    "max_text_positions": 32,
    "encoder_max_relative_position": 8,
}
_WHISPER_EARS = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "d_model": 16,
    "max_source_positions": 8,
    "dropout": 0.1,
}
_SEAMLESS = {
    **{k: v for k, v in SEQ2SEQ.items() if k != "d_model"},
    "hidden_size": 16,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 24,
    "speech_encoder_layerdrop": 0.0,
    "feature_projection_input_dim": 8,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "conv_depthwise_kernel_size": 3,
}


def _spoken(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 60), "labels": labels(batch)}


def _read_aloud(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch),
        "attention_mask": mask(batch),
        "labels": torch.randn(batch, 8, 8),
        "speaker_embeddings": torch.randn(batch, 4),
    }


def _heard(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 12, 8), "labels": labels(batch)}


def _sound_and_text(batch: int) -> Inputs:
    ids = tokens(batch, 8)
    ids[ids == 7] = 8
    ids[:, 1:5] = 7
    return {
        "input_features": torch.randn(batch, 8, 16),
        "feature_attention_mask": torch.ones(batch, 16, dtype=torch.long),
        "input_ids": ids,
        "attention_mask": torch.ones(batch, 8, dtype=torch.long),
        "labels": labels(batch, 8),
    }


def _codebooks(batch: int) -> Inputs:
    codes = torch.randint(0, 16, (batch, LENGTH, 2))
    return {"input_ids": tokens(batch), "attention_mask": mask(batch), "labels": codes}


def _musicgen() -> Any:
    config = hf.MusicgenConfig(
        text_encoder={
            "model_type": "t5",
            "vocab_size": TOKENS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 2,
        },
        audio_encoder={
            "model_type": "encodec",
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": 16,
            "codebook_dim": 8,
            "upsampling_ratios": [2, 2],
            "num_lstm_layers": 1,
        },
        decoder={
            "vocab_size": 16,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "ffn_dim": 24,
            "num_attention_heads": 2,
            "num_codebooks": 2,
            "max_position_embeddings": 32,
        },
    )
    config.decoder.pad_token_id = 16
    config.decoder.decoder_start_token_id = 16
    return hf.MusicgenForConditionalGeneration(config)


def _speech_to_words() -> Any:
    return hf.SpeechEncoderDecoderModel(
        hf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
            hf.Wav2Vec2Config(**_WAVES, num_feat_extract_layers=2),
            hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True),
            pad_token_id=0,
            decoder_start_token_id=1,
        )
    )


_TOKENS = {
    "vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_PARAKEET = {
    **_BLOCKS, "conv_kernel_size": 3, "subsampling_factor": 4, "subsampling_conv_channels": 4,
    "num_mel_bins": 8, "layerdrop": 0.0, "max_position_embeddings": 32,
}  # fmt: skip


def _mel_frames(batch: int) -> Inputs:
    return {
        "input_features": torch.randn(batch, 24, 8), "labels": labels(batch),
        "attention_mask": torch.ones(batch, 24, dtype=torch.long),
    }  # fmt: skip


LISTENING: dict[str, Entry] = {
    "speecht5_asr": Entry(built("SpeechT5ForSpeechToText", **_SPEECHT5), _spoken),
    "speecht5_tts": Entry(built("SpeechT5ForTextToSpeech", **_SPEECHT5), _read_aloud),
    "seamless_m4t": Entry(built("SeamlessM4TForSpeechToText", **_SEAMLESS), _heard),
    "seamless_m4t_text": Entry(
        built(
            "SeamlessM4Tv2ForTextToText",
            **{k: v for k, v in _SEAMLESS.items() if not k.startswith("num_conv")},
        ),
        lambda n: {"input_ids": tokens(n), "attention_mask": mask(n), "labels": labels(n)},
    ),
    "moonshine": Entry(
        built(
            "MoonshineForConditionalGeneration",
            vocab_size=TOKENS,
            hidden_size=16,
            intermediate_size=24,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=2,
            decoder_num_attention_heads=2,
            max_position_embeddings=32,
            decoder_start_token_id=1,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        lambda n: {"input_values": torch.randn(n, 1000), "labels": labels(n)},
    ),
    "speech_to_bert": Entry(_speech_to_words, _spoken),
    "qwen2_audio": Entry(
        built(
            "Qwen2AudioForConditionalGeneration",
            audio_config=_WHISPER_EARS,
            audio_token_index=7,
            text_config={"model_type": "qwen2", **GROUPED},
        ),
        _sound_and_text,
    ),
    "voxtral": Entry(
        built(
            "VoxtralForConditionalGeneration",
            audio_token_id=7,
            audio_config={
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 8,
                "max_source_positions": 8,
                "vocab_size": TOKENS,
            },
            text_config={"model_type": "llama", **GROUPED},
        ),
        lambda n: (
            {k: v for k, v in _sound_and_text(n).items() if k != "feature_attention_mask"}
            | {
                "input_ids": torch.where(torch.arange(8) == 1, 7, tokens(n, 8).clamp(8)).where(
                    torch.arange(8) != 2, torch.tensor(7)
                )
            }
        ),
    ),
    "musicgen": Entry(_musicgen, _codebooks),
    "canary": Entry(
        built(
            "CanaryForConditionalGeneration",
            **_TOKENS,
            encoder_config=_PARAKEET,
            decoder_config={
                **_TOKENS,
                **_BLOCKS,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 32,
            },
        ),
        _mel_frames,
    ),
    "cohere_asr": Entry(
        built(
            "CohereAsrForConditionalGeneration",
            **_TOKENS,
            **_BLOCKS,
            max_position_embeddings=32,
            encoder_config={"model_type": "parakeet_encoder", **_PARAKEET},
        ),
        _mel_frames,
    ),
}
