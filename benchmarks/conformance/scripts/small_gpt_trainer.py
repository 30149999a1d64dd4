"""A small GPT that learns to sort: loss inside, a trainer class with callbacks, generation."""

import math
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(3407)
LENGTH, VOCABULARY = 5, 3


class SortDataset(Dataset):
    """Sequences followed by themselves, sorted; only the sorted half counts."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.rows = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        inp = self.rows[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: LENGTH - 1] = -1
        return x, y


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop, self.heads = nn.Dropout(0.1), heads
        self.register_buffer("bias", torch.tril(torch.ones(9, 9)).view(1, 1, 9, 9))

    def attention(self, x):
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, width=12, heads=3, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * LENGTH - 1, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def configure_optimizers(self):
        decay = [p for n, p in self.named_parameters() if p.dim() >= 2 and "lm_head" not in n]
        rest = [p for n, p in self.named_parameters() if p.dim() < 2 or "lm_head" in n]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95))

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, do_sample=False):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -(2 * LENGTH - 1) :])
            probs = F.softmax(logits[:, -1, :], dim=-1)
            nxt = torch.multinomial(probs, num_samples=1) if do_sample else torch.topk(probs, k=1, dim=-1)[1]
            idx = torch.cat((idx, nxt), dim=1)
        return idx


class Trainer:
    def __init__(self, model, train_dataset, max_iters):
        self.model, self.train_dataset, self.max_iters = model, train_dataset, max_iters
        self.callbacks = defaultdict(list)

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def run(self):
        optimizer = self.model.configure_optimizers()
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=10_000)
        loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=7, shuffle=False)
        self.model.train()
        self.iter_num, self.iter_time = 0, time.time()
        data_iter = iter(loader)
        while self.iter_num < self.max_iters:
            x, y = next(data_iter)
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def batch_end_callback(trainer):
    if trainer.iter_num % 5 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.10g}")


model = GPT()
trainer = Trainer(model, SortDataset(200), max_iters=16)
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
model.eval()
results = []
for x, _ in DataLoader(SortDataset(30), batch_size=13):
    inp = x[:, :LENGTH]
    cat = model.generate(inp, LENGTH, do_sample=False)
    correct = (torch.sort(inp)[0] == cat[:, LENGTH:]).all(1).cpu()
    for i in range(x.size(0)):
        results.append(int(correct[i]))
    drawn = model.generate(inp, 2, do_sample=True)
    print(f"drawn {drawn[:, -2:].sum().item()}")
print(f"score {sum(results)}/{len(results)}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
