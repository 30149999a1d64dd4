"""Segmentation by a U-Net: cross entropy and Dice, scaler switched off, plateau rates."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, random_split

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Shapes(Dataset):
    """Pictures with a bright box, and its mask."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        self.masks = torch.zeros(size, 12, 12, dtype=torch.long)
        for mask in self.masks:
            top, left = torch.randint(8, (2,), generator=generator).tolist()
            mask[top : top + 4, left : left + 5] = 1
        noise = torch.randn(size, 3, 12, 12, generator=generator)
        self.images = self.masks.unsqueeze(1) + 0.5 * noise

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "mask": self.masks[idx]}


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes):
        super().__init__()
        self.n_classes = n_classes
        self.inc = double_conv(n_channels, 6)
        self.down = nn.Sequential(nn.MaxPool2d(2), double_conv(6, 8))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = double_conv(14, 6)
        self.outc = nn.Conv2d(6, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down(x1))
        dy, dx = x1.size(2) - x2.size(2), x1.size(3) - x2.size(3)
        x2 = F.pad(x2, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_coeff(input, target, reduce_batch_first=False, epsilon=1e-6):
    sum_dim = (-1, -2) if input.dim() == 2 or not reduce_batch_first else (-1, -2, -3)
    inter = 2 * (input * target).sum(dim=sum_dim)
    sets_sum = input.sum(dim=sum_dim) + target.sum(dim=sum_dim)
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input.flatten(0, 1), target.flatten(0, 1), reduce_batch_first=True)


@torch.inference_mode()
def evaluate(net, dataloader):
    net.eval()
    score = 0
    for batch in dataloader:
        mask_true = F.one_hot(batch["mask"], net.n_classes).permute(0, 3, 1, 2).double()
        mask_pred = F.one_hot(net(batch["image"]).argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).double()
        score += dice_coeff(mask_pred[:, 1:].flatten(0, 1), mask_true[:, 1:].flatten(0, 1))
    net.train()
    return score / max(len(dataloader), 1)


dataset = Shapes(40)
train_set, val_set = random_split(dataset, [31, 9], generator=torch.Generator().manual_seed(0))
train_loader = DataLoader(train_set, shuffle=True, batch_size=6)
val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=4)
model = UNet(3, 2).to(memory_format=torch.channels_last)
optimizer = optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9, foreach=True)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
criterion = nn.CrossEntropyLoss()
for epoch in range(1, 3):
    model.train()
    epoch_loss = 0
    for batch in train_loader:
        images, true_masks = batch["image"], batch["mask"]
        assert images.shape[1] == 3
        images = images.to(dtype=torch.float64, memory_format=torch.channels_last)
        with torch.autocast("cpu", enabled=False):
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            one_hot = F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).double()
            loss += dice_loss(F.softmax(masks_pred, dim=1).double(), one_hot)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        epoch_loss += loss.item()
        print(f"loss (batch) {loss.item():.10g} norm {norm.item():.10g}")
    val_score = evaluate(model, val_loader)
    scheduler.step(val_score)
    print(
        f"epoch {epoch} loss {epoch_loss:.10g} dice {val_score:.10g} rate {optimizer.param_groups[0]['lr']:g}"
    )
    torch.save(model.state_dict(), f"checkpoint_epoch{epoch}.pth")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
