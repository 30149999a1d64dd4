"""Segmentation by the hardest pixels of a batch: top-k losses, a confusion matrix, mean IoU, poly rates."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils import data

torch.set_default_dtype(torch.float64)
torch.manual_seed(304)
np.random.seed(304)
CLASSES, IGNORE, EPOCHS = 4, 255, 3


class Streets(data.Dataset):
    def __init__(self, n):
        self.images = np.random.rand(n, 12, 12, 3)
        labels = (self.images.sum(-1) / 3 * CLASSES).astype(np.uint8)
        labels[np.random.rand(*labels.shape) < 0.1] = IGNORE
        self.labels = labels

    def __getitem__(self, index):
        image = self.images[index].astype(np.float64)[:, :, ::-1]
        image = (image - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        return (
            image.transpose((2, 0, 1)).copy(),
            self.labels[index].astype("int64"),
            np.array(image.shape),
            str(index),
        )

    def __len__(self):
        return len(self.images)


class OhemCrossEntropy(nn.Module):
    def __init__(self, thres=0.6, min_kept=300):
        super().__init__()
        self.thresh, self.min_kept = thres, min_kept
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="none")

    def forward(self, score, target):
        pred = F.softmax(score, dim=1)
        pixel_losses = self.criterion(score, target).contiguous().view(-1)
        mask = target.contiguous().view(-1) != IGNORE
        tmp_target = target.clone()
        tmp_target[tmp_target == IGNORE] = 0
        pred = pred.gather(1, tmp_target.unsqueeze(1))
        pred, ind = pred.contiguous().view(-1)[mask].contiguous().sort()
        min_value = pred[min(self.min_kept, pred.numel() - 1)]
        threshold = max(min_value, self.thresh)
        pixel_losses = pixel_losses[mask][ind]
        return pixel_losses[pred < threshold].mean()


class OhemTopK(nn.Module):
    def forward(self, score, target):
        loss = F.cross_entropy(score, target, ignore_index=IGNORE, reduction="none").view(-1)
        loss, _ = torch.sort(loss, descending=True)
        n_min = target.numel() // 8
        loss = loss[loss > 1.2] if loss[n_min] > 1.2 else loss[:n_min]
        return torch.mean(loss)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8, momentum=0.01), nn.ReLU(True)
        )
        self.aux, self.head = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 3, padding=1)

    def forward(self, x):
        h = self.stem(x)
        return [self.aux(h), self.head(h)]


class FullModel(nn.Module):
    def __init__(self, model, losses):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, inputs, labels):
        outputs = [
            F.interpolate(o, size=labels.shape[-2:], mode="bilinear", align_corners=True)
            for o in self.model(inputs)
        ]
        loss = 0.4 * self.losses[0](outputs[0], labels) + self.losses[1](outputs[1], labels)
        return torch.unsqueeze(loss, 0), outputs


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, weight=1):
        self.sum += val * weight
        self.count += weight

    def average(self):
        return self.sum / self.count


def get_confusion_matrix(label, pred):
    output = pred.cpu().numpy().transpose(0, 2, 3, 1)
    seg_pred = np.asarray(np.argmax(output, axis=3), dtype=np.uint8)
    seg_gt = np.asarray(label.cpu().numpy(), dtype=int)
    keep = seg_gt != IGNORE
    index = (seg_gt[keep] * CLASSES + seg_pred[keep]).astype("int32")
    return np.bincount(index, minlength=CLASSES**2).reshape(CLASSES, CLASSES)


train = data.DataLoader(Streets(27), batch_size=5, shuffle=True, drop_last=False, num_workers=0)
test = data.DataLoader(Streets(11), batch_size=4)
model = FullModel(Net(), nn.ModuleList([OhemTopK(), OhemCrossEntropy()]))
params = dict(model.named_parameters())
optimizer = torch.optim.SGD(
    [{"params": [v for k, v in params.items() if "head" not in k], "lr": 0.05},
     {"params": [v for k, v in params.items() if "head" in k], "lr": 0.5}],
    lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True,
)  # fmt: skip
for epoch in range(EPOCHS):
    model.train()
    meter = AverageMeter()
    for i_iter, (images, labels, sizes, names) in enumerate(train):
        losses, _ = model(images, labels)
        loss = losses.mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        power = (1 - float(i_iter + epoch * len(train)) / (EPOCHS * len(train))) ** 0.9
        optimizer.param_groups[0]["lr"] = 0.05 * power
        if len(optimizer.param_groups) == 2:
            optimizer.param_groups[1]["lr"] = 0.05 * power * 10
        print(
            f"{epoch} {i_iter} loss {loss.item():.10g} {meter.average():.10g} {sorted(map(int, names))[:2]}"
        )
    model.eval()
    matrix = np.zeros((CLASSES, CLASSES))
    with torch.no_grad():
        for images, labels, _, _ in test:
            _, outputs = model(images, labels)
            matrix += get_confusion_matrix(labels, outputs[-1])
    positives = matrix.sum(1) + matrix.sum(0) - np.diag(matrix)
    iou = np.diag(matrix) / np.maximum(1.0, positives)
    print(f"epoch {epoch} mean IoU {iou.mean():.10g} {matrix.astype(int).tolist()}")
print(f"norms {sum(v.norm() for v in params.values()):.10g} {model.model.stem[1].running_var.sum():.10g}")
