"""Decoder-only language models of recent years: dense, and with states, convolutions, linear attention."""

from __future__ import annotations

from tests.zoo.entry import TOKENS, Entry, built, causal, masked
from tests.zoo.sizes import EXPERTS, GROUPED, TEXT

_HALVES = {"head_dim": 8}
_SLIDING = {"head_dim": 8, "sliding_window": 4}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR = {
    **_LAYERS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4,
}  # fmt: skip
_ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_ngroups": 2,
    "chunk_size": 4, "use_mamba_kernels": False, "adapter_rank": 4,
}  # fmt: skip
_GEMMA3N = {
    **GROUPED, **_SLIDING, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": TOKENS, "hidden_size_per_layer_input": 4, "altup_num_inputs": 2,
    "laurel_rank": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}  # fmt: skip


RECENT: dict[str, Entry] = {
    "gemma": Entry(built("GemmaForCausalLM", **GROUPED, **_HALVES), masked),
    "gemma3n_text": Entry(built("Gemma3nForCausalLM", **_GEMMA3N), causal),
    "vaultgemma": Entry(built("VaultGemmaForCausalLM", **GROUPED, **_SLIDING), causal),
    "cohere2": Entry(built("Cohere2ForCausalLM", **GROUPED, sliding_window=4), causal),
    "olmo2": Entry(built("Olmo2ForCausalLM", **GROUPED), masked),
    "olmo3": Entry(built("Olmo3ForCausalLM", **GROUPED, sliding_window=4), causal),
    "glm": Entry(built("GlmForCausalLM", **GROUPED, **_HALVES), masked),
    "glm4": Entry(built("Glm4ForCausalLM", **GROUPED, **_HALVES), causal),
    "exaone4": Entry(built("Exaone4ForCausalLM", **GROUPED, sliding_window=4), causal),
    "smollm3": Entry(built("SmolLM3ForCausalLM", **GROUPED), masked),
    "helium": Entry(built("HeliumForCausalLM", **GROUPED, head_dim=4), causal),
    "arcee": Entry(built("ArceeForCausalLM", **GROUPED), causal),
    "apertus": Entry(built("ApertusForCausalLM", **GROUPED), causal),
    "bitnet": Entry(built("BitNetForCausalLM", **GROUPED), causal),
    "seed_oss": Entry(built("SeedOssForCausalLM", **GROUPED, **_HALVES), causal),
    "ministral": Entry(built("MinistralForCausalLM", **GROUPED, **_SLIDING), masked),
    "ernie4_5": Entry(built("Ernie4_5ForCausalLM", **GROUPED), causal),
    "hunyuan_v1_dense": Entry(built("HunYuanDenseV1ForCausalLM", **GROUPED, **_HALVES), causal),
    "persimmon": Entry(built("PersimmonForCausalLM", **TEXT), masked),
    "diffllama": Entry(built("DiffLlamaForCausalLM", **GROUPED, **_HALVES), causal),
    "nanochat": Entry(built("NanoChatForCausalLM", **GROUPED), causal),
    "doge": Entry(built("DogeForCausalLM", **GROUPED), causal),
    "modernbert_decoder": Entry(
        built("ModernBertDecoderForCausalLM", **TEXT, cls_token_id=1, sep_token_id=2, local_attention=4),
        causal,
    ),
    "xglm": Entry(
        built(
            "XGLMForCausalLM",
            vocab_size=TOKENS,
            d_model=16,
            ffn_dim=24,
            num_layers=2,
            attention_heads=2,
            max_position_embeddings=32,
        ),
        masked,
    ),
    "biogpt": Entry(built("BioGptForCausalLM", **TEXT), masked),
    "openai_gpt": Entry(
        built("OpenAIGPTLMHeadModel", vocab_size=TOKENS, n_positions=32, n_embd=16, n_layer=2, n_head=2),
        causal,
    ),
    "falcon_alibi": Entry(
        built(
            "FalconForCausalLM",
            vocab_size=TOKENS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            alibi=True,
            bos_token_id=1,
            eos_token_id=2,
        ),
        masked,
    ),
    "falcon_mamba": Entry(
        built(
            "FalconMambaForCausalLM",
            vocab_size=TOKENS,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            time_step_rank=2,
        ),
        causal,
    ),
    "bamba": Entry(built("BambaForCausalLM", **GROUPED, **_MAMBA, attn_layer_indices=[1]), masked),
    "falcon_h1": Entry(built("FalconH1ForCausalLM", **GROUPED, **_MAMBA, mamba_d_ssm=32, head_dim=8), causal),
    "zamba": Entry(
        built(
            "ZambaForCausalLM",
            **{**GROUPED, "num_hidden_layers": 4},
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=2,
            use_mamba_kernels=False,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        ),
        causal,
    ),
    "zamba2": Entry(built("Zamba2ForCausalLM", **GROUPED, **_ZAMBA2), causal),
    "lfm2": Entry(
        built("Lfm2ForCausalLM", **GROUPED, block_multiple_of=8, layer_types=["conv", "full_attention"]),
        masked,
    ),
    "olmo_hybrid": Entry(built("OlmoHybridForCausalLM", **GROUPED, **_LINEAR), causal),
    "qwen3_next": Entry(
        built(
            "Qwen3NextForCausalLM",
            **EXPERTS,
            **_LINEAR,
            num_experts=4,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            output_router_logits=True,
        ),
        causal,
    ),
    "qwen3_5": Entry(built("Qwen3_5ForCausalLM", **GROUPED, **_LINEAR), causal),
}
