"""Actor-critic of several games, a recurrent policy, episodes of any length, GAE, rewards normalized as they come."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence

torch.set_default_dtype(torch.float64)
parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=10)
args, unknown = parser.parse_known_args()
torch.manual_seed(args.seed)


class Corridor:
    """A walk to the end of a corridor in the dark, in at most 20 steps."""

    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)

    def reset(self):
        self.place, self.goal, self.steps = 0, self.rng.randint(2, 6), 0
        return np.array([self.place, self.goal * 0.1, self.rng.rand()])

    def step(self, action):
        self.place += [-1, 1, 2][action] if self.rng.rand() > 0.1 else 0
        self.steps += 1
        done = self.place >= self.goal or self.steps >= 20
        reward = 1.0 if self.place >= self.goal else -0.1
        return np.array([self.place, self.goal * 0.1, self.rng.rand()]), reward, done


class RunningMeanStd:
    def __init__(self):
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def update(self, x):
        mean, var, count = np.mean(x), np.var(x), len(x)
        delta, total = mean - self.mean, self.count + count
        m2 = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, m2 / total, total


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRUCell(3, 16)
        self.action_head, self.value_head = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x, h):
        h = self.gru(x, h)
        return F.softmax(self.action_head(h), dim=-1), self.value_head(h), h


def episode(env, model):
    state, h, done = env.reset(), torch.zeros(1, 16), False
    log_probs, values, rewards, entropies = [], [], [], []
    while not done:
        probs, value, h = model(torch.from_numpy(state).unsqueeze(0), h)
        m = Categorical(probs)
        action = m.sample()
        state, reward, done = env.step(action.item())
        log_probs.append(m.log_prob(action)), values.append(value.squeeze())
        entropies.append(m.entropy()), rewards.append(reward)
    return torch.cat(log_probs), torch.stack(values), torch.cat(entropies), rewards


def advantages_of(rewards, values, lam=0.9):
    found, gae, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values.detach().tolist()), strict=True):
        gae = reward + args.gamma * following - value + args.gamma * lam * gae
        following = value
        found.insert(0, gae)
    return torch.tensor(found)


envs = [Corridor(seed) for seed in range(3)]
model, running, normalizer = Policy(), 0.0, RunningMeanStd()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
eps = np.finfo(np.float64).eps.item()
for i_episode in range(args.episodes):
    games = [episode(env, model) for env in envs]
    policy_losses, value_losses = [], []
    for log_probs, values, entropies, rewards in games:
        normalizer.update(np.array(rewards))
        scaled = [r / np.sqrt(normalizer.var + 1e-8) for r in rewards]
        advantages = advantages_of(scaled, values)
        returns = advantages + values.detach()
        if len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + eps)
        policy_losses.append(-(log_probs * advantages).sum() - 0.01 * entropies.sum())
        value_losses.append(F.smooth_l1_loss(values, returns, reduction="sum"))
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    reward = np.mean([sum(rewards) for *_, rewards in games])
    running = 0.05 * reward + (1 - 0.05) * running
    padded = pad_sequence([log_probs.detach() for log_probs, *_ in games], batch_first=True)
    print(
        f"Episode {i_episode}\tReward {reward:.9g}\tAverage {running:.9g}\tloss {loss.item():.9g} {tuple(padded.shape)}"
    )
    if running > 0.9:
        print(f"Solved! Running reward is now {running}")
        break
print(f"norms {sum(p.norm() for p in model.parameters()):.9g}")
