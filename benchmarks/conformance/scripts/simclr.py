"""Contrastive learning of two views of each picture: masks, a similarity matrix, top-k accuracy."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
TEMPERATURE, N_VIEWS = 0.07, 2


class Views(Dataset):
    """Pictures, each as a list of two augmented views."""

    def __init__(self, size):
        self.data = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        return [image + 0.3 * torch.randn(image.shape) for _ in range(N_VIEWS)], index % 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x):
        return self.head(self.backbone(x))


def info_nce_loss(features, batch_size):
    labels = torch.cat([torch.arange(batch_size) for _ in range(N_VIEWS)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long)
    return logits / TEMPERATURE, labels


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


loader = DataLoader(Views(42), batch_size=10, shuffle=True, drop_last=False)
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), 0.003, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    for step, (images, _) in enumerate(loader):
        images = torch.cat(images, dim=0)
        features = model(images)
        logits, labels = info_nce_loss(features, images.shape[0] // N_VIEWS)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            top1, top2 = accuracy(logits, labels, topk=(1, 2))
            print(
                f"{epoch} {step} loss {loss.item():.10g} top1 {top1[0].item():.10g} top2 {top2[0].item():.10g}"
            )
    if epoch >= 1:
        scheduler.step()
    print(f"rate {scheduler.get_last_lr()[0]:.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
