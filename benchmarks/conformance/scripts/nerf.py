"""A small radiance field: rays sampled along their depth, volume rendering, PSNR, held-out view."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
NEAR, FAR, SAMPLES = 1.0, 3.0, 8


def posenc(x, levels=3):
    rets = [x]
    for i in range(levels):
        for fn in (torch.sin, torch.cos):
            rets.append(fn(2.0**i * x))
    return torch.cat(rets, -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(21, 24)
        self.second = nn.Linear(24 + 21, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.out(F.relu(self.second(torch.cat([h, x], -1))))


def cumprod_exclusive(tensor):
    cumprod = torch.cumprod(tensor, -1)
    cumprod = torch.roll(cumprod, 1, -1)
    cumprod[..., 0] = 1.0
    return cumprod


def render_rays(field, origins, directions, rand=True):
    z_vals = torch.linspace(NEAR, FAR, SAMPLES)
    if rand:
        noise = torch.rand(list(origins.shape[:-1]) + [SAMPLES]) * (FAR - NEAR) / SAMPLES
        z_vals = z_vals + noise
    else:
        z_vals = z_vals.expand(list(origins.shape[:-1]) + [SAMPLES])
    points = origins[..., None, :] + directions[..., None, :] * z_vals[..., :, None]
    flat = points.reshape(-1, 3)
    raw = torch.cat([field(posenc(flat[i : i + 64])) for i in range(0, flat.shape[0], 64)], 0)
    raw = raw.reshape(list(points.shape[:-1]) + [4])
    sigma, rgb = F.relu(raw[..., 3]), torch.sigmoid(raw[..., :3])
    far = torch.tensor([1e10]).expand(z_vals[..., :1].shape)
    dists = torch.cat([z_vals[..., 1:] - z_vals[..., :-1], far], -1)
    alpha = 1.0 - torch.exp(-sigma * dists)
    weights = alpha * cumprod_exclusive(1.0 - alpha + 1e-10)
    rgb_map = (weights[..., None] * rgb).sum(dim=-2)
    depth_map = (weights * z_vals).sum(dim=-1)
    return rgb_map, depth_map, weights.sum(dim=-1)


directions = F.normalize(torch.randn(70, 3), dim=-1)
origins = -2 * directions + 0.1 * torch.randn(70, 3)
colors = torch.sigmoid(3 * directions)
rays = TensorDataset(origins[:53], directions[:53], colors[:53])
loader = DataLoader(rays, batch_size=13, shuffle=True)
view = DataLoader(TensorDataset(origins[53:], directions[53:], colors[53:]), batch_size=17)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
psnrs = []
step = 0
for epoch in range(3):
    for origin, direction, target in loader:
        rgb, depth, acc = render_rays(field, origin, direction)
        loss = F.mse_loss(rgb, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * 0.1 ** (step / 50)
        step += 1
    with torch.no_grad():
        for origin, direction, target in view:
            rgb, depth, acc = render_rays(field, origin, direction, rand=False)
            psnr = -10.0 * torch.log10(F.mse_loss(rgb, target))
            psnrs.append(psnr.item())
    print(f"epoch {epoch} loss {loss.item():.10g} psnr {psnr.item():.10g} depth {depth.mean():.10g}")
print(f"best {max(psnrs):.10g}")
print(f"norms {sum(p.norm() for p in field.parameters()):.10g}")
