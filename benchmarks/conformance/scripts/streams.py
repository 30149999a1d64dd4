"""Data as streams: iterable data sets with two workers, chunks, concatenated sets, seeds of workers, islice."""

import itertools
import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

torch.set_default_dtype(torch.float64)


class Stream(IterableDataset):
    """Numbers of several files, of which each worker reads its own."""

    def __init__(self, files, buffer):
        self.files, self.buffer = files, buffer

    def read(self):
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        for seed, size in files:
            generator = np.random.default_rng(seed)
            for _ in range(size):
                row = generator.normal(size=5)
                yield row, float(np.tanh(row.sum()))

    def __iter__(self):
        held = []
        for sample in self.read():
            held.append(sample)
            if len(held) == self.buffer:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


class Noisy(torch.utils.data.Dataset):
    def __init__(self, base, scale):
        self.base, self.scale = base, scale

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x, y = self.base[i]
        return x + self.scale * torch.from_numpy(np.random.randn(*x.shape)), y


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def collate(scale, samples):
    xs, ys = zip(*samples, strict=True)
    return torch.tensor(np.stack(xs)) * scale, torch.tensor(ys)


random.seed(0), np.random.seed(0), torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)


def train(name, batches):
    model.train()
    sizes, total = [], 0.0
    for x, y in batches:
        loss = F.smooth_l1_loss(model(x).squeeze(1), y, beta=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(len(y))
        total += float(loss) * len(y)
    print(f"{name} loss {total / sum(sizes):.10g} sizes {sizes}")


files = [(1, 13), (2, 8), (3, 17)]
collated = partial(collate, 0.5)
generator = torch.Generator().manual_seed(7)
train("stream", DataLoader(Stream(files, 6), batch_size=9))
for epoch in range(2):
    loader = DataLoader(
        Stream(files, 6),
        8,
        num_workers=2,
        collate_fn=collated,
        worker_init_fn=seed_worker,
        generator=generator,
    )
    train(f"workers {epoch}", loader)
train(
    "chain",
    DataLoader(ChainDataset([Stream(files[:1], 3), Stream(files[1:], 4)]), batch_size=11, drop_last=True),
)
x = torch.randn(31, 5)
tensors = TensorDataset(x, torch.tanh(x.sum(1)))
joined = ConcatDataset([Noisy(tensors, 0.1), Subset(tensors, range(0, 31, 3)), Noisy(tensors, 0.3)])
loader = DataLoader(
    joined, 12, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=generator,
    persistent_workers=True, prefetch_factor=3,
)  # fmt: skip
for epoch in range(2):
    train(f"joined {epoch}", loader)
batches = DataLoader(joined, sampler=BatchSampler(SequentialSampler(tensors), 10, False), batch_size=None)
try:
    train("lists", batches)
except (TypeError, IndexError) as error:
    print("lists are no indices:", type(error).__name__)
forever = itertools.cycle(DataLoader(tensors, 7, shuffle=True))
train("cycled", itertools.islice(forever, 8))
with torch.no_grad():
    model.eval()
    whole = next(iter(DataLoader(tensors, batch_size=len(tensors))))
    error = (model(whole[0]).squeeze() - whole[1]).abs()
    print(f"error {error.mean():.10f} worst {error.max():.10f} at {int(error.argmax())}")
print(f"norms {sum(p.norm().item() for p in model.parameters()):.10g}")
