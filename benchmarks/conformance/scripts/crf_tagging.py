"""Tagging by a BiLSTM and a CRF: sentence by sentence without a loader, then batches with masks; Viterbi, spans."""

import random

import numpy as np
import torch
from torch import nn, optim

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
random.seed(1)
START, STOP = "<START>", "<STOP>"
tag_to_ix = {"B": 0, "I": 1, "O": 2, START: 3, STOP: 4}


def argmax(vec):
    _, idx = torch.max(vec, 1)
    return idx.item()


def prepare_sequence(seq, to_ix):
    return torch.tensor([to_ix[w] for w in seq], dtype=torch.long)


def log_sum_exp(vec):
    max_score = vec[0, argmax(vec)]
    return max_score + torch.log(torch.sum(torch.exp(vec - max_score.view(1, -1).expand(1, vec.size()[1]))))


class BiLSTM_CRF(nn.Module):
    def __init__(self, vocab_size, embedding_dim=6, hidden_dim=8):
        super().__init__()
        self.hidden_dim, self.tagset_size = hidden_dim, len(tag_to_ix)
        self.word_embeds = nn.Embedding(vocab_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim // 2, num_layers=1, bidirectional=True)
        self.hidden2tag = nn.Linear(hidden_dim, self.tagset_size)
        self.transitions = nn.Parameter(torch.randn(self.tagset_size, self.tagset_size))
        self.transitions.data[tag_to_ix[START], :] = -10000
        self.transitions.data[:, tag_to_ix[STOP]] = -10000

    def init_hidden(self):
        return torch.randn(2, 1, self.hidden_dim // 2), torch.randn(2, 1, self.hidden_dim // 2)

    def features(self, sentence):
        embeds = self.word_embeds(sentence).view(len(sentence), 1, -1)
        out, _ = self.lstm(embeds, self.init_hidden())
        return self.hidden2tag(out.view(len(sentence), self.hidden_dim))

    def partition(self, feats):
        forward_var = torch.full((1, self.tagset_size), -10000.0)
        forward_var[0][tag_to_ix[START]] = 0.0
        for feat in feats:
            alphas = []
            for next_tag in range(self.tagset_size):
                emit = feat[next_tag].view(1, -1).expand(1, self.tagset_size)
                score = forward_var + self.transitions[next_tag].view(1, -1) + emit
                alphas.append(log_sum_exp(score).view(1))
            forward_var = torch.cat(alphas).view(1, -1)
        return log_sum_exp(forward_var + self.transitions[tag_to_ix[STOP]])

    def score(self, feats, tags):
        score = torch.zeros(1)
        tags = torch.cat([torch.tensor([tag_to_ix[START]], dtype=torch.long), tags])
        for i, feat in enumerate(feats):
            score = score + self.transitions[tags[i + 1], tags[i]] + feat[tags[i + 1]]
        return score + self.transitions[tag_to_ix[STOP], tags[-1]]

    def viterbi(self, feats):
        backpointers = []
        forward_var = torch.full((1, self.tagset_size), -10000.0)
        forward_var[0][tag_to_ix[START]] = 0
        for feat in feats:
            pointers, best = [], []
            for next_tag in range(self.tagset_size):
                next_var = forward_var + self.transitions[next_tag]
                best_id = argmax(next_var)
                pointers.append(best_id)
                best.append(next_var[0][best_id].view(1))
            forward_var = (torch.cat(best) + feat).view(1, -1)
            backpointers.append(pointers)
        terminal = forward_var + self.transitions[tag_to_ix[STOP]]
        best_id = argmax(terminal)
        path = [best_id]
        for pointers in reversed(backpointers):
            path.append(best_id := pointers[best_id])
        assert path.pop() == tag_to_ix[START]
        return terminal[0][path[0]], path[::-1]

    def neg_log_likelihood(self, sentence, tags):
        feats = self.features(sentence)
        return self.partition(feats) - self.score(feats, tags)

    def forward(self, sentence):
        return self.viterbi(self.features(sentence))


words = ["the", "firm", "of", "Ada", "Byron", "met", "New", "York", "bank", "today"]
word_to_ix = {word: i + 1 for i, word in enumerate(words)}


def make(count):
    for _ in range(count):
        sentence = [random.choice(words) for _ in range(random.randint(2, 7))]
        tags, before = [], False
        for word in sentence:
            named = word[0].isupper()
            tags.append(("I" if before else "B") if named else "O")
            before = named
        yield sentence, tags


training, held_out = list(make(5)), list(make(3))
model = BiLSTM_CRF(len(words) + 1)
optimizer = optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-4)
with torch.no_grad():
    print("before", model(prepare_sequence(training[0][0], word_to_ix)))
for epoch in range(2):
    total = 0
    for sentence, tags in training:
        model.zero_grad()
        loss = model.neg_log_likelihood(prepare_sequence(sentence, word_to_ix), prepare_sequence(tags, tag_to_ix))
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"single {epoch} loss {total:.10g}")
with torch.no_grad():
    score, path = model(prepare_sequence(training[0][0], word_to_ix))
    print(f"after {score.item():.10g}", path)


