"""Models that write sounds: decoders over the codes of several codebooks, vocoders; and more listeners."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

from tests.zoo.entry import TOKENS, Entry, Flattened, Inputs, built, causal, labels, tokens
from tests.zoo.sizes import GROUPED

_MIMI = {
    "hidden_size": 16, "num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 16, "codebook_dim": 8,
    "num_quantizers": 2, "vector_quantization_hidden_dimension": 8, "upsample_groups": 16,
    "num_hidden_layers": 1, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "sliding_window": 8,
}  # fmt: skip
_CODEC = {"model_type": "mimi", **_MIMI}
_MOSHI = {
    "vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "sliding_window": 4, "ffn_dim": 24, "num_codebooks": 2,
}  # fmt: skip


def _frames(batch: int) -> Inputs:
    made = torch.randint(1, 12, (batch, 2))
    return {
        "input_features": torch.randn(batch, 40, 16), "labels": made,
        "attention_mask": torch.ones(batch, 40, dtype=torch.long),
    }  # fmt: skip


def _text_and_codes(batch: int) -> Inputs:
    ids = torch.cat([tokens(batch)[..., None], torch.randint(0, 16, (batch, 6, 2))], -1)
    return {"input_ids": ids, "labels": labels(batch)}


def _heard(marks: int) -> Callable[[int], Inputs]:
    """Frames of a sound, and a text with this many places for it."""

    def inputs(batch: int) -> Inputs:
        ids = torch.randint(8, TOKENS, (batch, 8))
        ids[:, 1 : 1 + marks] = 7
        return {
            "input_ids": ids, "labels": labels(batch, 8), "input_features": torch.randn(batch, 8, 16),
            "input_features_mask": torch.ones(batch, 16, dtype=torch.long),
        }  # fmt: skip

    return inputs


def _melody() -> nn.Module:
    """Takes a row of codes for each codebook of a sample."""
    config = hf.MusicgenMelodyDecoderConfig(
        vocab_size=16, max_position_embeddings=32, num_hidden_layers=2, ffn_dim=24, num_attention_heads=2,
        hidden_size=16, num_codebooks=2, pad_token_id=16, bos_token_id=16,
    )  # fmt: skip
    return Flattened(hf.MusicgenMelodyForCausalLM(config), "input_ids")


_EARS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 8,
}  # fmt: skip

SPEAKING: dict[str, Entry] = {
    "csm": Entry(
        built(
            "CsmForConditionalGeneration",
            **{**GROUPED, "vocab_size": 20},
            text_vocab_size=TOKENS,
            num_codebooks=2,
            audio_token_id=3,
            audio_eos_token_id=4,
            codebook_pad_token_id=19,
            codebook_eos_token_id=0,
            depth_decoder_config={
                **GROUPED,
                "vocab_size": 20,
                "num_codebooks": 2,
                "backbone_hidden_size": 16,
            },
            codec_config=_CODEC,
        ),
        lambda n: {
            "input_ids": torch.randint(1, 19, (n, 6, 2)),
            "labels": torch.randint(1, 19, (n, 6, 2)),
        },
    ),
    "csm_depth": Entry(
        built("CsmDepthDecoderForCausalLM", **GROUPED, num_codebooks=4, backbone_hidden_size=16),
        lambda n: {
            "input_ids": tokens(n, 4),
            "backbone_last_hidden_state": torch.randn(n, 16),
            "labels": labels(n, 4),
        },
    ),
    "moshi_text": Entry(built("MoshiForCausalLM", **_MOSHI, audio_vocab_size=16), causal),
    "kyutai_speech_to_text": Entry(
        built(
            "KyutaiSpeechToTextForConditionalGeneration",
            **_MOSHI,
            codebook_vocab_size=17,
            audio_bos_token_id=16,
            audio_pad_token_id=70,
            codec_config=_CODEC,
        ),
        _text_and_codes,
    ),
    "bark_semantic": Entry(
        built(
            "BarkSemanticModel",
            block_size=32,
            input_vocab_size=TOKENS,
            output_vocab_size=TOKENS,
            num_layers=2,
            num_heads=2,
            hidden_size=16,
            dropout=0.1,
        ),
        lambda n: {"input_ids": tokens(n)},
    ),
    "univnet": Entry(
        built(
            "UnivNetModel",
            model_in_channels=8,
            model_hidden_channels=8,
            num_mel_bins=8,
            kernel_predictor_hidden_channels=8,
            kernel_predictor_num_blocks=1,
            resblock_kernel_sizes=[3, 3],
            resblock_stride_sizes=[4, 4],
            resblock_dilation_sizes=[[1, 3], [1, 3]],
        ),
        lambda n: {"input_features": torch.randn(n, 7, 8), "noise_sequence": torch.randn(n, 7, 8)},
    ),
    "lasr_ctc": Entry(
        built(
            "LasrForCTC",
            vocab_size=12,
            pad_token_id=0,
            encoder_config={
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "conv_kernel_size": 3,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 16,
                "layerdrop": 0.0,
                "max_position_embeddings": 64,
            },
        ),
        _frames,
    ),
    "audioflamingo3": Entry(
        built(
            "AudioFlamingo3ForConditionalGeneration",
            audio_config={**_EARS, "intermediate_size": 24, "max_source_positions": 8},
            text_config={"model_type": "qwen2", **GROUPED},
            audio_token_id=7,
        ),
        _heard(4),
    ),
    "glmasr": Entry(
        built(
            "GlmAsrForConditionalGeneration",
            audio_config={**_EARS, "intermediate_size": 64, "max_position_embeddings": 32},
            text_config={"model_type": "llama", **GROUPED},
            audio_token_id=7,
        ),
        _heard(2),
    ),
    "clvp_decoder": Entry(
        built(
            "ClvpForCausalLM",
            vocab_size=TOKENS,
            max_position_embeddings=32,
            max_text_tokens=32,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_mel_attn_blocks=1,
            bos_token_id=1,
            eos_token_id=2,
            feature_size=8,
        ),
        causal,
    ),
    "musicgen_melody_decoder": Entry(
        _melody,
        lambda n: {
            "input_ids": torch.randint(0, 16, (n, 2, 6)),
            "labels": torch.randint(0, 16, (n, 6, 2)),
        },
    ),
    "mimi": Entry(built("MimiModel", **_MIMI), lambda n: {"input_values": torch.randn(n, 1, 64)}),
}
