"""More encoders of text, documents, tables and proteins."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.entry import LENGTH, TOKENS, Entry, Inputs, built, labels, mask, masked, pixels, tokens
from tests.zoo.sizes import GROUPED, TEXT

_LONG = 16
_SMALL_BOXES = {"max_2d_position_embeddings": 100}


def _long(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch, _LONG),
        "attention_mask": mask(batch, _LONG),
        "labels": labels(batch, _LONG),
    }


def _classes(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch), "attention_mask": mask(batch), "labels": torch.randint(0, 2, (batch,))
    }  # fmt: skip


def _spans(batch: int) -> Inputs:
    ends = torch.randint(0, LENGTH, (2, batch))
    return {"input_ids": tokens(batch), "start_positions": ends[0], "end_positions": ends[1]}


def _corners(batch: int, highest: int = 50) -> Tensor:
    corner = torch.randint(0, highest, (batch, LENGTH, 2))
    return torch.cat([corner, corner + highest // 2], -1)


def _page(batch: int) -> Inputs:
    return {**masked(batch), "bbox": _corners(batch), "labels": torch.randint(0, 2, (batch, LENGTH))}


def _page_image(batch: int) -> Inputs:
    return {**_page(batch), **pixels(batch)}


def _markup(batch: int) -> Inputs:
    paths = torch.randint(0, 10, (2, batch, LENGTH, 5))
    return {**_spans(batch), "xpath_tags_seq": paths[0], "xpath_subs_seq": paths[1]}


def _table(batch: int) -> Inputs:
    """Each cell's row and column, and in which cells the answer is."""
    kinds = torch.zeros(batch, LENGTH, 7, dtype=torch.long)
    kinds[:, 2:, 0] = 1
    kinds[:, 2:, 1] = torch.tensor([1, 1, 2, 2])
    kinds[:, 2:, 2] = torch.tensor([1, 2, 1, 2])
    return {
        "input_ids": tokens(batch),
        "attention_mask": mask(batch),
        "token_type_ids": kinds,
        "labels": torch.randint(0, 2, (batch,)),
    }


def _entities(batch: int) -> Inputs:
    return {
        **masked(batch), "entity_ids": torch.randint(1, 10, (batch, 2)),
        "entity_attention_mask": torch.ones(batch, 2, dtype=torch.long),
        "entity_position_ids": torch.tensor([[[1, 2, -1], [3, -1, -1]]] * batch),
        "entity_labels": torch.randint(0, 10, (batch, 2)),
    }  # fmt: skip


def _protein(batch: int) -> Inputs:
    made = masked(batch)
    made["input_ids"][1, 2] = 32  # the mask token
    return made


def _relevance(batch: int) -> Inputs:
    """Scores of pairs, regressed."""
    return {"input_ids": tokens(batch), "attention_mask": mask(batch), "labels": torch.rand(batch)}


def _choices(batch: int) -> Inputs:
    made = torch.randint(3, TOKENS, (batch, 3, LENGTH))
    return {"input_ids": made, "labels": torch.randint(0, 3, (batch,))}


