"""Packed sequences, documents and bags: Llama, an LSTM, EmbeddingBag, CTC, GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from benchmarks.conformance.ragged_models.case import BARE, Case, joined
from fxdp import Rows
from tests.zoo.entry import built
from tests.zoo.sizes import GROUPED

WIDTH, WORDS = 8, 11


class Llama(nn.Module):
    """transformers' Llama on documents in one row, as `DataCollatorWithFlattening` packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = built("LlamaForCausalLM", use_cache=False, **GROUPED)()

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the next token."""
        loss: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, labels=labels).loss
        return loss


class Bounded(nn.Module):
    """Attention between `cu_seqlens`, causal, with a loss of each document."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the mean over documents of their tokens' mean losses."""
        lengths, size = cu_seqlens.diff(), input_ids.shape[1]
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=size)
        at = torch.arange(size)
        mask = (document[:, None] == document) & (at[:, None] >= at)
        q, k, v = self.project(self.embed(input_ids)).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, mask[None, None]).transpose(1, 2).flatten(2)
        each = F.cross_entropy(self.head(h)[0], labels[0], reduction="none")
        sums = torch.zeros(len(lengths), dtype=each.dtype).index_add(0, document, each)
        return (sums / lengths.clamp(min=1)).mean()


class Packed(nn.Module):
    """An LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True), nn.Linear(8, 1)

    def forward(self, packed: PackedSequence, target: Tensor) -> Tensor:
        """Return the loss of the last states."""
        padded, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        last = padded[torch.arange(len(lengths)), lengths.clamp(min=1) - 1]
        return F.mse_loss(self.head(last).squeeze(1), target)


class Bags(nn.Module):
    """Two tables of bags, by sum and by mean."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.mean = nn.EmbeddingBag(WORDS, 4, mode="sum"), nn.EmbeddingBag(WORDS, 4, mode="mean")
        self.head = nn.Linear(4, 1)

    def forward(self, input: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        """Return the loss of bags."""
        h = self.sum(input, offsets) * self.mean(input, offsets)
        return F.mse_loss(self.head(h).squeeze(1), target)


class Speech(nn.Module):
    """Frames of one length, labels of any: CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, frames: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss, a mean over samples of losses by label."""
        scores = self.head(frames).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, torch.full_like(lengths, frames.shape[1]), lengths)


