"""Hooks of optimizers, parameters and modules; spectral norm; samplers; averaged weights."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
calls = {"pre": 0, "post": 0, "gradient": 0, "forward": 0, "accumulated": 0, "backward": 0}


def count(name):
    def hook(*args):
        calls[name] += 1

    return hook


x, y = torch.randn(35, 6), torch.randint(3, (35,))
data = TensorDataset(x, y)
model = nn.Sequential(
    parametrizations.spectral_norm(nn.Linear(6, 10, bias=False)),
    nn.BatchNorm1d(10),
    nn.ReLU(),
    parametrizations.weight_norm(nn.Linear(10, 8)),
    nn.ReLU(),
    nn.Linear(8, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
optimizer.register_step_pre_hook(count("pre"))
optimizer.register_step_post_hook(count("post"))
model[5].weight.register_hook(lambda grad: (count("gradient")(), grad * 0.5)[1])
model[5].bias.register_post_accumulate_grad_hook(count("accumulated"))
activations = {}


def keep(module, args, output):
    calls["forward"] += 1
    activations["relu"] = output.detach().mean().item()


model[2].register_forward_hook(keep)
model[1].register_full_backward_hook(count("backward"))
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
weights = torch.where(y == 0, 2.0, 1.0)
loaders = {
    "weighted": DataLoader(data, batch_size=7, sampler=WeightedRandomSampler(weights, 35, replacement=True)),
    "batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 11, drop_last=False)),
    "dropped": DataLoader(data, batch_size=8, shuffle=True, drop_last=True),
    "seeded": DataLoader(data, batch_size=33, shuffle=True, generator=torch.Generator().manual_seed(3)),
}
total = sum(map(len, loaders.values()))
scheduler = OneCycleLR(optimizer, 0.1, total_steps=total)
for name, loader in loaders.items():
    model.train()
    for i, (inputs, labels) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), labels, label_smoothing=0.05) / 2
        loss.backward()
        if i % 2 == 1 or i == len(loader) - 1:
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
        scheduler.step()
        print(
            f"{name} loss {loss.item():.10g} relu {activations['relu']:.10g} rate {scheduler.get_last_lr()[0]:.10g}"
        )
print(calls)
update_bn(loaders["dropped"], averaged)
with torch.no_grad():
    for m in (model, averaged):
        m.eval()
        found = [F.cross_entropy(m(a), b, reduction="none") for a, b in DataLoader(data, batch_size=9)]
        print(f"evaluation {torch.cat(found).mean().item():.10g} of {len(torch.cat(found))}")
second = LambdaLR(torch.optim.Adam(model.parameters(), lr=0.1), lr_lambda=[lambda step: 0.9**step])
second.optimizer.step()
second.step()
print(f"rate {second.get_last_lr()[0]:.10g}")
print(
    f"norms {sum(p.norm() for p in model.parameters()):.10g} {sum(p.norm() for p in averaged.parameters()):.10g}"
)
