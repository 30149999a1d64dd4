"""What users of transformers give Trainer beside a model: samples, what makes batches of them, metrics.

Texts have other lengths in each sample; where the collator pads, a batch is as long as its longest one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers as hf

TOKENS = 40
CLASSES = 3

ParamShard = list[dict[str, Any]]


def tokenizer() -> Any:
    """A tokenizer of 40 words, made here; it pads with 0."""
    from tokenizers import Tokenizer, models

    words = ["[PAD]", "[BOS]", "[EOS]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(TOKENS - 5))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    special = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "bos_token", "eos_token", "mask_token")
    }
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]", **special)


def _ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(5, TOKENS) for _ in range(length)]


def sentence(draw: random.Random, i: int, fixed: int = 0) -> dict[str, Any]:
    """A text of this length, or another one in each sample."""
    ids = _ids(draw, fixed or 3 + (5 * i) % 7)
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def classified(label: Callable[[random.Random], Any], draw: random.Random, i: int) -> dict[str, Any]:
    """A text and what it is."""
    return sentence(draw, i) | {"labels": label(draw)}


def tagged(draw: random.Random, i: int) -> dict[str, Any]:
    """A text with a kind for each word but the first."""
    text = sentence(draw, i)
    return text | {"labels": [-100, *(draw.randrange(CLASSES) for _ in text["input_ids"][1:])]}


def asked(draw: random.Random, i: int) -> dict[str, Any]:
    """A text in which an answer begins and ends."""
    places = {"start_positions": draw.randrange(4), "end_positions": draw.randrange(4, 8)}
    return sentence(draw, i, 8) | places


def masked(draw: random.Random, i: int) -> dict[str, Any]:
    """A text in which some words are masked."""
    text = sentence(draw, i)
    labels = [x if draw.random() < 0.4 else -100 for x in text["input_ids"]]
    ids = [x if label == -100 else 3 for x, label in zip(text["input_ids"], labels, strict=True)]
    return text | {"input_ids": ids, "labels": labels}


def grouped(draw: random.Random, i: int) -> dict[str, Any]:
    """A block of running text."""
    text = sentence(draw, i, 8)
    return text | {"labels": list(text["input_ids"])}


def chosen(draw: random.Random, i: int) -> dict[str, Any]:
    """Two endings, of which one is right."""
    ids = [_ids(draw, 3 + (i + choice) % 5) for choice in range(2)]
    return {"input_ids": ids, "attention_mask": [[1] * len(x) for x in ids], "label": draw.randrange(2)}


def translated(draw: random.Random, i: int) -> dict[str, Any]:
    """A text and what it becomes."""
    return sentence(draw, i) | {"labels": [*_ids(draw, 2 + (3 * i) % 5), 2]}


def _random(shape: Sequence[int], draw: random.Random) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(draw.randrange(10**6)))


def image(draw: random.Random, i: int) -> dict[str, Any]:
    """An image and what it shows."""
    return {"pixel_values": _random((3, 16, 16), draw), "labels": draw.randrange(CLASSES)}


def scene(draw: random.Random, i: int) -> dict[str, Any]:
    """An image with a kind for each pixel; 255 is none."""
    labels = torch.tensor([draw.choice((0, 1, 2, 255)) for _ in range(256)]).view(16, 16)
    return {"pixel_values": _random((3, 16, 16), draw), "labels": labels}


def pair(draw: random.Random, i: int) -> dict[str, Any]:
    """An image and its text."""
    return sentence(draw, i) | {"pixel_values": _random((3, 16, 16), draw)}


def sound(
    draw: random.Random, i: int, key: str = "input_values", size: tuple[int, ...] = (200,)
) -> dict[str, Any]:
    """A sound and what it is."""
    return {key: _random(size, draw), "labels": draw.randrange(CLASSES)}


def spoken(draw: random.Random, i: int) -> dict[str, Any]:
    """A sound of its own length, and its letters."""
    words = [draw.randrange(1, 12) for _ in range(2 + i % 3)]
    return {"input_values": _random((150 + 10 * (i % 4),), draw).tolist(), "labels": words}


def dictated(draw: random.Random, i: int) -> dict[str, Any]:
    """A spectrum and its words."""
    return {"input_features": _random((8, 16), draw), "labels": [*_ids(draw, 2 + (3 * i) % 5), 2]}


def series(draw: random.Random, i: int) -> dict[str, Any]:
    """A past and its future."""
    return {"past_values": _random((16, 2), draw), "future_values": _random((4, 2), draw)}


def _padded(values: Sequence[Sequence[Any]], fill: Any) -> torch.Tensor:
    longest = max(map(len, values))
    return torch.tensor([[*x, *[fill] * (longest - len(x))] for x in values])


def collate_speech(features: ParamShard) -> dict[str, torch.Tensor]:
    """Pads sounds and their words apart, as in the guides for CTC."""
    sounds = [row["input_values"] for row in features]
    mask = _padded([[1] * len(sound) for sound in sounds], 0)
    labels = _padded([row["labels"] for row in features], -100)
    return {
        "input_values": _padded(sounds, 0.0).to(torch.get_default_dtype()),
        "attention_mask": mask,
        "labels": labels,
    }


def collate_dictation(features: ParamShard) -> dict[str, torch.Tensor]:
    """Pads words, as in the guides for Whisper; all sounds are 30 seconds."""
    sounds = torch.stack([row["input_features"] for row in features])
    return {"input_features": sounds, "labels": _padded([row["labels"] for row in features], -100)}


def collate_pairs(features: ParamShard) -> dict[str, Any]:
    """Images with their texts, as in the example for CLIP."""
    pixels = torch.stack([row["pixel_values"] for row in features])
    texts = {key: _padded([row[key] for row in features], 0) for key in ("input_ids", "attention_mask")}
    return {"pixel_values": pixels, **texts, "return_loss": True}


def _first(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions


def accuracy(found: Any) -> dict[str, float]:
    """Of the largest logits where there is a label, and the mean of all logits there."""
    logits, labels = _first(found.predictions), found.label_ids
    counts = labels != -100
    right = (logits.argmax(-1) == labels)[counts].mean()
    return {"accuracy": float(right), "mean": float(logits[counts].mean()), "rows": float(len(labels))}


def errors(found: Any) -> dict[str, float]:
    """Of numbers, or of several labels."""
    predicted = _first(found.predictions).reshape(found.label_ids.shape)
    return {"mse": float(((predicted - found.label_ids) ** 2).mean()), "rows": float(len(predicted))}


def spans(found: Any) -> dict[str, float]:
    """Of where answers begin and end."""
    pairs = zip(found.predictions, found.label_ids, strict=True)
    return {f"exact_{i}": float((p.argmax(-1) == y).mean()) for i, (p, y) in enumerate(pairs)}


def generated(found: Any) -> dict[str, float]:
    """Of generated texts."""
    made = np.where(found.predictions < 0, 0, found.predictions)
    return {"sum": float(made.sum()), "rows": float(len(made))}


def pixels(found: Any) -> dict[str, float]:
    """Of maps of logits smaller than the labels."""
    logits, labels = found.predictions, found.label_ids
    return {"mean": float(logits.mean()), "labels": float((labels == 1).mean()), "rows": float(len(logits))}


def words(found: Any) -> dict[str, float]:
    """Of each moment's letter."""
    return {"sum": float(_first(found.predictions).argmax(-1).sum()), "rows": float(len(found.label_ids))}
