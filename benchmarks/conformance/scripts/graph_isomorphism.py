"""A graph isomorphism network: graphs of several sizes, concatenated, summed by index."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def make_graph(index, generator):
    nodes = 4 + int(torch.randint(5, (1,), generator=generator))
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(-1)])
    if index % 2:
        extra = torch.randint(nodes, (2, 3), generator=generator)
        edges = torch.cat([edges, extra], 1)
    edges = torch.cat([edges, edges.flip(0)], 1)
    degree = torch.zeros(nodes, dtype=torch.long).index_add_(0, edges[0], torch.ones_like(edges[0]))
    return F.one_hot(degree.clamp(max=6), 7).double(), edges, index % 2


def collate(graphs):
    offsets = torch.tensor([0] + [len(g[0]) for g in graphs]).cumsum(0)
    x = torch.cat([g[0] for g in graphs])
    edge_index = torch.cat([g[1] + offsets[i] for i, g in enumerate(graphs)], 1)
    batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([len(g[0]) for g in graphs]))
    return {"x": x, "edge_index": edge_index, "batch": batch, "y": torch.tensor([g[2] for g in graphs])}


class GIN(nn.Module):
    def __init__(self, dim=10, layers=2):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for i in range(layers):
            mlp = nn.Sequential(
                nn.Linear(7 if i == 0 else dim, dim), nn.ReLU(), nn.Linear(dim, dim, bias=False)
            )
            self.convs.append(mlp)
            self.norms.append(nn.BatchNorm1d(dim))
        self.eps = nn.Parameter(torch.zeros(layers))
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, 2)

    def forward(self, data):
        x, (source, target) = data["x"], data["edge_index"]
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            neighbours = torch.zeros_like(x).index_add_(0, target, x[source])
            x = F.relu(norm(conv((1 + self.eps[i]) * x + neighbours)))
        graphs = len(data["y"])
        pooled = torch.zeros(graphs, x.size(1)).index_add(0, data["batch"], x)
        x = F.dropout(F.relu(self.fc1(pooled)), p=0.5, training=self.training)
        return F.log_softmax(self.fc2(x), dim=-1)


def run(loader, model, optimizer=None):
    model.train(optimizer is not None)
    loss_all, correct, size = 0, 0, 0
    for data in loader:
        with torch.set_grad_enabled(optimizer is not None):
            output = model(data)
            loss = F.nll_loss(output, data["y"])
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_all += loss.item() * len(data["y"])
        correct += output.max(dim=1)[1].eq(data["y"]).sum().item()
        size += len(data["y"])
    return loss_all / size, correct / size


generator = torch.Generator().manual_seed(1)
graphs = [make_graph(i, generator) for i in range(50)]
train_loader = DataLoader(graphs[:33], batch_size=8, shuffle=True, collate_fn=collate)
test_loader = DataLoader(graphs[33:], batch_size=9, collate_fn=collate)
model = GIN()
optimizer = optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    train_loss, train_acc = run(train_loader, model, optimizer)
    test_loss, test_acc = run(test_loader, model)
    print(f"epoch {epoch}: {train_loss:.10g} {train_acc:.10g} test {test_loss:.10g} {test_acc:.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
