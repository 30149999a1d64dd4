"""The classic ImageNet script: meters, top-k accuracy, validation, best checkpoint, resuming."""

import argparse
import shutil
import time
from enum import Enum

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.set_default_dtype(torch.float64)


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)

    def summary(self):
        return f"{self.name} {self.avg:.10g}" if self.summary_type is Summary.AVERAGE else ""


def accuracy(output, target, topk=(1,)):
    """Return the percentage of samples whose label is among the k best."""
    with torch.no_grad():
        maxk, batch_size = max(topk), target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).double().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


def train(loader, model, criterion, optimizer, epoch, print_freq):
    batch_time = AverageMeter("Time", ":6.3f", Summary.NONE)
    losses, top1, top5 = (AverageMeter(name, ":.10g") for name in ("Loss", "Acc@1", "Acc@5"))
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to("cpu", non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % print_freq == 0:
            print("\t".join([f"Epoch: [{epoch}][{i}/{len(loader)}]", *map(str, (losses, top1, top5))]))


def validate(loader, model, criterion):
    losses, top1, top5 = (AverageMeter(name, ":.10g") for name in ("Loss", "Acc@1", "Acc@5"))
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))
    print(" *", *(meter.summary() for meter in (losses, top1, top5)))
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=12, type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    labels = torch.randint(7, (70,))
    images = torch.randn(7, 3, 8, 8)[labels] + torch.randn(70, 3, 8, 8)
    dataset = TensorDataset(images, labels)
    train_loader = DataLoader(Subset(dataset, range(49)), args.batch_size, shuffle=True, pin_memory=False)
    val_loader = DataLoader(Subset(dataset, range(49, 70)), args.batch_size, shuffle=False)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(8, 7),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    best_acc1 = 0
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, print_freq=2)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}
        save_checkpoint(
            state | {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, is_best
        )
    checkpoint = torch.load("checkpoint.pth.tar", weights_only=False)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    print(f"resumed at {checkpoint['epoch']}, best {float(checkpoint['best_acc1']):.10g}")
    train(train_loader, model, criterion, optimizer, 2, print_freq=2)
    validate(val_loader, model, criterion)
    print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")


if __name__ == "__main__":
    main()