class Policy(nn.Module):
    """GRPO: rewards are normalized in their group, and the clipped loss is a mean of completions' means."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(
        self, tokens: Tensor, of: Tensor, lengths: Tensor, reward: Tensor, group: Tensor, prompt: Tensor
    ) -> Tensor:
        """Return the loss."""
        groups = len(prompt)
        size = torch.zeros(groups).index_add(0, group, torch.ones_like(reward))
        mean = torch.zeros(groups).index_add(0, group, reward) / size
        centered = reward - mean[group]
        spread = (torch.zeros(groups).index_add(0, group, centered**2) / (size - 1)).sqrt()
        advantage = centered / (spread[group] + 1e-4)
        logits = self.head(self.embed(tokens))
        chosen = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        ratio = (chosen - chosen.detach() * 1.1).exp()
        weight = advantage[of]
        terms = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
        sums = torch.zeros(len(reward)).index_add(0, of, terms)
        return (sums / lengths.clamp(min=1)).mean()


def _length(i: int) -> int:
    return 1 if i in BARE else 2 + (i * 3) % 5


def _document(i: int, made: Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (1, _length(i)), generator=made)
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(_length(i))[None]}


_TOKENS = Rows("tokens", dim=1)
_PACKED = {
    "input_ids": _TOKENS, "labels": _TOKENS, "position_ids": Rows("tokens", dim=1, within="documents")
}  # fmt: skip
_ROW = dict.fromkeys(_PACKED, (1, 0))


def _bounded(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = joined(samples, _ROW, _PACKED)
    lengths = [0, *(one["input_ids"].shape[1] for one in samples)]
    return {
        "input_ids": rows["input_ids"], "labels": rows["labels"].clamp(min=0),
        "cu_seqlens": torch.tensor(lengths).cumsum(0),
    }  # fmt: skip


_BOUNDED = {"input_ids": _TOKENS, "labels": _TOKENS, "cu_seqlens": Rows("documents", bounds="tokens")}


def _sequence(i: int, made: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(_length(i), WIDTH, dtype=torch.float64, generator=made)
    return x, torch.randn(1, dtype=torch.float64, generator=made)


def _packed(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[PackedSequence, Tensor]:
    if not samples:
        none = torch.empty(0, WIDTH, dtype=torch.float64)
        return PackedSequence(none, torch.empty(0, dtype=torch.int64)), none[:, 0]
    packed = pack_sequence([x for x, _ in samples], enforce_sorted=False)
    return packed, torch.cat([target for _, target in samples])


def _pair(batch: tuple[Any, Tensor]) -> dict[str, Any]:
    return {"packed": batch[0], "target": batch[1]}


def _bag(i: int, made: Generator) -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (0 if i in BARE else _length(i),), generator=made)
    return {"input": words, "target": torch.randn(1, dtype=torch.float64, generator=made)}


def _bags(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found = joined(samples, {"input": (0,), "target": (0,)}, _BAGS)
    lengths = torch.tensor([len(one["input"]) for one in samples], dtype=torch.int64)
    return {**found, "offsets": lengths.cumsum(0) - lengths}


_BAGS = {"input": Rows("words"), "offsets": Rows("bags", starts="words"), "target": Rows("bags")}
_FRAMES = {"frames": Rows("samples"), "labels": Rows("labels"), "lengths": Rows("samples", lengths="labels")}


def _speech(i: int, made: Generator) -> dict[str, Tensor]:
    labels = torch.randint(1, WORDS, (_length(i),), generator=made)
    return {
        "frames": torch.randn(1, 14, WIDTH, dtype=torch.float64, generator=made), "labels": labels,
        "lengths": torch.tensor([len(labels)]),
    }  # fmt: skip


def _group(i: int, made: Generator) -> dict[str, Tensor]:
    """Completions of one prompt; some have no token."""
    lengths = torch.tensor([0, 0] if i in BARE else [1 + i, 2, 7 - i])
    count, tokens = len(lengths), int(lengths.sum())
    return {
        "tokens": torch.randint(0, WORDS, (tokens,), generator=made),
        "of": torch.repeat_interleave(torch.arange(count), lengths),
        "lengths": lengths,
        "reward": torch.rand(count, dtype=torch.float64, generator=made),
        "group": torch.zeros(count, dtype=torch.int64),
        "prompt": torch.tensor([i]),
    }


_GROUPS = {
    "tokens": Rows("tokens"), "of": Rows("tokens", into="completions"),
    "lengths": Rows("completions", lengths="tokens"), "reward": Rows("completions"),
    "group": Rows("completions", into="groups"), "prompt": Rows("groups"),
}  # fmt: skip

CASES = {
    "Llama, position_ids": Case(
        "tokens, documents", Llama, _document, partial(joined, like=_ROW, rows=_PACKED), _PACKED,
        recognised=True,
    ),
    "attention, cu_seqlens": Case("tokens, documents", Bounded, _document, _bounded, _BOUNDED),
    "LSTM, PackedSequence": Case("samples, steps", Packed, _sequence, _packed, {}, _pair, recognised=True),
    "EmbeddingBag": Case("words, bags", Bags, _bag, _bags, _BAGS),
    "CTC": Case(
        "samples, labels", Speech, _speech,
        partial(joined, like={"frames": (0, 14, WIDTH), "labels": (0,), "lengths": (0,)}, rows=_FRAMES),
        _FRAMES,
    ),
    "GRPO": Case(
        "tokens, completions, groups", Policy, _group,
        partial(joined, like=dict.fromkeys(_GROUPS, (0,)), rows=_GROUPS), _GROUPS,
    ),
}  # fmt: skip
