"""Vision-language models of transformers: texts with two, one or no image, of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.conformance.ragged_models.case import BARE, Case
from fxdp import Rows
from tests.zoo.captioning import CAPTIONING
from tests.zoo.entry import SIDE, TOKENS, built
from tests.zoo.looking import LOOKING
from tests.zoo.matching import MATCHING
from tests.zoo.others import MULTIMODAL
from tests.zoo.seeing import SEEING
from tests.zoo.sizes import GROUPED, IMAGE

MARK, START, LENGTH = 3, 5, 12
Sample = dict[str, Any]


class Answering(nn.Module):
    """A model of transformers, by its loss."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = build()

    def forward(self, **inputs: Any) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(**inputs).loss
        return loss


def images_of(i: int) -> int:
    """Return how many images a sample has."""
    return 0 if i in BARE else 1 + i % 2


def _text(marks: Sequence[int], made: Generator) -> tuple[Tensor, Tensor]:
    """A text with so many places for the patches of each image, and labels."""
    ids = torch.randint(12, TOKENS, (1, LENGTH), generator=made)
    at = 0
    for count in marks:
        ids[0, at] = START
        ids[0, at + 1 : at + 1 + count] = MARK
        at += 1 + count
    labels = torch.randint(12, TOKENS, (1, LENGTH), generator=made)
    labels[:, : 1 + int(torch.randint(0, 6, (1,), generator=made))] = -100
    return ids, labels


def _of_patches(i: int, made: Generator) -> Sample:
    """Patches of all images in rows, and each image's size in patches: the way of Qwen."""
    grids = [(1, 2, 2), (1, 2, 4)][: images_of(i)]
    ids, labels = _text([t * h * w // 4 for t, h, w in grids], made)
    grid = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
    patches = int(grid.prod(1).sum())
    return {
        "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == MARK).int(), "image_grid_thw": grid,
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, dtype=torch.float64, generator=made),
    }  # fmt: skip


def _of_images(i: int, made: Generator, *, marks: int, views: int = 0) -> Sample:
    """Images of one size, several views of each, and their sizes: the way of LLaVA."""
    count = images_of(i) if views == 0 else min(images_of(i), 1)
    ids, labels = _text([marks] * count, made)
    shape = (count, views, 3, SIDE, SIDE) if views else (count, 3, SIDE, SIDE)
    return {
        "input_ids": ids, "labels": labels,
        "pixel_values": torch.randn(shape, dtype=torch.float64, generator=made),
        "image_sizes": torch.full((count, 2), SIDE),
    }  # fmt: skip


def _padded(i: int, made: Generator) -> Sample:
    """Two places for images in each sample, of which zeros are none: the way of SmolVLM."""
    ids, labels = _text([1] * images_of(i), made)
    pixels = torch.randn(1, 2, 3, SIDE, SIDE, dtype=torch.float64, generator=made)
    pixels[:, images_of(i) :] = 0
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "attention_mask": mask}


def _masked(i: int, made: Generator) -> Sample:
    """Images of several sizes, padded, with a mask of pixels: the way of ViLT."""
    mask = torch.ones(1, SIDE, SIDE, dtype=torch.int64)
    if i in BARE:
        mask[:, 8:] = 0
    pixels = torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64, generator=made)
    return {
        "input_ids": torch.randint(3, TOKENS, (1, 6), generator=made), "pixel_values": pixels,
        "pixel_mask": mask, "labels": torch.rand(1, 3, dtype=torch.float64, generator=made),
    }  # fmt: skip


def _shaped(i: int, made: Generator) -> Sample:
    """Rows of patches of images of several shapes, padded: the way of SigLIP 2."""
    shape, mask = [2, 2], torch.ones(1, 4, dtype=torch.int64)
    if i in BARE:
        shape, mask[:, 2:] = [1, 2], 0
    return {
        "input_ids": torch.randint(3, TOKENS, (1, 6), generator=made),
        "pixel_values": torch.randn(1, 4, 3 * 8 * 8, dtype=torch.float64, generator=made),
        "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([shape]),
    }  # fmt: skip


def _collated(samples: Sequence[Sample], like: Callable[[int, Generator], Sample]) -> Sample:
    none = {key: value[:0] for key, value in like(0, Generator()).items()}
    return {key: torch.cat([empty, *(s[key] for s in samples)]) for key, empty in none.items()}


_ROPE = {"rope_type": "default", "rope_theta": 100.0}


def _pixtral() -> nn.Module:
    return built(
        "LlavaForConditionalGeneration",
        vision_config={"model_type": "pixtral", **IMAGE, "rope_parameters": _ROPE},
        text_config={"model_type": "mistral", **GROUPED}, image_token_index=MARK,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )()  # fmt: skip


def _case(
    build: Callable[[], nn.Module], sample: Callable[[int, Generator], Sample], rows: Mapping[str, Any],
    axes: str = "samples, images", more: Mapping[str, Any] = {},
) -> Case:  # fmt: skip
    keys = sample(0, Generator())
    return Case(
        axes, partial(Answering, build), sample, partial(_collated, like=sample),
        {key: rows.get(key, 0) for key in keys}, partial(_with, more=more), recognised=bool(rows),
    )  # fmt: skip


def _with(batch: Sample, *, more: Mapping[str, Any]) -> Sample:
    return {**batch, **more}


_PATCHES = {"pixel_values": Rows("patches"), "image_grid_thw": Rows("images", lengths="patches")}
_IMAGES = {"pixel_values": Rows("images"), "image_sizes": Rows("images")}
_CONTRASTIVE = {"return_loss": True}

CASES = {
    **{
        name: _case(CAPTIONING[name].build, _of_patches, _PATCHES, "samples, images, patches")
        for name in ("qwen2_vl", "qwen2_5_vl")
    },
    **{
        name: _case(SEEING[name].build, partial(_of_images, marks=marks, views=2), _IMAGES)
        for name, marks in {"llava_next": 10, "llava_onevision": 10}.items()
    },
    "pixtral": _case(_pixtral, partial(_of_images, marks=4), _IMAGES),
    "mistral3": _case(LOOKING["mistral3"].build, partial(_of_images, marks=1), _IMAGES),
    "smolvlm": _case(SEEING["smolvlm"].build, _padded, {}),
    "vilt": _case(MULTIMODAL["vilt"].build, _masked, {}, "samples, pixels"),
    "siglip2": _case(MATCHING["siglip2"].build, _shaped, {}, "samples, patches", _CONTRASTIVE),
}
