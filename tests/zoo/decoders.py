"""Decoder-only language models."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.zoo.entry import TOKENS, Entry, built, causal, masked
from tests.zoo.sizes import GROUPED, TEXT

_GPT = {
    "vocab_size": TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"experts_implementation": "batched_mm", "output_router_logits": True}


def _deepseek_v3() -> nn.Module:
    config = hf.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 2}, moe_intermediate_size=8, n_routed_experts=4, n_shared_experts=1,
        n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config)


def gpt_neo() -> nn.Module:
    config = hf.GPTNeoConfig(
        vocab_size=TOKENS, hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=2, max_position_embeddings=32, window_size=4, intermediate_size=24,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPTNeoForCausalLM(config)


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=TOKENS, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2)
    )


def _mamba2() -> nn.Module:
    config = hf.Mamba2Config(
        vocab_size=TOKENS, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8,
        n_groups=2, chunk_size=4,
    )  # fmt: skip
    return hf.Mamba2ForCausalLM(config)


def _recurrent_gemma() -> nn.Module:
    config = hf.RecurrentGemmaConfig(
        **TEXT, lru_width=16, attention_window_size=4, block_types=("recurrent", "attention"),
        num_key_value_heads=1,
    )  # fmt: skip
    return hf.RecurrentGemmaForCausalLM(config)


def _falcon() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": False}
    return hf.FalconForCausalLM(hf.FalconConfig(vocab_size=TOKENS, bos_token_id=1, eos_token_id=2, **sizes))


def _bloom() -> nn.Module:
    config = hf.BloomConfig(
        vocab_size=TOKENS, hidden_size=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return hf.BloomForCausalLM(config)


def _opt() -> nn.Module:
    config = hf.OPTConfig(
        **{k: v for k, v in TEXT.items() if k != "intermediate_size"}, ffn_dim=24, word_embed_proj_dim=16
    )
    return hf.OPTForCausalLM(config)


def _mpt() -> nn.Module:
    return hf.MptForCausalLM(
        hf.MptConfig(vocab_size=TOKENS, d_model=16, n_layers=2, n_heads=2, max_seq_len=32)
    )


def _rwkv() -> nn.Module:
    config = hf.RwkvConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, context_length=32
    )
    return hf.RwkvForCausalLM(config)


def _xlnet() -> nn.Module:
    return hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=TOKENS, d_model=16, n_layer=2, n_head=2, d_inner=24))


def _gpt_oss() -> nn.Module:
    config = hf.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return hf.GptOssForCausalLM(config)


def _jamba() -> nn.Module:
    config = hf.JambaConfig(
        **GROUPED, num_experts=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2,
        attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return hf.JambaForCausalLM(config)


def _ctrl() -> nn.Module:
    return hf.CTRLLMHeadModel(
        hf.CTRLConfig(vocab_size=TOKENS, n_positions=32, n_embd=16, dff=24, n_layer=2, n_head=2)
    )


DECODERS: dict[str, Entry] = {
    "gemma2": Entry(built("Gemma2ForCausalLM", **GROUPED, head_dim=8, sliding_window=4), causal),
    "gemma3": Entry(
        built("Gemma3ForCausalLM", **GROUPED, head_dim=8, sliding_window=4),
        causal,
    ),
    "qwen2": Entry(built("Qwen2ForCausalLM", **GROUPED), masked),
    "qwen3": Entry(built("Qwen3ForCausalLM", **GROUPED, head_dim=8), causal),
    "phi": Entry(built("PhiForCausalLM", **TEXT), causal),
    "phi3": Entry(built("Phi3ForCausalLM", **GROUPED), causal),
    "mistral": Entry(built("MistralForCausalLM", **GROUPED, sliding_window=4), masked),
    "falcon": Entry(_falcon, causal),
    "opt": Entry(_opt, masked),
    "bloom": Entry(_bloom, masked),
    "gptj": Entry(built("GPTJForCausalLM", **_GPT, rotary_dim=4), causal),
    "gpt_neox": Entry(built("GPTNeoXForCausalLM", **TEXT), causal),
    "gpt_bigcode": Entry(built("GPTBigCodeForCausalLM", **_GPT), causal),
    "codegen": Entry(built("CodeGenForCausalLM", **{**_GPT, "n_head": 4}, rotary_dim=2), causal),
    "ctrl": Entry(_ctrl, causal),
    "mpt": Entry(_mpt, masked),
    "olmo": Entry(built("OlmoForCausalLM", **GROUPED), causal),
    "olmoe": Entry(
        built(
            "OlmoeForCausalLM",
            **GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            **_MOE,
        ),
        causal,
    ),
    "qwen2_moe": Entry(
        built(
            "Qwen2MoeForCausalLM",
            **GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            **_MOE,
        ),
        masked,
    ),
    "granite": Entry(built("GraniteForCausalLM", **GROUPED), causal),
    "cohere": Entry(built("CohereForCausalLM", **GROUPED), causal),
    "stablelm": Entry(built("StableLmForCausalLM", **GROUPED), causal),
    "starcoder2": Entry(built("Starcoder2ForCausalLM", **GROUPED), causal),
    "nemotron": Entry(built("NemotronForCausalLM", **GROUPED), causal),
    "deepseek_v3": Entry(_deepseek_v3, causal),
    "gpt_oss": Entry(_gpt_oss, causal),
    "mamba2": Entry(_mamba2, causal),
    "recurrent_gemma": Entry(_recurrent_gemma, causal),
    "jamba": Entry(_jamba, causal),
    "rwkv": Entry(_rwkv, causal),
    "xlnet": Entry(_xlnet, causal),
}
