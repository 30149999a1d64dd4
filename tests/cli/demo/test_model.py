"""The demonstration's GPT."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fxdp.cli.demo.model import GPT, GPTConfig

TINY = GPTConfig(vocabulary=11, length=6, layers=2, width=8, heads=2)


def test_the_loss_is_the_mean_cross_entropy() -> None:
    model = GPT(TINY)
    tokens, targets = torch.randint(11, (2, 3, 6)).unbind(0)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


def test_no_position_sees_a_later_one() -> None:
    model = GPT(TINY).double()
    tokens = torch.randint(11, (1, 6))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 11
    torch.testing.assert_close(model(tokens)[:, :-1], model(other)[:, :-1])


def test_the_head_is_tied() -> None:
    names = [name for name, _ in GPT(TINY).named_parameters()]
    assert len(names) == len(set(names))
    assert not any("head" in name for name in names)


def test_the_default_is_small() -> None:
    assert sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters()) < 1_000_000
