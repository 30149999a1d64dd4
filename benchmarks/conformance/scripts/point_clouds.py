"""Point clouds: PointNet with learned transforms, EdgeConv on nearest neighbours, farthest points, chamfer distances."""

import random
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate

torch.set_default_dtype(torch.float64)
torch.manual_seed(2), random.seed(2), np.random.seed(2)
warnings.filterwarnings("ignore")


class Solids(Dataset):
    def __init__(self, n, points=24, augment=True):
        self.n, self.points, self.augment = n, points, augment
        rng = np.random.default_rng(n)
        self.clouds, self.labels = [], rng.integers(0, 3, n)
        for label in self.labels:
            p = rng.normal(size=(40, 3))
            if label == 0:
                p /= np.linalg.norm(p, axis=1, keepdims=True)
            elif label == 1:
                p = np.clip(p, -0.7, 0.7)
            else:
                p[:, :2] /= np.linalg.norm(p[:, :2], axis=1, keepdims=True)
            self.clouds.append(p)

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        choice = np.random.choice(40, self.points, replace=True)
        cloud = self.clouds[idx][choice, :]
        cloud = cloud - np.expand_dims(np.mean(cloud, axis=0), 0)
        cloud = cloud / np.max(np.sqrt(np.sum(cloud**2, axis=1)), 0)
        if self.augment:
            theta = np.random.uniform(0, np.pi * 2)
            rotation = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
            cloud[:, [0, 2]] = cloud[:, [0, 2]].dot(rotation)
            cloud += np.random.normal(0, 0.02, size=cloud.shape)
        return {"points": torch.from_numpy(cloud), "label": torch.from_numpy(np.array([self.labels[idx]]))}


def collate(batch):
    """Drops a part of the points of the batch, as many in each cloud."""
    out = default_collate(batch)
    kept = random.randint(18, 24)
    return out["points"][:, :kept], out["label"]


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = torch.nn.Conv1d(k, 8, 1), torch.nn.Conv1d(8, 12, 1)
        self.fc1, self.fc2 = nn.Linear(12, 8), nn.Linear(8, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(8), nn.BatchNorm1d(12), nn.BatchNorm1d(8)

    def forward(self, x):
        batchsize = x.size()[0]
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = torch.max(x, 2, keepdim=True)[0]
        x = self.fc2(F.relu(self.bn3(self.fc1(x.view(-1, 12)))))
        iden = torch.from_numpy(np.eye(self.k).flatten()).view(1, self.k * self.k).repeat(batchsize, 1)
        return (x + iden.to(x.device)).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.stn, self.fstn = TNet(3), TNet(8)
        self.conv1, self.conv2 = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 16, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(8), nn.BatchNorm1d(16)
        self.fc, self.dropout = nn.Linear(16, classes), nn.Dropout(p=0.3)

    def forward(self, x):
        x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        trans_feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        x, critical = torch.max(self.bn2(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.dropout(x)), dim=1), trans_feat, critical


def feature_transform_regularizer(trans):
    identity = torch.eye(trans.size()[1])[None, :, :]
    return torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2)))


def knn(x, k):
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    return (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]


def get_graph_feature(x, k=4):
    batch_size, num_dims, num_points = x.size()
    idx = knn(x, k)
    idx_base = torch.arange(0, batch_size, device=x.device).view(-1, 1, 1) * num_points
    idx = (idx + idx_base).view(-1)
    x = x.transpose(2, 1).contiguous()
    feature = x.view(batch_size * num_points, -1)[idx, :].view(batch_size, num_points, k, num_dims)
    x = x.view(batch_size, num_points, 1, num_dims).repeat(1, 1, k, 1)
    return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()


class DGCNN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
        self.linear = nn.Linear(16, classes)

    def forward(self, x):
        x = self.conv(get_graph_feature(x)).max(dim=-1, keepdim=False)[0]
        pooled = torch.cat((F.adaptive_max_pool1d(x, 1).squeeze(-1), F.adaptive_avg_pool1d(x, 1).squeeze(-1)), 1)
        return self.linear(pooled)


def farthest_point_sample(xyz, npoint):
    B, N, _ = xyz.shape
    centroids = torch.zeros(B, npoint, dtype=torch.long)
    distance = torch.ones(B, N) * 1e10
    farthest = torch.randint(0, N, (B,), dtype=torch.long)
    batch_indices = torch.arange(B, dtype=torch.long)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[batch_indices, farthest, :].view(B, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


def chamfer(a, b):
    d = torch.cdist(a, b)
    return d.min(dim=2).values.mean() + d.min(dim=1).values.mean()


def smoothed(pred, gold, eps=0.2):
    one_hot = torch.zeros_like(pred).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - eps) + (1 - one_hot) * eps / (pred.size(1) - 1)
    return -(one_hot * F.log_softmax(pred, dim=1)).sum(dim=1).mean()


train = DataLoader(Solids(38), batch_size=6, shuffle=True, collate_fn=collate, drop_last=False)
test = DataLoader(Solids(15, augment=False), batch_size=4, collate_fn=collate)
classifier = PointNet()
optimizer = torch.optim.Adam(classifier.parameters(), lr=5e-3, betas=(0.9, 0.999))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
for epoch in range(2):
    if epoch:
        scheduler.step()
    for i, (points, target) in enumerate(train, 0):
        target = target[:, 0]
        points = points.transpose(2, 1)
        optimizer.zero_grad()
        classifier = classifier.train()
        pred, trans_feat, critical = classifier(points)
        loss = F.nll_loss(pred, target)
        loss += feature_transform_regularizer(trans_feat) * 0.001
        loss.backward()
        optimizer.step()
        correct = pred.data.max(1)[1].eq(target.data).cpu().sum()
        print("[%d: %d/%d] loss: %.10g accuracy: %.6f" % (epoch, i, points.size(2), loss.item(), correct.item() / float(len(points))))
    used = len(torch.unique(critical))
    print("critical", used)
total_correct = total_testset = 0
for points, target in test:
    classifier = classifier.eval()
    pred, _, _ = classifier(points.transpose(2, 1))
    total_correct += pred.data.max(1)[1].eq(target[:, 0].data).cpu().sum().item()
    total_testset += points.size()[0]
print(f"final accuracy {total_correct / float(total_testset):.6f}")
net = DGCNN()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for epoch in range(2):
    train_pred, train_true = [], []
    for points, label in train:
        label = label.squeeze(1)
        logits = net(points.permute(0, 2, 1))
        loss = smoothed(logits, label)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        train_true.append(label.cpu().numpy())
        train_pred.append(logits.max(dim=1)[1].detach().cpu().numpy())
    train_true, train_pred = np.concatenate(train_true), np.concatenate(train_pred)
    print(f"edges {epoch} {loss.item():.10g} {(train_true == train_pred).mean():.6f} of {len(train_true)}")
decoder = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 24))
optimizer = torch.optim.Adam(decoder.parameters(), 1e-2)
for points, _ in train:
    picked = farthest_point_sample(points, 6)
    sampled = points.gather(1, picked.unsqueeze(-1).expand(-1, -1, 3))
    loss = chamfer(decoder(sampled.flatten(1)).view(-1, 8, 3), points)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    print(f"chamfer {loss.item():.10g} {picked.sum().item()}")
print(f"norms {sum(p.norm().item() for m in (classifier, net, decoder) for p in m.parameters()):.10g}")
