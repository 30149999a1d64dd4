"""Random inputs for a model of transformers, by the names of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from benchmarks.conformance.libraries.tiny_configs import FIRST_WORD, IMAGE, TOKEN_IDS
from tests.zoo.entry import TOKENS, Inputs, mask

LENGTH, FRAMES, STEPS, WAVE = 8, 2, 64, 1280

_MEDIA: dict[str, Sequence[tuple[Any, ...]]] = {
    "pixel_values": (("channels", "side", "side"), (1, "channels", "side", "side")),
    "pixel_values_videos": ((FRAMES, "channels", "side", "side"),),
    "input_features": (("bins", "steps"), ("steps", "bins")),
    "input_values": ((1, "wave"), ("wave",)),
    "past_values": (("steps",),),
}
"""What is not text, and the shapes that a sample of it may have."""
_TOKENS = {"pixel_values": "image", "pixel_values_videos": "video"}
_CLASSES = ("SequenceClassification", "ImageClassification", "VideoClassification", "AudioClassification")


@dataclass(frozen=True)
class Call:
    """What a model is called with; called with a batch size, it draws that.

    Attributes
    ----------
    names : the arguments.
    kind : the name of the model's class, which says what its labels are.
    sizes : what its configuration says of channels and bins.
    shape : which of the shapes that a medium may have.
    marks : how many tokens of a text stand for a sample's image, video or sound.
    times : how much longer a medium is along each side than it usually is here.
    """

    names: tuple[str, ...]
    kind: str
    sizes: tuple[tuple[str, int], ...]
    shape: int = 0
    marks: int = 0
    times: int = 1

    def __str__(self) -> str:
        return ", ".join(self.names)

    def __call__(self, batch: int) -> Inputs:
        return {name: self._drawn(name, batch) for name in self.names}

    @property
    def media(self) -> list[str]:
        """Its arguments that are no text."""
        return [name for name in self.names if name in _MEDIA]

    def with_marks(self, marks: int) -> Call:
        """With so many tokens for each sample's image."""
        return replace(self, marks=marks)

    def larger(self) -> Call:
        """With media twice as long along each side."""
        return replace(self, times=2 * self.times)

    @property
    def _length(self) -> int:
        return LENGTH + self.marks

    def _drawn(self, name: str, batch: int) -> Tensor:
        if name in _MEDIA:
            return self._medium(name, batch)
        if name == "attention_mask":
            return mask(batch, self._length)
        if name == "labels":
            return self._labels(batch)
        ids = torch.randint(FIRST_WORD, TOKENS, (batch, self._length))
        if name == "input_ids" and self.marks:
            medium = next(iter(self.media), "")
            ids[:, 1 : 1 + self.marks] = TOKEN_IDS[_TOKENS.get(medium, "audio")]
        return ids

    def _medium(self, name: str, batch: int) -> Tensor:
        shapes = _MEDIA[name]
        sizes = dict(self.sizes) | {"steps": STEPS, "wave": WAVE}
        sizes |= {name: self.times * sizes[name] for name in ("side", "steps", "wave")}
        sample = shapes[min(self.shape, len(shapes) - 1)]
        return torch.randn(batch, *(sizes.get(size, size) for size in sample))

    def _labels(self, batch: int) -> Tensor:
        side = self.times * dict(self.sizes)["side"]
        if self.kind.endswith(_CLASSES):
            return torch.randint(0, 2, (batch,))
        if self.kind.endswith("SemanticSegmentation"):
            return torch.randint(0, 2, (batch, side, side))
        if "input_ids" not in self.names and "pixel_values" in self.names:
            return torch.rand(batch, side, side)
        if "input_ids" not in self.names:
            return torch.randint(FIRST_WORD, TOKENS, (batch, 3))
        made = torch.randint(FIRST_WORD, TOKENS, (batch, self._length))
        made[torch.rand(made.shape) < 0.4] = -100
        return made


def calls(model: nn.Module) -> Iterator[Call]:
    """What a model may be called with, with labels and the most complete first."""
    names = inspect.signature(model.forward).parameters
    text = [name for name in ("input_ids", "attention_mask") if name in names and "input_ids" in names]
    media = [name for name in _MEDIA if name in names]
    targets = [[name] for name in ("labels", "decoder_input_ids") if name in names]
    both = [["labels", "decoder_input_ids"]] if len(targets) == 2 else []
    sizes = tuple((name, _size(model, keys, default)) for name, (keys, default) in _SIZES.items())
    for some in [*([name] for name in media), []] if text else [[name] for name in media]:
        for more in [*targets, *both, []]:
            for shape in range(max([len(_MEDIA[name]) for name in some], default=1)):
                yield Call((*text, *some, *more), type(model).__name__, sizes, shape)


_SIZES = {
    "channels": (("num_channels", "in_channels"), 3),
    "side": (("image_size",), IMAGE),
    "bins": (("num_mel_bins", "n_mels", "feature_size"), 16),
}
"""By which names a configuration knows what a shape needs, and what it is where it says nothing."""


def _size(model: Any, keys: Sequence[str], default: int) -> int:
    """What the configuration of a model or of its parts says of a size."""
    parts = [model.config, *(v for v in vars(model.config).values() if isinstance(v, PreTrainedConfig))]
    found = [vars(part).get(key) for part in parts for key in keys]
    return next((max(v) if isinstance(v, (list, tuple)) else v for v in found if v), default)
