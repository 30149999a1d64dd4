"""Word vectors with negative samples and sparse gradients; a recommender by BPR, hit rates and NDCG."""

import collections

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
np.random.seed(12)
torch.manual_seed(12)


class SkipGram(nn.Module):
    def __init__(self, words, dim):
        super().__init__()
        self.u_embeddings = nn.Embedding(words, dim, sparse=True)
        self.v_embeddings = nn.Embedding(words, dim, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight.data, -1.0 / dim, 1.0 / dim)
        nn.init.constant_(self.v_embeddings.weight.data, 0.01)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v, emb_neg_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        score = torch.clamp(torch.sum(torch.mul(emb_u, emb_v), dim=1), max=10, min=-10)
        score = -F.logsigmoid(score)
        neg_score = torch.clamp(torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(), max=10, min=-10)
        neg_score = -torch.sum(F.logsigmoid(-neg_score), dim=1)
        return torch.mean(score + neg_score)


class Windows(Dataset):
    def __init__(self, text, window):
        frequency = (
            np.array([count for _, count in sorted(collections.Counter(text.tolist()).items())]) ** 0.75
        )
        self.negatives = np.random.choice(len(frequency), 3000, p=frequency / frequency.sum())
        self.position = 0
        self.sentences = [text[i : i + 8] for i in range(0, len(text), 8)]
        self.window = window

    def __len__(self):
        return len(self.sentences)

    def get_negatives(self, size):
        response = self.negatives[self.position : self.position + size]
        self.position = (self.position + size) % len(self.negatives)
        return (
            response if len(response) == size else np.concatenate((response, self.negatives[: self.position]))
        )

    def __getitem__(self, idx):
        words = self.sentences[idx]
        boundary = np.random.randint(1, self.window)
        return [
            (u, v, self.get_negatives(4))
            for i, u in enumerate(words)
            for j, v in enumerate(words[max(i - boundary, 0) : i + boundary])
            if u != v
        ]

    @staticmethod
    def collate(batches):
        every = [item for batch in batches for item in batch]
        u, v, negatives = zip(*every, strict=True)
        return torch.LongTensor(u), torch.LongTensor(v), torch.LongTensor(np.array(negatives))


text = np.random.choice(20, 240, p=np.arange(1, 21) / 210)
dataset = Windows(text, 4)
loader = DataLoader(dataset, batch_size=6, shuffle=True, num_workers=0, collate_fn=dataset.collate)
model = SkipGram(20, 6)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
for epoch in range(2):
    running_loss = 0.0
    for i, (u, v, negatives) in enumerate(loader):
        if len(u) > 1:
            optimizer.zero_grad()
            loss = model(u, v, negatives)
            loss.backward()
            optimizer.step()
            running_loss = running_loss * 0.9 + loss.item() * 0.1
            if i % 2 == 0:
                print(f"{epoch} {i} pairs {len(u)} loss {loss.item():.10g} running {running_loss:.10g}")
embedding = model.u_embeddings.weight.cpu().data.numpy()
print(
    f"vectors {np.linalg.norm(embedding):.10g} nearest {(embedding @ embedding.T).argsort(1)[:, -2].tolist()}"
)


class BPR(nn.Module):
    def __init__(self, users, items, factors=5):
        super().__init__()
        self.embed_user, self.embed_item = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.bias = nn.Embedding(items, 1)
        for table in (self.embed_user, self.embed_item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, user, item_i, item_j):
        user = self.embed_user(user)
        scores = [
            (user * self.embed_item(i)).sum(dim=-1) + self.bias(i).squeeze(-1) for i in (item_i, item_j)
        ]
        return scores[0], scores[1]


class Ratings(Dataset):
    def __init__(self, pairs, items):
        self.pairs, self.items, self.known = pairs, items, set(map(tuple, pairs))

    def ng_sample(self):
        self.rows = []
        for u, i in self.pairs:
            for _ in range(2):
                j = np.random.randint(self.items)
                while (u, j) in self.known:
                    j = np.random.randint(self.items)
                self.rows.append([u, i, j])

    def __len__(self):
        return 2 * len(self.pairs)

    def __getitem__(self, idx):
        return tuple(self.rows[idx])


users, items = 9, 15
liked = np.random.rand(users, items) < 0.25
pairs = [(u, i) for u in range(users) for i in range(items) if liked[u, i]]
held_out = dict(pairs)
train = Ratings([p for p in pairs if held_out[p[0]] != p[1]], items)
train_loader = DataLoader(train, batch_size=13, shuffle=True)
model = BPR(users, items)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-3)
for epoch in range(3):
    model.train()
    train_loader.dataset.ng_sample()
    for user, item_i, item_j in train_loader:
        model.zero_grad()
        prediction_i, prediction_j = model(user, item_i, item_j)
        loss = -(prediction_i - prediction_j).sigmoid().log().sum()
        loss.backward()
        optimizer.step()
    model.eval()
    hits, ndcg = [], []
    for u, truth in held_out.items():
        scores, _ = model(torch.tensor([u]).expand(items), torch.arange(items), torch.arange(items))
        _, indices = torch.topk(scores, 4)
        recommended = torch.take(torch.arange(items), indices).cpu().numpy().tolist()
        hits.append(int(truth in recommended))
        ndcg.append(np.reciprocal(np.log2(recommended.index(truth) + 2)) if truth in recommended else 0)
    print(f"{epoch} loss {loss.item():.10g} hits {np.mean(hits):.10g} ndcg {np.mean(ndcg):.10g}")
