"""Sequences of several lengths: packed and unpacked, CTC, masks of attention."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Sequences(Dataset):
    """Sequences of 3 to 9 values; the label says whether they sum to more than zero."""

    def __init__(self, size):
        lengths = torch.randint(3, 10, (size,)).tolist()
        self.rows = [torch.randn(n, 4) for n in lengths]
        self.spoken = [torch.randint(1, 5, (1 + n // 3,)) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], int(self.rows[i].sum() > 0), self.spoken[i]


def collate(batch):
    rows, labels, spoken = zip(*batch, strict=True)
    lengths = torch.tensor([len(r) for r in rows])
    counts = torch.tensor([len(s) for s in spoken])
    return (
        pad_sequence(rows, batch_first=True),
        lengths,
        torch.tensor(labels),
        pad_sequence(spoken, True),
        counts,
    )


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.classify, self.speak = nn.Linear(12, 2), nn.Linear(12, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = self.rnn(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        mask = torch.arange(output.size(1))[None, :] >= lengths[:, None]
        attended, _ = self.attention(output, output, output, key_padding_mask=mask)
        output = (output + attended).masked_fill(mask.unsqueeze(-1), 0.0)
        pooled = output.sum(1) / lengths.unsqueeze(1)
        last = output[torch.arange(len(x)), lengths - 1]
        return self.classify(pooled + last), F.log_softmax(self.speak(output), -1)


loader = DataLoader(Sequences(37), batch_size=8, shuffle=True, collate_fn=collate)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, lengths, labels, spoken, counts in loader:
        logits, log_probs = model(x, lengths)
        ctc = F.ctc_loss(log_probs.transpose(0, 1), spoken, lengths, counts, zero_infinity=True)
        loss = F.cross_entropy(logits, labels) + 0.1 * ctc
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        hits = (logits.argmax(1) == labels).sum().item()
        print(
            f"{epoch} loss {loss.item():.10g} ctc {ctc.item():.10g} norm {norm.item():.10g} hits {hits}/{len(x)}"
        )
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
