"""What a forward does to parameters that a graph would not do at each step: refused, with the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxdp.errors import CaptureError
from tests.capturing import capture


class _Game(nn.Module):
    """A generator and a critic, and what a forward makes of them."""

    def __init__(self, body: Callable[[_Game, Tensor], Tensor]) -> None:
        super().__init__()
        self.make = nn.Linear(4, 4)
        self.judge = nn.Linear(4, 4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.places: nn.Module | nn.Parameter | None = None
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _freezes(game: _Game, x: Tensor) -> Tensor:
    made = game.make(x)
    game.judge.requires_grad_(False)
    fooled = game.judge(made).mean()
    game.judge.requires_grad_(True)
    return fooled + game.judge(made.detach()).square().mean()


def _freezes_by_assignment(game: _Game, x: Tensor) -> Tensor:
    game.judge.weight.requires_grad = False
    return game.judge(game.make(x)).mean()


def _thaws(game: _Game, x: Tensor) -> Tensor:
    game.fixed.requires_grad_()
    return (game.make(x) * game.fixed).mean()


def _hooks(game: _Game, x: Tensor) -> Tensor:
    game.make.weight.register_hook(lambda gradient: gradient * 2)
    return game.make(x).mean()


def _hooks_sums(game: _Game, x: Tensor) -> Tensor:
    game.make.weight.register_post_accumulate_grad_hook(lambda p: None)
    return game.make(x).mean()


def _makes(game: _Game, x: Tensor) -> Tensor:
    if game.places is None:
        game.places = nn.Parameter(torch.ones(4))
    return (game.make(x) * game.places).square().mean()


def _makes_a_layer(game: _Game, x: Tensor) -> Tensor:
    game.places = nn.Linear(4, 4)
    return game.places(game.make(x)).square().mean()


def _exchanges(game: _Game, x: Tensor) -> Tensor:
    game.make.weight = nn.Parameter(game.make.weight * 2)
    return game.make(x).mean()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_freezes, "`game.judge.requires_grad_.False.`: the forward freezes the parameter judge.weight"),
        (_freezes_by_assignment, "the forward freezes the parameter judge.weight .*outside of the forward"),
        (_thaws, "`game.fixed.requires_grad_..`: the forward thaws the parameter fixed"),
        (_hooks, "the forward hooks the parameter make.weight by register_hook, once more at each call"),
        (_hooks_sums, "the forward hooks the parameter make.weight by register_post_accumulate_grad_hook"),
        (_makes, r"the forward makes parameters .places of a _Game.*Make them in __init__"),
        (_makes_a_layer, r"`game.places = nn.Linear.*the forward makes parameters .places of a _Game"),
        (_exchanges, r"the forward makes parameters .weight of a Linear"),
    ],
)
def test_it_is_refused_with_the_line(body: Callable[[_Game, Tensor], Tensor], words: str) -> None:
    game = _Game(body)
    with pytest.raises(CaptureError, match=rf"at .*test_parameter_changes.py:\d+ .*{words}"):
        capture(game, (torch.randn(6, 4),), {})
    assert [name for name, p in game.named_parameters() if not p.requires_grad] == ["fixed"]
    assert len(list(game.parameters())) == 5


def _keeps(game: _Game, x: Tensor) -> Tensor:
    game.judge.requires_grad_(True)
    game.fixed.requires_grad = False
    h = game.make(x)
    h.register_hook(lambda gradient: gradient * 2)
    return (game.judge(h) * game.fixed).mean()


def test_what_changes_nothing_is_taken() -> None:
    capture(_Game(_keeps), (torch.randn(6, 4),), {})


def test_a_parameter_made_for_evaluation_is_taken() -> None:
    with torch.no_grad():
        capture(_Game(_makes), (torch.randn(6, 4),), {})


def _makes_others(game: _Game, x: Tensor) -> Tensor:
    with torch.no_grad():
        game.make.weight = nn.Parameter(game.make.weight * 2, requires_grad=False)
    return game.make(x).mean()


def test_one_that_is_made_of_itself_at_each_call_is_refused() -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match=r"\(weight of make \(Linear\) at .*second call"):
        capture(_Game(_makes_others), (torch.randn(6, 4),), {})
