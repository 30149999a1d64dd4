"""Pairs of digits that are equal or not: a siamese network, pairs drawn by the data set."""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)


class Matcher(Dataset):
    """Pairs of pictures: with an even index of one kind, with an odd one of two."""

    def __init__(self, first, size):
        digits = load_digits()
        self.data = torch.tensor(digits.images[first : first + size] / 16).unsqueeze(1)
        self.targets = digits.target[first : first + size]
        self.kinds = {k: [i for i, t in enumerate(self.targets) if t == k] for k in range(10)}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        kind = random.randint(0, 9)
        first = random.choice(self.kinds[kind])
        if index % 2 == 0:
            return self.data[first], self.data[random.choice(self.kinds[kind])], torch.tensor(1.0)
        other = random.choice([k for k in range(10) if k != kind])
        return self.data[first], self.data[random.choice(self.kinds[other])], torch.tensor(0.0)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.fc = nn.Sequential(nn.Linear(48, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.features(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


def train(model, loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}] Loss: {loss.item():.10g}")


def test(model, loader):
    model.eval()
    test_loss, correct = 0, 0
    criterion = nn.BCELoss()
    with torch.no_grad():
        for images_1, images_2, targets in loader:
            outputs = model(images_1, images_2).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    print(f"Test: loss {test_loss / len(loader.dataset):.10g} accuracy {correct}/{len(loader.dataset)}")


random.seed(1)
torch.manual_seed(1)
train_loader = DataLoader(Matcher(0, 60), batch_size=14, shuffle=True)
test_loader = DataLoader(Matcher(200, 60), batch_size=29)
model = SiameseNetwork()
optimizer = optim.Adadelta(model.parameters(), lr=0.5)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(1, 4):
    train(model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
torch.save(model.state_dict(), "siamese_network.pt")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
