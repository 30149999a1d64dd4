"""A word language model, a transformer: causal mask kept by the model, plain updates, generation."""

import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(1111)
bptt, batch_size, eval_batch_size, clip = 6, 5, 3, 0.25
words = topics["numbers"].split() + topics["strings"].split()[:300]
vocabulary = {w: i for i, w in enumerate(dict.fromkeys(words))}
corpus = torch.tensor([vocabulary[w] for w in words])[:360]


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=50):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).double() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0), :])


class TransformerModel(nn.Transformer):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.2):
        super().__init__(
            d_model=ninp, nhead=nhead, dim_feedforward=nhid, num_encoder_layers=nlayers, dropout=dropout
        )
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.input_emb, self.ninp = nn.Embedding(ntoken, ninp), ninp
        self.decoder = nn.Linear(ninp, ntoken)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def _generate_square_subsequent_mask(self, sz):
        return torch.log(torch.tril(torch.ones(sz, sz)))

    def forward(self, src, has_mask=True):
        if has_mask:
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = self._generate_square_subsequent_mask(len(src)).to(src.device)
        else:
            self.src_mask = None
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.ninp))
        return F.log_softmax(self.decoder(self.encoder(src, mask=self.src_mask)), dim=-1)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


train_data, val_data = batchify(corpus[:260], batch_size), batchify(corpus[260:], eval_batch_size)
ntokens = len(vocabulary)
model, criterion, lr, best_val_loss = TransformerModel(ntokens, 12, 2, 16, 2), nn.NLLLoss(), 1.0, None
for epoch in range(1, 3):
    model.train()
    total_loss = 0.0
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        output = model(data).view(-1, ntokens)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for i in range(0, val_data.size(0) - 1, bptt):
            data, targets = get_batch(val_data, i)
            val_loss += len(data) * criterion(model(data).view(-1, ntokens), targets).item()
    val_loss /= len(val_data) - 1
    print(f"epoch {epoch} train {total_loss:.10g} valid {val_loss:.10g} ppl {math.exp(val_loss):.10g}")
    if not best_val_loss or val_loss < best_val_loss:
        torch.save(model, "transformer.pt")
        best_val_loss = val_loss
    else:
        lr /= 4.0
model = torch.load("transformer.pt", weights_only=False).eval()
names = list(vocabulary)
with torch.no_grad():
    input = torch.randint(ntokens, (1, 1), dtype=torch.long)
    text = []
    for _ in range(8):
        output = model(input, False)
        word_weights = output[-1].squeeze().div(1.0).exp().cpu()
        word_idx = torch.multinomial(word_weights, 1)[0]
        input = torch.cat([input, torch.Tensor(1, 1).fill_(word_idx).long()], 0)
        text.append(names[word_idx])
print(len(" ".join(text)))
print(f"norms {sum(p.norm() for p in model.parameters() if p is not None):.10g}")
