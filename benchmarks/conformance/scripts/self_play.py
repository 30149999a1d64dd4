"""Self-play: tree search with a network, games in a buffer of arrays, augmented, an arena that accepts or rejects."""

import logging
import math
import os
import random
from collections import deque
from pickle import Pickler, Unpickler
from random import shuffle

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from tqdm import tqdm

torch.set_default_dtype(torch.float64)
log = logging.getLogger(__name__)


class dotdict(dict):
    def __getattr__(self, name):
        return self[name]


args = dotdict(numIters=2, numEps=4, tempThreshold=4, updateThreshold=0.5, maxlen=300, numMCTSSims=8, arena=4, cpuct=1, lr=0.01, epochs=3, batch_size=16)


class Game:
    """Three in a row, as boards of 1, -1 and 0."""

    def start(self):
        return np.zeros((3, 3), dtype=int)

    def step(self, board, player, action):
        board = board.copy()
        board[action // 3, action % 3] = player
        return board, -player

    def valid(self, board):
        return (board.reshape(-1) == 0).astype(np.uint8)

    def ended(self, board, player):
        lines = [*board, *board.T, board.diagonal(), np.fliplr(board).diagonal()]
        for value in (1, -1):
            if any((line == value).all() for line in lines):
                return value * player
        return 0 if (board == 0).any() else 1e-4

    def symmetries(self, board, pi):
        pi = np.reshape(pi, (3, 3))
        for i in range(4):
            for flip in (False, True):
                b, p = np.rot90(board, i), np.rot90(pi, i)
                yield (np.fliplr(b), np.fliplr(p).ravel()) if flip else (b, p.ravel())


class Network(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3)
        self.bn1, self.bn2, self.fc_bn = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.BatchNorm1d(12)
        self.fc, self.pi, self.v = nn.Linear(channels, 12), nn.Linear(12, 9), nn.Linear(12, 1)

    def forward(self, s):
        s = s.view(-1, 1, 3, 3)
        s = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(s))))))
        s = F.dropout(F.relu(self.fc_bn(self.fc(s.view(-1, 8)))), p=0.3, training=self.training)
        return F.log_softmax(self.pi(s), dim=1), torch.tanh(self.v(s))


