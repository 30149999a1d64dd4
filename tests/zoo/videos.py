"""Models of videos."""

from __future__ import annotations

import torch

from tests.zoo.entry import SIDE, Entry, Inputs, built
from tests.zoo.sizes import IMAGE


def _video(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 4, 3, SIDE, SIDE), "labels": torch.randint(0, 2, (batch,))}


def _clips(batch: int) -> Inputs:
    return {
        "pixel_values_videos": torch.randn(batch, 4, 3, SIDE, SIDE),
        "labels": torch.randint(0, 2, (batch,)),
    }


def _masked_video(batch: int) -> Inputs:
    hidden = torch.tensor([[True, False, True, True, False, False, True, False]] * batch)
    return {"pixel_values": torch.randn(batch, 4, 3, SIDE, SIDE), "bool_masked_pos": hidden}


VIDEOS: dict[str, Entry] = {
    "timesformer": Entry(
        built("TimesformerForVideoClassification", **IMAGE, num_frames=4, hidden_dropout_prob=0.1), _video
    ),
    "videomae": Entry(built("VideoMAEForVideoClassification", **IMAGE, num_frames=4), _video),
    "videomae_masked": Entry(
        built(
            "VideoMAEForPreTraining",
            **IMAGE,
            num_frames=4,
            decoder_num_attention_heads=2,
            decoder_hidden_size=8,
            decoder_num_hidden_layers=1,
            decoder_intermediate_size=8,
        ),
        _masked_video,
    ),
    "vivit": Entry(
        built(
            "VivitForVideoClassification",
            **{k: v for k, v in IMAGE.items() if k != "patch_size"},
            num_frames=4,
            tubelet_size=[2, 8, 8],
        ),
        _video,
    ),
    "vjepa2": Entry(
        built(
            "VJEPA2ForVideoClassification",
            hidden_size=24,
            patch_size=8,
            crop_size=SIDE,
            frames_per_clip=4,
            num_attention_heads=2,
            num_hidden_layers=2,
            mlp_ratio=2,
            num_pooler_layers=1,
            drop_path_rate=0.1,
            pred_hidden_size=24,
            pred_num_attention_heads=2,
            pred_num_hidden_layers=1,
        ),
        _clips,
    ),
}
