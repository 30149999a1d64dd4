"""Digits by a small convolutional network: the first example that most people run."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 12, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(48, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, loader, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if index % args.log_interval == 0:
            done = index * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(loader.dataset)}]\tLoss: {loss.item():.10g}")


def test(model, loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    size = len(loader.dataset)
    print(
        f"Test: average loss {test_loss / size:.10g}, accuracy {correct}/{size} ({100 * correct / size:.2f}%)"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images[:241] / 16).unsqueeze(1)
    labels = torch.tensor(digits.target[:241])
    train_loader = DataLoader(TensorDataset(images[:145], labels[:145]), args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[145:], labels[145:]), 32)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "mnist_cnn.pt")
    print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")


if __name__ == "__main__":
    main()
