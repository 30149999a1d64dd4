"""A GPT script: batches cut from one text, accumulation, warm-up, estimated losses, resuming."""

import math
import os
from contextlib import nullcontext
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

out_dir = "out"
eval_interval, eval_iters, log_interval, always_save_checkpoint = 4, 3, 2, False
gradient_accumulation_steps, batch_size, block_size = 3, 5, 8
n_layer, n_head, n_embd, dropout = 2, 2, 12, 0.1
learning_rate, max_iters, weight_decay, grad_clip = 1e-2, 12, 1e-1, 1.0
warmup_iters, lr_decay_iters, min_lr = 3, 12, 1e-3
config = {
    k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))
}

os.makedirs(out_dir, exist_ok=True)
torch.set_default_dtype(torch.float64)
torch.manual_seed(1337)
ctx = nullcontext()
text = topics["strings"][:4000]
chars = sorted(set(text))
data = np.array([chars.index(c) for c in text], dtype=np.uint16)
data[:3600].tofile(os.path.join(out_dir, "train.bin"))
data[3600:].tofile(os.path.join(out_dir, "val.bin"))


def get_batch(split):
    found = np.memmap(os.path.join(out_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(found) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(found[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(found[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout, F.gelu, batch_first=True)
        self.h = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.lm_head(self.h(x, mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


iter_num, best_val_loss = 0, 1e9
model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay
)
checkpoint = None


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)  # noqa: N806
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
while iter_num <= max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.10g}, val loss {losses['val']:.10g}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint |= {"iter_num": iter_num, "best_val_loss": best_val_loss, "config": config}
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.10g}")
    iter_num += 1
checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
print(f"best at {checkpoint['iter_num']}: {checkpoint['best_val_loss']:.10g}")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
