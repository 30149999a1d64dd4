"""FixMatch: labelled and unlabelled batches at once, confident pseudo-labels, interleaved BatchNorm, EMA."""

import copy
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

torch.set_default_dtype(torch.float64)
random.seed(0), np.random.seed(0), torch.manual_seed(0)
MU, BATCH, THRESHOLD, T = 3, 5, 0.55, 0.8


class Weak:
    def __call__(self, x):
        return x[..., ::-1].copy() if random.random() < 0.5 else x


class Strong(Weak):
    def __call__(self, x):
        x = super().__call__(x) + np.random.normal(0, 0.2, x.shape)
        i, j = np.random.randint(0, 5, 2)
        x[:, i : i + 3, j : j + 3] = 0.5
        return x


class Unlabelled(Dataset):
    def __init__(self, images):
        self.images, self.weak, self.strong = images, Weak(), Strong()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return (self.weak(self.images[i]), self.strong(self.images[i])), -1


class Labelled(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.transform(self.images[i]) if self.transform else self.images[i]
        return image, int(self.labels[i])


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


class ModelEMA:
    def __init__(self, model, decay):
        self.ema, self.decay = copy.deepcopy(model), decay
        self.ema.eval()
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd, esd = model.state_dict(), self.ema.state_dict()
            for k in self.param_keys:
                esd[k].copy_(esd[k] * self.decay + (1.0 - self.decay) * msd[k].detach())
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


labels = np.random.randint(0, 3, 90)
images = np.random.rand(90, 1, 8, 8) * 0.5 + labels[:, None, None, None] * 0.3
labelled = Labelled(images[:17], labels[:17], Weak())
labelled_loader = DataLoader(labelled, BATCH, sampler=RandomSampler(labelled), drop_last=True)
unlabelled = Unlabelled(images[17:66])
unlabelled_loader = DataLoader(unlabelled, BATCH * MU, sampler=RandomSampler(unlabelled), drop_last=True)
test = Labelled(images[66:], labels[66:])
test_loader = DataLoader(test, BATCH, sampler=SequentialSampler(test))
model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, momentum=0.01), nn.LeakyReLU(0.1, inplace=True),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3),
)  # fmt: skip
decay = [p for n, p in model.named_parameters() if not any(nd in n for nd in ["bias", "1."])]
other = [p for n, p in model.named_parameters() if any(nd in n for nd in ["bias", "1."])]
optimizer = optim.SGD(
    [{"params": decay, "weight_decay": 5e-4}, {"params": other, "weight_decay": 0.0}],
    lr=0.1,
    momentum=0.9,
    nesterov=True,
)
scheduler = optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: max(0.0, math.cos(math.pi * 7.0 * step / (16.0 * 12)))
)
ema = ModelEMA(model, 0.9)
labelled_iter, unlabelled_iter = iter(labelled_loader), iter(unlabelled_loader)
for epoch in range(2):
    model.train()
    for step in range(6):
        try:
            inputs_x, targets_x = next(labelled_iter)
        except StopIteration:
            labelled_iter = iter(labelled_loader)
            inputs_x, targets_x = next(labelled_iter)
        try:
            (inputs_w, inputs_s), _ = next(unlabelled_iter)
        except StopIteration:
            unlabelled_iter = iter(unlabelled_loader)
            (inputs_w, inputs_s), _ = next(unlabelled_iter)
        batch_size = inputs_x.shape[0]
        inputs = interleave(torch.cat((inputs_x, inputs_w, inputs_s)), 2 * MU + 1)
        logits = de_interleave(model(inputs), 2 * MU + 1)
        logits_x = logits[:batch_size]
        logits_w, logits_s = logits[batch_size:].chunk(2)
        del logits
        loss_x = F.cross_entropy(logits_x, targets_x, reduction="mean")
        pseudo = torch.softmax(logits_w.detach() / T, dim=-1)
        max_probs, targets_u = torch.max(pseudo, dim=-1)
        mask = max_probs.ge(THRESHOLD).float()
        loss_u = (F.cross_entropy(logits_s, targets_u, reduction="none") * mask).mean()
        loss = loss_x + loss_u
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(model)
        model.zero_grad()
        print(
            f"{epoch} {step} {loss.item():.10g} {loss_x.item():.10g} {loss_u.item():.10g} mask {mask.mean().item():.10g}"
        )
    for name, tested in (("model", model), ("ema", ema.ema)):
        tested.eval()
        total, hits = 0.0, 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                outputs = tested(inputs)
                total += F.cross_entropy(outputs, targets).item() * inputs.shape[0]
                hits += (outputs.topk(1, 1)[1].t() == targets.view(1, -1)).reshape(-1).sum().item()
        print(f"{name} test {total / len(test):.10g} hits {hits}")
