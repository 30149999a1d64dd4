"""Images with text, speech, time series, decisions."""

from __future__ import annotations

from functools import partial

import torch
import transformers as hf
from torch import nn

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, pairs, pixels, tokens
from tests.zoo.sizes import GROUPED, IMAGE, SEQ2SEQ, TEXT


def _siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE))


def _blip() -> nn.Module:
    config = hf.BlipConfig(
        text_config={**TEXT, "encoder_hidden_size": 16},
        vision_config=IMAGE,
        projection_dim=8,
        image_text_hidden_size=8,
    )
    return hf.BlipForConditionalGeneration(config)


def _caption(batch: int) -> Inputs:
    return {**pixels(batch), "input_ids": tokens(batch), "labels": labels(batch)}


def _altclip() -> nn.Module:
    return hf.AltCLIPModel(
        hf.AltCLIPConfig(text_config={**TEXT, "project_dim": 8}, vision_config=IMAGE, projection_dim=8)
    )


def _chinese_clip() -> nn.Module:
    return hf.ChineseCLIPModel(hf.ChineseCLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8))


def _vilt() -> nn.Module:
    config = hf.ViltConfig(**{**IMAGE, **TEXT}, max_image_length=-1, num_labels=3)
    return hf.ViltForQuestionAnswering(config)


def _questions(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), **pixels(batch), "labels": torch.rand(batch, 3)}


def _flava() -> nn.Module:
    config = hf.FlavaConfig(
        image_config=IMAGE, text_config=TEXT, multimodal_config={**IMAGE}, hidden_size=16, projection_dim=8
    )
    return hf.FlavaModel(config)


def _vision_text(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), **pixels(batch)}


def _git() -> nn.Module:
    return hf.GitForCausalLM(hf.GitConfig(**TEXT, vision_config=IMAGE))


def _llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**IMAGE), text_config=hf.LlamaConfig(**GROUPED),
        image_token_index=3,
        image_seq_length=4, vision_feature_layer=-1,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def _with_images(batch: int) -> Inputs:
    """Four places for patches in each text."""
    ids = torch.randint(4, TOKENS, (batch, 8))
    ids[:, 1:5] = 3
    return {**pixels(batch), "input_ids": ids, "labels": labels(batch, 8)}


def _vision_encoder_decoder() -> nn.Module:
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**IMAGE), hf.GPT2Config(
            vocab_size=TOKENS, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2,
            add_cross_attention=True,
        ), pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return hf.VisionEncoderDecoderModel(config)


def _captions(batch: int) -> Inputs:
    return {**pixels(batch), "labels": labels(batch)}


_SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "pad_token_id": 0,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.1, "ctc_loss_reduction": "mean",
}  # fmt: skip


def _speech(batch: int) -> Inputs:
    made = torch.randint(1, 12, (batch, 3))
    made[-1, 2:] = -100
    return {"input_values": torch.randn(batch, 60), "labels": made}


def _speech_classes(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 60), "labels": torch.randint(0, 2, (batch,))}


def _whisper() -> nn.Module:
    sizes = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    config = hf.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=10, max_target_positions=16)
    return hf.WhisperForConditionalGeneration(config)


def _mel(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 20), "labels": labels(batch)}


def _speech_to_text() -> nn.Module:
    sizes = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    config = hf.Speech2TextConfig(
        **sizes, input_feat_per_channel=8, max_source_positions=20, max_target_positions=16, conv_channels=8,
        num_conv_layers=2,
    )  # fmt: skip
    return hf.Speech2TextForConditionalGeneration(config)


def _filters(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 20, 8), "labels": labels(batch)}


def _ast() -> nn.Module:
    sizes = {k: v for k, v in IMAGE.items() if k != "image_size"}
    config = hf.ASTConfig(
        **{**sizes, "patch_size": 4}, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8
    )
    return hf.ASTForAudioClassification(config)


def _spectrum(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 16, 8), "labels": torch.randint(0, 2, (batch,))}


_SERIES = {
    "prediction_length": 3, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def _series(batch: int, future: int = 3) -> Inputs:
    past = 8
    return {
        "past_values": torch.rand(batch, past), "past_time_features": torch.rand(batch, past, 1),
        "past_observed_mask": torch.ones(batch, past), "future_values": torch.rand(batch, future),
        "future_time_features": torch.rand(batch, future, 1),
    }  # fmt: skip


def _patchtst() -> nn.Module:
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, ffn_dim=24,
        num_hidden_layers=2, num_attention_heads=2, prediction_length=4,
    )  # fmt: skip
    return hf.PatchTSTForPrediction(config)


