"""More models of images: their classes, features, and what is left out of them."""

from __future__ import annotations

from functools import partial

import torch

from tests.zoo.entry import TOKENS, Entry, Inputs, built, images, pixels, tokens
from tests.zoo.sizes import HGNET, IMAGE

_WIDE = partial(images, side=32)
_WIDE_PIXELS = partial(pixels, side=32)


def _codes(batch: int) -> Inputs:
    made = tokens(batch, 9)
    return {"input_ids": made[:, :-1], "labels": made[:, 1:].clone()}


def _patches(batch: int) -> Inputs:
    return {**pixels(batch), "interpolate_pos_encoding": True}


PICTURES: dict[str, Entry] = {
    "bit": Entry(
        built(
            "BitForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=2
        ),
        images,
    ),
    "data2vec_vision": Entry(
        built("Data2VecVisionForImageClassification", **IMAGE, use_shared_relative_position_bias=True), images
    ),
    "dinov2_registers": Entry(
        built("Dinov2WithRegistersForImageClassification", **IMAGE, mlp_ratio=2, num_register_tokens=2),
        images,
    ),
    "dinov3_vit": Entry(
        built(
            "DINOv3ViTModel",
            **IMAGE,
            num_register_tokens=2,
            drop_path_rate=0.1,
            pos_embed_rescale=2.0,
        ),
        pixels,
    ),
    "dinov3_convnext": Entry(
        built("DINOv3ConvNextModel", hidden_sizes=[8, 8, 12, 12], depths=[1, 1, 1, 1], drop_path_rate=0.1),
        _WIDE_PIXELS,
    ),
    "hgnet_v2": Entry(built("HGNetV2ForImageClassification", **HGNET), _WIDE),
    "hiera": Entry(
        built(
            "HieraForImageClassification",
            embed_dim=8,
            image_size=[32, 32],
            depths=[1, 1, 1],
            num_heads=[1, 2, 2],
            num_query_pool=2,
            masked_unit_size=[4, 4],
            masked_unit_attention=[True, False, False],
            drop_path_rate=0.1,
        ),
        _WIDE,
    ),
    "hiera_mae": Entry(
        built(
            "HieraForPreTraining",
            embed_dim=8,
            image_size=[32, 32],
            depths=[1, 1, 1],
            num_heads=[1, 2, 2],
            num_query_pool=2,
            masked_unit_size=[4, 4],
            masked_unit_attention=[True, False, False],
            decoder_hidden_size=8,
            decoder_depth=1,
            decoder_num_heads=2,
        ),
        lambda n: {**pixels(n, 32), "noise": torch.rand(n, 4)},
    ),
    "ijepa": Entry(built("IJepaForImageClassification", **IMAGE), images),
    "imagegpt": Entry(
        built(
            "ImageGPTForCausalImageModeling",
            vocab_size=TOKENS + 1,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
        ),
        _codes,
    ),
    "mobilenet_v1": Entry(
        built("MobileNetV1ForImageClassification", image_size=32, depth_multiplier=0.1, min_depth=4), _WIDE
    ),
    "mobilevitv2": Entry(
        built(
            "MobileViTV2ForImageClassification",
            image_size=64,
            width_multiplier=0.125,
            n_attn_blocks=[1, 1, 1],
            base_attn_unit_dims=[64, 64, 64],
        ),
        partial(images, side=64),
    ),
    "pvt_v2": Entry(
        built(
            "PvtV2ForImageClassification",
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            drop_path_rate=0.1,
        ),
        _WIDE,
    ),
    "textnet": Entry(
        built(
            "TextNetForImageClassification",
            stem_out_channels=8,
            hidden_sizes=[8, 8, 8, 8, 12],
            conv_layer_kernel_sizes=[[[3, 3]], [[3, 1], [1, 3]], [[3, 3]], [[3, 3]]],
            conv_layer_strides=[[1], [2, 1], [2], [2]],
        ),
        _WIDE,
    ),
    "vitdet": Entry(
        built(
            "VitDetModel",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            pretrain_image_size=32,
            patch_size=4,
            mlp_ratio=2,
            window_block_indices=[0],
            window_size=3,
            use_relative_position_embeddings=True,
            drop_path_rate=0.1,
        ),
        _WIDE_PIXELS,
    ),
    "aimv2": Entry(built("Aimv2VisionModel", **IMAGE), pixels),
    "swin2sr": Entry(
        built(
            "Swin2SRForImageSuperResolution",
            image_size=16,
            embed_dim=12,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        pixels,
    ),
    "imagegpt_classes": Entry(
        built(
            "ImageGPTForImageClassification",
            vocab_size=TOKENS,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
        ),
        lambda n: {"input_ids": tokens(n, 8), "labels": torch.randint(0, 2, (n,))},
    ),
    "vit_interpolated": Entry(built("ViTModel", **{**IMAGE, "image_size": 32}), _patches),
}