class BatchedCRF(nn.Module):
    """The same in log space over padded batches."""

    def __init__(self, tags):
        super().__init__()
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.trans = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def forward(self, emissions, tags, mask):
        steps, batch = tags.shape
        score = self.start[tags[0]] + emissions[0, torch.arange(batch), tags[0]]
        alpha = self.start + emissions[0]
        for i in range(1, steps):
            score += (self.trans[tags[i - 1], tags[i]] + emissions[i, torch.arange(batch), tags[i]]) * mask[i]
            step = torch.logsumexp(alpha.unsqueeze(2) + self.trans + emissions[i].unsqueeze(1), dim=1)
            alpha = torch.where(mask[i].unsqueeze(1), step, alpha)
        last = tags[mask.long().sum(0) - 1, torch.arange(batch)]
        return torch.logsumexp(alpha + self.end, 1) - (score + self.end[last])

    def decode(self, emissions, mask):
        score, history = self.start + emissions[0], []
        for i in range(1, len(emissions)):
            best, index = (score.unsqueeze(2) + self.trans + emissions[i].unsqueeze(1)).max(dim=1)
            score = torch.where(mask[i].unsqueeze(1), best, score)
            history.append(index)
        score = score + self.end
        paths = []
        for b, end in enumerate(mask.long().sum(0) - 1):
            path = [score[b].argmax().item()]
            for index in reversed(history[:end]):
                path.append(index[b][path[-1]].item())
            paths.append(path[::-1])
        return paths


def collate(batch):
    batch.sort(key=lambda pair: len(pair[0]), reverse=True)
    pad = nn.utils.rnn.pad_sequence
    x = pad([prepare_sequence(s, word_to_ix) for s, _ in batch])
    y = pad([prepare_sequence(t, tag_to_ix) for _, t in batch])
    return x, y, x != 0


def spans(path):
    found, begin = set(), None
    for i, tag in enumerate([*path, 2]):
        if tag != 1 and begin is not None:
            found.add((begin, i))
            begin = None
        if tag == 0:
            begin = i
    return found


embed, lstm, head, crf = nn.Embedding(11, 6, padding_idx=0), nn.LSTM(6, 5, bidirectional=True), nn.Linear(10, 3), BatchedCRF(3)
parameters = [p for part in (embed, lstm, head, crf) for p in part.parameters()]
optimizer = optim.Adam(parameters, lr=0.03)
loader = torch.utils.data.DataLoader(list(make(41)), batch_size=7, shuffle=True, collate_fn=collate)
for epoch in range(3):
    losses, right, guessed, true = [], 0, 0, 0
    for x, y, mask in loader:
        emissions = head(torch.tanh(lstm(embed(x))[0]))
        loss = crf(emissions, y, mask).mean()
        optimizer.zero_grad(), loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        losses.append([loss.item(), norm.item()])
        for path, tags, length in zip(crf.decode(emissions.detach(), mask), y.t().tolist(), mask.sum(0)):
            got, want = spans(path), spans(tags[: int(length)])
            right, guessed, true = right + len(got & want), guessed + len(got), true + len(want)
    means = np.mean(losses, axis=0)
    print(f"batched {epoch} loss {means[0]:.10g} norm {means[1]:.10g} f1 {2 * right / max(guessed + true, 1):.6f} of {true}")
print(f"norms {sum(p.norm() for p in parameters).item():.10g}")
