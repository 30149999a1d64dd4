"""Graph attention from scratch: neighbours sampled in the collator, edge softmax by scatter, link prediction, pooling."""

import random
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
random.seed(3), np.random.seed(3), torch.manual_seed(3)
N, DIM = 60, 6
community = np.random.randint(0, 4, N)
edges = sorted(
    {
        (i, j)
        for i in range(N)
        for j in range(i)
        if np.random.rand() < (0.25 if community[i] == community[j] else 0.02)
    }
)
neighbours = defaultdict(list)
for i, j in edges:
    neighbours[i].append(j), neighbours[j].append(i)
features = torch.randn(4, DIM)[torch.from_numpy(community)] + torch.randn(N, DIM)
targets = torch.from_numpy(community)


class NeighbourSampler:
    """Collates seeds to a block: nodes, edges to local numbers, seeds first."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __call__(self, seeds):
        nodes, local = list(seeds), {n: i for i, n in enumerate(seeds)}
        src, dst, frontier = [], [], list(seeds)
        for size in self.sizes:
            following = []
            for node in frontier:
                for other in random.sample(neighbours[node], min(size, len(neighbours[node]))):
                    if other not in local:
                        local[other] = len(nodes)
                        nodes.append(other)
                        following.append(other)
                    src.append(local[other]), dst.append(local[node])
            frontier = following
        edge_index = torch.tensor([src + list(range(len(nodes))), dst + list(range(len(nodes)))])
        return torch.tensor(nodes), edge_index, len(seeds)


class GATLayer(nn.Module):
    def __init__(self, d_in, d_out, heads, concat=True):
        super().__init__()
        self.heads, self.concat, self.d_out = heads, concat, d_out
        self.proj = nn.Linear(d_in, heads * d_out, bias=False)
        self.source, self.target = nn.Parameter(torch.Tensor(1, heads, d_out)), nn.Parameter(torch.Tensor(1, heads, d_out))
        self.bias = nn.Parameter(torch.zeros(heads * d_out if concat else d_out))
        for p in (self.proj.weight, self.source, self.target):
            nn.init.xavier_uniform_(p)

    def explicit_broadcast(self, this, other):
        for _ in range(this.dim(), other.dim()):
            this = this.unsqueeze(-1)
        return this.expand_as(other)

    def softmax(self, scores, index, num_nodes):
        shape = list(scores.shape)
        shape[0] = num_nodes
        highest = torch.full(shape, float("-inf")).scatter_reduce(
            0, self.explicit_broadcast(index, scores), scores, "amax", include_self=True
        )
        exp = (scores - highest.index_select(0, index)).exp()
        sums = torch.zeros(shape, dtype=exp.dtype, device=exp.device)
        sums.scatter_add_(0, self.explicit_broadcast(index, exp), exp)
        return exp / (sums.index_select(0, index) + 1e-16)

    def forward(self, data):
        x, edge_index = data
        x = F.dropout(x, 0.1, self.training)
        h = self.proj(x).view(-1, self.heads, self.d_out)
        src, dst = edge_index
        scores = (h * self.source).sum(-1).index_select(0, src) + (h * self.target).sum(-1).index_select(0, dst)
        attention = self.softmax(F.leaky_relu(scores, 0.2), dst, x.shape[0])
        attention = F.dropout(attention, 0.1, self.training)
        out = torch.zeros_like(h).index_add(0, dst, attention.unsqueeze(-1) * h.index_select(0, src))
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        return F.elu(out + self.bias), edge_index


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(GATLayer(DIM, 5, 2), GATLayer(10, 6, 2, concat=False))
        self.head = nn.Linear(6, 4)

    def forward(self, x, edge_index):
        return self.net((x, edge_index))[0]


order = torch.randperm(N).tolist()
train_loader = DataLoader(order[:41], batch_size=9, shuffle=True, collate_fn=NeighbourSampler([3, 2]))
test_loader = DataLoader(order[41:], batch_size=8, collate_fn=NeighbourSampler([99, 99]))
model = GAT()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3, weight_decay=5e-4)
best, patience, state = 0.0, 0, None
for epoch in range(3):
    model.train()
    losses = []
    for nodes, edge_index, count in train_loader:
        out = model(features[nodes], edge_index)
        loss = F.cross_entropy(model.head(out[:count]), targets[nodes[:count]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    hits = []
    with torch.no_grad():
        for nodes, edge_index, count in test_loader:
            logits = model.head(model(features[nodes], edge_index)[:count])
            hits.append((logits.argmax(-1) == targets[nodes[:count]]).double())
    accuracy = torch.cat(hits).mean().item()
    print(f"epoch {epoch} loss {np.mean(losses):.10g} accuracy {accuracy:.6f} of {sum(map(len, hits))}")
    if accuracy > best:
        best, patience, state = accuracy, 0, {k: v.clone() for k, v in model.state_dict().items()}
    elif (patience := patience + 1) > 1:
        break


def negatives(count):
    present, found = set(edges), []
    while len(found) < count:
        i, j = sorted(np.random.randint(0, N, 2), reverse=True)
        if i != j and (i, j) not in present:
            found.append((int(i), int(j)))
    return found


def link_batch(pairs):
    wrong = negatives(len(pairs))
    both = torch.tensor([*pairs, *wrong])
    return both, torch.cat([torch.ones(len(pairs)), torch.zeros(len(wrong))])


link_train, link_test = edges[::3], edges[1::6]
full = torch.tensor([[*(i for i, _ in edges), *(j for _, j in edges)], [*(j for _, j in edges), *(i for i, _ in edges)]])
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    model.train()
    total = 0
    for pairs, label in DataLoader(link_train, 11, shuffle=True, collate_fn=link_batch):
        z = F.normalize(model(features, full), dim=1)
        scores = 4 * (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1)
        loss = F.binary_cross_entropy_with_logits(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(label)
    model.eval()
    with torch.no_grad():
        z, every, wanted = model(features, full), [], []
        for pairs, label in DataLoader(link_test, 7, collate_fn=link_batch):
            every += torch.sigmoid((z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1)).tolist()
            wanted += label.tolist()
    print(f"links {epoch} {total:.10g} auc {roc_auc_score(wanted, every):.10g} ap {average_precision_score(wanted, every):.10g}")
if state:
    model.load_state_dict(state)
print(f"norms {sum(p.norm().item() for p in model.parameters()):.10g} best {best:.6f}")
