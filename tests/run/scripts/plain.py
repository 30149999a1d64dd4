"""A plain loop: BatchNorm, layers that draw, clipping, a schedule, metrics, evaluation by a batch thread."""

import argparse
import queue
import threading

import torch
from torch import nn
from torch.distributions import VonMises
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save")
args = parser.parse_args()


def ahead(loader):
    """Fetch a loader's batches by a thread."""
    held = queue.Queue(2)
    threading.Thread(target=lambda: [held.put(batch) for batch in [*loader, None]]).start()
    return iter(held.get, None)


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(29, 6)
y = (x.sum(1) > 0).long() + (x[:, 0] > 0).long()
train = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True, num_workers=args.workers)
test = DataLoader(TensorDataset(x, y), batch_size=10)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.RReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
first = next(iter(test))[0]
model[0].bias.data = 0.1 * first.std(0).mean().expand(16).clone()  # the first batch sets a parameter
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=args.epochs * len(train))
for epoch in range(args.epochs):
    model.train()
    total, right = 0.0, 0
    for data, target in train:
        data = data + 0.1 * torch.randn(data.size(0), 6)
        optimizer.zero_grad()
        out = model(data)
        loss = F.cross_entropy(out, target, label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item() * data.size(0)
        right += (out.argmax(1) == target).sum().item()
    model.eval()
    with torch.inference_mode():
        losses = torch.cat(
            [F.cross_entropy(model(a.view(-1, 6)), b, reduction="none") for a, b in ahead(test)]
        )
    print(f"epoch {epoch}: loss {total / len(train.dataset):.9f} right {right} norm {norm:.9f}")
    print("the last batch", data, loss, losses[-3:], VonMises(out[:, 0], 4.0).sample((3,)))
    print(f"test {losses.mean():.9f} of {len(losses)}, worst {losses.max().item():.9f}")
print("parameters", *(f"{p.double().sum().item():.9f}" for p in model.parameters()))
if args.save:
    torch.save(model.state_dict(), args.save)
    print("saved", sum(v.sum().item() for v in torch.load(args.save).values()))
