"""Metric learning: batches of p classes by k samples, hardest triplets, centers with an own optimizer, recall."""

import random
from collections import defaultdict

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_default_dtype(torch.float64)
random.seed(1), np.random.seed(1), torch.manual_seed(1)
CLASSES, DIM = 7, 6


class PKSampler(Sampler):
    """Batches of k samples of each of p classes."""

    def __init__(self, labels, p, k):
        self.p, self.k, self.index = p, k, defaultdict(list)
        for i, label in enumerate(labels):
            self.index[int(label)].append(i)

    def __len__(self):
        return len(self.index) // self.p

    def __iter__(self):
        classes = list(self.index)
        random.shuffle(classes)
        for start in range(0, len(self) * self.p, self.p):
            batch = []
            for c in classes[start : start + self.p]:
                batch += list(np.random.choice(self.index[c], self.k, replace=len(self.index[c]) < self.k))
            yield batch


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, DIM))

    def forward(self, x, labels):
        batch_size = x.size(0)
        distmat = (
            torch.pow(x, 2).sum(dim=1, keepdim=True).expand(batch_size, CLASSES)
            + torch.pow(self.centers, 2).sum(dim=1, keepdim=True).expand(CLASSES, batch_size).t()
        )
        distmat.addmm_(x, self.centers.t(), beta=1, alpha=-2)
        mask = (
            labels.unsqueeze(1)
            .expand(batch_size, CLASSES)
            .eq(torch.arange(CLASSES).expand(batch_size, CLASSES))
        )
        return (distmat * mask.float()).clamp(min=1e-12, max=1e12).sum() / batch_size


def pairwise(x):
    dot = torch.matmul(x, x.t())
    square = torch.diag(dot)
    distances = F.relu(square.unsqueeze(0) - 2.0 * dot + square.unsqueeze(1))
    zero = distances.eq(0.0).float()
    return (1.0 - zero) * torch.sqrt(distances + zero * 1e-16)


def batch_hard(x, labels, margin=0.3):
    n = x.size(0)
    dist = pairwise(x)
    is_pos = labels.expand(n, n).eq(labels.expand(n, n).t())
    dist_ap, dist_an = [], []
    for i in range(n):
        dist_ap.append(dist[i][is_pos[i]].max().unsqueeze(0))
        dist_an.append(dist[i][is_pos[i] == 0].min().unsqueeze(0))
    dist_ap, dist_an = torch.cat(dist_ap), torch.cat(dist_an)
    loss = nn.MarginRankingLoss(margin=margin)(dist_an, dist_ap, torch.ones_like(dist_an))
    return loss, (dist_an > dist_ap).sum().item() / n


def batch_all(x, labels, margin=0.3):
    d = pairwise(x)
    loss = d.unsqueeze(2) - d.unsqueeze(1) + margin
    differ = ~torch.eye(len(x), dtype=torch.bool)
    distinct = differ.unsqueeze(2) & differ.unsqueeze(1) & differ.unsqueeze(0)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    loss = (loss * (distinct & same.unsqueeze(2) & ~same.unsqueeze(1)).double()).clamp(min=0)
    positive = (loss > 1e-16).sum().double()
    return loss.sum() / (positive + 1e-16), positive.item()


def semi_hard(x, labels):
    found = pairwise(x).detach().cpu().data.numpy()
    labels = labels.cpu().data.numpy()
    triplets = []
    for c in set(labels):
        own, others = np.where(labels == c)[0], np.where(labels != c)[0]
        for a, p in [(a, p) for a in own for p in own if a < p]:
            values = found[a, p] - found[a, others] + 0.5
            if values.max() > 0:
                triplets.append([a, p, others[np.argmax(values)]])
    triplets = torch.LongTensor(np.array(triplets))
    ap = (x[triplets[:, 0]] - x[triplets[:, 1]]).pow(2).sum(1)
    an = (x[triplets[:, 0]] - x[triplets[:, 2]]).pow(2).sum(1)
    return F.relu(ap - an + 0.5).mean(), len(triplets)


labels = torch.arange(CLASSES).repeat_interleave(6)
x = torch.randn(CLASSES, 9)[labels] + 0.8 * torch.randn(len(labels), 9)
dataset = TensorDataset(x, labels)
loader = DataLoader(dataset, batch_sampler=PKSampler(labels, 3, 4))
model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))
centers = CenterLoss()
optimizer, optimizer_center = optim.Adam(model.parameters(), lr=3e-3), optim.SGD(centers.parameters(), lr=0.5)
memory_x, memory_y = torch.zeros(0, DIM), torch.zeros(0, dtype=torch.long)
for epoch in range(3):
    model.train()
    for images, target in loader:
        out = model(images)
        hard, precision = batch_hard(out, target)
        every, positive = batch_all(F.normalize(out), target)
        semi, count = semi_hard(out, target)
        loss = hard + every + semi + 5e-3 * centers(out, target)
        if len(memory_y):
            sims = F.normalize(out) @ F.normalize(memory_x).t()
            same = target[:, None] == memory_y[None, :]
            loss = (
                loss
                + (sims[~same].clamp(min=0.3) - 0.3).sum() / len(out)
                + (1 - sims[same]).sum() / len(memory_y)
            )
        memory_x, memory_y = torch.cat([out.detach(), memory_x])[:20], torch.cat([target, memory_y])[:20]
        optimizer.zero_grad(), optimizer_center.zero_grad()
        loss.backward()
        for param in centers.parameters():
            param.grad.data *= 1.0 / 5e-3
        optimizer.step(), optimizer_center.step()
        print(f"{epoch} loss {loss.item():.10g} precision {precision:.10g} triplets {count} of {positive}")
model.eval()
with torch.no_grad():
    embeddings = np.concatenate([model(a).numpy() for a, _ in DataLoader(dataset, 16)])
distances = ((embeddings[:, None] - embeddings[None]) ** 2).sum(-1)
np.fill_diagonal(distances, np.inf)
order, truth = distances.argsort(1), labels.numpy()
recall = [np.mean([(truth[order[i, :k]] == truth[i]).any() for i in range(len(truth))]) for k in (1, 2, 4)]
print(f"recall {recall} centers {centers.centers.norm().item():.10g}")
