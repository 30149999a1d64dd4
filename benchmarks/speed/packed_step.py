"""Packed documents beside padded ones: seconds and CPU seconds of a step of a small Llama, on 1 and 2 ranks.

    python -m benchmarks.speed.packed_step --ranks 2 --padding 0 0.2 0.4

One model in two batches of the same documents: padded to the longest one with a mask, and packed into one row
by `position_ids`. `--padding` is the share of the padded batch that is padding. Both are compiled through
Inductor, as users do, with AdamW; rounds alternate, and the figures are medians. A ratio below 1 says that
packed is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxdp
from fxdp import Rows

_LENGTH, _VOCABULARY = 128, 2048


class _Model(nn.Module):
    """A Llama with its loss; tokens where `labels` are -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                num_attention_heads=4, num_key_value_heads=4, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, input_ids: Tensor, labels: Tensor, **how: Tensor) -> Tensor:
        logits = self.llama(input_ids=input_ids, **how).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _lengths(count: int, padding: float) -> list[int]:
    """Return lengths of documents, the first the longest, that leave this share of a padded batch empty."""
    if not padding:
        return [_LENGTH] * count
    left = round(count * _LENGTH * (1 - padding)) - _LENGTH
    least, most = max(2 * left // (count - 1) - _LENGTH, 8), _LENGTH
    found = [_LENGTH, *torch.linspace(most, least, count - 1).round().int().tolist()]
    found[-1] += count * _LENGTH - round(count * _LENGTH * padding) - sum(found)
    return found


def _batches(lengths: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the documents padded, and packed."""
    rows = [torch.randint(1, _VOCABULARY, (n,)) for n in lengths]
    labels = [torch.cat([row[1:], torch.tensor([-100])]) for row in rows]
    pad = nn.utils.rnn.pad_sequence
    padded = {
        "input_ids": pad(rows, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }  # fmt: skip
    if len(set(lengths)) == 1:
        del padded["attention_mask"]
    packed = {
        "input_ids": torch.cat(rows)[None], "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }  # fmt: skip
    return padded, packed


_TOKENS = Rows("tokens", dim=1)
_PACKED = {"input_ids": _TOKENS, "labels": _TOKENS, "position_ids": Rows("tokens", dim=1, within="documents")}


def _step(batch: dict[str, Tensor], batch_dims: Any) -> Callable[[], float]:
    compiled = fxdp.compile(_Model(), batch_dims=batch_dims)
    optimizer = torch.optim.AdamW(compiled.parameters())

    def step() -> float:
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def measured(padding: float, documents: int, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a padded step, and the ratios of a packed one: of seconds and of CPU seconds."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    padded, packed = _batches(_lengths(documents, padding))
    steps = _step(padded, None), _step(packed, ((), _PACKED))
    losses = [[step() for _ in range(2)] for step in steps]
    if abs(losses[0][1] - losses[1][1]) > 1e-3 * losses[0][1]:
        raise AssertionError(f"the losses of padded and packed steps are {losses}")
    seconds: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds):
        for step, found in zip(steps, seconds, strict=True):
            start, of_process = time.perf_counter(), time.process_time()
            step()
            found.append((time.perf_counter() - start, time.process_time() - of_process))
    of = [[statistics.median(one[i] for one in found) for found in seconds] for i in range(2)]
    return of[0][0], of[0][1] / of[0][0], of[1][1] / of[1][0]


def main() -> None:
    """Print a line for each share of padding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--padding", type=float, nargs="+", default=[0.0, 0.2, 0.4])
    parser.add_argument("--documents", type=int, default=8, help="of each rank")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    for padding in given.padding:
        arguments = padding, given.documents, given.rounds
        ranks = given.ranks
        found = measured(*arguments) if ranks == 1 else fxdp.launch(measured, *arguments, nproc=ranks)[0]
        print(f"ranks {given.ranks}, padding {padding:.0%}: padded {found[0]:.3f} s, packed x{found[1]:.2f}, "
              f"CPU x{found[2]:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
