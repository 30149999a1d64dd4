"""Models of images: classification, segmentation, depth, detection, reconstruction."""

from __future__ import annotations

from functools import partial

import torch
import transformers as hf
from torch import nn

from tests.zoo.entry import Entry, Inputs, built, images, pixels
from tests.zoo.sizes import IMAGE

_WIDE = partial(images, side=32)


def _segments(batch: int) -> Inputs:
    made = torch.randint(0, 3, (batch, 32, 32))
    made[0, 4:] = 255
    return {**pixels(batch, 32), "labels": made}


def _masked_patches(batch: int) -> Inputs:
    return {**pixels(batch), "bool_masked_pos": torch.tensor([[True, False, True, False]] * batch)}


def _noise(batch: int) -> Inputs:
    return {**pixels(batch), "noise": torch.rand(batch, 4)}


def _swin(model: str) -> nn.Module:
    return built(
        model,
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
    )()


def _convnext(model: str) -> nn.Module:
    return built(model, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=2)()


def _segformer() -> nn.Module:
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def _mobilevit() -> nn.Module:
    config = hf.MobileViTConfig(
        image_size=32, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 12],
        num_attention_heads=2, last_hidden_size=12,
    )  # fmt: skip
    return hf.MobileViTForImageClassification(config)


def _efficientnet() -> nn.Module:
    config = hf.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, hidden_dim=320, kernel_sizes=[3, 5], in_channels=[8, 8],
        out_channels=[8, 12], depthwise_padding=[], strides=[1, 2], num_block_repeats=[1, 1],
        expand_ratios=[1, 2], depth_coefficient=1.0,
    )  # fmt: skip
    return hf.EfficientNetForImageClassification(config)


def _mobilenet_v2() -> nn.Module:
    config = hf.MobileNetV2Config(
        image_size=32, depth_multiplier=0.25, min_depth=8, first_layer_is_expansion=True
    )
    return hf.MobileNetV2ForImageClassification(config)


def _levit() -> nn.Module:
    config = hf.LevitConfig(
        image_size=64, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2], kernel_size=3, stride=2, padding=1,
    )  # fmt: skip
    return hf.LevitForImageClassification(config)


def _cvt() -> nn.Module:
    config = hf.CvtConfig(
        embed_dim=[8, 16], num_heads=[1, 2], depth=[1, 2], patch_sizes=[3, 3], patch_stride=[2, 2],
        patch_padding=[1, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.1], qkv_bias=[True, True], cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
        padding_q=[1, 1], stride_q=[1, 1],
    )  # fmt: skip
    return hf.CvtForImageClassification(config)


def _poolformer() -> nn.Module:
    config = hf.PoolFormerConfig(
        num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 12], patch_sizes=[3, 3], strides=[2, 2],
        padding=[1, 1], mlp_ratio=2.0, drop_path_rate=0.1,
    )  # fmt: skip
    return hf.PoolFormerForImageClassification(config)


def _pvt() -> nn.Module:
    config = hf.PvtConfig(
        image_size=32, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    )  # fmt: skip
    return hf.PvtForImageClassification(config)


def _dinov2() -> nn.Module:
    return built("Dinov2ForImageClassification", **IMAGE, mlp_ratio=2)()


def _dpt() -> nn.Module:
    config = hf.DPTConfig(
        **{**IMAGE, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[4, 4, 8,
        8],
        fusion_hidden_size=8, reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False, head_in_index=-1,
    )  # fmt: skip
    return hf.DPTForDepthEstimation(config)


def _focalnet() -> nn.Module:
    config = hf.FocalNetConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]
    )
    return hf.FocalNetForImageClassification(config)


def _swiftformer() -> nn.Module:
    config = hf.SwiftFormerConfig(
        depths=[1, 1], embed_dims=[8, 12], mlp_ratio=2, downsamples=[True, True], down_patch_size=3,
        down_stride=2, down_pad=1, drop_path_rate=0.1,
    )  # fmt: skip
    return hf.SwiftFormerForImageClassification(config)


def _vit_mae() -> nn.Module:
    config = hf.ViTMAEConfig(
        **IMAGE, decoder_hidden_size=16, decoder_num_attention_heads=2, decoder_num_hidden_layers=1,
        decoder_intermediate_size=24, mask_ratio=0.5,
    )  # fmt: skip
    return hf.ViTMAEForPreTraining(config)


VISION: dict[str, Entry] = {
    "beit": Entry(built("BeitForImageClassification", **IMAGE), images),
    "beit_relative": Entry(
        built("BeitForImageClassification", **IMAGE, use_relative_position_bias=True),
        images,
    ),
    "deit": Entry(built("DeiTForImageClassification", **IMAGE), images),
    "dinov2": Entry(_dinov2, images),
    "vit_mim": Entry(built("ViTForMaskedImageModeling", **IMAGE, encoder_stride=8), _masked_patches),
    "vit_mae": Entry(_vit_mae, _noise),
    "vit_msn": Entry(built("ViTMSNForImageClassification", **IMAGE), images),
    "swin": Entry(partial(_swin, "SwinForImageClassification"), _WIDE),
    "swinv2": Entry(partial(_swin, "Swinv2ForImageClassification"), _WIDE),
    "convnext": Entry(partial(_convnext, "ConvNextForImageClassification"), images),
    "convnextv2": Entry(partial(_convnext, "ConvNextV2ForImageClassification"), images),
    "segformer": Entry(_segformer, _segments),
    "mobilevit": Entry(_mobilevit, _WIDE),
    "mobilenet_v2": Entry(_mobilenet_v2, _WIDE),
    "efficientnet": Entry(_efficientnet, _WIDE),
    "regnet": Entry(
        built(
            "RegNetForImageClassification",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            groups_width=4,
        ),
        images,
    ),
    "levit": Entry(_levit, partial(images, side=64)),
    "cvt": Entry(_cvt, _WIDE),
    "poolformer": Entry(_poolformer, images),
    "pvt": Entry(_pvt, _WIDE),
    "focalnet": Entry(_focalnet, _WIDE),
    "swiftformer": Entry(_swiftformer, partial(images, side=64)),
    "dpt": Entry(_dpt, pixels),
}
