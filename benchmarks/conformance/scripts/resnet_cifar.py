"""A residual network: augmentation in the data set, accuracy, best checkpoint, cosine rates."""

import os

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Pictures(Dataset):
    """Ten kinds of noisy patterns, flipped and shifted at random in training."""

    def __init__(self, size, train):
        generator = torch.Generator().manual_seed(size)
        patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        self.targets = torch.randint(10, (size,), generator=generator)
        self.data = patterns[self.targets] + 0.5 * torch.randn(size, 3, 8, 8, generator=generator)
        self.train = train

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        if self.train:
            padded = F.pad(image, (1, 1, 1, 1))
            top, left = torch.randint(3, (2,)).tolist()
            image = padded[:, top : top + 8, left : left + 8]
            if torch.rand(1).item() < 0.5:
                image = image.flip(-1)
        return image, int(self.targets[index])


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            conv = nn.Conv2d(in_planes, planes, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(planes))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.layers = nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 12, 2))
        self.linear = nn.Linear(12, 10)

    def forward(self, x):
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        out = F.avg_pool2d(out, 4)
        return self.linear(out.view(out.size(0), -1))


trainloader = DataLoader(Pictures(65, True), batch_size=16, shuffle=True)
testloader = DataLoader(Pictures(40, False), batch_size=20, shuffle=False)
net = ResNet()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
best_acc = 0


def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        print(f"{epoch}.{batch_idx} Loss: {train_loss / (batch_idx + 1):.10g} | Acc: {correct}/{total}")


def test(epoch):
    global best_acc
    net.eval()
    test_loss, correct, total = 0, 0, 0
    with torch.no_grad():
        for inputs, targets in testloader:
            outputs = net(inputs)
            test_loss += criterion(outputs, targets).item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    acc = 100.0 * correct / total
    print(f"test {epoch} loss {test_loss / len(testloader):.10g} acc {acc:.10g}")
    if acc > best_acc:
        os.makedirs("checkpoint", exist_ok=True)
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(3):
    train(epoch)
    test(epoch)
    scheduler.step()
print(f"best {best_acc:.10g}, saved at epoch {torch.load('./checkpoint/ckpt.pth')['epoch']}")
print(f"norms {sum(p.norm() for p in net.parameters()):.10g}")
