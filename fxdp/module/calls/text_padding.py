"""Pad values of tokenized text, for ranks whose collators pad to lengths of their own.

A batch of transformers says with `attention_mask` which places count. Such a batch may be padded further with
the values below without a change of the numbers: on one device the collator would pad to the longest text of
the global batch in the same way.

    rank 0   5 7 2 .   1 1 1 0        5 7 2 . . .   1 1 1 0 0 0
             6 4 9 8   1 1 1 1   ->   6 4 9 8 . .   1 1 1 1 0 0
    rank 1   3 3 4 6 1 2              3 3 4 6 1 2

The side is the one on which texts of the run are padded already. As long as none was, or some at either side,
nobody knows it, and the call is refused: a model's positions may count from the first place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

_MASK = "attention_mask"
_TEXTS = ("input_ids", "input_values", "decoder_input_ids")
_VALUES: Mapping[str, float] = {
    "input_ids": 0, "decoder_input_ids": 0, "input_values": 0.0, _MASK: 0, "decoder_attention_mask": 0,
    "token_type_ids": 0, "mm_token_type_ids": 0, "special_tokens_mask": 1, "labels": -100,
}  # fmt: skip
_LAST_NAME = re.compile(r"(\w+)\W*$")


def text_pads(model: nn.Module, paths: Sequence[str], tensors: Sequence[Tensor]) -> list[float | None] | None:
    """Return the pad value of each tensor of a batch of text; None if the batch has no mask for its text."""
    names = [_name(path) for path in paths]
    known = dict(zip(names, tensors, strict=True))
    mask, text = known.get(_MASK), next((known[name] for name in _TEXTS if name in known), None)
    if mask is None or text is None or mask.ndim < 2 or mask.shape != text.shape:
        return None
    values = {**_VALUES, **dict.fromkeys(("input_ids", "decoder_input_ids"), _pad_token(model))}
    return [
        values.get(name) if name != "labels" or not tensor.is_floating_point() else None
        for name, tensor in zip(names, tensors, strict=True)
    ]


def padded_sides(paths: Sequence[str], tensors: Sequence[Tensor]) -> tuple[bool, bool]:
    """Return whether a row of this rank's mask is padded at its start, and whether one is at its end."""
    masks = [t for path, t in zip(paths, tensors, strict=True) if _name(path) == _MASK and t.numel()]

    def at(place: int, other: int) -> bool:
        return any(bool(((mask[..., place] == 0) & (mask[..., other] != 0)).any()) for mask in masks)

    return at(0, -1), at(-1, 0)


def _name(path: str) -> str:
    found = _LAST_NAME.search(path)
    return "" if found is None else found.group(1)


def _pad_token(model: nn.Module) -> int:
    """Return the padding token of a model of transformers; 0 if no part of the model names one."""
    configs = (getattr(module, "config", None) for module in model.modules())
    tokens = (getattr(config, "pad_token_id", None) for config in configs)
    return next((token for token in tokens if isinstance(token, int)), 0)
