"""A family of peft is a kind of adapter in its registry, on a small decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import peft
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
from torch import nn

from benchmarks.conformance.libraries.entries import Families, Member, WithLoss, first_that_runs
from tests.zoo.entry import LENGTH, TOKENS, Entry, causal

SMALL: dict[str, Any] = {
    "r": 4, "group_size": 4, "num_virtual_tokens": 3, "num_tasks": 3, "total_step": 10, "adapter_len": 3,
    "adapter_layers": 1, "block_size": 4, "n_tasks": 3,
    "token_indices": [0, 1, 2], "encoder_hidden_size": 16, "n_frequency": 20, "num_vectors": 8,
    "vector_length": 8, "n_skills": 2, "n_splits": 2, "gralora_k": 2, "boft_block_size": 4,
    "oft_block_size": 4, "cpt_token_ids": [1, 2, 3], "cpt_tokens_type_mask": [1, 2, 3], "cpt_mask": [1, 1, 1],
}  # fmt: skip
"""Sizes for a small model, by the name of the setting."""
LAYERS: tuple[dict[str, Any], ...] = (
    {},  # what the adapter itself chooses for a llama
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
)
"""What the adapter is put on."""


def families() -> Families:
    """All kinds that the registry has."""
    return {str(kind.value).lower(): partial(_smallest, kind) for kind in CONFIGS}


def _smallest(kind: Any) -> Member:
    return first_that_runs(_entries(kind))


def _entries(kind: Any) -> Iterator[tuple[str, Entry]]:
    fields = {field.name for field in dataclasses.fields(CONFIGS[kind])}
    small = {name: value for name, value in SMALL.items() if name in fields}
    for sizes in (small, {}):
        for layers in LAYERS:
            settings = {**sizes, **{k: v for k, v in layers.items() if k in fields}}
            yield (
                f"llama with {kind.value.lower()}",
                Entry(partial(_build, kind, settings), partial(_inputs, kind)),
            )


def _build(kind: Any, settings: dict[str, Any]) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=TOKENS, **sizes))
    adapter = CONFIGS[kind](task_type="CAUSAL_LM", **settings)
    return WithLoss(peft.get_peft_model(model, adapter))


def _inputs(kind: Any, batch: int) -> dict[str, Any]:
    tasks = (
        {"task_ids": torch.randint(0, 3, (batch,))}
        if kind.value in ("POLY", "MULTITASK_PROMPT_TUNING")
        else {}
    )
    return {**causal(batch), "attention_mask": torch.ones(batch, LENGTH, dtype=torch.long), **tasks}
