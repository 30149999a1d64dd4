"""Vision-language inputs of transformers' processors: as many images per sample as it has, or none.

{"input_ids": [B, L], "pixel_values": [patches, C], "image_grid_thw": [images, 3]}          Qwen
{"input_ids": [B, L], "pixel_values": [images, ...], "image_sizes": [images, 2]}            LLaVA
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import Largest

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_OF_IMAGES = ("image_sizes", "pixel_attention_mask", "pixel_mask")


def rows(mapping: Mapping[Any, Any]) -> dict[str, Rows | Largest]:
    """Return what the images of a mapping with text hold; empty for all else."""
    if not isinstance(mapping.get("input_ids"), Tensor):
        return {}
    found: dict[str, Rows | Largest] = {}
    for pixels, grid in _GRIDS.items():
        if isinstance(mapping.get(grid), Tensor):
            found[pixels] = Rows(f"patches of {pixels}")
            found[grid] = Rows(grid, lengths=f"patches of {pixels}")
    if not found and isinstance(mapping.get("pixel_values"), Tensor):
        of_images = ("pixel_values", *(key for key in _OF_IMAGES if isinstance(mapping.get(key), Tensor)))
        found = {key: Rows("images") for key in of_images}
    return found
