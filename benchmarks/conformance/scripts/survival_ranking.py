"""Risk sets and lists: Cox's partial likelihood with ties, discrete hazards, LambdaRank per query, Plackett-Luce, NDCG."""

import collections
import csv
import io

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import kendalltau
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(50), np.random.seed(50)


def make_table(n):
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["age", "dose", "group", "time", "event"])
    for _ in range(n):
        age, dose, group = np.random.normal(60, 8), np.random.rand(), np.random.choice(["a", "b", "c"])
        risk = 0.05 * (age - 60) - dose + {"a": 0, "b": 0.5, "c": -0.4}[group]
        time, censored = np.random.exponential(np.exp(-risk)), np.random.exponential(2.0)
        writer.writerow([f"{age:.3f}", f"{dose:.4f}", group, f"{min(time, censored):.2f}", int(time <= censored)])
    buffer.seek(0)
    return list(csv.DictReader(buffer))


class Patients(Dataset):
    def __init__(self, rows):
        numbers = np.array([[float(r["age"]), float(r["dose"])] for r in rows])
        groups = np.eye(3)[[ord(r["group"]) - ord("a") for r in rows]]
        self.mean, self.std = numbers.mean(0), numbers.std(0)
        self.x = np.concatenate([(numbers - self.mean) / self.std, groups], 1)
        self.time = np.array([float(r["time"]) for r in rows])
        self.event = np.array([int(r["event"]) for r in rows], dtype=bool)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.time[i], self.event[i]


def cox_loss(log_h, durations, events, eps=1e-7):
    idx = durations.sort(descending=True)[1]
    events, log_h = events[idx].double(), log_h[idx]
    if events.sum() == 0:
        return log_h.sum() * 0
    gamma = log_h.max()
    log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(eps).log().add(gamma)
    return -log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum())


def efron_loss(log_h, durations, events):
    order = torch.argsort(durations)
    log_h, durations, events = log_h[order], durations[order], events[order]
    at_risk = torch.logcumsumexp(log_h.flip(0), 0).flip(0)
    total = log_h.new_zeros(())
    for t in torch.unique(durations[events]):
        tied = (durations == t) & events
        first = int((durations == t).nonzero()[0])
        m = int(tied.sum())
        sums = torch.logsumexp(log_h[tied], 0)
        total = total + log_h[tied].sum()
        for k in range(m):
            total = total - torch.log(at_risk[first].exp() - k / m * sums.exp())
    return -total / events.sum()


def concordance(risk, time, event):
    better = comparable = 0.0
    for i in np.flatnonzero(event):
        later = time > time[i]
        comparable += later.sum()
        better += (risk[i] > risk[later]).sum() + 0.5 * (risk[i] == risk[later]).sum()
    return better / comparable


train_set, test_set = Patients(make_table(55)), Patients(make_table(31))
net = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(12, 1, bias=False))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for epoch in range(3):
    losses = []
    net.train()
    for x, time, event in DataLoader(train_set, 16, shuffle=True):
        loss_fn = efron_loss if epoch == 2 else cox_loss
        loss = loss_fn(net(x).squeeze(1), time, event)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        risk = np.concatenate([net(x).flatten().numpy() for x, *_ in DataLoader(test_set, 12)])
    print(f"cox {epoch} {np.mean(losses):.10g} concordance {concordance(risk, test_set.time, test_set.event):.10g}")
cuts = np.quantile(train_set.time[train_set.event], np.linspace(0.1, 0.9, 5))
hazard = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 6))
optimizer = torch.optim.Rprop(hazard.parameters(), 1e-2)
for epoch in range(2):
    for x, time, event in DataLoader(train_set, len(train_set)):
        bins = torch.bucketize(time, torch.from_numpy(cuts))
        target = torch.zeros(len(x), 6).scatter(1, bins.view(-1, 1), event.view(-1, 1).double())
        bce = F.binary_cross_entropy_with_logits(hazard(x), target, reduction="none")
        loss = bce.cumsum(1).gather(1, bins.view(-1, 1)).mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    survival = (1 - torch.sigmoid(hazard(x))).add(1e-7).log().cumsum(1).exp().detach()
    brier = ((survival - (time[:, None] > torch.cat([torch.from_numpy(cuts), time.max()[None]])).double()) ** 2).mean(0)
    print(f"hazard {epoch} {loss.item():.10g}", " ".join(f"{b:.10g}" for b in brier))


