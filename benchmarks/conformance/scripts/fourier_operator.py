"""Neural operators: Fourier layers with complex weights, relative losses, 3D convolutions, autoregressive rollouts."""

import operator
from functools import reduce
from timeit import default_timer

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
np.random.seed(0)


class LpLoss:
    def __init__(self, p=2, size_average=True):
        self.p, self.size_average = p, size_average

    def rel(self, x, y):
        num_examples = x.size()[0]
        diff_norms = torch.norm(x.reshape(num_examples, -1) - y.reshape(num_examples, -1), self.p, 1)
        y_norms = torch.norm(y.reshape(num_examples, -1), self.p, 1)
        return torch.mean(diff_norms / y_norms) if self.size_average else torch.sum(diff_norms / y_norms)

    def __call__(self, x, y):
        return self.rel(x, y)


class UnitGaussianNormalizer:
    def __init__(self, x, eps=0.00001):
        self.mean, self.std, self.eps = torch.mean(x, 0), torch.std(x, 0), eps

    def encode(self, x):
        return (x - self.mean) / (self.std + self.eps)

    def decode(self, x):
        return (x * (self.std + self.eps)) + self.mean


class SpectralConv2d(nn.Module):
    def __init__(self, in_channels, out_channels, modes1, modes2):
        super().__init__()
        self.out_channels, self.modes1, self.modes2 = out_channels, modes1, modes2
        scale = 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(scale * torch.rand(in_channels, out_channels, modes1, modes2, dtype=torch.cdouble))
        self.weights2 = nn.Parameter(scale * torch.rand(in_channels, out_channels, modes1, modes2, dtype=torch.cdouble))

    def compl_mul2d(self, inp, weights):
        return torch.einsum("bixy,ioxy->boxy", inp, weights)

    def forward(self, x):
        batchsize = x.shape[0]
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(batchsize, self.out_channels, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cdouble, device=x.device)
        out_ft[:, :, : self.modes1, : self.modes2] = self.compl_mul2d(x_ft[:, :, : self.modes1, : self.modes2], self.weights1)
        out_ft[:, :, -self.modes1 :, : self.modes2] = self.compl_mul2d(x_ft[:, :, -self.modes1 :, : self.modes2], self.weights2)
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class FNO2d(nn.Module):
    def __init__(self, modes=3, width=6, layers=2, channels=3):
        super().__init__()
        self.p = nn.Linear(channels, width)
        self.convs = nn.ModuleList(SpectralConv2d(width, width, modes, modes) for _ in range(layers))
        self.ws = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.norm = nn.InstanceNorm2d(width)
        self.q = nn.Conv2d(width, 1, 1)

    def block(self, conv, w, x):
        return F.gelu(self.norm(conv(self.norm(x))) + w(x))

    def forward(self, x):
        x = torch.cat((x, self.get_grid(x.shape, x.device)), dim=-1)
        x = F.pad(self.p(x).permute(0, 3, 1, 2), [0, 2, 0, 2])
        for conv, w in zip(self.convs, self.ws):
            x = checkpoint(self.block, conv, w, x, use_reentrant=False) if self.training else self.block(conv, w, x)
        return self.q(x[..., :-2, :-2]).permute(0, 2, 3, 1)

    def get_grid(self, shape, device):
        batchsize, size_x, size_y = shape[0], shape[1], shape[2]
        gridx = torch.tensor(np.linspace(0, 1, size_x), dtype=torch.double)
        gridx = gridx.reshape(1, size_x, 1, 1).repeat([batchsize, 1, size_y, 1])
        gridy = torch.tensor(np.linspace(0, 1, size_y), dtype=torch.double)
        gridy = gridy.reshape(1, 1, size_y, 1).repeat([batchsize, size_x, 1, 1])
        return torch.cat((gridx, gridy), dim=-1).to(device)


def count_params(model):
    return sum(reduce(operator.mul, list(p.size() + (2,) if p.is_complex() else p.size())) for p in model.parameters())


