"""Captions by attention: batches sorted by length that shrink in time, packed targets, beam search, BLEU."""

import random
from collections import Counter
from math import exp, log

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
random.seed(5)
torch.manual_seed(5)
WORDS = ["<pad>", "<start>", "<end>", *"abcdefg"]
PAD, START, END = range(3)


class Captions(Dataset):
    """Pictures with a caption that tells where they are bright."""

    def __init__(self, size):
        self.items = []
        for _ in range(size):
            word = random.randint(3, len(WORDS) - 2)
            length = random.randint(1, 5)
            image = torch.randn(3, 8, 8) * 0.3 + word / 5
            self.items.append((image, [START] + [word + i % 2 for i in range(length)] + [END]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        image, caption = self.items[index]
        return image, torch.LongTensor(caption + [PAD] * (8 - len(caption))), torch.LongTensor([len(caption)])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 10, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 2)))

    def forward(self, images):
        return self.net(images).permute(0, 2, 3, 1)


class Decoder(nn.Module):
    def __init__(self, dim=12, encoder_dim=10):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), dim)
        self.encoder_att, self.decoder_att, self.full_att = (
            nn.Linear(10, 9),
            nn.Linear(dim, 9),
            nn.Linear(9, 1),
        )
        self.cell = nn.LSTMCell(dim + encoder_dim, dim, bias=True)
        self.init_h, self.init_c = nn.Linear(encoder_dim, dim), nn.Linear(encoder_dim, dim)
        self.f_beta, self.fc = nn.Linear(dim, encoder_dim), nn.Linear(dim, len(WORDS))
        self.dropout = nn.Dropout(0.2)

    def start(self, encoder_out):
        mean = encoder_out.mean(dim=1)
        return self.init_h(mean), self.init_c(mean)

    def attend(self, encoder_out, h):
        att = self.full_att(F.relu(self.encoder_att(encoder_out) + self.decoder_att(h).unsqueeze(1))).squeeze(
            2
        )
        alpha = F.softmax(att, dim=1)
        return torch.sigmoid(self.f_beta(h)) * (encoder_out * alpha.unsqueeze(2)).sum(dim=1), alpha

    def forward(self, encoder_out, captions, lengths):
        batch_size = encoder_out.size(0)
        encoder_out = encoder_out.view(batch_size, -1, encoder_out.size(-1))
        lengths, order = lengths.squeeze(1).sort(dim=0, descending=True)
        encoder_out, captions = encoder_out[order], captions[order]
        embeddings = self.embedding(captions)
        h, c = self.start(encoder_out)
        steps = (lengths - 1).tolist()
        predictions = torch.zeros(batch_size, max(steps), len(WORDS))
        alphas = torch.zeros(batch_size, max(steps), encoder_out.size(1))
        for t in range(max(steps)):
            n = sum([length > t for length in steps])
            context, alpha = self.attend(encoder_out[:n], h[:n])
            h, c = self.cell(torch.cat([embeddings[:n, t, :], context], dim=1), (h[:n], c[:n]))
            predictions[:n, t, :] = self.fc(self.dropout(h))
            alphas[:n, t, :] = alpha
        return predictions, captions, steps, alphas, order


def beam_search(encoder, decoder, image, k=3):
    out = encoder(image.unsqueeze(0)).view(1, -1, 10).expand(k, -1, -1)
    words, top, seqs = torch.full((k, 1), START), torch.zeros(k, 1), torch.full((k, 1), START)
    complete, scores_of = [], []
    h, c = decoder.start(out)
    for step in range(1, 9):
        context, _ = decoder.attend(out, h)
        h, c = decoder.cell(torch.cat([decoder.embedding(words).squeeze(1), context], dim=1), (h, c))
        scores = top.expand(k, len(WORDS)) + F.log_softmax(decoder.fc(h), dim=1)
        best, index = (scores[0] if step == 1 else scores.view(-1)).topk(k, 0, True, True)
        beams, nexts = index // len(WORDS), index % len(WORDS)
        seqs = torch.cat([seqs[beams], nexts.unsqueeze(1)], dim=1)
        alive = [i for i, word in enumerate(nexts) if word != END]
        done = list(set(range(len(nexts))) - set(alive))
        complete.extend(seqs[done].tolist())
        scores_of.extend(best[done])
        k -= len(done)
        if k == 0:
            break
        seqs, h, c, out = seqs[alive], h[beams[alive]], c[beams[alive]], out[beams[alive]]
        top, words = best[alive].unsqueeze(1), nexts[alive].unsqueeze(1)
    if not complete:
        return seqs[0].tolist(), top[0].item()
    i = scores_of.index(max(scores_of))
    return complete[i], scores_of[i].item()


def bleu(reference, guess):
    grams = [
        (Counter(zip(*[s[i:] for i in range(n)], strict=False)) for s in (reference, guess)) for n in (1, 2)
    ]
    scores = [(sum((a & b).values()) + 1) / (sum(b.values()) + 1) for a, b in grams]
    return exp(min(0, 1 - len(reference) / max(len(guess), 1))) * exp(sum(map(log, scores)) / 2)


data = Captions(46)
loader = DataLoader(data, batch_size=13, shuffle=True)
encoder, decoder = Encoder(), Decoder()
optimizers = [
    torch.optim.Adam(filter(lambda p: p.requires_grad, m.parameters()), 1e-2) for m in (encoder, decoder)
]
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    for i, (images, captions, lengths) in enumerate(loader):
        scores, sorted_captions, steps, alphas, _ = decoder(encoder(images), captions, lengths)
        targets = pack_padded_sequence(sorted_captions[:, 1:], steps, batch_first=True).data
        scores = pack_padded_sequence(scores, steps, batch_first=True).data
        loss = criterion(scores, targets) + ((1.0 - alphas.sum(dim=1)) ** 2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.data.clamp_(-0.5, 0.5)
            optimizer.step()
        _, index = scores.topk(2, 1, True, True)
        top2 = (
            index.eq(targets.view(-1, 1).expand_as(index)).view(-1).float().sum().item()
            * 100
            / targets.size(0)
        )
        print(f"{epoch} {i} loss {loss.item():.10g} top-2 {top2:.10g} words {sum(steps)}")
encoder.eval(), decoder.eval()
with torch.no_grad():
    for i in range(4):
        image, caption, length = data[i]
        found, score = beam_search(encoder, decoder, image)
        reference = caption[: length.item()].tolist()
        print(
            f"beam {' '.join(WORDS[w] for w in found)} score {score:.10g} bleu {bleu(reference, found):.10g}"
        )
