"""More models of time series."""

from __future__ import annotations

import torch

from tests.zoo.entry import Entry, built

SERIES: dict[str, Entry] = {
    "timesfm": Entry(
        built(
            "TimesFmModelForPrediction",
            patch_length=4,
            context_length=16,
            horizon_length=4,
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=16,
            head_dim=8,
            num_attention_heads=2,
            quantiles=[0.2, 0.5, 0.8],
        ),
        lambda n: {
            "past_values": torch.randn(n, 16),
            "future_values": torch.randn(n, 4),
            "freq": torch.zeros(n, dtype=torch.long),
        },
    ),
    "patchtst_pretraining": Entry(
        built(
            "PatchTSTForPretraining",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            do_mask_input=True,
        ),
        lambda n: {"past_values": torch.rand(n, 16, 2)},
    ),
    "patchtst_classes": Entry(
        built(
            "PatchTSTForClassification",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_targets=3,
        ),
        lambda n: {"past_values": torch.rand(n, 16, 2), "target_values": torch.randint(0, 3, (n,))},
    ),
    "patchtsmixer_regression": Entry(
        built(
            "PatchTSMixerForRegression",
            context_length=16,
            patch_length=4,
            patch_stride=4,
            num_input_channels=2,
            d_model=8,
            num_layers=2,
            num_targets=2,
        ),
        lambda n: {"past_values": torch.rand(n, 16, 2), "target_values": torch.rand(n, 2)},
    ),
}
