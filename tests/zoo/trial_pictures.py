"""What a new user's trial failed on, small: models of diffusers, torchvision and timm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Norms of groups, and the time shifts or scales the channels between."""

    def __init__(self, width: int, scales: bool) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        self.conv, self.out = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.time, self.scales = nn.Linear(4, width * (1 + scales)), scales

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv(F.silu(self.first(x)))
        shift = self.time(F.silu(time))[:, :, None, None]
        if self.scales:
            scale, shift = shift.chunk(2, 1)
            h = self.second(h) * (1 + scale) + shift
        else:
            h = self.second(h + shift)
        return x + self.out(F.silu(h))  # type: ignore[no-any-return]


class PlaneAttention(nn.Module):
    """Pixels look at each other, or at a text; planes lie as channels then, and come back."""

    def __init__(self, width: int, context: int | None = None) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.GroupNorm(2, width), nn.Linear(width, 4), nn.Linear(4, width)
        self.key, self.value = (nn.Linear(context or width, 4) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        seen = rows if context is None else context
        query, key, value = (
            layer(part).unflatten(2, (2, 2)).transpose(1, 2)
            for layer, part in ((self.query, rows), (self.key, seen), (self.value, seen))
        )
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.out(out).transpose(1, 2).reshape(x.shape) + x  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """diffusers' UNet2D: noise at a step of each sample is to be found again."""

    def __init__(
        self, attention: bool = False, scales: bool = False, context: int | None = None, kinds: int = 0
    ) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, stride=2), nn.Conv2d(8, 2, 3, padding=1)
        self.block = None if context or attention else Residual(4, scales)
        self.middle = PlaneAttention(4, context) if context or attention else None
        self.kinds = nn.Embedding(kinds, 4) if kinds else None
        self.register_buffer("kept", torch.linspace(1e-4, 2e-2, 10).neg().log1p().cumsum(0).exp())

    def forward(self, x: Tensor, noise: Tensor, step: Tensor, extra: Tensor | None = None) -> Tensor:
        kept = self.kept[step][:, None, None, None]
        skip = self.conv(F.pad(kept.sqrt() * x + (1 - kept).sqrt() * noise, (0, 1, 0, 1)))
        h = skip if self.middle is None else self.middle(skip, extra)
        if self.block is not None:
            angle = step[:, None] * torch.exp(-math.log(100) * torch.arange(2) / 2)
            time = torch.cat([angle.sin(), angle.cos()], 1)
            h = self.block(h, time if self.kinds is None else time + self.kinds(extra))
        up = F.interpolate(torch.cat([h, skip], 1), scale_factor=2.0, mode="nearest")
        return F.mse_loss(self.head(up), noise)


class Codebook(nn.Module):
    """diffusers' VQModel: the nearest of a few codes, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(2, 4, 2, 2), nn.GroupNorm(2, 4), nn.SiLU())
        self.codes, self.decode = nn.Embedding(6, 4), nn.ConvTranspose2d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.encode(x).permute(0, 2, 3, 1).contiguous()
        chosen = self.codes(torch.cdist(found.view(-1, 4), self.codes.weight).argmin(1)).view(found.shape)
        commitment = F.mse_loss(chosen.detach(), found) + 0.25 * F.mse_loss(chosen, found.detach())
        straight = found + (chosen - found).detach()
        return F.mse_loss(self.decode(straight.permute(0, 3, 1, 2).contiguous()), x) + commitment


class Gaussian(nn.Module):
    """diffusers' AutoencoderKL: a sample of what is encoded, and its divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(2, 4, 2, 2), nn.GroupNorm(2, 4), nn.SiLU())
        self.decode = nn.ConvTranspose2d(2, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encode(x).chunk(2, 1)
        log = log.clamp(-30, 20)
        drawn = mean + (0.5 * log).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log.exp() - 1 - log).sum((1, 2, 3)).mean()
        return F.mse_loss(self.decode(drawn), x) + 1e-2 * divergence


