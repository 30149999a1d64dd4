"""Capsules with routing by agreement and a decoder; a spatial transformer; a recurrent model of glimpses."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)


class Digits(Dataset):
    def __init__(self, n):
        shapes = (torch.rand(3, 1, 6, 6) > 0.5).double()
        self.y = torch.randint(3, (n,))
        self.shift = torch.randint(-2, 3, (n, 2))
        self.x = torch.stack(
            [torch.roll(F.pad(shapes[y], (2, 2, 2, 2)), tuple(s.tolist()), (1, 2)) for y, s in zip(self.y, self.shift)]
        )

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + 0.05 * torch.randn(1, 10, 10), int(self.y[i])


def squash(tensor, dim=-1):
    squared = (tensor**2).sum(dim=dim, keepdim=True)
    return squared / (1 + squared) * tensor / torch.sqrt(squared + 1e-12)


class CapsuleLayer(nn.Module):
    def __init__(self, num_capsules, num_route_nodes, in_channels, out_channels, kernel_size=None, stride=None, iterations=3):
        super().__init__()
        self.num_route_nodes, self.num_iterations, self.num_capsules = num_route_nodes, iterations, num_capsules
        if num_route_nodes != -1:
            self.route_weights = nn.Parameter(0.1 * torch.randn(num_capsules, num_route_nodes, in_channels, out_channels))
        else:
            self.capsules = nn.ModuleList(
                [nn.Conv2d(in_channels, out_channels, kernel_size, stride) for _ in range(num_capsules)]
            )

    def forward(self, x):
        if self.num_route_nodes != -1:
            priors = x[None, :, :, None, :] @ self.route_weights[:, None, :, :, :]
            logits = Variable(torch.zeros(*priors.size()))
            for i in range(self.num_iterations):
                probs = F.softmax(logits, dim=2)
                outputs = squash((probs * priors).sum(dim=2, keepdim=True))
                if i != self.num_iterations - 1:
                    logits = logits + (priors * outputs).sum(dim=-1, keepdim=True)
            return outputs
        outputs = [capsule(x).view(x.size(0), -1, 1) for capsule in self.capsules]
        return squash(torch.cat(outputs, dim=-1))


class CapsuleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.primary = CapsuleLayer(4, -1, 6, 3, kernel_size=3, stride=2)
        self.digits = CapsuleLayer(3, 27, 4, 6)
        self.decoder = nn.Sequential(nn.Linear(18, 20), nn.ReLU(inplace=True), nn.Linear(20, 100), nn.Sigmoid())

    def forward(self, x, y=None):
        x = F.relu(self.conv1(x), inplace=True)
        x = self.digits(self.primary(x)).squeeze().transpose(0, 1)
        classes = F.softmax((x**2).sum(dim=-1) ** 0.5, dim=-1)
        if y is None:
            _, max_length_indices = classes.max(dim=1)
            y = torch.eye(3).index_select(dim=0, index=max_length_indices.data)
        return classes, self.decoder((x * y[:, :, None]).reshape(x.size(0), -1))


class CapsuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.reconstruction_loss = nn.MSELoss(reduction="sum")

    def forward(self, images, labels, classes, reconstructions):
        left = F.relu(0.9 - classes, inplace=True) ** 2
        right = F.relu(classes - 0.1, inplace=True) ** 2
        margin = (labels * left + 0.5 * (1.0 - labels) * right).sum()
        assert torch.numel(images) == torch.numel(reconstructions)
        images = images.view(reconstructions.size()[0], -1)
        return (margin + 0.005 * self.reconstruction_loss(reconstructions, images)) / images.size(0)


class STN(nn.Module):
    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, stride=2), nn.ReLU(True), nn.Conv2d(4, 6, 3), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(24, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.double))
        self.conv, self.drop, self.fc = nn.Conv2d(1, 5, 5), nn.Dropout2d(), nn.Linear(45, 3)

    def stn(self, x):
        theta = self.fc_loc(self.localization(x).view(-1, 24)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.drop(self.conv(self.stn(x))), 2))
        return F.log_softmax(self.fc(x.view(-1, 45)), dim=1)


class Glimpses(nn.Module):
    """Looks at patches around places that it draws; rewarded by REINFORCE."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Linear(16 + 2, 12), nn.GRUCell(12, 14)
        self.locate, self.value, self.classify = nn.Linear(14, 2), nn.Linear(14, 1), nn.Linear(14, 3)

    def look(self, x, where):
        coords = (0.5 * ((where + 1.0) * (x.shape[-1] - 4))).long()
        return torch.cat([im[:, c[0] : c[0] + 4, c[1] : c[1] + 4].flatten()[None] for im, c in zip(x, coords)])

    def forward(self, x, steps=3):
        hidden, where = torch.zeros(len(x), 14), torch.zeros(len(x), 2).uniform_(-1, 1)
        log_pis, baselines = [], []
        for _ in range(steps):
            hidden = self.cell(F.relu(self.embed(torch.cat([self.look(x, where), where], 1))), hidden)
            mean = torch.tanh(self.locate(hidden.detach()))
            policy = torch.distributions.Normal(mean, 0.2)
            where = policy.sample().clamp(-1, 1)
            log_pis.append(policy.log_prob(where).sum(1))
            baselines.append(self.value(hidden).squeeze(1))
        return F.log_softmax(self.classify(hidden), 1), torch.stack(log_pis), torch.stack(baselines)