TEXTS: dict[str, Entry] = {
    "xlm_roberta": Entry(
        built("XLMRobertaForTokenClassification", **TEXT),
        lambda n: {"input_ids": tokens(n), "labels": torch.randint(0, 2, (n, LENGTH))},
    ),
    "xlm_roberta_xl": Entry(built("XLMRobertaXLForMaskedLM", **TEXT), masked),
    "roberta_prelayernorm": Entry(built("RobertaPreLayerNormForMaskedLM", **TEXT), masked),
    "bert_regression": Entry(built("BertForSequenceClassification", **TEXT, num_labels=1), _relevance),
    "bert_choices": Entry(built("BertForMultipleChoice", **TEXT), _choices),
    "bert_two_losses": Entry(
        built("BertForPreTraining", **TEXT),
        lambda n: {**masked(n), "next_sentence_label": torch.randint(0, 2, (n,))},
    ),
    "data2vec_text": Entry(built("Data2VecTextForMaskedLM", **TEXT), masked),
    "megatron_bert": Entry(built("MegatronBertForMaskedLM", **TEXT), masked),
    "ernie": Entry(built("ErnieForMaskedLM", **TEXT, use_task_id=True), masked),
    "bert_generation": Entry(built("BertGenerationDecoder", **TEXT, is_decoder=True), masked),
    "esm": Entry(
        built(
            "EsmForMaskedLM",
            **TEXT,
            mask_token_id=32,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
        ),
        _protein,
    ),
    "ibert": Entry(built("IBertForMaskedLM", **TEXT), masked),
    "luke": Entry(built("LukeForMaskedLM", **TEXT, entity_vocab_size=10, entity_emb_size=8), _entities),
    "markuplm": Entry(
        built(
            "MarkupLMForQuestionAnswering",
            **TEXT,
            max_depth=5,
            xpath_unit_hidden_size=4,
            max_xpath_tag_unit_embeddings=12,
            max_xpath_subs_unit_embeddings=12,
            tag_pad_id=10,
            subs_pad_id=10,
        ),
        _markup,
    ),
    "layoutlmv3": Entry(
        built(
            "LayoutLMv3ForTokenClassification",
            **TEXT,
            **_SMALL_BOXES,
            coordinate_size=3,
            shape_size=2,
            input_size=16,
            patch_size=8,
        ),
        _page_image,
    ),
    "lilt": Entry(
        built(
            "LiltForTokenClassification",
            **{**TEXT, "hidden_size": 24},
            **_SMALL_BOXES,
            channel_shrink_ratio=2,
        ),
        _page,
    ),
    "bros": Entry(
        built("BrosForTokenClassification", **{**TEXT, "hidden_size": 64}),
        lambda n: {**_page(n), "bbox": _corners(n) / 100.0},
    ),
    "tapas": Entry(
        built(
            "TapasForSequenceClassification",
            **TEXT,
            max_num_rows=4,
            max_num_columns=4,
            type_vocab_sizes=[3, 4, 4, 2, 4, 4, 4],
        ),
        _table,
    ),
    "splinter": Entry(built("SplinterForQuestionAnswering", **TEXT, question_token_id=5), _spans),
    "xmod": Entry(
        built("XmodForMaskedLM", **TEXT, languages=["en_XX", "de_DE"], default_language="en_XX"), masked
    ),
    "nomic_bert": Entry(built("NomicBertForMaskedLM", **TEXT), masked),
    "gte": Entry(built("GteForMaskedLM", **TEXT), masked),
    "eurobert": Entry(built("EuroBertForMaskedLM", **GROUPED), masked),
    "jina_embeddings_v3": Entry(built("JinaEmbeddingsV3ForMaskedLM", **TEXT), masked),
    "modernbert_classes": Entry(
        built(
            "ModernBertForSequenceClassification",
            **TEXT,
            cls_token_id=1,
            sep_token_id=2,
            local_attention=4,
            classifier_pooling="mean",
        ),
        _classes,
    ),
    "llama_classes": Entry(built("LlamaForSequenceClassification", **GROUPED), _classes),
    "yoso": Entry(built("YosoForMaskedLM", **TEXT), masked),
    "mra": Entry(
        built("MraForMaskedLM", **{**TEXT, "max_position_embeddings": 64}, block_per_row=1),
        lambda n: {"input_ids": tokens(n, 32), "labels": labels(n, 32)},
    ),
    "roc_bert": Entry(
        built(
            "RoCBertForMaskedLM",
            **TEXT,
            pronunciation_vocab_size=12,
            shape_vocab_size=12,
            pronunciation_embed_dim=4,
            shape_embed_dim=4,
        ),
        lambda n: {
            **masked(n),
            "input_shape_ids": torch.randint(0, 12, (n, LENGTH)),
            "input_pronunciation_ids": torch.randint(0, 12, (n, LENGTH)),
        },
    ),
    "reformer": Entry(
        built(
            "ReformerForMaskedLM",
            vocab_size=TOKENS,
            hidden_size=16,
            attention_head_size=8,
            num_attention_heads=2,
            attn_layers=["local", "lsh"],
            axial_pos_shape=[4, 4],
            axial_pos_embds_dim=[8, 8],
            feed_forward_size=24,
            local_attn_chunk_length=4,
            lsh_attn_chunk_length=4,
            num_buckets=2,
            hash_seed=0,
            max_position_embeddings=16,
            pad_token_id=0,
        ),
        _long,
    ),
    "lxmert": Entry(
        built(
            "LxmertForQuestionAnswering",
            **TEXT,
            l_layers=1,
            x_layers=1,
            r_layers=1,
            visual_feat_dim=8,
            num_qa_labels=3,
        ),
        lambda n: {
            "input_ids": tokens(n),
            "visual_feats": torch.randn(n, 4, 8),
            "visual_pos": torch.rand(n, 4, 4),
            "labels": torch.randint(0, 3, (n,)),
        },
    ),
    "visual_bert": Entry(
        built("VisualBertForQuestionAnswering", **TEXT, visual_embedding_dim=8, num_labels=3),
        lambda n: {
            "input_ids": tokens(n),
            "attention_mask": mask(n),
            "visual_embeds": torch.randn(n, 4, 8),
            "visual_attention_mask": torch.ones(n, 4, dtype=torch.long),
            "labels": torch.softmax(torch.randn(n, 3), -1),
        },
    ),
    "dpr": Entry(built("DPRReader", **TEXT), lambda n: {"input_ids": tokens(n), "attention_mask": mask(n)}),
}
