"""Decoders with a mixture of experts."""

from __future__ import annotations

from tests.zoo.entry import TOKENS, Entry, built, causal, masked
from tests.zoo.sizes import EXPERTS, GROUPED, TEXT

_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_FULL = {**EXPERTS, "num_key_value_heads": 4}
_DBRX = {
    "vocab_size": TOKENS, "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    "output_router_logits": True,
}  # fmt: skip

MIXTURES: dict[str, Entry] = {
    "qwen3_moe": Entry(
        built(
            "Qwen3MoeForCausalLM",
            **EXPERTS,
            head_dim=8,
            num_experts=4,
            moe_intermediate_size=8,
            output_router_logits=True,
        ),
        masked,
    ),
    "phimoe": Entry(
        built("PhimoeForCausalLM", **EXPERTS, num_local_experts=4, output_router_logits=True), causal
    ),
    "granitemoe": Entry(
        built("GraniteMoeForCausalLM", **EXPERTS, num_local_experts=4, output_router_logits=True), causal
    ),
    "granitemoeshared": Entry(
        built(
            "GraniteMoeSharedForCausalLM",
            **EXPERTS,
            num_local_experts=4,
            shared_intermediate_size=8,
            output_router_logits=True,
        ),
        causal,
    ),
    "granitemoehybrid": Entry(
        built(
            "GraniteMoeHybridForCausalLM",
            **EXPERTS,
            num_local_experts=4,
            shared_intermediate_size=8,
            layer_types=["mamba", "attention"],
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=2,
            mamba_d_state=4,
            mamba_chunk_size=4,
            output_router_logits=True,
        ),
        causal,
    ),
    "jetmoe": Entry(
        built(
            "JetMoeForCausalLM",
            **{**TEXT, "num_key_value_heads": 2},
            kv_channels=8,
            num_local_experts=4,
            num_experts_per_tok=1,
            output_router_logits=True,
        ),
        causal,
    ),
    "dbrx": Entry(built("DbrxForCausalLM", **_DBRX), causal),
    "deepseek_v2": Entry(built("DeepseekV2ForCausalLM", **_FULL, **_LATENT, **_ROUTED), causal),
    "glm4_moe": Entry(built("Glm4MoeForCausalLM", **EXPERTS, **_ROUTED, head_dim=8), masked),
    "dots1": Entry(built("Dots1ForCausalLM", **EXPERTS, **_ROUTED, head_dim=8), causal),
    "ernie4_5_moe": Entry(
        built(
            "Ernie4_5_MoeForCausalLM",
            **GROUPED,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=8,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            experts_implementation="batched_mm",
        ),
        causal,
    ),
    "flex_olmo": Entry(
        built("FlexOlmoForCausalLM", **EXPERTS, num_experts=4, output_router_logits=True), causal
    ),
    "minimax": Entry(
        built(
            "MiniMaxForCausalLM",
            **EXPERTS,
            head_dim=8,
            num_local_experts=4,
            block_size=4,
            layer_types=["linear_attention", "full_attention"],
            output_router_logits=True,
        ),
        causal,
    ),
    "minimax_m2": Entry(
        built("MiniMaxM2ForCausalLM", **EXPERTS, head_dim=8, num_local_experts=4, output_router_logits=True),
        causal,
    ),
    "llama4_text": Entry(
        built(
            "Llama4ForCausalLM",
            **{**EXPERTS, "num_experts_per_tok": 1},
            head_dim=8,
            num_local_experts=4,
            intermediate_size_mlp=24,
            attention_chunk_size=4,
        ),
        causal,
    ),
    "hunyuan_v1_moe": Entry(
        built(
            "HunYuanMoEV1ForCausalLM",
            **GROUPED,
            head_dim=8,
            num_experts=4,
            moe_topk=2,
            experts_implementation="batched_mm",
        ),
        causal,
    ),
    "lfm2_moe": Entry(
        built(
            "Lfm2MoeForCausalLM",
            **EXPERTS,
            num_experts=4,
            moe_intermediate_size=8,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"],
        ),
        causal,
    ),
    "mixtral_eager": Entry(
        built("MixtralForCausalLM", **GROUPED, num_local_experts=4, experts_implementation="eager"), causal
    ),
}