data = Digits(47)
train, test = torch.utils.data.random_split(data, (33, 14))
model, loss_fn = CapsuleNet(), CapsuleLoss()
optimizer = torch.optim.Adam(model.parameters())
print("# parameters:", sum(param.numel() for param in model.parameters()))
for epoch in range(2):
    confusion = torch.zeros(3, 3, dtype=torch.long)
    for images, labels in DataLoader(train, 7, shuffle=True):
        onehot = torch.eye(3).index_select(dim=0, index=labels)
        classes, reconstructions = model(images, onehot)
        loss = loss_fn(images, onehot, classes, reconstructions)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        for t, p in zip(labels.view(-1), classes.argmax(1).view(-1)):
            confusion[t.long(), p.long()] += 1
    print(f"capsules {epoch} {loss.item():.10g}", confusion.tolist())
with torch.no_grad():
    for images, labels in DataLoader(test, 6):
        classes, pictures = model(images)
        print(f"test {classes[torch.arange(len(labels)), labels].mean():.10g} {pictures.mean():.10g}")
stn = STN()
optimizer = torch.optim.SGD(stn.parameters(), lr=0.05)
for epoch in range(2):
    stn.train()
    for images, labels in DataLoader(train, 8, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        loss = F.nll_loss(stn(images), labels)
        loss.backward()
        optimizer.step()
    stn.eval()
    with torch.no_grad():
        total = sum(F.nll_loss(stn(images), labels, reduction="sum").item() for images, labels in DataLoader(test, 5))
    print(f"stn {epoch} {loss.item():.10g} test {total / len(test):.10g} theta {stn.fc_loc[2].bias.norm().item():.10g}")
eyes = Glimpses()
optimizer = torch.optim.Adam(eyes.parameters(), 5e-3)
for epoch in range(2):
    rewards, seen = 0, 0
    for images, labels in DataLoader(train, 9):
        log_probs, log_pi, baselines = eyes(images)
        reward = (torch.max(log_probs, 1)[1].detach() == labels).double().unsqueeze(0).repeat(3, 1)
        advantage = reward - baselines.detach()
        loss = F.nll_loss(log_probs, labels) + F.mse_loss(baselines, reward) + torch.mean(torch.sum(-log_pi * advantage, dim=0)) * 0.01
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        rewards, seen = rewards + reward[0].sum().item(), seen + len(images)
    print(f"glimpses {epoch} {loss.item():.10g} {rewards}/{seen}")
print(f"norms {sum(p.norm().item() for m in (model, stn, eyes) for p in m.parameters()):.10g}")
