from __future__ import annotations

import torch
from torch import Tensor, nn

import fxdp


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, z: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.one + cut.detach(), z * self.other


def test_hooks_hear_of_gradients_as_on_one_device() -> None:
    def effects(model: nn.Module, run: nn.Module) -> list[object]:
        said: list[object] = []
        for name, parameter in model.named_parameters():

            def before(gradient: Tensor, name: str = name) -> Tensor:
                said.append((name, gradient.tolist()))
                return gradient * 2

            def after(parameter: Tensor, name: str = name) -> None:
                said.append((name, "after", None if parameter.grad is None else parameter.grad.tolist()))

            parameter.register_hook(before)
            parameter.register_post_accumulate_grad_hook(after)
        for read in ((0,), (0, 1), (1,), (0, 1)):  # gradients accumulate
            inputs = [torch.full((3, 2), 2.0, requires_grad=True) for _ in range(3)]
            for name, given in zip(("x", "z", "cut"), inputs, strict=True):
                given.register_hook(lambda gradient, name=name: said.append((name, gradient.tolist())))  # type: ignore[no-untyped-call]
            outputs = run(*inputs)
            sum((outputs[i].sum() for i in read), torch.zeros(())).backward()
            said.append(read)
            said.append([parameter.grad is None for parameter in model.parameters()])
        return said

    model, alone = _Heads(), _Heads()
    found, expected = effects(model, fxdp.compile(model, backend="eager")), effects(alone, alone)
    assert sorted(map(str, found)) == sorted(map(str, expected)), "in whichever order within a backward"
    assert len(found) == 26
