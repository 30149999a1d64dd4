"""The newest decoders: latent and indexed attention, states, experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.zoo.entry import TOKENS, Entry, Inputs, built, causal
from tests.zoo.sizes import GROUPED

_SIZES = {
    **GROUPED, "head_dim": 8, "sliding_window": 4, "d_model": 16, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8,
    "v_head_dim": 8, "swa_head_dim": 8, "swa_v_head_dim": 8, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "n_shared_experts": 1, "num_shared_experts": 1, "top_k_experts": 2, "index_topk": 4,
    "index_head_dim": 8, "index_n_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "vocab_size_per_layer_input": TOKENS,
    "hidden_size_per_layer_input": 4, "num_layers": 2, "d_ff": 24,
}  # fmt: skip
"""Small values of what most configurations call by these names."""

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_THEN_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}


def small(model: str, **own: Any) -> Callable[[], nn.Module]:
    """Builds a model of this class with those sizes that its configuration has, and some of its own."""

    def build() -> nn.Module:
        known = inspect.signature(getattr(transformers, model).config_class.__init__).parameters
        sizes = {name: size for name, size in _SIZES.items() if name in known}
        return built(model, **{"experts_implementation": "batched_mm", **sizes, **own})()

    return build


def _decoder(model: str, inputs: Callable[[int], Inputs] = causal, **own: Any) -> Entry:
    return Entry(small(model, **own), inputs)


NEWEST: dict[str, Entry] = {
    "cwm": _decoder("CwmForCausalLM"),
    "jais2": _decoder("Jais2ForCausalLM"),
    "ministral3": _decoder("Ministral3ForCausalLM"),
    "granite_swa": _decoder("GraniteSWAForCausalLM"),
    "gpt_neox_japanese": _decoder("GPTNeoXJapaneseForCausalLM"),
    "hyperclovax": _decoder("HyperCLOVAXForCausalLM"),
    "gemma4_text": _decoder("Gemma4ForCausalLM"),
    "hrm_text": _decoder("HrmTextForCausalLM"),
    "beam": _decoder("BeamForCausalLM"),
    "minicpm3": _decoder("MiniCPM3ForCausalLM", num_key_value_heads=4),
    "youtu": _decoder("YoutuForCausalLM", num_key_value_heads=4),
    "emu3_text": _decoder("Emu3ForCausalLM"),
    "lfm3": _decoder(
        "Lfm3ForCausalLM", layer_types=["conv", "full_attention", "sliding_attention"], num_hidden_layers=3
    ),
    "xlstm": _decoder(  # with a cache eager cannot train it: states change that the backward needs
        "xLSTMForCausalLM",
        use_cache=False,
        num_heads=2,
        hidden_size=64,
        mode="train",
        chunk_size=3,
        ffn_round_up_to_multiple_of=8,
    ),
    "kimi_linear": _decoder(
        "KimiLinearForCausalLM",
        num_key_value_heads=4,
        linear_head_dim=8,
        linear_num_heads=2,
        **_LINEAR,
        **_DENSE_THEN_SPARSE,
    ),
    "bailing_hybrid": _decoder(
        "BailingHybridForCausalLM", num_key_value_heads=4, **_LINEAR, **_DENSE_THEN_SPARSE
    ),
    "qwen3_5_moe": _decoder("Qwen3_5MoeForCausalLM", **_LINEAR),
    "nemotron_h": _decoder(
        "NemotronHForCausalLM",
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        use_mamba_kernels=False,
        ssm_state_size=4,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=4,
        moe_shared_expert_intermediate_size=8,
    ),
    "zaya": _decoder("ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=8),
    "deepseek_v32": _decoder("DeepseekV32ForCausalLM", num_key_value_heads=4),
    "deepseek_v4": _decoder("DeepseekV4ForCausalLM"),
    "glm_moe_dsa": _decoder("GlmMoeDsaForCausalLM", num_key_value_heads=4),
    "glm4_moe_lite": _decoder("Glm4MoeLiteForCausalLM", num_key_value_heads=4),
    "mistral4": _decoder("Mistral4ForCausalLM", num_key_value_heads=4),
    "axk1": _decoder("AXK1ForCausalLM", num_key_value_heads=4),
    "mimo_v2_flash": _decoder("MiMoV2FlashForCausalLM"),
    "solar_open": _decoder("SolarOpenForCausalLM"),
    "exaone_moe": _decoder("ExaoneMoeForCausalLM"),
    "afmoe": _decoder("AfmoeForCausalLM"),
    "aria_text": _decoder("AriaTextForCausalLM"),
    "laguna": _decoder("LagunaForCausalLM"),
    "hy_v3": _decoder("HYV3ForCausalLM"),
    "flint": _decoder("FlintForCausalLM"),
    "mellum": _decoder("MellumForCausalLM"),
    "cohere2_moe": _decoder("Cohere2MoeForCausalLM"),
    "granitemoe_swa": _decoder("GraniteMoeSWAForCausalLM"),
    "kolibri1": _decoder("Kolibri1ForCausalLM"),
    "longcat_flash": _decoder(
        "LongcatFlashForCausalLM",
        num_key_value_heads=4,
        head_dim=4,
        ffn_hidden_size=24,
        expert_ffn_hidden_size=8,
        zero_expert_num=2,
        moe_topk=2,
    ),
}
