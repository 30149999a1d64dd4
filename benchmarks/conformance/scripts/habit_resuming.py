"""Early stopping, and resuming with a scheduler that is made before or after loading."""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class EarlyStopping:
    def __init__(self, patience=2, delta=0.0, path="early.pt"):
        self.patience, self.delta, self.path = patience, delta, path
        self.counter, self.best_score, self.early_stop, self.val_loss_min = 0, None, False, np.inf

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None or score >= self.best_score + self.delta:
            self.best_score, self.counter = score, 0
            torch.save(model.state_dict(), self.path)
            print(f"Validation loss decreased ({self.val_loss_min:.10g} --> {val_loss:.10g})")
            self.val_loss_min = val_loss
        else:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            self.early_stop = self.counter >= self.patience


def make(scheduled=True):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.08)
    return model, optimizer, schedule(optimizer) if scheduled else None


def schedule(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, milestones=[2])


def epoch(model, optimizer, scheduler, loader):
    model.train()
    train_losses = []
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        train_losses.append(loss.item())
    scheduler.step()
    return np.average(train_losses)


torch.manual_seed(0)
x = torch.randn(46, 5)
y = x[:, :1].sin() + 0.7 * torch.randn(46, 1)
train_loader = DataLoader(TensorDataset(x[:25], y[:25]), batch_size=6, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[25:], y[25:]), batch_size=10)
model, optimizer, scheduler = make()
stopping = EarlyStopping()
for number in range(10):
    train_loss = epoch(model, optimizer, scheduler, train_loader)
    model.eval()
    valid_losses = []
    with torch.no_grad():
        for data, target in valid_loader:
            valid_losses.append(F.mse_loss(model(data), target).item())
    print(
        f"{number} train {train_loss:.10g} valid {np.average(valid_losses):.10g} rate {scheduler.get_last_lr()[0]:.10g}"
    )
    if number == 2:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint |= {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "epoch": number}
        torch.save(checkpoint, "checkpoint.pt")
    stopping(np.average(valid_losses), model)
    if stopping.early_stop:
        print("Early stopping")
        break
model.load_state_dict(torch.load("early.pt"))
for before in (True, False):
    model, optimizer, scheduler = make(before)
    checkpoint = torch.load("checkpoint.pt", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if not before:
        scheduler = schedule(optimizer)
    scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["rng"])
    for number in range(checkpoint["epoch"] + 1, 6):
        found = epoch(model, optimizer, scheduler, train_loader)
        print(f"resumed {number} train {found:.10g} rate {optimizer.param_groups[0]['lr']:.10g}")
print(os.path.exists("early.pt"), f"norms {sum(p.norm() for p in model.parameters()):.10g}")
