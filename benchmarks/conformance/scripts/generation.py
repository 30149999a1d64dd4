"""A byte language model: loss in a wrapper, cycled loaders, accumulation, generation between."""

from pydoc_data.topics import topics

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
NUM_BATCHES, BATCH_SIZE, ACCUMULATE, VALIDATE_EVERY, GENERATE_EVERY, SEQ_LEN = 8, 3, 2, 3, 4, 10


def cycle(loader):
    while True:
        yield from loader


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.to_qkv, self.to_out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(b, n, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        freqs = torch.arange(n).double()[:, None] / (10 ** torch.arange(0, d // self.heads, 2).double())
        q, k = (self.rotate(t, torch.cat([freqs, freqs], -1)) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))

    @staticmethod
    def rotate(t, freqs):
        x1, x2 = t.chunk(2, dim=-1)
        return t * freqs.cos() + torch.cat((-x2, x1), dim=-1) * freqs.sin()


class Decoder(nn.Module):
    def __init__(self, tokens=128, dim=16, depth=2, heads=2):
        super().__init__()
        self.token_emb = nn.Embedding(tokens, dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            ff = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            self.layers.append(nn.ModuleList([nn.RMSNorm(dim), Attention(dim, heads), ff]))
        self.to_logits = nn.Linear(dim, tokens, bias=False)

    def forward(self, x):
        x = self.token_emb(x)
        for norm, attend, ff in self.layers:
            x = x + attend(norm(x))
            x = x + ff(x)
        return self.to_logits(x)


class AutoregressiveWrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    @torch.no_grad()
    def generate(self, prompts, seq_len, temperature=1.0, top_k=10):
        self.net.eval()
        prompts = prompts[None, :] if prompts.ndim == 1 else prompts
        out, start = prompts, prompts.shape[-1]
        for _ in range(seq_len):
            logits = self.net(out[:, -SEQ_LEN:])[:, -1]
            val, ind = torch.topk(logits, top_k)
            filtered = torch.full_like(logits, float("-inf")).scatter_(1, ind, val)
            sample = torch.multinomial(F.softmax(filtered / temperature, dim=-1), 1)
            out = torch.cat((out, sample), dim=-1)
        self.net.train()
        return out[:, start:].squeeze(0)

    def forward(self, x):
        inp, target = x[:, :-1], x[:, 1:]
        logits = self.net(inp)
        loss = F.cross_entropy(logits.transpose(1, 2), target)
        correct = (logits.argmax(dim=-1) == target).double().mean()
        return loss, correct


class TextSamplerDataset(Dataset):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        rand_start = torch.randint(0, self.data.size(0) - SEQ_LEN - 1, (1,))
        return self.data[rand_start : rand_start + SEQ_LEN + 1].long()

    def __len__(self):
        return self.data.size(0) // SEQ_LEN


data = torch.tensor([min(b, 127) for b in topics["strings"].encode()[:1200]], dtype=torch.uint8)
train_dataset, val_dataset = TextSamplerDataset(data[:1000]), TextSamplerDataset(data[1000:])
train_loader = cycle(DataLoader(train_dataset, batch_size=BATCH_SIZE, drop_last=True))
val_loader = cycle(DataLoader(val_dataset, batch_size=BATCH_SIZE, drop_last=True))
model = AutoregressiveWrapper(Decoder())
optim_ = optim.Adam(model.parameters(), lr=3e-3)
for i in range(NUM_BATCHES):
    model.train()
    for _ in range(ACCUMULATE):
        loss, correct = model(next(train_loader))
        (loss / ACCUMULATE).backward()
    print(f"training loss: {loss.item():.10g} right {correct.item():.10g}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim_.step()
    optim_.zero_grad()
    if i % VALIDATE_EVERY == 0:
        model.eval()
        with torch.no_grad():
            loss, _ = model(next(val_loader))
            print(f"validation loss: {loss.item():.10g}")
    if i % GENERATE_EVERY == 0:
        model.eval()
        inp = val_dataset[i % len(val_dataset)][:-1]
        sample = model.generate(inp, 6)
        print("generated", *sample.cpu().numpy().tolist())
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
