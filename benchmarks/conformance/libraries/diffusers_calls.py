"""What small models of diffusers are called with, where the library's own tests do not say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, randn

from tests.zoo.entry import Inputs

TOKENS = 5
"""Of a text."""
LIST = "list_of_"
"""Before the name of an input that is a list with a tensor for each sample: here it is one tensor."""


@dataclass(frozen=True, slots=True)
class Small:
    """A model's settings, and its keyword arguments at a batch of this size."""

    settings: dict[str, Any]
    inputs: Callable[[int], Inputs]
    build: Callable[..., nn.Module] | None = None
    """Of the settings; the class itself if this is left out."""


def image(batch: int, channels: int = 3, side: int = 16) -> Inputs:
    return {"sample": randn(batch, channels, side, side)}


def video(batch: int, channels: int = 3, side: int = 16) -> Inputs:
    return {"sample": randn(batch, channels, 5, side, side)}


def sound(batch: int, samples: int = 48, channels: int = 1) -> Inputs:
    return {"sample": randn(batch, channels, samples)}


def times(batch: int) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def text(batch: int, width: int) -> Tensor:
    return randn(batch, TOKENS, width)


def noised(batch: int, channels: int = 4, width: int = 8, side: int = 8) -> Inputs:
    """What a UNet is called with."""
    return {
        **image(batch, channels, side),
        "timestep": times(batch),
        "encoder_hidden_states": text(batch, width),
    }


def guided(batch: int) -> Inputs:
    """What a network of ControlNet is called with: the image that guides is twice as large."""
    return {**noised(batch), "controlnet_cond": randn(batch, 3, 16, 16)}


def guided_by_some(batch: int) -> Inputs:
    """A list of images, and which kinds of guidance a sample has: the first of two."""
    return {
        **guided(batch),
        "controlnet_cond": [randn(batch, 3, 16, 16)],
        "control_type": torch.tensor([[1.0, 0.0]]).repeat(batch, 1),
        "control_type_idx": [0],
    }


def guided_twice(batch: int) -> Inputs:
    return {
        **guided(batch),
        "controlnet_cond": [randn(batch, 3, 16, 16), randn(batch, 3, 16, 16)],
        "conditioning_scale": [1.0, 0.5],
        "return_dict": False,
    }


def positions(tokens: int, axes: int) -> Tensor:
    """Where each token is: the same for all samples."""
    return torch.stack([torch.arange(tokens, dtype=torch.get_default_dtype())] * axes, -1)


def tokens_with_text(batch: int, channels: int, width: int, axes: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 16, channels),
        "encoder_hidden_states": text(batch, width),
        "timestep": torch.rand(batch),
        "img_ids": positions(16, axes),
        "txt_ids": positions(TOKENS, axes),
    }


def flux_guided(batch: int) -> Inputs:
    return {
        **tokens_with_text(batch, 16, 32, 3),
        "controlnet_cond": randn(batch, 16, 16),
        "pooled_projections": randn(batch, 32),
    }


def kandinsky(batch: int, channels: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 2, 4, 4, channels),
        "encoder_hidden_states": text(batch, 8),
        "timestep": torch.rand(batch) * 1000,
        "pooled_projections": randn(batch, 8),
    }


def kandinsky_in_places(batch: int) -> Inputs:
    places = [torch.arange(2)] * 3
    return {**kandinsky(batch, 4), "visual_rope_pos": places, "text_rope_pos": torch.arange(TOKENS)}


def hunyuan_guided(batch: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 4, 16, 16),
        "timestep": torch.rand(batch) * 1000,
        "controlnet_cond": randn(batch, 4, 16, 16),
        "encoder_hidden_states": text(batch, 32),
        "text_embedding_mask": torch.ones(batch, TOKENS),
        "encoder_hidden_states_t5": text(batch, 32),
        "text_embedding_mask_t5": torch.ones(batch, TOKENS),
        "image_meta_size": torch.rand(batch, 6) * 16,
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": [randn(64, 8), randn(64, 8)],
    }


