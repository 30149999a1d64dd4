"""Mixup and cutmix by NumPy, label smoothing, class weights, averaged weights with update_bn, an EMA by hand."""

import random
from copy import deepcopy

import numpy as np
import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
CLASSES = 4


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Pictures(Dataset):
    """Pictures of numbers in NumPy, flipped and shifted at random."""

    def __init__(self, n, train):
        rng = np.random.RandomState(0 if train else 1)
        self.x, self.y = rng.randn(n, 8, 8, 3), rng.randint(0, CLASSES, n)
        self.x += self.y[:, None, None, None] / 2
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        image = self.x[i]
        if self.train:
            if random.random() < 0.5:
                image = image[:, ::-1]
            image = np.roll(image, np.random.randint(-1, 2), axis=0)
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), self.y[i]


def rand_bbox(size, lam):
    w, h = size[2], size[3]
    cut = np.sqrt(1.0 - lam)
    cx, cy = np.random.randint(w), np.random.randint(h)
    x1, x2 = np.clip([cx - int(w * cut) // 2, cx + int(w * cut) // 2], 0, w)
    y1, y2 = np.clip([cy - int(h * cut) // 2, cy + int(h * cut) // 2], 0, h)
    return x1, y1, x2, y2


def mix(inputs, targets):
    kind = np.random.rand()
    index = torch.randperm(inputs.size(0))
    lam = np.random.beta(1.0, 1.0)
    if kind < 0.4:
        inputs = lam * inputs + (1 - lam) * inputs[index, :]
    elif kind < 0.8:
        x1, y1, x2, y2 = rand_bbox(inputs.size(), lam)
        inputs[:, :, x1:x2, y1:y2] = inputs[index, :, x1:x2, y1:y2]
        lam = 1 - (x2 - x1) * (y2 - y1) / (inputs.size(-1) * inputs.size(-2))
    else:
        lam = 1.0
    return inputs, targets, targets[index], lam


class ModelEMA:
    """Average of all states, numbers of batches included."""

    def __init__(self, model, decay):
        self.module, self.decay = deepcopy(model).eval(), decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            if ema_v.dtype.is_floating_point:
                ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)
            else:
                ema_v.copy_(model_v)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, hits = 0.0, 0
    for x, y in loader:
        out = model(x)
        total += nn.functional.cross_entropy(out, y, reduction="sum").item()
        hits += out.argmax(1).eq(y).sum().item()
    return total / len(loader.dataset), 100.0 * hits / len(loader.dataset)


seed_everything(42)
train = DataLoader(Pictures(51, True), batch_size=8, shuffle=True)
test = DataLoader(Pictures(23, False), batch_size=10, shuffle=False)
counts = np.bincount(train.dataset.y, minlength=CLASSES)
weight = torch.tensor(counts.sum() / (CLASSES * counts))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2),
    nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Dropout(0.1), nn.Linear(12, CLASSES),
)  # fmt: skip
criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
ema, swa = ModelEMA(model, 0.9), AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)
swa_scheduler = SWALR(optimizer, swa_lr=1e-3, anneal_epochs=1)
for epoch in range(4):
    model.train()
    running = 0.0
    for i, (x, y) in enumerate(train):
        x, a, b, lam = mix(x, y)
        out = model(x)
        loss = lam * criterion(out, a) + (1 - lam) * criterion(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        running += loss.item()
        if epoch < 2:
            scheduler.step(epoch + i / len(train))
    if epoch >= 2:
        swa.update_parameters(model)
        swa_scheduler.step()
    print(f"epoch {epoch} loss {running / len(train):.10g} rate {optimizer.param_groups[0]['lr']:.10g}")
    print(
        "  model {:.10g} {:.10g}  ema {:.10g} {:.10g}".format(
            *validate(model, test), *validate(ema.module, test)
        )
    )
update_bn(train, swa)
print("averaged {:.10g} {:.10g}".format(*validate(swa, test)))
print(f"norms {sum(v.double().norm() for v in swa.state_dict().values()):.10g}")
