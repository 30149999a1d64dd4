"""Continual learning: Fisher information per sample, elastic penalties, a reservoir of memories, projected gradients."""

import copy
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    random_split,
)

torch.set_default_dtype(torch.float64)
SEED = 12


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)


class PermutedDataset(Dataset):
    def __init__(self, dataset, permutation):
        self.dataset, self.permutation = dataset, permutation

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, idx):
        x, y = self.dataset[idx]
        return x[self.permutation], y


class MLP(nn.Module):
    def __init__(self, n_in=16, hidden=20, classes=4):
        super().__init__()
        self.layers = nn.Sequential(
            OrderedDict(
                [("fc1", nn.Linear(n_in, hidden)), ("act1", nn.ReLU()), ("fc2", nn.Linear(hidden, hidden)),
                 ("act2", nn.ReLU()), ("out", nn.Linear(hidden, classes))]
            )
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class EWC:
    def __init__(self, model, dataset):
        self.model = model
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.means = {n: p.clone().detach() for n, p in self.params.items()}
        self.precision = self.diag_fisher(dataset)

    def diag_fisher(self, dataset):
        precision = {n: torch.zeros_like(p) for n, p in copy.deepcopy(self.params).items()}
        self.model.eval()
        for x, _ in dataset:
            self.model.zero_grad()
            output = self.model(x).view(1, -1)
            label = output.max(1)[1].view(-1)
            F.nll_loss(F.log_softmax(output, dim=1), label).backward()
            for n, p in self.model.named_parameters():
                precision[n].data += p.grad.data**2 / len(dataset)
        return precision

    def penalty(self, model):
        loss = 0
        for n, p in model.named_parameters():
            loss += (self.precision[n] * (p - self.means[n]) ** 2).sum()
        return loss


class Reservoir:
    def __init__(self, size):
        self.size, self.seen = size, 0
        self.x, self.y, self.logits = [], [], []

    def add(self, x, y, logits):
        for i in range(len(x)):
            if len(self.x) < self.size:
                self.x.append(x[i]), self.y.append(y[i]), self.logits.append(logits[i])
            elif (index := np.random.randint(0, self.seen + 1)) < self.size:
                self.x[index], self.y[index], self.logits[index] = x[i], y[i], logits[i]
            self.seen += 1

    def get(self, n):
        choice = np.random.choice(len(self.x), size=min(n, len(self.x)), replace=False)
        return tuple(torch.stack([values[ind] for ind in choice]) for values in (self.x, self.y, self.logits))


def evaluate(model, loader):
    model.eval()
    losses, hits = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            losses += F.cross_entropy(out, y, reduction="sum").item()
            hits += (F.softmax(out, dim=1).max(dim=1)[1] == y).data.sum()
    return losses / len(loader.dataset), float(hits) / len(loader.dataset)


def gradient_vector(model):
    return torch.cat([p.grad.view(-1) if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])


def set_gradient(model, vector):
    begin = 0
    for p in model.parameters():
        p.grad.copy_(vector[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


seed_everything(SEED)
labels = torch.randint(4, (67,))
full = TensorDataset(torch.randn(4, 16)[labels] + 0.7 * torch.randn(67, 16), labels)
base, held = random_split(full, [0.75, 0.25], generator=torch.Generator().manual_seed(SEED))
permutations = [torch.arange(16), *(torch.randperm(16) for _ in range(2))]
train_sets = [PermutedDataset(base, p) for p in permutations]
tests = [DataLoader(PermutedDataset(held, p), batch_size=6) for p in permutations]
for method in ("naive", "ewc", "replay", "agem", "joint"):
    seed_everything(SEED + 1)
    model = MLP()
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    penalties, memory, acc = [], Reservoir(15), {}
    tasks = [ConcatDataset(train_sets)] if method == "joint" else train_sets
    for task, data in enumerate(tasks):
        sampler = RandomSampler(data, replacement=False, num_samples=40)
        for epoch in range(2):
            model.train()
            total = 0
            for x, y in DataLoader(data, batch_size=9, sampler=sampler):
                optimizer.zero_grad()
                output = model(x)
                loss = F.cross_entropy(output, y)
                if method == "ewc":
                    loss = loss + 40 * sum((p.penalty(model) for p in penalties), 0.0)
                if method == "replay" and memory.x:
                    old_x, old_y, old_logits = memory.get(7)
                    out = model(old_x)
                    loss = loss + 0.3 * F.mse_loss(out, old_logits) + 0.5 * F.cross_entropy(out, old_y)
                loss.backward()
                if method == "agem" and task:
                    current = gradient_vector(model)
                    old_x, old_y, _ = memory.get(10)
                    model.zero_grad()
                    F.cross_entropy(model(old_x), old_y).backward()
                    reference = gradient_vector(model)
                    dot = torch.dot(current, reference)
                    if dot.item() < 0:
                        current = current - dot / torch.dot(reference, reference) * reference
                    set_gradient(model, current)
                optimizer.step()
                if epoch == 0 and method in ("replay", "agem"):
                    memory.add(x.detach(), y, output.detach())
                total += loss.data.item()
        if method == "ewc":
            picked = Subset(data, np.random.permutation(len(data))[:12].tolist())
            penalties.append(EWC(model, picked))
            print("fisher", " ".join(f"{v.sum().item():.10g}" for v in penalties[-1].precision.values()))
        acc[task] = [evaluate(model, loader) for loader in tests[: task + 1]]
        print(f"{method} task {task} loss {total:.10g}", " ".join(f"{loss:.10g}/{a:.4f}" for loss, a in acc[task]))
    forgetting = np.mean([acc[t][t][1] - acc[len(tasks) - 1][t][1] for t in range(len(tasks))])
    kept = sum(float(x.sum()) for x in memory.x)
    print(f"{method} forgetting {forgetting:.6f} kept {kept:.10g} norms {sum(p.norm().item() for p in model.parameters()):.10g}")