def _channels(batch: int) -> Inputs:
    return {"past_values": torch.rand(batch, 16, 2), "future_values": torch.rand(batch, 4, 2)}


def _patchtsmixer() -> nn.Module:
    config = hf.PatchTSMixerConfig(
        context_length=16, patch_length=4, patch_stride=4, num_input_channels=2, d_model=8, num_layers=2,
        prediction_length=4,
    )  # fmt: skip
    return hf.PatchTSMixerForPrediction(config)


def _decision() -> nn.Module:
    config = hf.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=16, max_ep_len=32, n_layer=2, n_head=2, n_positions=64
    )
    return hf.DecisionTransformerModel(config)


def _episodes(batch: int) -> Inputs:
    steps = 4
    return {
        "states": torch.randn(batch, steps, 5), "actions": torch.randn(batch, steps, 3),
        "rewards": torch.randn(batch, steps, 1), "returns_to_go": torch.randn(batch, steps, 1),
        "timesteps": torch.arange(steps).repeat(batch, 1), "attention_mask": mask(batch, steps),
    }  # fmt: skip


def _perceiver() -> nn.Module:
    config = hf.PerceiverConfig(
        vocab_size=TOKENS, d_model=16, d_latents=16, num_latents=4, num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=LENGTH,
        qk_channels=16, v_channels=16,
    )  # fmt: skip
    return hf.PerceiverForMaskedLM(config)


def _perceiver_text(batch: int) -> Inputs:
    return {"inputs": tokens(batch), "attention_mask": mask(batch), "labels": labels(batch)}


def _encodec() -> nn.Module:
    config = hf.EncodecConfig(
        num_filters=4, hidden_size=8, codebook_size=16, codebook_dim=8, upsampling_ratios=[2, 2],
        num_lstm_layers=1,
        use_causal_conv=True,
    )  # fmt: skip
    return hf.EncodecModel(config)


def _audio(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 1, 64)}


MULTIMODAL: dict[str, Entry] = {
    "siglip": Entry(_siglip, pairs),
    "blip": Entry(_blip, _caption),
    "altclip": Entry(_altclip, pairs),
    "chinese_clip": Entry(_chinese_clip, pairs),
    "vilt": Entry(_vilt, _questions),
    "flava": Entry(_flava, _vision_text),
    "git": Entry(_git, _caption),
    "llava": Entry(_llava, _with_images),
    "vit_to_gpt2": Entry(_vision_encoder_decoder, _captions),
}

SPEECH: dict[str, Entry] = {
    "wav2vec2": Entry(built("Wav2Vec2ForCTC", **_SPEECH), _speech),
    "wav2vec2_classes": Entry(built("Wav2Vec2ForSequenceClassification", **_SPEECH), _speech_classes),
    "hubert": Entry(built("HubertForCTC", **_SPEECH), _speech),
    "wavlm": Entry(built("WavLMForCTC", **_SPEECH), _speech),
    "whisper": Entry(_whisper, _mel),
    "speech_to_text": Entry(_speech_to_text, _filters),
    "ast": Entry(_ast, _spectrum),
    "encodec": Entry(_encodec, _audio),
}

OTHERS: dict[str, Entry] = {
    "time_series_transformer": Entry(
        built("TimeSeriesTransformerForPrediction", **_SERIES),
        _series,
    ),
    "informer": Entry(  # of few keys it may sample one alone: then its queries are ranked by rounding errors
        built("InformerForPrediction", **(_SERIES | {"prediction_length": 7})),
        partial(_series, future=7),
    ),
    "autoformer": Entry(  # exported it has masks, for which it takes a head to be as wide as a series is long
        built(
            "AutoformerForPrediction",
            **(_SERIES | {"d_model": 12}),
            moving_average=3,
            label_length=3,
        ),
        _series,
    ),
    "patchtst": Entry(_patchtst, _channels),
    "patchtsmixer": Entry(_patchtsmixer, _channels),
    "decision_transformer": Entry(_decision, _episodes),
    "perceiver": Entry(_perceiver, _perceiver_text),
}
