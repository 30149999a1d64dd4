"""Knowledge distillation: a frozen teacher, hints by hooks, layers thawed midway, plateau rates, logging."""

import copy
import logging
import sys

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.set_default_dtype(torch.float64)
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
logger = logging.getLogger(__name__)
torch.manual_seed(11)
T, ALPHA, PATIENCE = 4.0, 0.7, 3


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(width * 16, 5)

    def forward(self, x):
        return self.classifier(self.dropout(torch.flatten(self.features(x), 1)))


def run_epoch(model, loader, step=None):
    model.train(step is not None)
    losses, correct, seen = [], 0, 0
    for images, labels in loader:
        with torch.set_grad_enabled(step is not None):
            logits = model(images)
            loss = step(images, logits, labels) if step else F.cross_entropy(logits, labels)
        losses.append(loss.item() * images.size(0))
        correct += torch.sum(torch.max(logits, 1)[1] == labels.data).item()
        seen += images.size(0)
    return sum(losses) / seen, correct / seen


images = torch.randn(70, 1, 8, 8)
labels = (images.mean((1, 2, 3)) * 20).long().clamp(-2, 2) + 2
dataset = TensorDataset(images, labels)
train_set, val_set = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(1))
loaders = {
    "train": DataLoader(train_set, batch_size=16, shuffle=True),
    "val": DataLoader(val_set, batch_size=9),
}
teacher, student = Net(12), Net(4)
optimizer = optim.Adam(teacher.parameters(), lr=5e-3)


def supervised(images, logits, labels):
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for epoch in range(2):
    loss, acc = run_epoch(teacher, loaders["train"], supervised)
    logger.info("teacher %d: loss %.10g, accuracy %.10g", epoch, loss, acc)
teacher.eval().requires_grad_(False)

hints = {}
teacher.features.register_forward_hook(lambda m, i, o: hints.__setitem__("teacher", o))
student.features.register_forward_hook(lambda m, i, o: hints.__setitem__("student", o))
regressor = nn.Conv2d(4, 12, 1)
for parameter in student.classifier.parameters():
    parameter.requires_grad = False
decay = [p for n, p in student.named_parameters() if p.requires_grad and not n.endswith("bias")]
plain = [p for n, p in student.named_parameters() if p.requires_grad and n.endswith("bias")]
optimizer = optim.SGD(
    [
        {"params": decay, "weight_decay": 1e-3},
        {"params": plain},
        {"params": regressor.parameters(), "lr": 0.1},
    ],
    lr=0.05,
    momentum=0.9,
)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def distil(images, logits, labels):
    with torch.no_grad():
        targets = teacher(images)
    soft = F.kl_div(F.log_softmax(logits / T, dim=1), F.softmax(targets / T, dim=1), reduction="batchmean")
    hint = F.mse_loss(regressor(hints["student"]), hints["teacher"])
    loss = soft * (ALPHA * T * T) + F.cross_entropy(logits, labels) * (1.0 - ALPHA) + 0.1 * hint
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_value_(student.parameters(), 0.1)
    optimizer.step()
    return loss


best, best_weights, waited = float("inf"), copy.deepcopy(student.state_dict()), 0
for epoch in range(5):
    if epoch == 2:
        student.classifier.requires_grad_(True)
        optimizer.add_param_group({"params": student.classifier.parameters(), "lr": 0.02})
        scheduler.min_lrs.append(0)
    train_loss, train_acc = run_epoch(student, loaders["train"], distil)
    val_loss, val_acc = run_epoch(student, loaders["val"])
    scheduler.step(val_loss)
    rates = [group["lr"] for group in optimizer.param_groups]
    logger.info(
        "%d: train %.10g %.10g val %.10g %.10g rates %s",
        epoch,
        train_loss,
        train_acc,
        val_loss,
        val_acc,
        rates,
    )
    if val_loss < best:
        best, best_weights, waited = val_loss, copy.deepcopy(student.state_dict()), 0
    else:
        waited += 1
        if waited >= PATIENCE:
            logger.info("stopped early at %d", epoch)
            break
student.load_state_dict(best_weights)
logger.info("best %.10g", best)
for name, parameter in student.named_parameters():
    logger.info("%-20s %.10g", name, parameter.norm())
