"""Translation by encoder, attention and decoder: teacher forcing at random, greedy decoding."""

import math
import random
import time

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

torch.set_default_dtype(torch.float64)
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
SOS_token, EOS_token, MAX_LENGTH, WORDS = 0, 1, 6, 12


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        batch_size = encoder_outputs.size(0)
        decoder_input = torch.empty(batch_size, 1, dtype=torch.long).fill_(SOS_token)
        decoder_hidden, decoder_outputs, attentions = encoder_hidden, [], []
        for i in range(MAX_LENGTH):
            embedded = self.dropout(self.embedding(decoder_input))
            context, attn_weights = self.attention(decoder_hidden.permute(1, 0, 2), encoder_outputs)
            output, decoder_hidden = self.gru(torch.cat((embedded, context), dim=2), decoder_hidden)
            decoder_output = self.out(output)
            decoder_outputs.append(decoder_output)
            attentions.append(attn_weights)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                _, topi = decoder_output.topk(1)
                decoder_input = topi.squeeze(-1).detach()
        decoder_outputs = F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)
        return decoder_outputs, decoder_hidden, torch.cat(attentions, dim=1)


def get_dataloader(batch_size):
    n = 41
    input_ids, target_ids = np.zeros((n, MAX_LENGTH), np.int64), np.zeros((n, MAX_LENGTH), np.int64)
    for idx in range(n):
        words = [random.randrange(2, WORDS) for _ in range(random.randint(2, MAX_LENGTH - 1))]
        input_ids[idx, : len(words) + 1] = [*words, EOS_token]
        target_ids[idx, : len(words) + 1] = [*reversed(words), EOS_token]
    data = TensorDataset(torch.LongTensor(input_ids), torch.LongTensor(target_ids))
    return DataLoader(data, sampler=RandomSampler(data), batch_size=batch_size)


def train_epoch(loader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    total_loss = 0
    for input_tensor, target_tensor in loader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        teacher = target_tensor if random.random() < 0.7 else None
        decoder_outputs, _, _ = decoder(encoder_outputs, encoder_hidden, teacher)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
    return total_loss / len(loader)


hidden_size = 10
train_dataloader = get_dataloader(8)
encoder, decoder = EncoderRNN(WORDS, hidden_size), AttnDecoderRNN(hidden_size, WORDS)
start = time.time()
optimizers = [optim.Adam(m.parameters(), lr=5e-3) for m in (encoder, decoder)]
for epoch in range(1, 3):
    loss = train_epoch(train_dataloader, encoder, decoder, *optimizers, nn.NLLLoss())
    assert math.isfinite(loss) and time.time() >= start
    print(f"({epoch} {epoch / 2 * 100:.0f}%) {loss:.10g}")
encoder.eval()
decoder.eval()
with torch.no_grad():
    inputs, _ = next(iter(train_dataloader))
    outputs, hidden, attention = decoder(*encoder(inputs))
    _, topi = outputs[0].topk(1)
    decoded_ids = topi.squeeze()
    sentence = []
    for idx in decoded_ids:
        if idx.item() == EOS_token:
            sentence.append("<EOS>")
            break
        sentence.append(f"w{idx.item()}")
    print(" ".join(sentence), f"{attention[0].max():.10g}")
print(f"norms {sum(p.norm() for m in (encoder, decoder) for p in m.parameters()):.10g}")