class NNetWrapper:
    def __init__(self):
        self.nnet = Network()

    def train(self, examples):
        optimizer = optim.Adam(self.nnet.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            self.nnet.train()
            total_pi, total_v, count = 0, 0, int(len(examples) / args.batch_size)
            t = tqdm(range(count), desc="Training Net", disable=None)
            for _ in t:
                sample_ids = np.random.randint(len(examples), size=args.batch_size)
                boards, pis, vs = list(zip(*[examples[i] for i in sample_ids]))
                boards = torch.DoubleTensor(np.array(boards).astype(np.float64))
                target_pis = torch.DoubleTensor(np.array(pis))
                target_vs = torch.DoubleTensor(np.array(vs).astype(np.float64))
                out_pi, out_v = self.nnet(boards)
                l_pi = -torch.sum(target_pis * out_pi) / target_pis.size()[0]
                l_v = torch.sum((target_vs - out_v.view(-1)) ** 2) / target_vs.size()[0]
                optimizer.zero_grad()
                (l_pi + l_v).backward()
                optimizer.step()
                total_pi, total_v = total_pi + l_pi.item(), total_v + l_v.item()
                t.set_postfix(Loss_pi=l_pi, Loss_v=l_v)
            print(f"epoch {epoch} pi {total_pi / count:.10g} v {total_v / count:.10g}")

    def predict(self, board):
        board = torch.DoubleTensor(board.astype(np.float64)).contiguous()
        self.nnet.eval()
        with torch.no_grad():
            pi, v = self.nnet(board)
        return torch.exp(pi).data.cpu().numpy()[0], v.data.cpu().numpy()[0]

    def save(self, folder="temp", filename="checkpoint.pth.tar"):
        if not os.path.exists(folder):
            os.mkdir(folder)
        torch.save({"state_dict": self.nnet.state_dict()}, os.path.join(folder, filename))

    def load(self, folder="temp", filename="checkpoint.pth.tar"):
        self.nnet.load_state_dict(torch.load(os.path.join(folder, filename), map_location="cpu")["state_dict"])


class MCTS:
    def __init__(self, game, nnet):
        self.game, self.nnet = game, nnet
        self.Qsa, self.Nsa, self.Ns, self.Ps, self.Es, self.Vs = {}, {}, {}, {}, {}, {}

    def probabilities(self, board, temp=1):
        for _ in range(args.numMCTSSims):
            self.search(board)
        s = board.tobytes()
        counts = [self.Nsa.get((s, a), 0) for a in range(9)]
        if temp == 0:
            best = np.random.choice(np.array(np.argwhere(counts == np.max(counts))).flatten())
            return [float(a == best) for a in range(9)]
        counts = [x ** (1.0 / temp) for x in counts]
        return [x / float(sum(counts)) for x in counts]

    def search(self, board):
        s = board.tobytes()
        if s not in self.Es:
            self.Es[s] = self.game.ended(board, 1)
        if self.Es[s] != 0:
            return -self.Es[s]
        if s not in self.Ps:
            self.Ps[s], v = self.nnet.predict(board)
            valids = self.game.valid(board)
            self.Ps[s] = self.Ps[s] * valids
            self.Ps[s] /= np.sum(self.Ps[s])
            self.Vs[s], self.Ns[s] = valids, 0
            return -v
        best, act = -float("inf"), -1
        for a in np.flatnonzero(self.Vs[s]):
            u = self.Qsa.get((s, a), 0) + args.cpuct * self.Ps[s][a] * math.sqrt(self.Ns[s] + 1e-8) / (1 + self.Nsa.get((s, a), 0))
            if u > best:
                best, act = u, a
        following, player = self.game.step(board, 1, act)
        v = self.search(following * player)
        n = self.Nsa.get((s, act), 0)
        self.Qsa[s, act] = (n * self.Qsa.get((s, act), 0) + v) / (n + 1)
        self.Nsa[s, act] = n + 1
        self.Ns[s] += 1
        return -v


def episode(game, nnet):
    examples, board, player, step, mcts = [], game.start(), 1, 0, MCTS(game, nnet)
    while True:
        step += 1
        canonical = board * player
        pi = mcts.probabilities(canonical, temp=int(step < args.tempThreshold))
        for b, p in game.symmetries(canonical, pi):
            examples.append([b, player, p])
        board, player = game.step(board, player, np.random.choice(len(pi), p=pi))
        r = game.ended(board, player)
        if r != 0:
            return [(x[0], x[2], r * ((-1) ** (x[1] != player))) for x in examples]


def play(game, one, two):
    board, player = game.start(), 1
    while (result := game.ended(board, 1)) == 0:
        board, player = game.step(board, player, int(np.argmax((one if player == 1 else two).probabilities(board * player, temp=0))))
    return round(result)


if __name__ == "__main__":
    torch.manual_seed(10), np.random.seed(10), random.seed(10)
    game, nnet, pnet = Game(), NNetWrapper(), NNetWrapper()
    history = []
    for i in range(1, args.numIters + 1):
        recent = deque([], maxlen=args.maxlen)
        for _ in range(args.numEps):
            recent += episode(game, nnet)
        history.append(recent)
        with open(f"examples_{i}", "wb") as f:
            Pickler(f).dump(history)
        with open(f"examples_{i}", "rb") as f:
            examples = [e for part in Unpickler(f).load() for e in part]
        shuffle(examples)
        nnet.save(filename="temp.pth.tar")
        pnet.load(filename="temp.pth.tar")
        nnet.train(examples)
        results = [play(game, *((MCTS(game, pnet), MCTS(game, nnet))[:: 1 if k % 2 else -1])) * (-1 if k % 2 else 1) for k in range(args.arena)]
        won, lost = results.count(1), results.count(-1)
        accepted = won + lost > 0 and won / (won + lost) >= args.updateThreshold
        nnet.save(filename="best.pth.tar") if accepted else nnet.load(filename="temp.pth.tar")
        pi, v = nnet.predict(game.start())
        print(f"iteration {i} of {len(examples)} won {won} lost {lost} accepted {accepted} value {v.item():.10g} pi {pi.max():.10g}")
    print(f"norms {sum(p.norm().item() for p in nnet.nnet.parameters()):.10g}", sorted(os.listdir("temp")))