class Queries(Dataset):
    def __init__(self, n):
        self.lists = []
        truth = np.random.normal(size=4)
        for _ in range(n):
            docs = np.random.normal(size=(np.random.randint(2, 9), 4))
            self.lists.append((docs, np.clip((docs @ truth + 1).round(), 0, 4)))

    def __len__(self):
        return len(self.lists)

    def __getitem__(self, i):
        return self.lists[i]


def ndcg(scores, relevance, k=5):
    order = np.argsort(-scores, kind="stable")
    gain, ideal = 2 ** relevance[order][:k] - 1, 2 ** np.sort(relevance)[::-1][:k] - 1
    discount = 1 / np.log2(np.arange(len(gain)) + 2)
    return (gain * discount).sum() / max((ideal * discount).sum(), 1e-9)


def lambdas(scores, relevance, sigma=1.0):
    n = len(scores)
    positions = scores.argsort(descending=True).argsort().double() + 1
    gains = 2**relevance - 1
    ideal = (gains.sort(descending=True).values / torch.log2(torch.arange(n) + 2.0)).sum().clamp(min=1e-9)
    with torch.no_grad():
        higher = (relevance[:, None] > relevance[None, :]).double()
        lower = higher.t()
        delta = (gains[:, None] - gains[None, :]) * (1 / torch.log2(positions + 1)[:, None] - 1 / torch.log2(positions + 1)[None, :])
        rho = 1 / (1 + torch.exp(sigma * (scores[:, None] - scores[None, :])))
        return (sigma * (-rho * higher + rho.t() * lower) * delta.abs() / ideal).sum(1)


def plackett_luce(scores, relevance, mask):
    order = relevance.masked_fill(~mask, -1).argsort(dim=1, descending=True, stable=True)
    sorted_scores = scores.masked_fill(~mask, float("-inf")).gather(1, order)
    tail = torch.logcumsumexp(sorted_scores.flip(1), dim=1).flip(1)
    inside = mask.gather(1, order)
    return (tail - sorted_scores).masked_fill(~inside, 0).sum(1).mean()


train_lists, test_lists = Queries(23), Queries(9)
ranker = nn.Sequential(nn.Linear(4, 8), nn.ReLU6(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(ranker.parameters(), lr=0.05)
for epoch in range(2):
    seen = collections.Counter()
    for docs, relevance in DataLoader(train_lists, batch_size=None, shuffle=True):
        scores = ranker(docs).squeeze(1)
        optimizer.zero_grad()
        scores.backward(lambdas(scores.detach(), relevance))
        optimizer.step()
        seen[int(relevance.max())] += 1
    with torch.no_grad():
        found = [(ranker(torch.from_numpy(d)).squeeze(1).numpy(), r) for d, r in test_lists.lists]
    print(f"lambda {epoch} ndcg {np.mean([ndcg(s, r) for s, r in found]):.10g}", sorted(seen.items()))


def pad(batch):
    longest = max(len(r) for _, r in batch)
    docs, relevance = torch.zeros(len(batch), longest, 4), torch.zeros(len(batch), longest)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, (d, r) in enumerate(batch):
        docs[i, : len(r)], relevance[i, : len(r)], mask[i, : len(r)] = torch.as_tensor(d), torch.as_tensor(r), True
    return docs, relevance, mask


for epoch in range(2):
    for docs, relevance, mask in DataLoader(train_lists, 5, shuffle=True, collate_fn=pad):
        loss = plackett_luce(ranker(docs).squeeze(-1), relevance, mask)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    with torch.no_grad():
        tau = [
            kendalltau(s[m].tolist(), r[m].tolist()).statistic
            for d, rel, mask in DataLoader(test_lists, 4, collate_fn=pad)
            for s, r, m in zip(ranker(d).squeeze(-1), rel, mask)
        ]
    print(f"plackett {epoch} {loss.item():.10g} tau {np.nanmean(tau):.10g}")
print(f"norms {sum(p.norm().item() for m in (net, hazard, ranker) for p in m.parameters()):.10g}")
