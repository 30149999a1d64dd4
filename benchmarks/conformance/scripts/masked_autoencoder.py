"""A masked autoencoder: patches hidden by sorted noise, loss of hidden patches, accumulation."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=16, values=12, dim=12, decoder_dim=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.1, requires_grad=False)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(dim)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.randn(1, 1, decoder_dim) * 0.02)
        self.decoder_pos = nn.Parameter(torch.randn(1, patches + 1, decoder_dim) * 0.1, requires_grad=False)
        self.decoder = nn.TransformerEncoderLayer(decoder_dim, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.pred = nn.Linear(decoder_dim, values)

    def patchify(self, imgs):
        x = imgs.reshape(imgs.shape[0], 3, 4, 2, 4, 2)
        x = torch.einsum("nchpwq->nhwpqc", x)
        return x.reshape(imgs.shape[0], 16, 12)

    def random_masking(self, x, mask_ratio):
        N, L, D = x.shape  # noqa: N806
        len_keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, imgs, mask_ratio=0.75):
        x = self.patch_embed(imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat((cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.decoder_embed(self.norm(self.encoder(x)))
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos
        pred = self.pred(self.decoder(x))[:, 1:, :]
        target = self.patchify(imgs)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


class Scaler:
    """Loss scaling with clipping, as an object that is called."""

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)

    def __call__(self, loss, optimizer, parameters, update_grad):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def adjust_learning_rate(optimizer, epoch):
    lr = 5e-3 * epoch if epoch < 1 else 5e-3 * 0.5 * (1.0 + math.cos(math.pi * (epoch - 1) / 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group.get("lr_scale", 1.0)
    return lr


loader = DataLoader(TensorDataset(torch.randn(51, 3, 8, 8)), batch_size=10, shuffle=True)
model = MaskedAutoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
loss_scaler, accum_iter = Scaler(), 2
for epoch in range(3):
    model.train(True)
    optimizer.zero_grad()
    for step, (samples,) in enumerate(loader):
        if step % accum_iter == 0:
            adjust_learning_rate(optimizer, step / len(loader) + epoch)
        loss, _, mask = model(samples)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            raise SystemExit(f"Loss is {loss_value}, stopping training")
        loss /= accum_iter
        update = (step + 1) % accum_iter == 0
        norm = loss_scaler(loss, optimizer, model.parameters(), update_grad=update)
        if update:
            optimizer.zero_grad()
            print(
                f"{epoch}.{step} loss {loss_value:.10g} norm {norm.item():.10g} hidden {mask.sum().item():g}"
            )
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
