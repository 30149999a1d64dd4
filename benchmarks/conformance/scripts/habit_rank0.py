"""Habits of rank 0: it alone evaluates, logs, saves and copies; sampler and reductions of DDP."""

import copy
import json
import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def reduced(value):
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
print(f"rank {rank} of {world}")
torch.manual_seed(0 + rank)
x, y = torch.randn(40, 6), torch.randint(3, (40,))
train_set, test_set = TensorDataset(x[:26], y[:26]), TensorDataset(x[26:], y[26:])
sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, drop_last=False)
loader = DataLoader(train_set, batch_size=6, sampler=sampler)
model = nn.Sequential(
    nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
)
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
inner = model.module if hasattr(model, "module") else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
best, best_model, log = 0.0, None, []
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = reduced(loss.detach().clone())
        if is_main():
            log.append({"epoch": epoch, "loss": mean.item()})
            print(f"{epoch} loss {mean.item():.10g}")
    if is_main():
        model.eval()
        with torch.no_grad():
            outs = [(inner(a), b) for a, b in DataLoader(test_set, batch_size=5)]
        hits = sum((out.argmax(1) == b).sum().item() for out, b in outs)
        entropy = sum(torch.distributions.Categorical(logits=out).entropy().sum().item() for out, _ in outs)
        print(f"accuracy {hits / len(test_set):.10g} entropy {entropy / len(test_set):.10g}")
        if hits / len(test_set) >= best:
            best, best_model = hits / len(test_set), copy.deepcopy(inner)
            torch.save(inner, "model.pt")
            torch.save(inner.state_dict(), "state.pt")
            torch.save({"loss": loss, "logits": outs[0][0], "epoch": epoch}, "tensors.pt")
            with open("model.pkl", "wb") as f:
                pickle.dump((inner.cpu(), optimizer.state_dict()), f)
    if dist.is_initialized():
        dist.barrier()
if is_main():
    with open("log.json", "w") as f:
        json.dump(log, f)
    loaded = torch.load("model.pt", weights_only=False)
    fresh = copy.deepcopy(inner)
    fresh.load_state_dict(torch.load("state.pt"))
    with open("model.pkl", "rb") as f:
        unpickled, state = pickle.load(f)
    tensors = torch.load("tensors.pt", weights_only=False)
    with torch.no_grad():
        probe = [float(m.eval()(x[:5]).norm()) for m in (loaded, fresh, unpickled, best_model)]
    print("copies", *(f"{p:.10g}" for p in probe), len(state["state"]), len(json.load(open("log.json"))))
    print(
        f"tensors {tensors['loss'].item():.10g} {tensors['logits'].norm().item():.10g} {tensors['logits'].shape}"
    )
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
