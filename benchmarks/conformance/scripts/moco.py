"""Momentum contrast: a queue of keys in a buffer, its pointer, a momentum encoder, shuffled keys."""

import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class TwoCrops(Dataset):
    """A picture, augmented twice."""

    def __init__(self, n):
        self.images = torch.rand(n, 3, 8, 8)

    def __len__(self):
        return len(self.images)

    def augment(self, image):
        image = image * torch.empty(3, 1, 1).uniform_(0.7, 1.3)
        return image.flip(-1) if torch.rand(1).item() < 0.5 else image

    def __getitem__(self, i):
        return {"im_1": self.augment(self.images[i]), "im_2": self.augment(self.images[i]), "index": i}


class MoCo(nn.Module):
    def __init__(self, dim=8, K=48, m=0.95, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, dim)
        )
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for param in self.encoder_k.parameters():
            param.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        if ptr + batch_size > self.K:
            batch_size = self.K - ptr
        self.queue[:, ptr : ptr + batch_size] = keys[:batch_size].T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    @torch.no_grad()
    def _shuffle(self, x):
        idx = torch.randperm(x.shape[0])
        return x[idx], torch.argsort(idx)

    def contrastive_loss(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            im_k_, unshuffle = self._shuffle(im_k)
            k = nn.functional.normalize(self.encoder_k(im_k_), dim=1)[unshuffle]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        return nn.CrossEntropyLoss()(logits, labels), q, k

    def forward(self, im_1, im_2, symmetric=True):
        with torch.no_grad():
            self._momentum_update_key_encoder()
        if symmetric:
            loss_12, q1, k2 = self.contrastive_loss(im_1, im_2)
            loss_21, q2, k1 = self.contrastive_loss(im_2, im_1)
            loss, k = loss_12 + loss_21, torch.cat([k1, k2], dim=0)
        else:
            loss, q, k = self.contrastive_loss(im_1, im_2)
        self._dequeue_and_enqueue(k)
        return loss


loader = DataLoader(TwoCrops(50), batch_size=12, shuffle=True, num_workers=0, pin_memory=False)
model = MoCo()
optimizer = torch.optim.SGD(model.parameters(), lr=0.06, weight_decay=5e-4, momentum=0.9)
for epoch in range(3):
    model.train()
    lr = 0.06 * 0.5 * (1.0 + math.cos(math.pi * epoch / 3))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    total_loss, total_num = 0.0, 0
    for batch in loader:
        loss = model(batch["im_1"], batch["im_2"], symmetric=epoch < 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_num += loader.batch_size
        total_loss += loss.item() * loader.batch_size
        print(f"  {loss.item():.10g} pointer {int(model.queue_ptr)} queue {model.queue.sum().item():.10g}")
    print(f"epoch {epoch} lr {lr:.10g} loss {total_loss / total_num:.10g}")
model.eval()
with torch.no_grad():
    bank = torch.cat([nn.functional.normalize(model.encoder_q(b["im_1"]), dim=1) for b in loader], dim=0)
    weight, nearest = torch.mm(bank, bank.t()).topk(k=5, dim=-1)
    print(
        f"bank {bank.shape[0]} nearest {nearest[:, 1].sum().item()} weight {(weight / 0.1).exp().mean().item():.10g}"
    )
torch.save(
    {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "moco.pth"
)
checkpoint = torch.load("moco.pth", weights_only=True)
print(f"saved {checkpoint['state_dict']['queue'].norm():.10g} {len(checkpoint['optimizer']['state'])}")
