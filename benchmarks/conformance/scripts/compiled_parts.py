"""torch.compile as people use it: a submodule in place, a loss function, a training step, modes of dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
torch.set_float32_matmul_precision("high")


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mlp = (
            nn.RMSNorm(dim),
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.inp, self.blocks = nn.Linear(7, dim), nn.ModuleList(Block(dim) for _ in range(3))
        self.out = nn.Linear(dim, 4)

    @torch.compiler.disable
    def statistics(self, h):
        return {"mean": h.mean().item(), "dead": (h.abs() < 1e-3).sum().item()}

    def forward(self, x, with_statistics=False):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return (self.out(h), self.statistics(h)) if with_statistics else self.out(h)


@torch.compile
def focal_loss(logits, target, gamma: float = 2.0):
    log_p = F.log_softmax(logits, -1).gather(1, target[:, None]).squeeze(1)
    return (-((1 - log_p.exp()) ** gamma) * log_p).mean()


x = torch.randn(62, 7)
y = x[:, :4].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
net = Net()
for i, block in enumerate(net.blocks):
    net.blocks[i] = torch.compile(block, mode="default")
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, foreach=True)
for epoch in range(2):
    for a, b in loader:
        logits, found = net(a, with_statistics=True)
        loss = focal_loss(logits, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch} loss {loss.item():.10g} mean {found['mean']:.10g} dead {found['dead']}")
print(sorted(name for name in net.state_dict() if "0.mlp" in name or "inp" in name))

model = torch.compile(
    nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)), dynamic=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.compile(fullgraph=False)
def train_step(inputs, targets):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    return loss.detach()


for epoch in range(2):
    model.train()
    losses = [train_step(*batch) for batch in loader]
    model.eval()
    with torch.no_grad():
        hits = sum((model(a).argmax(1) == b).sum() for a, b in loader)
    print(f"step {epoch} {torch.stack(losses).mean().item():.10g} hits {int(hits)}")
weights = {name.removeprefix("_orig_mod."): value for name, value in model.state_dict().items()}
print(f"norms {sum(v.double().norm() for v in weights.values()):.10g} {list(weights)[:2]}")
explained = model._orig_mod if hasattr(model, "_orig_mod") else model
print(type(explained).__name__, isinstance(model, nn.Module))
model.compile()
evaluate = torch.compile(lambda rows: F.softmax(model(rows), -1).max(-1).values.mean())
with torch.no_grad():
    print(f"confidence {evaluate(x).item():.10g} {evaluate(next(iter(loader))[0]).item():.10g}")
