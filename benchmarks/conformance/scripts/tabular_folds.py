"""Tabular data: k folds by scikit-learn, embeddings of categories, AUC and F1 from NumPy, a table of CSV."""

import copy
import csv
import random

import numpy as np
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

torch.set_default_dtype(torch.float64)
SEED, FOLDS, EPOCHS = 2024, 3, 3
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)


class Table(Dataset):
    def __init__(self, numbers, categories, target):
        self.numbers, self.categories, self.target = numbers, categories, target

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return {
            "numbers": torch.tensor(self.numbers[i]),
            "categories": torch.tensor(self.categories[i], dtype=torch.long),
            "target": torch.tensor(self.target[i]),
        }


class TabularNet(nn.Module):
    def __init__(self, sizes, numbers):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(n, min(4, (n + 1) // 2)) for n in sizes])
        width = sum(e.embedding_dim for e in self.embeddings)
        self.norm = nn.BatchNorm1d(numbers)
        self.layers = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(width + numbers, 16)), nn.PReLU(), nn.BatchNorm1d(16), nn.Dropout(0.3),
            nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, numbers, categories):
        x = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return self.layers(torch.cat([*x, self.norm(numbers)], 1)).squeeze(-1)


def reset_weights(m):
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()


@torch.no_grad()
def predict(model, loader):
    model.eval()
    outputs, targets = [], []
    for batch in loader:
        logits = model(batch["numbers"], batch["categories"])
        outputs.append(logits.sigmoid().detach().cpu().numpy())
        targets.extend(batch["target"].numpy().tolist())
    return np.concatenate(outputs), np.array(targets)


n = 96
numbers = StandardScaler().fit_transform(np.random.lognormal(size=(n, 4)))
categories = np.stack([np.random.randint(0, k, n) for k in (3, 5)], 1)
chance = 1 / (1 + np.exp(-(numbers[:, 0] * 2 + categories[:, 0] - 1)))
target = (np.random.rand(n) < chance).astype(np.float64)
dataset = Table(numbers, categories, target)
model = TabularNet([3, 5], 4)
out_of_fold = np.zeros(n)
with open("folds.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=["fold", "epoch", "loss", "auc"])
    writer.writeheader()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(numbers, target)
    for fold, (train_idx, valid_idx) in enumerate(folds):
        model.apply(reset_weights)
        train = DataLoader(dataset, batch_size=19, sampler=SubsetRandomSampler(train_idx))
        valid = DataLoader(torch.utils.data.Subset(dataset, valid_idx), batch_size=15)
        positives = target[train_idx].sum()
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor((len(train_idx) - positives) / positives))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=3e-2, epochs=EPOCHS, steps_per_epoch=len(train)
        )
        best_auc, best_state = 0.0, None
        for epoch in range(EPOCHS):
            model.train()
            losses = []
            for batch in train:
                optimizer.zero_grad()
                loss = criterion(model(batch["numbers"], batch["categories"]), batch["target"])
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            probabilities, truth = predict(model, valid)
            auc = roc_auc_score(truth, probabilities)
            writer.writerow(
                {"fold": fold, "epoch": epoch, "loss": f"{np.mean(losses):.10g}", "auc": f"{auc:.10g}"}
            )
            if auc > best_auc:
                best_auc, best_state = auc, copy.deepcopy(model.state_dict())
        model.load_state_dict(best_state)
        out_of_fold[valid_idx], _ = predict(model, valid)
        print(f"fold {fold} auc {best_auc:.10g}")
with open("folds.csv") as file:
    print(file.read())
classes = (out_of_fold > np.median(out_of_fold)).astype(int)
print(f"auc {roc_auc_score(target, out_of_fold):.10g} f1 {f1_score(target, classes, average='macro'):.10g}")
print(f"accuracy {accuracy_score(target, classes):.10g}\n{confusion_matrix(target, classes)}")
