"""A diffusion transformer: noise at drawn steps, labels dropped, EMA, samples by guidance."""

from collections import OrderedDict
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
STEPS, CLASSES = 20, 3
alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 0.2, STEPS), 0)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.attn = nn.MultiheadAttention(size, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(size, 2 * size), nn.GELU(approximate="tanh"), nn.Linear(2 * size, size)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        nn.init.normal_(self.adaLN_modulation[-1].weight, std=0.02)

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift_a, scale_a)
        x = x + gate_a.unsqueeze(1) * self.attn(h, h, h, need_weights=False)[0]
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    def __init__(self, size=12, depth=2, heads=2, dropout_prob=0.3):
        super().__init__()
        self.x_embedder = nn.Conv2d(2, size, 2, 2)
        self.t_embedder = nn.Sequential(nn.Linear(8, size), nn.SiLU(), nn.Linear(size, size))
        self.y_embedder = nn.Embedding(CLASSES + 1, size)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, size) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(size, heads) for _ in range(depth)])
        self.final, self.dropout_prob = nn.Linear(size, 8), dropout_prob

    def timestep_embedding(self, t):
        freqs = torch.exp(-torch.arange(4) * 2.0)
        args = t[:, None] * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x, t, y):
        h = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        if self.training:
            drop_ids = torch.rand(y.shape[0]) < self.dropout_prob
            y = torch.where(drop_ids, CLASSES, y)
        c = self.t_embedder(self.timestep_embedding(t)) + self.y_embedder(y)
        for block in self.blocks:
            h = block(h, c)
        h = self.final(h).reshape(x.shape[0], 2, 2, 2, 2, 2)
        return torch.einsum("nhwpqc->nchpwq", h).reshape(x.shape)

    def forward_with_cfg(self, x, t, y, cfg_scale):
        half = x[: len(x) // 2]
        eps = self.forward(torch.cat([half, half], dim=0), t, y)
        cond_eps, uncond_eps = torch.split(eps, len(eps) // 2, dim=0)
        half_eps = uncond_eps + cfg_scale * (cond_eps - uncond_eps)
        return torch.cat([half_eps, half_eps], dim=0)


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


labels = torch.randint(CLASSES, (45,))
latents = torch.randn(CLASSES, 2, 4, 4)[labels] + 0.3 * torch.randn(45, 2, 4, 4)
loader = DataLoader(TensorDataset(latents, labels), batch_size=11, shuffle=True)
model = DiT()
ema = deepcopy(model)
for p in ema.parameters():
    p.requires_grad = False
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
update_ema(ema, model, decay=0)
model.train()
ema.eval()
train_steps, log_steps, running_loss = 0, 0, 0
for epoch in range(3):
    for x, y in loader:
        t = torch.randint(0, STEPS, (x.shape[0],))
        noise = torch.randn_like(x)
        a = alphas_cumprod[t][:, None, None, None]
        x_t = a.sqrt() * x + (1 - a).sqrt() * noise
        loss = (model(x_t, t, y) - noise).square().mean(dim=[1, 2, 3]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model)
        running_loss += loss.item()
        log_steps += 1
        train_steps += 1
        if train_steps % 4 == 0:
            print(f"(step={train_steps:07d}) Train Loss: {running_loss / log_steps:.10g}")
            running_loss, log_steps = 0, 0
    torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, "latest.pt")
with torch.no_grad():
    z = torch.randn(6, 2, 4, 4)
    z, y = torch.cat([z, z], 0), torch.cat([torch.arange(6) % 3, torch.full((6,), CLASSES)])
    for step in reversed(range(STEPS)):
        eps = ema.forward_with_cfg(z, torch.full((12,), step), y, 1.5)
        z = z - 0.1 * eps
    print(f"samples {z.chunk(2)[0].std().item():.10g} {F.mse_loss(z[:6], z[6:]).item():.10g}")
print(f"norms {sum(p.norm() for m in (model, ema) for p in m.parameters()):.10g}")
