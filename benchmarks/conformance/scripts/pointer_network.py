"""Pointer networks: sorting by pointing, teacher forcing by chance, masks by scatter_, length buckets, TorchScript cells."""

import argparse
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_default_dtype(torch.float64)


class SortingDataset(Dataset):
    def __init__(self, num_samples, low=3, high=7):
        super().__init__()
        self.seqs, self.labels = [], []
        for _ in range(num_samples):
            seq = [random.randint(0, 99) / 50 - 1 for _ in range(random.randint(low, high))]
            self.seqs.append(seq)
            self.labels.append(sorted(range(len(seq)), key=seq.__getitem__))

    def __getitem__(self, index):
        return self.seqs[index], len(self.seqs[index]), self.labels[index]

    def __len__(self):
        return len(self.seqs)


class BucketSampler(Sampler):
    """Batches of one length, in random order."""

    def __init__(self, data, batch_size):
        self.data, self.batch_size = data, batch_size

    def __iter__(self):
        buckets = {}
        for i in torch.randperm(len(self.data)).tolist():
            buckets.setdefault(len(self.data.seqs[i]), []).append(i)
        batches = [b[i : i + self.batch_size] for b in buckets.values() for i in range(0, len(b), self.batch_size)]
        random.shuffle(batches)
        return iter(batches)


def sparse_collate(batch):
    seqs, lengths, labels = zip(*batch)
    longest = max(lengths)
    seq, label = torch.zeros(len(batch), longest, 1), torch.full((len(batch), longest), -1)
    for i, n in enumerate(lengths):
        seq[i, :n, 0] = torch.as_tensor(seqs[i])
        label[i, :n] = torch.as_tensor(labels[i])
    return {"seq": seq, "length": torch.tensor(lengths), "label": label}


class Attention(torch.jit.ScriptModule):
    def __init__(self, hidden: int):
        super().__init__()
        self.W1 = nn.Linear(hidden, hidden, bias=False)
        self.W2 = nn.Linear(hidden, hidden, bias=False)
        self.vt = nn.Linear(hidden, 1, bias=False)

    @torch.jit.script_method
    def forward(self, state: Tensor, outputs: Tensor, mask: Tensor) -> Tensor:
        u = self.vt(torch.tanh(self.W1(outputs) + self.W2(state).unsqueeze(1))).squeeze(-1)
        return F.log_softmax(u.masked_fill(~mask, -1e9), dim=-1)


@torch.jit.script
def masked_accuracy(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    hits = torch.masked_select(output, mask).eq(torch.masked_select(target, mask))
    return hits.double().mean()


class PointerNet(nn.Module):
    def __init__(self, embed: int, hidden: int):
        super().__init__()
        self.embedding = nn.Linear(1, embed, bias=False)
        self.encoder = nn.LSTM(embed, hidden, num_layers=1, batch_first=True, bidirectional=True)
        self.decoding = nn.LSTMCell(hidden, hidden)
        self.attn = Attention(hidden)
        for m in self.modules():
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)
        for name, p in self.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(p)

    def forward(self, seq, lengths, label: Tensor | None = None, forcing: float = 0.0) -> tuple[Tensor, Tensor, list[int]]:
        batch, longest = seq.shape[:2]
        embedded = self.embedding(seq)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        outputs, (h, c) = self.encoder(packed)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
        outputs = outputs[:, :, : outputs.size(2) // 2] + outputs[:, :, outputs.size(2) // 2 :]
        state, cell = h.sum(0), c.sum(0)
        point = seq.new_zeros(torch.Size((batch, outputs.size(2))))
        valid = torch.arange(longest)[None, :] < lengths[:, None]
        scores, picks, forced = [], [], []
        free = valid.clone()
        for i in range(longest):
            state, cell = self.decoding(point, (state, cell))
            log_p = self.attn(state, outputs, valid)
            pick = log_p.masked_fill(~torch.where(i < lengths[:, None], free, valid), -1e9).argmax(1, keepdim=True)
            if label is not None and random.random() < forcing:
                pick = label[:, i : i + 1].clamp(min=0)
                forced.append(i)
            free = free.scatter(1, pick, False)
            point = outputs.gather(1, pick.unsqueeze(-1).expand(-1, -1, outputs.size(2))).squeeze(1)
            scores.append(log_p)
            picks.append(pick)
        return torch.stack(scores, 1), torch.cat(picks, 1), forced


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum, self.count = self.sum + val * n, self.count + n

    @property
    def avg(self):
        return self.sum / self.count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=5e-3, type=float)
    args, _ = parser.parse_known_args()
    torch.manual_seed(77)
    random.seed(77)
    model = PointerNet(6, 8)
    train, test = SortingDataset(46), SortingDataset(17, 3, 9)
    train_loader = DataLoader(train, batch_sampler=BucketSampler(train, 6), collate_fn=sparse_collate)
    test_loader = DataLoader(test, batch_size=5, collate_fn=sparse_collate)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    for epoch in range(args.epochs):
        losses, accuracy, began = AverageMeter(), AverageMeter(), time.time()
        model.train()
        for batch_idx, batch in enumerate(train_loader):
            seq, length, target = batch["seq"], batch["length"], batch["label"]
            optimizer.zero_grad()
            log_p, picks, forced = model(seq, length, target, forcing=0.6 - 0.2 * epoch)
            loss = F.nll_loss(log_p.view(-1, log_p.shape[-1]), target.reshape(-1), ignore_index=-1)
            assert not torch.isnan(loss), "Model diverged with loss = NaN"
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            losses.update(loss.item(), seq.size(0))
            accuracy.update(masked_accuracy(picks, target, target >= 0).item(), int((target >= 0).sum()))
            if batch_idx % 3 == 0:
                print(f"Epoch {epoch} [{batch_idx}/{len(seq)}x{seq.size(1)}] loss {losses.avg:.10g} forced {forced}")
        scheduler.step()
        assert time.time() >= began
        print(f"Epoch {epoch}: train {losses.avg:.10g} accuracy {accuracy.avg:.10g}")
        model.eval()
        right, total, tables = 0, 0, []
        with torch.inference_mode():
            for batch in test_loader:
                log_p, picks, _ = model(batch["seq"], batch["length"])
                for seq, n, p in zip(batch["seq"], batch["length"], picks):
                    ordered = seq[p[:n], 0]
                    right += int(torch.all(ordered[1:] >= ordered[:-1]))
                    tables.append(ordered.std(unbiased=False).item())
                total += len(picks)
        print(f"Test {right}/{total} spread {sum(tables):.10g}")
    print(f"norms {sum(p.norm().item() for p in model.parameters()):.10g}")


if __name__ == "__main__":
    main()
