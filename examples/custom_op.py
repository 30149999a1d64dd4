"""An op of your own, forward and backward, that runs on each rank's part of the batch.

    python examples/custom_op.py
    torchrun --nproc-per-node 2 examples/custom_op.py

fxdp knows the ops of torch. An op that it does not know is never wrong: its operands are gathered and it
runs replicated on every rank, which `compiled.plan` reports. One line says how the op acts on the batch, and
then it runs on the rank's own rows, without communication; `fxdp.check_rule` proves that line.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp


@torch.library.custom_op("example::similarity", mutates_args=())
def similarity(x: Tensor, prototypes: Tensor) -> Tensor:
    """The cosine of each row's angle, times the prototype's length: `[n, d], [k, d] -> [n, k]`."""
    return F.normalize(x) @ prototypes.T


@torch.library.custom_op("example::similarity_backward", mutates_args=())
def similarity_backward(grad: Tensor, x: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and prototypes."""
    length = x.norm(dim=1, keepdim=True)
    unit, along = x / length, grad @ prototypes
    return (along - (along * unit).sum(1, keepdim=True) * unit) / length, grad.T @ unit


@similarity.register_fake
def _(x: Tensor, prototypes: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], prototypes.shape[0])


@similarity_backward.register_fake
def _(grad: Tensor, x: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(prototypes)


similarity.register_autograd(
    lambda ctx, grad: similarity_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# A letter is a dim along which the op may be split; where a result lacks it, the parts are terms of a sum.
# So prototypes' gradients are summed over n, the samples: fxdp adds them up over the ranks.
fxdp.register_rule(similarity, labels="n_, k_ -> nk")
fxdp.register_rule(similarity_backward, labels="nk, n_, k_ -> n_, k_", linear_in=["grad"])


class Classifier(nn.Module):
    """One prototype per class."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.prototypes = nn.Parameter(torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[n, 3]`."""
        scores: Tensor = similarity(self.features(x), self.prototypes)
        return scores


def main() -> None:
    """Prove the rules, prove a model, and train it."""
    for op, dims in ((similarity, ("BD", "KD")), (similarity_backward, ("BK", "BD", "KD"))):
        size = {"B": "B", "D": 4, "K": 3}
        samples = [fxdp.Sample(*(size[d] for d in names)) for names in dims]
        print(op, "runs as:", *fxdp.check_rule(op, *samples), sep="\n    ")

    torch.manual_seed(0)
    model = Classifier().double()
    x, y = torch.randn(7, 8, dtype=torch.float64), torch.randint(3, (7,))
    fxdp.verify(model, (x,), {"target": y}, mesh={"dp": 4}, loss_fn=F.cross_entropy).raise_if_wrong()
    print("four ranks compute what one device does; what they send:")
    plan = fxdp.plan(model, (x,), {"target": y}, mesh={"dp": 4}, loss_fn=F.cross_entropy)
    print(*(f"    {row.op}: {row.bytes} bytes, {row.cause}" for row in plan.communication), sep="\n")

    compiled = fxdp.compile(model, loss_fn=F.cross_entropy, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        loss = compiled(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
