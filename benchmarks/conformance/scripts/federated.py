"""Federated learning: unequal clients with loaders of their own, averaged states, SCAFFOLD, records in a data base."""

import copy
import csv
import logging
import os
import sqlite3
import sys
import time
from collections import OrderedDict

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)
logger = logging.getLogger("fed")


class DatabaseSet(Dataset):
    """Rows of a data base, which each worker opens for itself."""

    def __init__(self, path):
        self.path, self.connection = path, None
        with sqlite3.connect(path) as db:
            self.keys = [row[0] for row in db.execute("select id from samples order by id")]
            self.targets = np.array([row[0] for row in db.execute("select label from samples order by id")])

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, i):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        blob, label = self.connection.execute("select data, label from samples where id = ?", (self.keys[i],)).fetchone()
        return torch.from_numpy(np.frombuffer(blob).copy()).view(1, 6, 6), int(label)

    def __getstate__(self):
        return {**self.__dict__, "connection": None}


def make(path, n=150):
    rng = np.random.default_rng(8)
    with sqlite3.connect(path) as db:
        db.execute("create table samples (id integer primary key, data blob, label integer)")
        for i in range(n):
            label = int(rng.integers(0, 4))
            x = rng.normal(size=36) * 0.5
            x[label * 9 : label * 9 + 9] += 1
            db.execute("insert into samples values (?, ?, ?)", (i * 3, x.tobytes(), label))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 4))

    def forward(self, x):
        return self.classifier(self.features(x))


def dirichlet_split(targets, clients, alpha, rng):
    parts = [[] for _ in range(clients)]
    for c in np.unique(targets):
        index = rng.permutation(np.where(targets == c)[0])
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients)) * len(index)).astype(int)[:-1]
        for k, part in enumerate(np.split(index, cuts)):
            parts[k] += part.tolist()
    return [sorted(p) for p in parts]


class Client:
    def __init__(self, number, dataset, indices):
        self.number, self.subset = number, Subset(dataset, indices)
        self.control = None
        labels = dataset.targets[indices]
        counts = np.bincount(labels, minlength=4)
        sampler = WeightedRandomSampler(1.0 / counts[labels], len(indices)) if number % 2 else RandomSampler(self.subset)
        self.loader = DataLoader(self.subset, batch_sampler=BatchSampler(sampler, 5, drop_last=False), num_workers=0)

    def train(self, server, server_control, lr, epochs=1, mu=0.01):
        model = nn.DataParallel(copy.deepcopy(server))
        if hasattr(model, "module"):
            model = model.module
        start = [p.detach().clone() for p in model.parameters()]
        if self.control is None:
            self.control = [torch.zeros_like(p) for p in model.parameters()]
        optimizer, criterion = torch.optim.SGD(model.parameters(), lr=lr), nn.CrossEntropyLoss(reduction="none")
        model.train()
        losses, steps = [], 0
        for _ in range(epochs):
            for x, y in self.loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                proximal = sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), start))
                (loss.mean() + mu / 2 * proximal).backward()
                for p, c, g in zip(model.parameters(), self.control, server_control):
                    p.grad.data.add_(g - c)
                optimizer.step()
                losses.extend(loss.tolist())
                steps += 1
        delta = []
        for i, (p, q) in enumerate(zip(model.parameters(), start)):
            new = self.control[i] - server_control[i] + (q - p.detach()) / (steps * lr)
            delta.append(new - self.control[i])
            self.control[i] = new
        return model.state_dict(), len(self.subset), delta, float(np.mean(losses))


def average(states, weights):
    total, out = sum(weights), OrderedDict()
    for key in states[0]:
        out[key] = sum(s[key] * (w / total) for s, w in zip(states, weights))
    return out


def evaluate(model, loader):
    model.eval()
    confusion = torch.zeros(4, 4, dtype=torch.long)
    loss = 0.0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            for t, p in zip(y.view(-1), out.argmax(1).view(-1)):
                confusion[t.long(), p.long()] += 1
    recall = confusion.diag().double() / confusion.sum(1).clamp(min=1)
    return loss / confusion.sum().item(), recall, confusion


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    logger.addHandler(logging.FileHandler("fed.log", mode="w"))
    began = time.time()
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    make("samples.db")
    dataset = DatabaseSet("samples.db")
    held = set(rng.choice(len(dataset), 40, replace=False).tolist())
    rest = np.array([i for i in range(len(dataset)) if i not in held])
    parts = [rest[p].tolist() for p in dirichlet_split(dataset.targets[rest], 5, 0.8, rng)]
    clients = [Client(k, dataset, p) for k, p in enumerate(parts) if p]
    test = DataLoader(Subset(dataset, sorted(held)), batch_size=16, num_workers=2, persistent_workers=True)
    server = Net()
    control, patience, best = [torch.zeros_like(p) for p in server.parameters()], 0, float("inf")
    logger.info("clients %s", [len(c.subset) for c in clients])
    writer = csv.writer(open("rounds.csv", "w", newline=""))
    for round_ in range(6):
        chosen = rng.choice(len(clients), 3, replace=False)
        results = [clients[k].train(server, control, 0.2 * 0.9**round_) for k in chosen]
        server.load_state_dict(average([r[0] for r in results], [r[1] for r in results]))
        for i, c in enumerate(control):
            c += sum(r[2][i] for r in results) / len(clients)
        loss, recall, confusion = evaluate(server, test)
        row = [round_, *map(int, chosen), *[f"{r[3]:.10g}" for r in results], f"{loss:.10g}"]
        writer.writerow(row)
        logger.info("round %s recall %s control %.10g", row, " ".join(f"{x:.6f}" for x in recall), sum(c.norm() for c in control))
        if loss < best:
            best, patience = loss, 0
            torch.save(server, "server.pth")
        elif (patience := patience + 1) >= 2:
            logger.info("stopping early")
            break
    final = torch.load("server.pth", weights_only=False)
    print("best", f"{best:.10g}", evaluate(final, test)[2].tolist(), f"{sum(p.norm().item() for p in final.parameters()):.10g}")
    if time.time() - began > 1e6:
        sys.exit("too slow")
    os.remove("samples.db")
    sys.exit(0)
