"""Small autoencoders of diffusers where the library's own tests have none.

Sizes are those of its pipelines' tests where these have them, else its defaults made small.
"""

from __future__ import annotations

from torch import randn

from benchmarks.conformance.libraries import diffusers_calls as calls
from benchmarks.conformance.libraries.diffusers_calls import TOKENS, Small

_VIDEO_VAE = {
    "latent_channels": 4, "block_out_channels": (16, 16), "layers_per_block": 1,
    "spatial_compression_ratio": 4, "temporal_compression_ratio": 2,
    "downsample_match_channel": False, "upsample_match_channel": False,
}  # fmt: skip
_QWEN_VAE = {
    "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip
_PROTEIN = {
    "nlayers": 2, "token_dim": 16, "nheads": 2, "dim_cond": 8, "pair_repr_dim": 8, "latent_dim": 4,
    "token_type_emb_dim": 4,
}  # fmt: skip

AUTOENCODERS: dict[str, Small] = {
    "AutoencoderKLAllegro": Small(
        {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}, calls.video
    ),
    "AutoencoderKLFlux2": Small(
        {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",),
         "block_out_channels": (4,), "layers_per_block": 1, "latent_channels": 2, "norm_num_groups": 1},
        calls.image,
    ),
    "AutoencoderKLHunyuanImage": Small(
        {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 32, 32, 32),
         "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 16},
        calls.image,
    ),
    "AutoencoderKLHunyuanImageRefiner": Small(_VIDEO_VAE, calls.video),
    "AutoencoderKLHunyuanVideo15": Small(_VIDEO_VAE, calls.video),
    "AutoencoderKLKVAEAudio": Small(
        {"encoder_dim": 4, "encoder_rates": [2, 4], "latent_dim": 8, "codebook_dim": 4, "decoder_dim": 8,
         "decoder_rates": [4, 2], "attn_num_heads": 2},
        calls.sound,
    ),
    "AutoencoderKLQwenImage": Small({"base_dim": 8, **_QWEN_VAE}, calls.video),
    "AutoencoderKLQwenImage21": Small(
        {"base_dim": 8, "decoder_base_dim": 8, **_QWEN_VAE, "dim_mult": [1, 2, 2],
         "temperal_downsample": [False, True]},
        lambda n: {"sample": randn(n, 4, 1, 16, 16)},
    ),
    "AutoencoderOobleck": Small(
        {"encoder_hidden_size": 6, "downsampling_ratios": [1, 2], "decoder_channels": 3,
         "decoder_input_channels": 3, "channel_multiples": [2, 4], "sampling_rate": 4},
        lambda n: calls.sound(n, 16, 2),
    ),
    "Kandinsky6SRLatentUpscalerBank": Small(
        {"in_channels": 4, "stage_channels": (8, 8, 8), "num_pre_blocks": 1, "num_mid_blocks": 1,
         "num_post_blocks": 1, "num_x2_adapter_blocks": 1},
        lambda n: {"latents": randn(n, 4, 2, 4, 4), "scale": 2},
    ),
    "Kandinsky6SRVAE": Small(
        {"latent_channels": 4, "encoder_block_out_channels": (4, 8), "decoder_block_out_channels": (4, 8),
         "layers_per_block": 1, "temporal_compression_ratio": 2, "temporal_compression_start_level": 0},
        calls.video,
    ),
    "LongCatAudioDiTVae": Small(
        {"channels": 16, "c_mults": [1, 2], "strides": [2], "latent_dim": 8, "encoder_latent_dim": 16,
         "downsampling_ratio": 2},
        calls.sound,
    ),
    "MMAudioVAE": Small(
        {"mel_bins": 16, "latent_channels": 4, "hidden_channels": 8, "channel_multipliers": (1, 2),
         "layers_per_block": 1, "sample_rate": 16000, "n_fft": 64, "hop_length": 16},
        lambda n: {"sample": randn(n, 512)},
    ),
    "MMAudioVocoder": Small(
        {"num_mels": 8, "upsample_initial_channel": 8, "upsample_rates": (2, 2),
         "upsample_kernel_sizes": (4, 4), "resblock_kernel_sizes": (3,),
         "resblock_dilation_sizes": ((1, 3),)},
        lambda n: {"mel": randn(n, 8, 6)},
    ),
    "MiniMaxMusic3Vocoder": Small(
        {"latent_channels": 8, "decoder_input_dim": 8, "decoder_hidden_dim": 8, "upsampling_ratios": (2, 2)},
        lambda n: {"latents": randn(n, 8, 6)},
    ),
    "RFD4ProteinaAutoencoder": Small(
        {**_PROTEIN, "atom37_mask": [[True] * 37] * 147, "allowed_residue_types": [[True] * 147] * 7},
        lambda n: {**calls.protein(n), "z_latent": randn(n, TOKENS, 4), "ca_coors_nm": randn(n, TOKENS, 3)},
    ),
}  # fmt: skip
