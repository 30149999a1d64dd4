"""A vision transformer: GradScaler that skips steps, accumulation with an uneven end, decayed layer rates."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
ACCUMULATE, EPOCHS, WARMUP = 4, 3, 3


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)),
        )
        self.drop_path = DropPath(drop)
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))

    def forward(self, x):
        x = x + self.drop_path(self.gamma * self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=16, depth=3):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        rates = [r.item() for r in torch.linspace(0, 0.3, depth)]
        self.blocks = nn.ModuleList([Block(dim, 4, r) for r in rates])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.size(0), -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def layer_id(name):
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith(("patch", "cls", "pos")) else 4


def groups_of(model, lr, decay=0.75):
    groups = {}
    for name, p in model.named_parameters():
        no_decay = p.ndim == 1 or name.endswith(".bias") or name in ("cls_token", "pos_embed")
        key = f"layer_{layer_id(name)}_{'no_decay' if no_decay else 'decay'}"
        scale = decay ** (4 - layer_id(name))
        group = groups.setdefault(
            key,
            {"params": [], "lr": lr * scale, "lr_scale": scale, "weight_decay": 0.0 if no_decay else 0.05},
        )
        group["params"].append(p)
    return list(groups.values())


def adjust(optimizer, epoch, lr=4e-3):
    if epoch < WARMUP / 2:
        now = lr * epoch / (WARMUP / 2)
    else:
        now = 1e-5 + (lr - 1e-5) * 0.5 * (
            1.0 + math.cos(math.pi * (epoch - WARMUP / 2) / (EPOCHS - WARMUP / 2))
        )
    for group in optimizer.param_groups:
        group["lr"] = now * group.get("lr_scale", 1.0)
    return now


x = torch.randn(74, 3, 8, 8)
y = x.mean((2, 3)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
model = ViT()
optimizer = torch.optim.AdamW(groups_of(model, 4e-3), betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
for epoch in range(EPOCHS):
    model.train()
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(loader):
        if i % ACCUMULATE == 0:
            lr = adjust(optimizer, i / len(loader) + epoch)
        left = len(loader) - i // ACCUMULATE * ACCUMULATE
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.cross_entropy(model(images), labels) / min(ACCUMULATE, left)
        if epoch == 1 and i == 5:
            loss = loss * float("inf")  # as an overflow: this step is skipped, and the scale halved
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
            scaler.unscale_(optimizer)
            norms = [p.grad.norm(2) for p in model.parameters() if p.grad is not None]
            total = torch.stack(norms).norm(2)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            print(
                f"{epoch} {i} loss {loss.item():.10g} norm {total:.10g} lr {lr:.10g} scale {scaler.get_scale()}"
            )
    for name, p in model.named_parameters():
        if name.endswith("qkv.weight"):
            print(f"  {name} {p.norm():.10g} {p.abs().max().item():.10g}")
model.eval()
with torch.inference_mode():
    found = torch.cat([model(images).argmax(-1) for (images,) in DataLoader(TensorDataset(x), 20)])
    print(f"accuracy {(found == y).double().mean().item():.10g}")