def qwen_guided(batch: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 16, 16),
        "controlnet_cond": randn(batch, 16, 16),
        "encoder_hidden_states": text(batch, 16),
        "encoder_hidden_states_mask": torch.ones(batch, TOKENS, dtype=torch.bool),
        "timestep": torch.rand(batch),
        "img_shapes": [[(1, 4, 4)]],
    }


def world(batch: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 4, 2, 4, 4),
        "timestep": torch.randint(0, 1000, (batch, 1, 2)),
        "encoder_hidden_states": randn(batch, 1, TOKENS, 8),
        "encoder_attention_mask": torch.ones(batch, TOKENS),
    }


def refined(batch: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 8, 4),
        "encoder_hidden_states": text(batch, 8),
        "timestep": torch.rand(batch, 8) * 1000,
        "video_rotary_emb": (randn(1, 8, 16), randn(1, 8, 16)),
    }


def masked_image(batch: int) -> Inputs:
    return {
        "input_ids": torch.randint(0, 16, (batch, 4, 4)),
        "encoder_hidden_states": text(batch, 16),
        "pooled_text_emb": randn(batch, 16),
        "micro_conds": torch.rand(batch, 5),
    }


def edited(batch: int) -> Inputs:
    """One picture is made, of four tokens by four, with no other beside it."""
    return {
        "hidden_states": randn(batch, 16, 4),
        "encoder_hidden_states": text(batch, 16),
        "timestep": torch.rand(batch),
        "img_shapes": [[(1, 4, 4)]],
        "img_mask": torch.tensor([[False] * TOKENS + [True] * 4]).repeat(batch, 1),
    }


def film(batch: int) -> Inputs:
    return {
        "encodings_and_masks": [(text(batch, 16), torch.ones(batch, TOKENS))],
        "decoder_input_tokens": randn(batch, 8, 4),
        "decoder_noise_time": torch.rand(batch),
    }


def cascade(batch: int) -> Inputs:
    return {
        **image(batch, 4, 8),
        "timestep_ratio": torch.rand(batch),
        "clip_text_pooled": randn(batch, 1, 16),
    }


def moving_guided(batch: int) -> Inputs:
    """A text for each of the five images of a sample."""
    return {
        **video(batch, 4, 8),
        "timestep": times(batch),
        "encoder_hidden_states": text(5 * batch, 8),
        "controlnet_cond": randn(batch, 3, 5, 16, 16),
        "conditioning_mask": torch.ones(batch, 1, 5, 16, 16),
    }


def from_picture(batch: int) -> Inputs:
    return {
        "sample": randn(batch, 4, 2, 16, 16),
        "timestep": times(batch),
        "fps": torch.tensor([2]),
        "image_latents": randn(batch, 4, 2, 16, 16),
        "image_embeddings": randn(batch, 16),
        "encoder_hidden_states": text(batch, 16),
    }


def listed(batch: int) -> Inputs:
    return {
        LIST + "x": randn(batch, 4, 1, 8, 8),
        LIST + "cap_feats": randn(batch, TOKENS, 16),
        LIST + "control_context": randn(batch, 4, 1, 8, 8),
        "t": torch.rand(batch),
    }


def protein(batch: int) -> Inputs:
    """Residues of a protein; what else is known of them is left out."""
    residues = (batch, TOKENS)
    yes = torch.ones(residues, dtype=torch.bool)
    return {
        "padding_mask": yes,
        "token_type": torch.randint(0, 7, residues),
        "atom37_mask": torch.ones(*residues, 37, dtype=torch.bool),
        "conditioning": {"is_in_context_conditioning": ~yes, "supports_local_latent": yes},
    }


def noised_protein(batch: int) -> Inputs:
    return {
        **protein(batch),
        "bb_ca": randn(batch, TOKENS, 3),
        "local_latents": randn(batch, TOKENS, 4),
        "bb_ca_time": torch.rand(batch),
        "local_latents_time": torch.rand(batch),
    }


def prior_tokens(batch: int) -> Inputs:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "encoder_hidden_states": text(batch, 32),
        "prior_token_id": torch.randint(0, 64, (batch, 16)),
        "prior_token_drop": torch.zeros(batch, dtype=torch.bool),
        "timestep": times(batch),
        "target_size": torch.full((batch, 2), 8.0),
        "crop_coords": torch.zeros(batch, 2),
    }
