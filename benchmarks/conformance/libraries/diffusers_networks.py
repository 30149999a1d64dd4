"""Small networks of diffusers where the library's own tests have none.

Sizes are those of its pipelines' tests where these have them, else its defaults made small.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn, randn

from benchmarks.conformance.libraries import diffusers_calls as calls
from benchmarks.conformance.libraries.diffusers_calls import TOKENS, Small, text

_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")
_GUIDED = {
    "block_out_channels": (4, 8), "layers_per_block": 1, "down_block_types": _BLOCKS,
    "cross_attention_dim": 8, "attention_head_dim": 2, "norm_num_groups": 2,
    "conditioning_embedding_out_channels": (4, 4),
}  # fmt: skip
_FILM = {
    "input_dims": 4, "targets_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8,
    "d_ff": 16,
}  # fmt: skip
_CASCADE = {
    "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16,
    "block_out_channels": (8, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": 16, "clip_seq": 2,
    "block_types_per_layer": (
        ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
}  # fmt: skip
_GIST = {
    "in_channels": 4, "dim": 16, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 8,
    "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8, "gist_step": 2, "gist_min_text_len": 4, "gist_max_text_len": 16,
    "axes_dims": (4, 2, 2), "axes_lens": (32, 16, 16),
}  # fmt: skip
_Z_IMAGE = {
    "all_patch_size": (2,), "all_f_patch_size": (1,), "dim": 16, "n_refiner_layers": 1, "n_heads": 1,
    "n_kv_heads": 2,
}  # fmt: skip
_Z_AXES = {"axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]}


def _z_image_guided(**sizes: Any) -> nn.Module:
    """A network that has modules in common with the transformer that it guides."""
    guided = diffusers.ZImageTransformer2DModel(
        in_channels=4, n_layers=1, cap_feat_dim=16, **_Z_AXES, **sizes
    )
    places = {"control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": 4}
    made = diffusers.ZImageControlNetModel(**places, **sizes)
    made.gradient_checkpointing = False  # which its forward asks for
    return made.from_transformer(made, guided)


_PROTEIN = {
    "nlayers": 2, "token_dim": 16, "nheads": 2, "dim_cond": 8, "pair_repr_dim": 8, "latent_dim": 4,
    "token_type_emb_dim": 4,
}  # fmt: skip
_SIDE = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}

NETWORKS: dict[str, Small] = {
    "AnimaTextConditioner": Small(
        {"source_dim": 16, "target_dim": 16, "model_dim": 16, "num_layers": 2, "num_attention_heads": 4,
         "target_vocab_size": 40, "min_sequence_length": 8},
        lambda n: {"source_hidden_states": text(n, 16), "target_input_ids": torch.randint(0, 40, (n, 6)),
                   "target_attention_mask": torch.ones(n, 6), "source_attention_mask": torch.ones(n, TOKENS)},
    ),
    "BriaFibo2Transformer2DModel": Small(
        _GIST,
        lambda n: {"hidden_states": randn(n, 4, 8, 8), "timestep": torch.rand(n),
                   "encoder_hidden_states": randn(n, 2, TOKENS, 8)},
    ),
    "ControlNetModel": Small(_GUIDED, calls.guided),
    "MultiControlNetModel": Small(
        _GUIDED, calls.guided_twice,
        lambda **net: diffusers.MultiControlNetModel([diffusers.ControlNetModel(**net) for _ in range(2)]),
    ),
    "ControlNetUnionModel": Small(
        {**_GUIDED, "num_control_type": 2, "num_trans_channel": 4, "num_trans_head": 2, "num_proj_channel": 4,
         "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 16},
        calls.guided_by_some,
    ),
    "DreamLiteTransformer2DModel": Small(
        {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 8, "norm_num_groups": 2,
         "cross_attention_dim": 8},
        lambda n: {"hidden_states": randn(n, 8, 4, 4), "encoder_hidden_states": text(n, 8)},
    ),
    "DreamLiteUNetModel": Small(
        {"sample_size": 8, "block_out_channels": (8, 16, 16), "cross_attention_dim": 8,
         "attention_head_dim": 4, "layers_per_block": 1, "norm_num_groups": 4},
        calls.noised,
    ),
    "Flux3Transformer2DModel": Small(
        {"in_channels": 8, "cond_in_channels": 8, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8,
         "timestep_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        lambda n: calls.tokens_with_text(n, 8, 8, 4),
    ),
    "FluxControlNetModel": Small(
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
         "axes_dims_rope": [4, 4, 8]},
        calls.flux_guided,
    ),
    "HunyuanDiT2DControlNetModel": Small(
        {"sample_size": 16, "transformer_num_layers": 4, "patch_size": 2, "attention_head_dim": 8,
         "num_attention_heads": 3, "in_channels": 4, "cross_attention_dim": 32, "cross_attention_dim_t5": 32,
         "pooled_projection_dim": 16, "hidden_size": 24, "text_len": TOKENS, "text_len_t5": TOKENS},
        calls.hunyuan_guided,
    ),
    "HunyuanImageTransformer2DModel": Small(
        {"in_channels": 4, "out_channels": 4, **_SIDE, "num_layers": 1, "num_single_layers": 1,
         "num_refiner_layers": 1, "text_embed_dim": 32, "rope_axes_dim": (4, 4)},
        lambda n: {"hidden_states": randn(n, 4, 4, 4), "timestep": torch.rand(n) * 1000,
                   "encoder_hidden_states": text(n, 32), "encoder_attention_mask": torch.ones(n, TOKENS)},
    ),
    "I2VGenXLUNet": Small(
        {"block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2, "cross_attention_dim": 16,
         "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        calls.from_picture,
    ),
    "Kandinsky3UNet": Small(
        {"time_embedding_dim": 4, "groups": 2, "attention_head_dim": 4, "block_out_channels": (8, 16),
         "cross_attention_dim": 4, "encoder_hid_dim": 8},
        lambda n: {**calls.noised(n), "encoder_attention_mask": torch.ones(n, TOKENS)},
    ),
    "Kandinsky5Transformer3DModel": Small(
        {"in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16, "model_dim": 16, "ff_dim": 32,
         "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (2, 2, 4)},
        calls.kandinsky_in_places,
    ),
    "Kandinsky6Transformer3DModel": Small(
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16,
         "model_dim": 16, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (2, 2, 4),
         "in_audio_dim": 4, "out_audio_dim": 4},
        lambda n: {**calls.kandinsky(n, 9), "audio_hidden_states": randn(n, 3, 4)},
    ),
    "Kandinsky6SRTransformer3DModel": Small(
        {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 16, "ff_dim": 32,
         "num_visual_blocks": 2, "axes_dims": (4, 6, 6)},
        lambda n: {"hidden_states": randn(n, 1, 8, 8, 9), "timestep": torch.rand(n) * 1000},
    ),
    "MiniMaxMusic3ConditionEncoder": Small(
        {"condition_hidden_dim": 4, "num_condition_layers": 2, "out_dim": 8},
        lambda n: {"hidden_states": randn(n, 4, 8)},
    ),
    "MiniMaxMusic3RVQDepthDecoder": Small(
        {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
         "audio_vocab_size": 40, "num_codebooks": 2},
        lambda n: {"inputs_embeds": text(n, 16)},
    ),
    "QwenImage21Transformer2DModel": Small(
        {"in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "context_in_dim": 16, "axes_dims_rope": (4, 6, 6)},
        calls.edited,
    ),
    "QwenImageControlNetModel": Small(
        {"in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        calls.qwen_guided,
    ),
    "SD3ControlNetModel": Small(
        {"sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 16},
        lambda n: {"hidden_states": randn(n, 4, 8, 8), "controlnet_cond": randn(n, 4, 8, 8),
                   "encoder_hidden_states": text(n, 32), "pooled_projections": randn(n, 16),
                   "timestep": torch.rand(n) * 1000},
    ),
    "SanaControlNetModel": Small(
        {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_attention_heads": 2, "sample_size": 8,
         "attention_head_dim": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
         "cross_attention_dim": 8, "caption_channels": 8},
        lambda n: {"hidden_states": randn(n, 4, 8, 8), "encoder_hidden_states": text(n, 8),
                   "timestep": calls.times(n), "controlnet_cond": randn(n, 4, 8, 8)},
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Small(
        {**_SIDE, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 8},
        calls.refined,
    ),
    "SanaWMTransformer3DModel": Small(
        {"in_channels": 4, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "softmax_every_n": 2,
         "linear_head_dim": 8, "caption_channels": 8, "chunk_plucker_post_attn_blocks": 2},
        calls.world,
    ),
    "SparseControlNetModel": Small(
        {"block_out_channels": (8, 8), "layers_per_block": 1, "conditioning_channels": 3,
         "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "cross_attention_dim": 8,
         "conditioning_embedding_out_channels": (8, 8), "norm_num_groups": 2, "attention_head_dim": 4,
         "motion_num_attention_heads": 2, "use_simplified_condition_embedding": False},
        calls.moving_guided,
    ),
    "StableAudioDiTModel": Small(
        {"sample_size": 4, "in_channels": 3, "num_layers": 2, "attention_head_dim": 4,
         "num_attention_heads": 2, "num_key_value_attention_heads": 2, "out_channels": 3,
         "cross_attention_dim": 8, "time_proj_dim": 8,
         "global_states_input_dim": 8, "cross_attention_input_dim": 4},
        lambda n: {"hidden_states": randn(n, 3, 4), "timestep": torch.rand(n),
                   "encoder_hidden_states": text(n, 4), "global_hidden_states": randn(n, 1, 8)},
    ),
    "StableCascadeUNet": Small(_CASCADE, calls.cascade),
    "T2IAdapter": Small(
        {"channels": [8, 8], "num_res_blocks": 1, "downscale_factor": 2},
        lambda n: {"x": randn(n, 3, 16, 16)},
    ),
    "T5FilmDecoder": Small(_FILM, calls.film),
    "UVit2DModel": Small(
        {"hidden_size": 16, "cond_embed_dim": 16, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
         "encoder_hidden_size": 16, "vocab_size": 16, "codebook_size": 16, "in_channels": 16,
         "block_out_channels": 16, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 1,
         "num_attention_heads": 2, "intermediate_size": 32, "sample_size": 4},
        calls.masked_image,
    ),
    "ZImageControlNetModel": Small(_Z_IMAGE, calls.listed, _z_image_guided),
    "RFD4ProteinaTransformer": Small(
        {**_PROTEIN, "cath_emb_dim": 4, "t_emb_dim": 8, "seq_sep_dim": 8, "xt_pair_dist_dim": 4,
         "tri_mult_c": 8, "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
         "feats_pair_repr": ("xt_bb_ca_pair_dists",)},
        calls.noised_protein,
    ),
    "PRXTransformer2DModel": Small(
        {"context_in_dim": 8, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        lambda n: {"hidden_states": randn(n, 16, 8, 8), "encoder_hidden_states": text(n, 8),
                   "timestep": torch.rand(n)},
    ),
    "Transformer2DModel": Small(
        {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 8, "norm_num_groups": 2,
         "cross_attention_dim": 8},
        lambda n: {"hidden_states": randn(n, 8, 4, 4), "encoder_hidden_states": text(n, 8)},
    ),
    "GlmImageTransformer2DModel": Small(
        {"in_channels": 4, "out_channels": 4, **_SIDE, "text_embed_dim": 32, "time_embed_dim": 16,
         "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64},
        calls.prior_tokens,
    ),
    "JoyImageEditPlusTransformer3DModel": Small(
        {"patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 32, "num_attention_heads": 2,
         "text_dim": 16, "num_layers": 2, "rope_dim_list": [4, 6, 6], "theta": 256},
        lambda n: {"hidden_states": randn(n, 2, 16, 1, 2, 2), "encoder_hidden_states": text(n, 16),
                   "timestep": torch.rand(n), "shape_list": [[(1, 1, 1), (1, 1, 1)]] * 32},
    ),
    "HiDreamImageTransformer2DModel": Small(
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [8, 4], "text_emb_dim": 8,
         "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2),
         "max_resolution": (16, 16), "llama_layers": (0, 1)},
        lambda n: {"hidden_states": randn(n, 4, 16, 16), "encoder_hidden_states_t5": text(n, 8),
                   "encoder_hidden_states_llama3": randn(2, n, TOKENS, 4), "pooled_embeds": randn(n, 8),
                   "timesteps": calls.times(n)},
    ),
}  # fmt: skip