class Tiny(nn.Module):
    """diffusers' AutoencoderTiny: values are bounded instead of normalized, and as bytes between."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(2, 4, 3, 2, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.encode(x)
        kept = latent.div(6).add(0.5).clamp(0, 1).mul(255).round().to(torch.uint8).to(x.dtype)
        latent = latent + ((kept / 255 - 0.5) * 6 - latent).detach()
        return F.l1_loss(self.decode(F.interpolate((latent / 3).tanh() * 3, scale_factor=2.0)), x)


class Flow(nn.Module):
    """torchvision's RAFT: all pairs of pixels, looked up around where each pixel may have moved to."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.moves = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4 + 9, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor, flow: Tensor) -> Tensor:
        one, two = self.features(first), self.features(second)
        count, _, high, wide = one.shape
        pairs = (one.flatten(2).transpose(1, 2) @ two.flatten(2)).view(-1, 1, high, wide)
        around = torch.cartesian_prod(torch.arange(-1.0, 2), torch.arange(-1.0, 2)).view(1, 3, 3, 2)
        at = flow.detach().permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) + around
        looked = F.grid_sample(pairs, 2 * at / (high - 1) - 1, align_corners=True).view(count, high, wide, 9)
        return (self.moves(torch.cat([one, looked.permute(0, 3, 1, 2)], 1)) - flow).abs().mean()


class Regions(nn.Module):
    """torchvision's Swin v2: shifted windows, attention by cosines, no bias of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((2, 1, 1), math.log(10.0)))
        self.table = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
        self.register_buffer("near", torch.cartesian_prod(torch.arange(-1.0, 2), torch.arange(-1.0, 2)))
        self.register_buffer("which", torch.randint(0, 9, (16,)))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        cut = x.roll((-1, -1), (1, 2)).view(count, 2, 2, 2, 2, 4).transpose(2, 3).reshape(-1, 4, 4)
        bias = self.mixed.bias.clone()
        bias[4:8].zero_()
        rows = F.linear(cut, self.mixed.weight, bias).view(-1, 4, 3, 2, 2).permute(2, 0, 3, 1, 4)
        scores = F.normalize(rows[0], dim=-1) @ F.normalize(rows[1], dim=-1).transpose(-2, -1)
        near = 16 * self.table(self.near)[self.which].view(4, 4, 2).permute(2, 0, 1).sigmoid()
        scores = scores * self.scale.clamp(max=math.log(100.0)).exp() + near
        out = self.out((scores.softmax(-1) @ rows[2]).transpose(1, 2).reshape(cut.shape))
        full = out.view(count, 2, 2, 2, 2, 4).transpose(2, 3).reshape(x.shape).roll((1, 1), (1, 2))
        return (x + full).square().mean()


class PartlyZero(nn.Module):
    """A part of the bias is set to zero, so its gradient is zeros of the shape of a partial value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.clone()
        bias[2:4].zero_()
        return (self.linear(x) + bias).square().mean()


class Deep(nn.Module):
    """torchvision's VGG with BatchNorm, and dropout before its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(24, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x)), y, label_smoothing=0.1)


class Scales(nn.Module):
    """timm's Res2Net: each third of the channels sees what came out of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.norm, self.head = nn.BatchNorm2d(2), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, *parts = x.split(2, 1)
        outs, before = [first], torch.zeros_like(first)
        for part, conv in zip(parts, self.convs, strict=True):
            before = F.relu(conv(self.norm(part + before) if len(outs) > 1 else part + before))
            outs.append(before)
        return F.cross_entropy(self.head((torch.cat(outs, 1) + x).mean((2, 3))), y)


class Augmented(nn.Module):
    """timm's loss of three views that lie one after another, which ranks would cut elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.fc(x)
        size = logits.shape[0] // 3
        assert size * 3 == logits.shape[0]
        parts = [part.softmax(1) for part in torch.split(logits, size)]
        middle = torch.stack(parts).mean(0).clamp(1e-7, 1).log()
        spread = sum(F.kl_div(middle, part, reduction="batchmean") for part in parts)
        return F.cross_entropy(logits[:size], y[:size]) + 12 * spread / 3


class Detector(nn.Module):
    """torchvision's detectors: as many boxes for each image as it has things in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, 2, padding=1)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        found = self.conv(images).mean((2, 3))
        pairs = zip(found, (target["boxes"] for target in targets), strict=True)
        return torch.stack([F.l1_loss(box.expand(len(boxes), 4), boxes) for box, boxes in pairs]).mean()
