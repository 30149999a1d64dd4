"""Deep clustering: k-means by scikit-learn on features of each epoch, new heads, then active learning by margins."""

import logging
import sys

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler
from torch.utils.data.sampler import Sampler

torch.set_default_dtype(torch.float64)
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("deepcluster")
torch.manual_seed(31), np.random.seed(31)


class Pictures(Dataset):
    def __init__(self, n):
        self.truth = np.random.randint(0, 3, n)
        means = np.random.randn(3, 1, 6, 6)
        self.data = means[self.truth] + 0.6 * np.random.randn(n, 1, 6, 6)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return torch.from_numpy(self.data[index]), index


class ReassignedDataset(Dataset):
    def __init__(self, indices, pseudolabels, dataset):
        label_to_idx = {label: idx for idx, label in enumerate(sorted(set(pseudolabels)))}
        self.samples = [(idx, label_to_idx[pseudolabels[j]]) for j, idx in enumerate(indices)]
        self.dataset = dataset

    def __getitem__(self, index):
        i, label = self.samples[index]
        return self.dataset[i][0], label

    def __len__(self):
        return len(self.samples)


class UnifLabelSampler(Sampler):
    """As many samples of each cluster."""

    def __init__(self, n, images_lists):
        self.n, self.images_lists = n, images_lists
        self.indexes = self.generate()

    def generate(self):
        per = int(self.n / len(self.images_lists)) + 1
        res = np.concatenate([np.random.choice(ids, per, replace=len(ids) <= per) for ids in self.images_lists])
        np.random.shuffle(res)
        return res[: self.n].astype("int")

    def __iter__(self):
        return iter(self.indexes)

    def __len__(self):
        return len(self.indexes)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 10), nn.ReLU(True))
        self.top_layer = nn.Linear(10, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                n = m.kernel_size[0] * m.kernel_size[1] * m.out_channels
                for i in range(m.out_channels):
                    m.weight.data[i].normal_(0, (2.0 / n) ** 0.5)
            elif isinstance(m, nn.BatchNorm2d):
                m.weight.data.fill_(1), m.bias.data.zero_()

    def forward(self, x):
        x = self.features(x)
        x = self.classifier(x.view(x.size(0), -1))
        return self.top_layer(x) if self.top_layer else x


def compute_features(loader, model, n):
    model.eval()
    features = None
    for i, (inp, index) in enumerate(loader):
        with torch.no_grad():
            aux = model(inp).data.cpu().numpy()
        if i == 0:
            features = np.zeros((n, aux.shape[1]), dtype="float64")
        if i < len(loader) - 1:
            features[i * loader.batch_size : (i + 1) * loader.batch_size] = aux
        else:
            features[i * loader.batch_size :] = aux
        assert index[0].item() == i * loader.batch_size
    return features


data = Pictures(53)
loader = DataLoader(data, batch_size=10)
model = Net(3)
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.05, momentum=0.9, weight_decay=1e-5)
assignment = None
for epoch in range(3):
    model.top_layer = None
    model.classifier = nn.Sequential(*list(model.classifier.children())[:-1])
    features = compute_features(loader, model, len(data))
    reduced = PCA(4, whiten=True, random_state=0).fit_transform(StandardScaler().fit_transform(features))
    reduced /= np.linalg.norm(reduced, axis=1, keepdims=True)
    kmeans = KMeans(3, n_init=3, random_state=epoch).fit(reduced)
    images_lists = [np.flatnonzero(kmeans.labels_ == c) for c in range(3)]
    if assignment is not None:
        log.info("NMI against the previous %.6f", normalized_mutual_info_score(kmeans.labels_, assignment))
    assignment = kmeans.labels_
    log.info("inertia %.10g silhouette %.10g ARI %.6f", kmeans.inertia_, silhouette_score(reduced, assignment), adjusted_rand_score(data.truth, assignment))
    joined = np.concatenate(images_lists)
    train = ReassignedDataset(joined, [assignment[i] for i in joined], data)
    lists, begin = [], 0
    for ids in images_lists:
        lists.append(np.arange(begin, begin + len(ids)))
        begin += len(ids)
    mlp = list(model.classifier.children())
    mlp.append(nn.ReLU(inplace=True))
    model.classifier = nn.Sequential(*mlp)
    model.top_layer = nn.Linear(10, 3)
    model.top_layer.weight.data.normal_(0, 0.01)
    model.top_layer.bias.data.zero_()
    head = torch.optim.SGD(model.top_layer.parameters(), lr=0.05, weight_decay=1e-5)
    model.train()
    losses = []
    for inp, target in DataLoader(train, batch_size=8, sampler=UnifLabelSampler(45, lists)):
        loss = nn.CrossEntropyLoss()(model(inp), target)
        optimizer.zero_grad(), head.zero_grad()
        loss.backward()
        optimizer.step(), head.step()
        losses.append(loss.item())
    log.info("epoch %d loss %.10g last %.10g", epoch, np.mean(losses), losses[-1])


def margins(model, pool):
    model.eval()
    scores = torch.empty(len(data)).fill_(float("inf"))
    with torch.no_grad():
        for x, index in DataLoader(torch.utils.data.Subset(data, pool), 9):
            top = model(x).softmax(1).topk(2, dim=1).values
            scores[index] = top[:, 0] - top[:, 1]
    return scores


truth = torch.from_numpy(data.truth)
labelled = set(np.random.choice(len(data), 9, replace=False).tolist())
for cycle in range(3):
    net = Net(3)
    opt = torch.optim.Adam(net.parameters(), 0.01)
    net.train()
    for epoch in range(2):
        for x, index in DataLoader(data, 5, sampler=SubsetRandomSampler(sorted(labelled))):
            loss = nn.functional.cross_entropy(net(x), truth[index])
            opt.zero_grad(), loss.backward(), opt.step()
    pool = [i for i in range(len(data)) if i not in labelled]
    scores = margins(net, pool)
    chosen = scores.argsort()[:6].tolist()
    labelled |= set(chosen)
    net.eval()
    hits = sum((net(x).argmax(1) == truth[index]).sum() for x, index in loader)
    print(f"cycle {cycle} loss {loss.item():.10g} least {scores.min():.10g} chosen {chosen} right {hits}/{len(data)}")
