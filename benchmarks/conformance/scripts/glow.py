"""A flow with ActNorm that starts from data, invertible convolutions, log determinants, sampling at temperatures."""

from math import log, pi

import numpy as np
import torch
from scipy import linalg as la
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
np.random.seed(4)


class ActNorm(nn.Module):
    def __init__(self, in_channel):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, in_channel, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, in_channel, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def initialize(self, input):
        with torch.no_grad():
            flatten = input.permute(1, 0, 2, 3).contiguous().view(input.shape[1], -1)
            mean = flatten.mean(1).view(1, -1, 1, 1)
            std = flatten.std(1).view(1, -1, 1, 1)
            self.loc.data.copy_(-mean)
            self.scale.data.copy_(1 / (std + 1e-6))

    def forward(self, input):
        _, _, height, width = input.shape
        if self.initialized.item() == 0:
            self.initialize(input)
            self.initialized.fill_(1)
        logdet = height * width * torch.sum(torch.log(torch.abs(self.scale)))
        return self.scale * (input + self.loc), logdet

    def reverse(self, output):
        return output / self.scale - self.loc


class InvConv2dLU(nn.Module):
    def __init__(self, in_channel):
        super().__init__()
        q, _ = la.qr(np.random.randn(in_channel, in_channel))
        w_p, w_l, w_u = la.lu(q)
        w_s = np.diag(w_u)
        self.register_buffer("w_p", torch.from_numpy(w_p))
        self.register_buffer("u_mask", torch.from_numpy(np.triu(np.ones_like(w_u), 1)))
        self.register_buffer("l_mask", self.u_mask.T)
        self.register_buffer("s_sign", torch.sign(torch.from_numpy(w_s.copy())))
        self.register_buffer("l_eye", torch.eye(in_channel))
        self.w_l, self.w_u = (
            nn.Parameter(torch.from_numpy(w_l)),
            nn.Parameter(torch.from_numpy(np.triu(w_u, 1))),
        )
        self.w_s = nn.Parameter(torch.log(torch.abs(torch.from_numpy(w_s.copy()))))

    def weight(self):
        lower = self.w_l * self.l_mask + self.l_eye
        return (
            self.w_p @ lower @ ((self.w_u * self.u_mask) + torch.diag(self.s_sign * torch.exp(self.w_s)))
        )[..., None, None]

    def forward(self, input):
        _, _, height, width = input.shape
        return F.conv2d(input, self.weight()), height * width * torch.sum(self.w_s)

    def reverse(self, output):
        return F.conv2d(output, self.weight().squeeze().inverse().unsqueeze(2).unsqueeze(3))


class InvConv2d(nn.Module):
    def __init__(self, in_channel):
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(in_channel, in_channel))
        self.weight = nn.Parameter(q.unsqueeze(2).unsqueeze(3))

    def forward(self, input):
        _, _, height, width = input.shape
        return F.conv2d(input, self.weight), height * width * torch.slogdet(self.weight.squeeze())[1]

    def reverse(self, output):
        return F.conv2d(output, self.weight.squeeze().inverse().unsqueeze(2).unsqueeze(3))


class Coupling(nn.Module):
    def __init__(self, in_channel, filters=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channel // 2, filters, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(filters, in_channel, 1),
        )
        self.net[2].weight.data.mul_(0.1)

    def forward(self, input):
        in_a, in_b = input.chunk(2, 1)
        log_s, t = self.net(in_a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([in_a, (in_b + t) * s], 1), torch.sum(torch.log(s).view(input.shape[0], -1), 1)

    def reverse(self, output):
        out_a, out_b = output.chunk(2, 1)
        log_s, t = self.net(out_a).chunk(2, 1)
        return torch.cat([out_a, out_b / torch.sigmoid(log_s + 2) - t], 1)


class Glow(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        steps = [[ActNorm(channels), conv(channels), Coupling(channels)] for conv in (InvConv2dLU, InvConv2d)]
        self.flows = nn.ModuleList(sum(steps, []))

    def forward(self, input):
        b, c, h, w = input.shape
        out = (
            input.view(b, c, h // 2, 2, w // 2, 2)
            .permute(0, 1, 3, 5, 2, 4)
            .contiguous()
            .view(b, c * 4, h // 2, w // 2)
        )
        logdet = 0
        for flow in self.flows:
            out, det = flow(out)
            logdet = logdet + det
        log_p = (-0.5 * log(2 * pi) - 0.5 * out**2).sum((1, 2, 3))
        return log_p, logdet, out

    def reverse(self, z):
        for flow in reversed(self.flows):
            z = flow.reverse(z)
        b, c, h, w = z.shape
        return (
            z.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).contiguous().view(b, c // 4, h * 2, w * 2)
        )


images = torch.rand(44, 1, 6, 6) * torch.linspace(0.2, 1, 6)
loader = DataLoader(TensorDataset(images, torch.zeros(44)), batch_size=9, shuffle=True)
model, n_bins, n_pixel = Glow(), 2.0**5, 36
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
z_sample = torch.randn(3, 4, 3, 3) * 0.7
for epoch in range(3):
    for i, (image, _) in enumerate(loader):
        image = torch.floor(image * 255 / 2 ** (8 - 5)) / n_bins - 0.5
        if epoch == 0 and i == 0:
            with torch.no_grad():
                log_p, logdet, _ = model(image + torch.rand_like(image) / n_bins)
                continue
        log_p, logdet, z = model(image + torch.rand_like(image) / n_bins)
        logdet = logdet.mean()
        loss = (-(-log(n_bins) * n_pixel + logdet + log_p) / (log(2) * n_pixel)).mean()
        model.zero_grad()
        loss.backward()
        warmup_lr = 5e-3 * min(1, i * 9 / (20 * 3) + 0.1)
        optimizer.param_groups[0]["lr"] = warmup_lr
        optimizer.step()
    print(
        f"{epoch} loss {loss.item():.9g} logp {log_p.mean().item() / log(2):.9g} logdet {logdet.item():.9g}"
    )
    with torch.no_grad():
        restored = model.reverse(z)
        print(f"  error {(restored - model.reverse(model(restored)[2])).abs().max().item() < 1e-9}")
        print(f"  samples {model.reverse(z_sample).mean().item():.9g} restored {restored.std().item():.9g}")
