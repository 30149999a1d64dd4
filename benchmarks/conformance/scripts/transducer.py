"""Speech: a transducer's loss by dynamic programming, CTC beside it, masks of spectra, an own optimizer."""

import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
random.seed(10), np.random.seed(10), torch.manual_seed(10)
BLANK, LABELS = 0, 6


class NovoGrad(Optimizer):
    """Second moments by layer."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.5), eps=1e-8, weight_decay=0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros([])
                beta1, beta2 = group["betas"]
                state["step"] += 1
                norm = torch.sum(torch.pow(grad, 2))
                if state["exp_avg_sq"] == 0:
                    state["exp_avg_sq"].copy_(norm)
                else:
                    state["exp_avg_sq"].mul_(beta2).add_(norm, alpha=1 - beta2)
                grad = grad / state["exp_avg_sq"].sqrt().add_(group["eps"])
                if group["weight_decay"] != 0:
                    grad.add_(p, alpha=group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(grad)
                p.add_(state["exp_avg"], alpha=-group["lr"])


class Utterances(Dataset):
    def __init__(self, size):
        self.items = []
        for _ in range(size):
            words = [random.randint(1, LABELS - 1) for _ in range(random.randint(1, 4))]
            frames = np.concatenate([np.random.randn(random.randint(3, 5), 4) * 0.3 + w for w in words])
            self.items.append((torch.from_numpy(frames), torch.tensor(words)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        frames, words = self.items[i]
        frames = frames.clone()
        start = random.randrange(4)
        frames[:, start : start + 1] = 0  # a masked frequency
        return frames, words


def collate(batch):
    batch = sorted(batch, key=lambda item: -len(item[0]))
    frames, words = zip(*batch, strict=True)
    return (
        pad_sequence(frames, batch_first=True), torch.tensor([len(f) / len(frames[0]) for f in frames]),
        torch.cat(words), torch.tensor([len(w) for w in words], dtype=torch.int32),
    )  # fmt: skip


class Transducer(nn.Module):
    def __init__(self, hidden=10):
        super().__init__()
        self.conv = nn.Conv1d(4, hidden, 3, stride=1, padding=1)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.embed, self.predictor = nn.Embedding(LABELS, hidden), nn.LSTM(hidden, hidden, batch_first=True)
        self.joint, self.ctc = nn.Linear(hidden, LABELS), nn.Linear(hidden, LABELS)

    def encode(self, frames, lengths):
        h = F.hardtanh(self.conv(frames.transpose(1, 2)), 0, 20).transpose(1, 2)
        packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True)
        return pad_packed_sequence(self.encoder(packed)[0], batch_first=True)[0]

    def forward(self, frames, lengths, words):
        h = self.encode(frames, lengths)
        p, _ = self.predictor(self.embed(F.pad(words, (1, 0))))
        joint = self.joint(torch.tanh(h.unsqueeze(2) + p.unsqueeze(1)))
        return F.log_softmax(joint, -1), F.log_softmax(self.ctc(h), -1)


def transducer_loss(log_probs, words, frames, labels):
    b, t_max, u_max, _ = log_probs.shape
    blank = log_probs[..., BLANK]
    emit = log_probs[:, :, :-1].gather(3, words[:, None, :, None].expand(b, t_max, u_max - 1, 1)).squeeze(3)
    alpha = [[None] * u_max for _ in range(t_max)]
    for t in range(t_max):
        for u in range(u_max):
            if t == 0 and u == 0:
                alpha[t][u] = log_probs.new_zeros(b)
                continue
            options = []
            if t > 0:
                options.append(alpha[t - 1][u] + blank[:, t - 1, u])
            if u > 0:
                options.append(alpha[t][u - 1] + emit[:, t, u - 1])
            alpha[t][u] = options[0] if len(options) == 1 else torch.logaddexp(*options)
    table = torch.stack([torch.stack(row, 1) for row in alpha], 1)
    every = torch.arange(b)
    return -(table[every, frames - 1, labels] + blank[every, frames - 1, labels])


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def greedy(log_probs, sizes):
    decoded = []
    for row, size in zip(log_probs.argmax(-1), sizes, strict=True):
        path = row[: int(size)].tolist()
        decoded.append([c for i, c in enumerate(path) if c != BLANK and (i == 0 or c != path[i - 1])])
    return decoded


loader = DataLoader(Utterances(25), batch_size=6, shuffle=True, collate_fn=collate)
model, ctc = Transducer(), nn.CTCLoss(blank=BLANK, reduction="sum", zero_infinity=True)
optimizer = NovoGrad(model.parameters(), lr=2e-2, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 3, 0.5 + 0.5 * math.cos(step / 9))
)
for epoch in range(2):
    errors = total = 0
    for frames, percentages, targets, target_sizes in loader:
        sizes = percentages.mul(int(frames.size(1))).round().long()
        words = pad_sequence(targets.split(target_sizes.tolist()), batch_first=True)
        log_probs, ctc_probs = model(frames, sizes, words)
        rnnt = transducer_loss(log_probs, words, sizes, target_sizes.long()).mean()
        beside = ctc(ctc_probs.transpose(0, 1), targets, sizes, target_sizes) / frames.size(0)
        loss = rnnt + 0.3 * beside
        if not math.isfinite(loss.item()):
            print("skipped")
            continue
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        optimizer.step()
        scheduler.step()
        for guess, truth in zip(greedy(ctc_probs, sizes), targets.split(target_sizes.tolist()), strict=True):
            errors, total = errors + distance(guess, truth.tolist()), total + len(truth)
        print(
            f"{epoch} transducer {rnnt.item():.10g} ctc {beside.item():.10g} rate {optimizer.param_groups[0]['lr']:.10g}"
        )
    print(f"epoch {epoch} errors {errors} of {total}, {100 * errors / total:.10g} %")
