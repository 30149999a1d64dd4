"""What a new user's trial failed on, small: graphs, adapters, speech, rewards, and losses by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Graphs(nn.Module):
    """torch_geometric's mini-batches: graphs of any size, one after another, and which node is whose."""

    def __init__(self, pooled: str) -> None:
        super().__init__()
        self.fc, self.head, self.pooled = nn.Linear(6, 6), nn.Linear(6, 3), pooled

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        source, target = edge_index
        x = torch.zeros_like(x).index_add(0, target, self.fc(x)[source]).relu()
        index = batch[:, None].expand_as(x)
        graphs = x.new_zeros(len(y), 6).scatter_reduce(0, index, x, self.pooled)
        return F.cross_entropy(self.head(graphs), y)


class Batch:
    """As torch_geometric's, an object that pytree does not know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.fc(batch["graph"].x).square().mean()  # type: ignore[no-any-return]


class Readout(nn.Module):
    """torch_geometric's AttentiveFP: there are as many graphs as the last node's number says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        count = int(index.max()) + 1
        return x.new_zeros(count, 3).index_add(0, index, self.fc(x)).square().mean()


class Bags(nn.Module):
    """Words of all samples one after another, and where each sample's begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(words, offsets).square().mean()  # type: ignore[no-any-return]


class Plain(nn.Module):
    """A layer, and what subclasses do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()  # type: ignore[no-any-return]


class Mixup(Plain):
    def forward(self, x: Tensor) -> Tensor:
        share = np.random.beta(0.4, 0.4)
        return self.fc(share * x + (1 - share) * x.flip(0)).square().mean()  # type: ignore[no-any-return]


class Stochastic(Plain):
    """A layer that is left out now and then."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() if self.training and random.random() < 0.5 else self.fc(x).square().mean()


class LayerDrop(Plain):
    """As wav2vec 2.0 leaves layers out."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if not (self.training and torch.rand([]) < 0.1):
                x = self.fc(x).relu()
        return x.mean()


class Masked(Plain):
    """SpecAugment: spans of time, drawn sample by sample."""

    def forward(self, x: Tensor) -> Tensor:
        start = np.random.randint(0, 4, (x.shape[0],))
        mask = torch.zeros(x.shape, dtype=torch.bool)
        for row, first in enumerate(start):
            mask[row, first : first + 2] = True
        return self.fc(x.masked_fill(mask, 0.0)).square().mean()  # type: ignore[no-any-return]


class Hadamard(torch.autograd.Function):
    """peft's LoHa: a product of two low ranks, element by element, with a backward that computes it again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c, d, scale)
        return (a @ b) * (c @ d) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, c, d, scale = ctx.saved_tensors
        grad = grad * scale
        first, second = grad * (c @ d), grad * (a @ b)
        return first @ b.T, a.T @ first, second @ d.T, c.T @ second, None


class Adapter(nn.Module):
    """LoHa or LoKr beside a frozen layer; both draw whether to be left out, though never are by default."""

    def __init__(self, kronecker: bool, drop: float | None) -> None:
        super().__init__()
        self.base, self.drop, self.kronecker = nn.Linear(6, 6).requires_grad_(False), drop, kronecker
        shapes = ((2, 2), (3, 3)) if kronecker else ((6, 2), (2, 6)) * 2
        self.parts = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.drop is None or torch.rand(1) > self.drop:
            scale = torch.tensor(0.5)
            made = torch.kron(*self.parts) if self.kronecker else Hadamard.apply(*self.parts, scale)
            out = out + F.linear(x, made)
        return out.square().mean()  # type: ignore[no-any-return]


class Branch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean() if x.sum() > 0 else self.fc(x).sum()  # type: ignore[no-any-return]


class Pondering(Plain):
    """As many steps as it takes until all samples have halted."""

    def forward(self, x: Tensor) -> Tensor:
        halted = torch.zeros(x.shape[0])
        while halted.min() < 1:
            x = self.fc(x).tanh()
            halted = halted + x.mean(1).sigmoid()
        return x.square().mean()


class Matching(Plain):
    """DETR: which query is for which box is found by SciPy."""

    def forward(self, x: Tensor) -> Tensor:
        cost = torch.cdist(self.fc(x), x).detach().cpu().numpy()
        chosen = torch.as_tensor(cost.argmin(1))
        return F.l1_loss(self.fc(x), x[chosen])


class Samples(Plain):
    """A loop over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(row @ self.fc.bias for row in x)  # type: ignore[return-value]


class Critic(Plain):
    """WGAN-GP: the slope at points between true and made ones."""

    def forward(self, x: Tensor) -> Tensor:
        between = (x + torch.rand(x.shape[0], 1) * (x.flip(1) - x)).detach().requires_grad_()
        score = self.fc(between).tanh().sum(1)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


class Potential(nn.Module):
    """Forces are what an energy falls by: SchNet's filters of distances between six atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.radial, self.energy = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, at: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        apart = (at[:, :, None] - at[:, None]).square().sum(-1).add(1e-3).sqrt()[..., None]
        near = torch.exp(-(apart - torch.linspace(0, 3, 4)).square())
        found = self.energy(F.softplus(self.radial(near))).sum((1, 2, 3))
        (slope,) = torch.autograd.grad(found.sum(), at, create_graph=True)
        return F.mse_loss(found, energy) + F.mse_loss(-slope, forces)


class Answers(Plain):
    """GRPO: four answers to each prompt, and how much better each is than the others."""

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        rewards = reward.view(-1, 4)
        better = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        chosen = self.fc(x).log_softmax(-1)[:, 0]
        ratio = (chosen - chosen.detach()).exp()
        better = better.flatten()
        return -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()


class Momentum(nn.Module):
    """MoCo: keys by an average of the weights, which is kept as a parameter or a buffer."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.query = nn.Linear(6, 4)
        if buffers:
            self.register_buffer("key", self.query.weight.detach().clone())
        else:
            self.key = nn.Parameter(self.query.weight.detach().clone(), requires_grad=False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 8), dim=0))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.mul_(0.9).add_(0.1 * self.query.weight)
            key = F.normalize(F.linear(other, self.key), dim=1)
        query = F.normalize(self.query(x), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue], 1)
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return out.square().mean()
