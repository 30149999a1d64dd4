"""Encoders of text, and models that turn one text into another."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, masked, tokens
from tests.zoo.sizes import SEQ2SEQ, TEXT


def _classes(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch), "attention_mask": mask(batch), "labels": torch.randint(0, 2, (batch,))
    }  # fmt: skip


def _spans(batch: int) -> Inputs:
    ends = torch.randint(0, LENGTH, (2, batch))
    return {"input_ids": tokens(batch), "start_positions": ends[0], "end_positions": ends[1]}


def _boxes(batch: int) -> Inputs:
    corner = torch.randint(0, 500, (batch, LENGTH, 2))
    return {**masked(batch), "bbox": torch.cat([corner, corner + 100], -1)}


def _long(batch: int) -> Inputs:
    made = mask(batch, 16)
    return {"input_ids": tokens(batch, 16), "attention_mask": made, "labels": labels(batch, 16)}


def _distilbert() -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=TOKENS, dim=16, hidden_dim=24, n_layers=2, n_heads=2, max_position_embeddings=32
    )
    return hf.DistilBertForMaskedLM(config)


def deberta() -> nn.Module:
    return _deberta("DebertaForMaskedLM")


def _deberta(model: str) -> nn.Module:
    return built(
        model, **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4,
        max_relative_positions=8, type_vocab_size=0,
    )()  # fmt: skip


def _funnel() -> nn.Module:
    config = hf.FunnelConfig(
        vocab_size=TOKENS,
        block_sizes=[1, 1],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
        num_decoder_layers=1,
    )
    return hf.FunnelForMaskedLM(config)


def _mobilebert() -> nn.Module:
    config = hf.MobileBertConfig(
        **TEXT, embedding_size=8, true_hidden_size=8, intra_bottleneck_size=8, num_feedforward_networks=2
    )
    return hf.MobileBertForMaskedLM(config)


def _canine() -> nn.Module:
    config = hf.CanineConfig(
        **{k: v for k, v in TEXT.items() if k != "vocab_size"}, downsampling_rate=2,
        local_transformer_stride=4,
        num_hash_functions=2, num_hash_buckets=8, upsampling_kernel_size=2,
    )  # fmt: skip
    return hf.CanineForTokenClassification(config)


def _token_classes(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch, 8), "attention_mask": mask(batch, 8),
        "labels": torch.randint(0, 2, (batch, 8)),
    }  # fmt: skip


def _xlm() -> nn.Module:
    config = hf.XLMConfig(
        vocab_size=TOKENS, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=32, n_langs=1,
        pad_index=0, bos_index=1, eos_index=2,
    )  # fmt: skip
    return hf.XLMWithLMHeadModel(config)


def _flaubert() -> nn.Module:
    config = hf.FlaubertConfig(
        vocab_size=TOKENS, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=32, pad_index=0,
    )  # fmt: skip
    return hf.FlaubertWithLMHeadModel(config)


def _modernbert() -> nn.Module:
    config = hf.ModernBertConfig(
        **TEXT, cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2
    )
    return hf.ModernBertForMaskedLM(config)


def _big_bird(kind: str) -> nn.Module:
    config = hf.BigBirdConfig(**TEXT, attention_type=kind, block_size=2, num_random_blocks=1)
    return hf.BigBirdForMaskedLM(config)


def _t5(model: str, **more: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return built(model, vocab_size=TOKENS, decoder_start_token_id=0, **sizes, **more)()


def _led() -> nn.Module:
    sizes = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    config = hf.LEDConfig(
        **sizes,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
        attention_window=[4, 4],
    )
    return hf.LEDForConditionalGeneration(config)


def _prophetnet() -> nn.Module:
    config = hf.ProphetNetConfig(
        vocab_size=TOKENS, hidden_size=16, encoder_ffn_dim=24, num_encoder_layers=2,
        num_encoder_attention_heads=2, decoder_ffn_dim=24, num_decoder_layers=2,
        num_decoder_attention_heads=2,
        max_position_embeddings=32, decoder_start_token_id=2,
    )  # fmt: skip
    return hf.ProphetNetForConditionalGeneration(config)


def _bert_to_bert() -> nn.Module:
    encoder = hf.BertConfig(**TEXT)
    decoder = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, pad_token_id=0, decoder_start_token_id=1
    )
    return hf.EncoderDecoderModel(config)


ENCODERS: dict[str, Entry] = {
    "roberta": Entry(built("RobertaForSequenceClassification", **TEXT), _classes),
    "electra": Entry(built("ElectraForMaskedLM", **TEXT, embedding_size=8), masked),
    "albert": Entry(built("AlbertForMaskedLM", **TEXT, embedding_size=8), masked),
    "distilbert": Entry(_distilbert, masked),
    "deberta_v2": Entry(partial(_deberta, "DebertaV2ForMaskedLM"), masked),
    "longformer": Entry(built("LongformerForMaskedLM", **TEXT, attention_window=4), _long),
    "big_bird": Entry(partial(_big_bird, "original_full"), _long),
    "big_bird_sparse": Entry(partial(_big_bird, "block_sparse"), _long),
    "funnel": Entry(_funnel, masked),
    "mobilebert": Entry(_mobilebert, masked),
    "convbert": Entry(
        built("ConvBertForMaskedLM", **TEXT, embedding_size=16, head_ratio=1),
        masked,
    ),
    "squeezebert": Entry(built("SqueezeBertForMaskedLM", **TEXT, embedding_size=16), masked),
    "layoutlm": Entry(built("LayoutLMForMaskedLM", **TEXT), _boxes),
    "mpnet": Entry(built("MPNetForMaskedLM", **TEXT), masked),
    "camembert": Entry(built("CamembertForQuestionAnswering", **TEXT), _spans),
    "rembert": Entry(
        built(
            "RemBertForMaskedLM",
            **TEXT,
            input_embedding_size=8,
            output_embedding_size=8,
        ),
        masked,
    ),
    "roformer": Entry(built("RoFormerForMaskedLM", **TEXT), masked),
    "fnet": Entry(
        built("FNetForMaskedLM", **TEXT),
        lambda n: {"input_ids": tokens(n), "labels": labels(n)},
    ),
    "nystromformer": Entry(
        built(
            "NystromformerForMaskedLM",
            **TEXT,
            num_landmarks=6,
            segment_means_seq_len=6,
        ),
        masked,
    ),
    "modernbert": Entry(_modernbert, masked),
    "canine": Entry(_canine, _token_classes),
    "xlm": Entry(_xlm, masked),
    "flaubert": Entry(_flaubert, masked),
}

SEQ2SEQS: dict[str, Entry] = {
    "bart": Entry(built("BartForConditionalGeneration", **SEQ2SEQ), masked),
    "pegasus": Entry(built("PegasusForConditionalGeneration", **SEQ2SEQ), masked),
    "mbart": Entry(built("MBartForConditionalGeneration", **SEQ2SEQ), masked),
    "marian": Entry(built("MarianMTModel", **SEQ2SEQ), masked),
    "m2m_100": Entry(
        built(
            "M2M100ForConditionalGeneration",
            **SEQ2SEQ,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        masked,
    ),
    "m2m_100_layerdrop": Entry(  # skips layers by random numbers
        built("M2M100ForConditionalGeneration", **SEQ2SEQ), masked
    ),
    "blenderbot": Entry(built("BlenderbotForConditionalGeneration", **SEQ2SEQ), masked),
    "led": Entry(_led, masked),
    "mt5": Entry(partial(_t5, "MT5ForConditionalGeneration"), masked),
    "long_t5": Entry(partial(_t5, "LongT5ForConditionalGeneration", local_radius=3), masked),
    "switch_transformers": Entry(
        partial(
            _t5,
            "SwitchTransformersForConditionalGeneration",
            num_experts=3,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_decoder_layers=2,
        ),
        masked,
    ),
    "prophetnet": Entry(_prophetnet, masked),
    "bert_to_bert": Entry(_bert_to_bert, masked),
}
