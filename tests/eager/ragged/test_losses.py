"""Losses over ragged batches that hang or differ elsewhere: a rank without a box, uneven completions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp import Rows
from tests.eager.ragged.comparing import error_of, trained
from tests.eager.ragged.test_recognised import DOUBLE, detected


def retina_task(batch: Any) -> dict[str, Any]:
    """As RetinaNet: focal loss of all anchors, box loss of the positive ones, both by the number of these."""
    images, targets = batch
    model = nn.ModuleDict({"see": nn.Conv2d(3, 3, 3, padding=1), "box": nn.Conv2d(3, 4, 1)})
    positive, terms = 0, []
    for image, target in zip(images, targets, strict=True):
        seen = model["see"](image[None])
        scores = seen[0].flatten(1).t()
        offsets = model["box"](seen)[0].flatten(1).t()
        classes = torch.zeros_like(scores)
        for i, (box, label) in enumerate(zip(target["boxes"], target["labels"], strict=True)):
            classes[i, label] = 1.0
            terms.append((offsets[i] - box).abs().sum())
        positive += len(target["boxes"])
        p = scores.sigmoid()
        away = (1 - p) * classes + p * (1 - classes)
        terms.append((F.binary_cross_entropy_with_logits(scores, classes, reduction="none") * away**2).sum())
    return trained(model, torch.stack(terms).sum() / max(positive, 1), positive=positive)


@pytest.mark.parametrize("boxes", [[[2, 0], [0]], [[1], [], [0, 0], [3]]])
def test_a_rank_without_positive_anchors(boxes: list[list[int]]) -> None:
    parts: list[Any] = [detected(i, one) if one else ([], []) for i, one in enumerate(boxes)]
    full = [image for part in parts for image in part[0]], [target for part in parts for target in part[1]]
    error_of(retina_task, full, parts)


GROUP = 2
COMPLETIONS = {
    "tokens": Rows("tokens"), "of": Rows("tokens", into="completions"),
    "lengths": Rows("completions", lengths="tokens"), "reward": Rows("completions"),
    "group": Rows("completions", into="groups"), "prompt": Rows("groups"),
}  # fmt: skip


def completions(seed: int, lengths: list[int]) -> dict[str, Tensor]:
    """Completions of uneven lengths, a group of two for each prompt."""
    made = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int64)
    return {
        "tokens": torch.randint(0, 7, (sum(lengths),), generator=made),
        "of": torch.repeat_interleave(torch.arange(len(lengths)), counts),
        "lengths": counts,
        "reward": torch.rand(len(lengths), dtype=DOUBLE, generator=made),
        "group": torch.arange(len(lengths)) // GROUP,
        "prompt": torch.arange(len(lengths) // GROUP),
    }


def grpo_task(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Advantages are normalized in each group; the clipped loss is a mean of completions' means."""
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    groups, reward = len(batch["prompt"]), batch["reward"]
    mean = torch.zeros(groups).index_add(0, batch["group"], reward) / GROUP
    centered = reward - mean[batch["group"]]
    spread = (torch.zeros(groups).index_add(0, batch["group"], centered**2) / (GROUP - 1)).sqrt()
    advantage = centered / (spread[batch["group"]] + 1e-4)
    logits = model["head"](model["embed"](batch["tokens"]))
    chosen = logits.log_softmax(-1).gather(1, batch["tokens"][:, None]).squeeze(1)
    ratio = (chosen - chosen.detach() * 1.1).exp()
    weight = advantage[batch["of"]]
    terms = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    sums = torch.zeros(len(reward)).index_add(0, batch["of"], terms)
    loss = (sums / batch["lengths"].clamp(min=1)).mean()
    return trained(model, loss, advantage=advantage, tokens=terms.numel())


@pytest.mark.parametrize("lengths", [[[1, 9], []], [[3, 1, 0, 2], [], [8, 1], [2, 2]]])
def test_groups_of_uneven_completions(lengths: list[list[int]]) -> None:
    parts = [completions(i, one) for i, one in enumerate(lengths)]
    joined = completions(0, [n for one in lengths for n in one])
    for key in ("tokens", "reward"):
        joined[key] = torch.cat([part[key] for part in parts])
    error_of(grpo_task, joined, parts, COMPLETIONS)
