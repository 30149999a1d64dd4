"""A recommender: bags of tags by offsets, in-batch negatives with sampling corrections, a factorization machine, recall."""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(81)
rng = np.random.default_rng(81)
USERS, ITEMS, TAGS = 25, 40, 12


@dataclass
class Clicks:
    user: torch.Tensor
    item: torch.Tensor
    tags: torch.Tensor
    offsets: torch.Tensor
    weight: torch.Tensor

    def to(self, device):
        return Clicks(**{k: v.to(device) for k, v in vars(self).items()})

    def pin_memory(self):
        return self


tags_of = [rng.choice(TAGS, size=rng.integers(1, 5), replace=False).tolist() for _ in range(ITEMS)]
taste = rng.normal(size=(USERS, TAGS))
affinity = np.array([[taste[u, t].mean() for t in tags_of] for u in range(USERS)])
popularity = rng.zipf(1.6, size=ITEMS).clip(max=30)


class Log(Dataset):
    def __init__(self, count, seed):
        draw = np.random.default_rng(seed)
        self.rows = []
        for _ in range(count):
            u = draw.integers(USERS)
            p = np.exp(2 * affinity[u]) * popularity
            self.rows.append((int(u), int(draw.choice(ITEMS, p=p / p.sum()))))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    users, items = map(list, zip(*rows))
    bags = [tags_of[i] for i in items]
    offsets = np.cumsum([0, *map(len, bags)])[:-1]
    return Clicks(
        user=torch.tensor(users), item=torch.tensor(items), tags=torch.tensor(sum(bags, [])),
        offsets=torch.from_numpy(offsets), weight=torch.tensor([1.0 / popularity[i] ** 0.25 for i in items]),
    )  # fmt: skip


class NoRepeats(Sampler):
    """Batches without the same item twice."""

    def __init__(self, data, batch_size):
        super().__init__()
        self.data, self.batch_size = data, batch_size

    def __iter__(self):
        waiting = torch.randperm(len(self.data)).tolist()
        while waiting:
            batch, left, seen = [], [], set()
            for i in waiting:
                item = self.data[i][1]
                if len(batch) < self.batch_size and item not in seen:
                    batch.append(i), seen.add(item)
                else:
                    left.append(i)
            yield batch
            waiting = left


class Towers(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, width, max_norm=2.0), nn.Linear(width, width))
        self.item = nn.Embedding(ITEMS, width, sparse=True)
        self.tags = nn.EmbeddingBag(TAGS, width, mode="mean")
        self.mix = nn.Linear(2 * width, width)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def items(self, item, tags, offsets):
        return F.normalize(self.mix(torch.cat([self.item(item), self.tags(tags, offsets)], -1)), dim=-1)

    def forward(self, batch):
        u = F.normalize(self.user(batch.user), dim=-1)
        return self.log_scale.exp() * u @ self.items(batch.item, batch.tags, batch.offsets).T


train, test = Log(90, 1), Log(35, 2)
counts = Counter(item for _, item in train.rows)
log_q = torch.tensor([np.log((counts[i] + 1) / (len(train) + ITEMS)) for i in range(ITEMS)])
model = Towers()
dense = [p for n, p in model.named_parameters() if n != "item.weight"]
optimizers = [torch.optim.Adam(dense, 1e-2), torch.optim.SparseAdam([model.item.weight], 2e-2)]
for epoch in range(2):
    total = []
    for batch in DataLoader(train, batch_sampler=NoRepeats(train, 11), collate_fn=collate):
        batch = batch.to("cpu")
        scores = model(batch) - log_q[batch.item]
        target = torch.arange(len(batch.user))
        each = F.cross_entropy(scores, target, reduction="none") + F.cross_entropy(scores.T, target, reduction="none")
        loss = (batch.weight * each).sum() / batch.weight.sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        total.append((loss.item(), len(target)))
    print(f"towers {epoch} {np.average([t[0] for t in total], weights=[t[1] for t in total]):.10g} batches {[t[1] for t in total]}")
model.eval()
with torch.no_grad():
    catalogue = collate([(0, i) for i in range(ITEMS)])
    vectors = model.items(catalogue.item, catalogue.tags, catalogue.offsets)
    hits, reciprocal, n = 0, 0.0, 0
    for batch in DataLoader(test, 8, collate_fn=collate):
        scores = F.normalize(model.user(batch.user), dim=-1) @ vectors.T
        top = scores.topk(10, dim=1).indices
        found = (top == batch.item[:, None]).nonzero()
        hits += len(found)
        reciprocal += (1.0 / (found[:, 1] + 1)).sum().item()
        n += len(batch.user)
    best = heapq.nlargest(3, range(ITEMS), key=scores[-1].tolist().__getitem__)
print(f"recall {hits / n:.10g} mrr {reciprocal / n:.10g} best {best}")


class FactorizationMachine(nn.Module):
    def __init__(self, sizes, width=5):
        super().__init__()
        self.register_buffer("start", torch.tensor([0, *np.cumsum(sizes)[:-1]]))
        self.linear, self.factors = nn.Embedding(sum(sizes), 1), nn.Embedding(sum(sizes), width)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(len(sizes) * width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        nn.init.normal_(self.factors.weight, std=0.05)

    def forward(self, fields):
        fields = fields + self.start
        e = self.factors(fields)
        crossed = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1)
        return self.bias + self.linear(fields).sum((1, 2)) + crossed + self.deep(e.flatten(1)).squeeze(1)


clicked = set(train.rows)
pairs = [(*row, 1.0) for row in train.rows]
pairs += [(int(u), int(i), 0.0) for u, i in rng.integers((USERS, ITEMS), size=(110, 2)) if (u, i) not in clicked]
fields = torch.tensor([[u, i, len(tags_of[i]), (u * 7 + i) % 10] for u, i, _ in pairs])
targets = torch.tensor([y for *_, y in pairs])
order = torch.randperm(len(pairs))
split = int(0.8 * len(pairs))
data = torch.utils.data.TensorDataset(fields[order], targets[order])
loader = DataLoader(torch.utils.data.Subset(data, range(split)), 23, shuffle=True)
fm = FactorizationMachine([USERS, ITEMS, 5, 10])
optimizer = torch.optim.Adagrad(fm.parameters(), lr=0.05, weight_decay=1e-5)
for epoch in range(3):
    fm.train()
    for batch, (x, y) in enumerate(loader):
        loss = F.binary_cross_entropy_with_logits(fm(x), y, pos_weight=torch.tensor(1.5))
        loss = loss + 1e-3 * fm.factors(x + fm.start).pow(2).sum() / len(x)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    fm.eval()
    with torch.no_grad():
        x, y = data[split:]
        guess = torch.sigmoid(fm(x)).numpy()
    print(f"fm {epoch} {loss.item():.10g} auc {roc_auc_score(y, guess):.10g} log loss {log_loss(y, guess):.10g}")
print(f"norms {sum(p.norm().item() for m in (model, fm) for p in m.parameters()):.10g}")
