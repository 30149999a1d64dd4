"""Configurations of transformers made small by the names of their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from transformers import PreTrainedConfig

from tests.zoo.entry import TOKENS
from tests.zoo.sizes import HGNET

WIDTH, HEAD, LAYERS, IMAGE = 32, 8, 2, 32
TOKEN_IDS = {"pad": 0, "bos": 1, "eos": 2, "image": 3, "video": 4, "audio": 5}
"""Ids with a meaning; any other lies between these and the ids that texts are drawn from."""
FIRST_WORD = 16

_RULES = (
    (r"(token_id|token_index|_start_id|_end_id|_id)$", None),
    (r"vocab_size", TOKENS),
    (r"(experts_per_tok|moe_topk|top_k_experts|moe_top_k)$", 2),
    (r"(n_group|topk_group|num_groups|topk_groups)$", 1),
    (r"experts$", 4),
    (r"index_topk", 4),
    (r"(sliding_window|sliding_window_size|chunk_size|context_size)$", 4),
    (r"(num_position_embeddings|num_patches)$", 16),
    (r"posemb_grid_size|pos_emb_(height|width)", 4),
    (r"max_.*positions?(_embeddings)?$|(context|seq)_length$|max_(source|target)_positions|seq_len$", 64),
    (r"(image|img|crop)_size$|^resolution$", IMAGE),
    (r"^patch_size$", 8),
    (r"^window_size$", 2),
    (r"queries|num_query_tokens|num_latents", 6),
    (r"mel_bins|mel_dim", 16),
    (r"codebook_size|num_embeddings", 16),
    (r"heads?$|n_heads$|heads_per_stage$", 4),
    (r"(first_k_dense|num_first|num_last).*", 1),
    (r"(layers|depth|num_blocks|n_layers?|num_resnets)$", LAYERS),
    (r"lora_rank$|rank$", 8),
    (r"(rope_head_dim)$", 4),
    (r"(nope_head_dim)$", 4),
    (r"(head_dim|dim_head|d_kv|head_size)$", HEAD),
    (r"bins$|points$|buckets$", 8),
    (r"(intermediate|ffn|mlp|feed_?forward|d_ff|dim_ff|ff_dim).*", 48),
    (r"(hidden|embed|dim|d_model|n_embd|width|channel|filters|planes|size)", WIDTH),
)
"""Patterns of names and what is small for them, the first that is found in a name first."""


EXPERTS = {"experts_implementation": "batched_mm"}
PARTS: dict[str, dict[str, Any]] = {"hgnet_v2": HGNET}
"""Parts of models whose sizes do not go by their names."""


def tiny(config: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of this class with two narrow layers; `own` has what a family cannot do without."""
    return config(**_sizes(config(), own))


def _sizes(default: PreTrainedConfig, own: dict[str, Any]) -> dict[str, Any]:
    """What is smaller than by default, and what a family itself asks for; parts of a model as dicts."""
    own = PARTS.get(default.model_type, {}) | own
    found: dict[str, Any] = dict(EXPERTS) if _has_experts(default) else {}
    for field in fields(type(default)):
        name, value = field.name, _default(default, field)
        if isinstance(value, PreTrainedConfig):
            part = own.get(name, {})
            sizes = _sizes(value, part)
            found |= EXPERTS if EXPERTS.items() <= sizes.items() else {}  # what the entire says counts
            found[name] = {"model_type": value.model_type, **sizes}
        elif name not in own and (small := _small(name, value)) != value:
            found[name] = small
    if _is_grouped(default) and "num_key_value_heads" not in own:
        found["num_key_value_heads"] = min(2, vars(default)["num_key_value_heads"])
    if "mrope_section" in getattr(default, "ignore_keys_at_rope_validation", ()):
        known = default.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0}
        found["rope_parameters"] = known | {"mrope_section": [2, 1, 1]}
    parts = {name for name, value in found.items() if isinstance(value, dict) and "model_type" in value}
    return found | {name: value for name, value in own.items() if name not in parts}


def _default(config: PreTrainedConfig, field: Field[Any]) -> Any:
    """What a configuration has; where its layers differ it gives no answer, but its class does."""
    try:
        return getattr(config, field.name, None)
    except Exception:
        return field.default


def _is_grouped(config: PreTrainedConfig) -> bool:
    """Whether heads of keys serve several of queries."""
    known = vars(config)
    return (known.get("num_key_value_heads") or 1e9) < known.get("num_attention_heads", 0)


def _has_experts(config: PreTrainedConfig) -> bool:
    return any(word in field.name for field in fields(type(config)) for word in ("experts", "moe"))


def _small(name: str, value: Any) -> Any:
    """The value, or what is small for its name."""
    if isinstance(value, bool) or value is None:
        return value
    if name == "layer_types" and isinstance(value, Sequence):
        return _kinds(list(value))
    if re.search(r"layerdrop|mask_(time|feature)_prob", name):
        return 0.0
    if isinstance(value, int):
        return _number(name, value)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return type(value)(_numbers(name, list(value)))
    return value


def _kinds(layers: list[str]) -> list[str]:
    """One layer of each of two kinds, if there are two."""
    kinds = list(dict.fromkeys(layers))
    return (kinds * LAYERS)[:LAYERS]


def _number(name: str, value: int) -> int:
    for pattern, small in _RULES:
        if re.search(pattern, name):
            return _token_id(name, value) if small is None else min(value, small)
    return value


def _token_id(name: str, value: int) -> int:
    """An id of its own for each meaning."""
    known = re.sub(r"_token_(id|index)$", "", name)
    if known in TOKEN_IDS:
        return TOKEN_IDS[known]
    return value if value < FIRST_WORD else 6 + sum(map(ord, name)) % (FIRST_WORD - 6)


def _numbers(name: str, values: list[int]) -> list[int]:
    """Of several stages: ratios of sizes stay, each has one layer; places among layers are the last."""
    if re.search(r"depths|blocks_per_stage|num_blocks|stage_num|layers$", name):
        return [1] * len(values)
    if re.search(r"indexes|indices|hook_ids|look_", name):
        return [LAYERS - 1]
    if re.search(r"heads", name):
        return [max(1, value // min(values)) for value in values]
    if re.search(r"dim|hidden|channels|sizes?$|planes|filters", name) and min(values) >= 32:
        unit = 12 if all(v % 96 == 0 for v in values) else 32 if all(v % 256 == 0 for v in values) else 0
        return [value // (unit or min(values) // 8) for value in values]
    return values