def heat(field, steps):
    k = torch.fft.fftfreq(field.shape[-1]) * field.shape[-1]
    decay = torch.exp(-0.03 * (k[:, None] ** 2 + k[None, :] ** 2))
    fields = [field]
    for _ in range(steps):
        fields.append(torch.fft.ifft2(torch.fft.fft2(fields[-1]) * decay).real)
    return torch.stack(fields, -1)


series = heat(torch.randn(31, 8, 8), 4)
a, u = series[..., :1], series[..., 1:2]
normalizer = UnitGaussianNormalizer(a[:22])
train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(normalizer.encode(a[:22]), u[:22]), batch_size=5, shuffle=True)
test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(normalizer.encode(a[22:]), u[22:]), batch_size=4, shuffle=False)
model = FNO2d()
print(count_params(model))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(train_loader))
myloss = LpLoss(size_average=False)
y_normalizer = UnitGaussianNormalizer(u[:22])
for ep in range(3):
    model.train()
    t1 = default_timer()
    train_mse, train_l2 = 0, 0
    for x, y in train_loader:
        optimizer.zero_grad()
        out = y_normalizer.decode(model(x).squeeze(-1).unsqueeze(-1))
        mse = F.mse_loss(out.view(x.size(0), -1), y.view(x.size(0), -1), reduction="mean")
        l2 = myloss(out.view(x.size(0), -1), y.view(x.size(0), -1))
        l2.backward()
        optimizer.step()
        scheduler.step()
        train_mse += mse.item()
        train_l2 += l2.item()
    model.eval()
    test_l2 = 0.0
    with torch.no_grad():
        for x, y in test_loader:
            out = y_normalizer.decode(model(x))
            test_l2 += myloss(out, y).item()
    t2 = default_timer()
    assert t2 > t1
    print(ep, f"{train_mse / len(train_loader):.10g} {train_l2 / 22:.10g} {test_l2 / 9:.10g}")
pred, index = torch.zeros(9, 8, 8), 0
with torch.no_grad():
    for x, y in torch.utils.data.DataLoader(test_loader.dataset, batch_size=1, shuffle=False):
        out = y_normalizer.decode(model(x)).view(8, 8)
        pred[index] = out
        index = index + 1
print(f"predictions {pred.norm().item():.10g} {torch.linalg.norm(torch.fft.fft2(pred)).item():.10g}")


class FNO3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular")
        self.pool, self.up = nn.AvgPool3d((2, 2, 1)), nn.ConvTranspose3d(4, 1, (2, 2, 1), stride=(2, 2, 1))
        self.spectral = nn.Parameter(torch.randn(4, 4, 2, 2, 2, 2) * 0.1)
        self.norm = nn.BatchNorm3d(4)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.conv(x))))
        spectrum = torch.fft.rfftn(x, dim=[-3, -2, -1])
        low = spectrum[:, :, :2, :2, :2]
        mixed = torch.einsum("bixyz,ioxyz->boxyz", low, torch.view_as_complex(self.spectral))
        padded = F.pad(mixed, (0, spectrum.size(-1) - 2, 0, spectrum.size(-2) - 2, 0, spectrum.size(-3) - 2))
        return self.up(x + torch.fft.irfftn(padded, s=x.shape[-3:]))


cube = torch.stack([series[..., :4], torch.roll(series[..., :4], 1, 0)], 1)
net = FNO3d()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
for x, y in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(cube, series[..., 1:]), batch_size=7, shuffle=True):
    out = net(x).squeeze(1)
    phase = torch.fft.fft2(out - y, dim=(1, 2))
    loss = (out - y).abs().mean() + 1e-2 * phase.abs().pow(2).mean() + 1e-3 * torch.angle(phase + 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"3d {loss.item():.10g} {net.spectral.grad.norm().item():.10g}")
state, errors = normalizer.encode(a[22:25]), []
for t in range(3):
    with torch.no_grad():
        step = y_normalizer.decode(model(state))
    errors.append(myloss(step, series[22:25, ..., t + 1 : t + 2]).item())
    state = normalizer.encode(step)
print("rollout", " ".join(f"{e:.10g}" for e in errors))
