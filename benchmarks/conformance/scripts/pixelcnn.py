"""A PixelCNN with masked convolutions and gates: bits per dimension, weight norm, EMA for sampling pixel by pixel."""

import copy
import os
import sys
import time

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data
from tqdm import tqdm

torch.set_default_dtype(torch.float64)
torch.manual_seed(19), np.random.seed(19)
LEVELS, SIDE = 4, 6


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert mask_type in {"A", "B"}
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kh, kw = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kh // 2, kw // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kh // 2 + 1 :] = 0

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class GatedBlock(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.conv = MaskedConv2d("B", width, 2 * width, 3, 1, 1, bias=False)
        self.condition = nn.Embedding(classes, 2 * width)
        self.out = nn.utils.parametrizations.weight_norm(nn.Conv2d(width, width, 1))
        self.norm = nn.InstanceNorm2d(width, affine=True)

    def forward(self, x, label):
        a, b = (self.conv(x) + self.condition(label)[:, :, None, None]).chunk(2, dim=1)
        return x + self.out(self.norm(torch.tanh(a) * torch.sigmoid(b)))


class PixelCNN(nn.Module):
    def __init__(self, width=8, classes=3, blocks=2):
        super().__init__()
        self.first = MaskedConv2d("A", 1, width, 5, 1, 2, bias=False)
        self.blocks = nn.ModuleList(GatedBlock(width, classes) for _ in range(blocks))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv2d(width, 12, 1), nn.PReLU(12), nn.Conv2d(12, LEVELS, 1))

    def forward(self, x, label):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, label)
        return self.last(x)


@torch.no_grad()
def sample(net, labels):
    pictures = torch.zeros(len(labels), 1, SIDE, SIDE)
    net.eval()
    for i in range(SIDE):
        for j in range(SIDE):
            probs = F.softmax(net(pictures, labels)[:, :, i, j], dim=1).data
            pictures[:, :, i, j] = torch.multinomial(probs, 1).double() / (LEVELS - 1)
    return pictures


class Quantized(data.Dataset):
    def __init__(self, n, train=True):
        rng = np.random.RandomState(0 if train else 1)
        self.label = rng.randint(0, 3, n)
        yy, xx = np.mgrid[:SIDE, :SIDE] / SIDE
        base = np.stack([xx, yy, (xx + yy) / 2])
        self.raw = np.clip(base[self.label] + 0.1 * rng.randn(n, SIDE, SIDE), 0, 0.999)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        levels = (self.raw[i] * LEVELS).astype(np.int64)
        return levels[None] / (LEVELS - 1), levels, self.label[i]


tr = data.DataLoader(Quantized(45), batch_size=7, shuffle=True, num_workers=1, pin_memory=False)
te = data.DataLoader(Quantized(16, False), batch_size=6, shuffle=False, num_workers=1)
net = PixelCNN()
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = optim.Adamax(net.parameters(), lr=5e-3)
os.makedirs("samples", exist_ok=True)
for epoch in range(3):
    err_tr, began = [], time.time()
    net.train(True)
    with tqdm(tr, file=sys.stderr, desc=f"epoch {epoch}", mininterval=100) as bar:
        for inputs, levels, label in bar:
            loss = F.cross_entropy(net(inputs, label), levels)
            err_tr.append(loss.item() / np.log(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(net)
            bar.set_postfix(bits=f"{err_tr[-1]:.4f}")
    err_te, per_pixel = [], torch.zeros(SIDE, SIDE)
    net.train(False)
    with torch.no_grad():
        for inputs, levels, label in te:
            scores = F.cross_entropy(ema(inputs, label), levels, reduction="none")
            per_pixel += scores.sum(0)
            err_te.append(scores.mean().data / np.log(2))
    print(f"epoch={epoch}; nll_tr={np.mean(err_tr):.10g}; nll_te={np.mean([float(e) for e in err_te]):.10g}; worst={per_pixel.argmax().item()}")
    pictures = sample(ema.module, torch.arange(3).repeat_interleave(2))
    np.save(f"samples/{epoch}.npy", pictures.numpy())
    print("sample", pictures.sum(dim=(1, 2, 3)).mul(LEVELS - 1).round().tolist())
twin = copy.deepcopy(net)
torch.save(net.state_dict(), "pixelcnn.pth")
twin.load_state_dict(torch.load("pixelcnn.pth", weights_only=True))
with torch.no_grad():
    inputs, levels, label = next(iter(te))
    before = twin.eval()(inputs, label)
    nn.utils.parametrize.remove_parametrizations(twin.blocks[0].out, "weight")
    print(f"twin {(twin(inputs, label) - before).abs().max().item() < 1e-12}", sorted(os.listdir("samples")))
print(f"norms {sum(p.norm().item() for p in net.parameters()):.10g} {sum(p.norm().item() for p in ema.parameters()):.10g}")
