"""Learning without negatives: stopped gradient, collapse watched by deviation, kNN check."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class SimSiam(nn.Module):
    def __init__(self, dim=8, pred_dim=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(12, 10, bias=False),
            nn.BatchNorm1d(10),
            nn.ReLU(inplace=True),
            nn.Linear(10, dim, bias=False),
            nn.BatchNorm1d(dim, affine=False),
        )
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False),
            nn.BatchNorm1d(pred_dim),
            nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim),
        )

    def forward(self, x1, x2):
        z1, z2 = self.encoder(x1), self.encoder(x2)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count, self.val = name, 0.0, 0, 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    def __str__(self):
        return f"{self.name} {self.val:.10g} ({self.sum / self.count:.10g})"


def adjust_learning_rate(optimizer, init_lr, epoch, epochs):
    cur_lr = init_lr * 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))
    for param_group in optimizer.param_groups:
        param_group["lr"] = init_lr if param_group.get("fix_lr") else cur_lr


centers = torch.randn(4, 12) * 2
labels = torch.arange(47) % 4
data = TensorDataset(centers[labels] + torch.randn(47, 12), labels)
loader = DataLoader(data, batch_size=9, shuffle=True)
memory = DataLoader(data, batch_size=20)
model = SimSiam()
criterion = nn.CosineSimilarity(dim=1)
optim_params = [
    {"params": model.encoder.parameters(), "fix_lr": False},
    {"params": model.predictor.parameters(), "fix_lr": True},
]
optimizer = torch.optim.SGD(optim_params, 0.05, momentum=0.9, weight_decay=1e-4)
for epoch in range(3):
    adjust_learning_rate(optimizer, 0.05, epoch, 3)
    losses, spread = AverageMeter("Loss"), AverageMeter("Std")
    model.train()
    for i, (images, _) in enumerate(loader):
        views = [images + 0.5 * torch.randn_like(images) for _ in range(2)]
        p1, p2, z1, z2 = model(x1=views[0], x2=views[1])
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        losses.update(loss.item(), images.size(0))
        spread.update(F.normalize(z1, dim=1).std(dim=0).mean().item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] {losses} {spread}")
    model.eval()
    with torch.no_grad():
        bank = torch.cat([F.normalize(model.encoder(x), dim=1) for x, _ in memory])
        known = torch.cat([y for _, y in memory])
        hits = 0
        for x, y in memory:
            similarity = F.normalize(model.encoder(x), dim=1) @ bank.T
            _, nearest = similarity.topk(4, dim=1)
            votes = F.one_hot(known[nearest], 4).sum(1)
            hits += (votes.argmax(1) == y).sum().item()
    print(f"kNN {hits}/{len(data)}")
    torch.save(
        {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "s.pth"
    )
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
