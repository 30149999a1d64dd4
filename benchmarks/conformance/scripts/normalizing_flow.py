"""A normalizing flow: couplings, BatchNorm with its determinant, early stopping, samples."""

import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)


class CouplingLayer(nn.Module):
    def __init__(self, num_inputs, num_hidden, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale_net = nn.Sequential(
            nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, num_inputs, bias=False)
        )
        self.translate_net = nn.Sequential(
            nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_inputs, bias=False)
        )

    def forward(self, inputs, mode="direct"):
        masked = inputs * self.mask
        log_s = self.scale_net(masked) * (1 - self.mask)
        t = self.translate_net(masked) * (1 - self.mask)
        if mode == "direct":
            return inputs * torch.exp(log_s) + t, log_s.sum(-1, keepdim=True)
        return (inputs - t) * torch.exp(-log_s), -log_s.sum(-1, keepdim=True)


class BatchNormFlow(nn.Module):
    def __init__(self, num_inputs, momentum=0.1, eps=1e-5):
        super().__init__()
        self.log_gamma = nn.Parameter(torch.zeros(num_inputs))
        self.beta = nn.Parameter(torch.zeros(num_inputs))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(num_inputs))
        self.register_buffer("running_var", torch.ones(num_inputs))

    def forward(self, inputs, mode="direct"):
        if mode == "direct":
            if self.training:
                self.batch_mean = inputs.mean(0)
                self.batch_var = (inputs - self.batch_mean).pow(2).mean(0) + self.eps
                self.running_mean.mul_(1 - self.momentum).add_(self.batch_mean.data * self.momentum)
                self.running_var.mul_(1 - self.momentum).add_(self.batch_var.data * self.momentum)
                mean, var = self.batch_mean, self.batch_var
            else:
                mean, var = self.running_mean, self.running_var
            y = torch.exp(self.log_gamma) * (inputs - mean) / var.sqrt() + self.beta
            return y, (self.log_gamma - 0.5 * torch.log(var)).sum(-1, keepdim=True)
        x = (inputs - self.beta) / torch.exp(self.log_gamma) * self.running_var.sqrt() + self.running_mean
        return x, (-self.log_gamma + 0.5 * torch.log(self.running_var)).sum(-1, keepdim=True)


class FlowSequential(nn.Sequential):
    def forward(self, inputs, mode="direct", logdets=None):
        self.num_inputs = inputs.size(-1)
        if logdets is None:
            logdets = torch.zeros(inputs.size(0), 1, device=inputs.device)
        modules = self._modules.values()
        for module in modules if mode == "direct" else reversed(modules):
            inputs, logdet = module(inputs, mode)
            logdets += logdet
        return inputs, logdets

    def log_probs(self, inputs):
        u, log_jacob = self(inputs)
        log_probs = (-0.5 * u.pow(2) - 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)
        return (log_probs + log_jacob).sum(-1, keepdim=True)

    def sample(self, num_samples):
        return self.forward(torch.randn(num_samples, self.num_inputs), mode="inverse")[0]


data = torch.randn(90, 4) @ torch.randn(4, 4) + torch.randn(4)
train_loader = DataLoader(TensorDataset(data[:63]), batch_size=12, shuffle=True)
valid_loader = DataLoader(TensorDataset(data[63:]), batch_size=20, shuffle=False)
modules, mask = [], torch.arange(0, 4) % 2
for _ in range(2):
    modules += [CouplingLayer(4, 8, mask.double()), BatchNormFlow(4)]
    mask = 1 - mask
model = FlowSequential(*modules)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-6, eps=1e-2)


def validate(epoch):
    model.eval()
    val_loss = 0
    for (batch,) in valid_loader:
        with torch.no_grad():
            val_loss += -model.log_probs(batch).sum().item()
    print(f"validation {epoch}: {val_loss / len(valid_loader.dataset):.10g}")
    return val_loss / len(valid_loader.dataset)


best_validation_loss, best_epoch, best_model = float("inf"), 0, model
for epoch in range(4):
    model.train()
    train_loss = 0
    for (batch,) in train_loader:
        optimizer.zero_grad()
        loss = -model.log_probs(batch).mean()
        train_loss += loss.item()
        loss.backward()
        optimizer.step()
    for module in model.modules():
        if isinstance(module, BatchNormFlow):
            module.momentum = 0
    with torch.no_grad():
        model(train_loader.dataset.tensors[0])
    for module in model.modules():
        if isinstance(module, BatchNormFlow):
            module.momentum = 0.1
    print(f"train {epoch}: {train_loss / len(train_loader):.10g}")
    validation_loss = validate(epoch)
    if epoch - best_epoch >= 2:
        break
    if validation_loss < best_validation_loss:
        best_epoch, best_validation_loss, best_model = epoch, validation_loss, copy.deepcopy(model)
with torch.no_grad():
    samples = best_model.eval().sample(9)
print(f"best {best_epoch} {best_validation_loss:.10g} samples {samples.mean().item():.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
