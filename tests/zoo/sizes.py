"""Sizes that many configurations share."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import SIDE, TOKENS

Sizes = dict[str, Any]

TEXT: Sizes = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Transformers over text, in the names that most configurations use."""

GROUPED: Sizes = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Grouped-query attention."""

IMAGE: Sizes = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip
"""Transformers over patches of an image."""

SEQ2SEQ: Sizes = {
    "vocab_size": TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
"""Encoders and decoders in the names of BART."""

EXPERTS: Sizes = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
"""Mixtures of experts; their number and width have many names."""
HGNET: dict[str, Any] = {
    "embedding_size": 8,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 8, 12],
    "stem_channels": [3, 4, 8],
    "stage_in_channels": [8, 8, 8, 8],
    "stage_mid_channels": [4, 4, 4, 4],
    "stage_out_channels": [8, 8, 8, 12],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
"""HGNetV2, alone and as a backbone."""
