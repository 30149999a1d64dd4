"""REINFORCE: episodes of other lengths, log probabilities kept by the policy, a running reward."""

import argparse
import random
from collections import deque
from itertools import count

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--log-interval", type=int, default=3)
args = parser.parse_args()
random.seed(args.seed)
torch.manual_seed(args.seed)


class Balance:
    """A stick that falls unless it is pushed back."""

    def reset(self):
        self.angle, self.speed = random.uniform(-0.1, 0.1), random.uniform(-0.1, 0.1)
        return [self.angle, self.speed]

    def step(self, action):
        self.speed += 0.2 * self.angle + (0.05 if action == 1 else -0.05)
        self.angle += self.speed
        return [self.angle, self.speed], 1.0, abs(self.angle) > 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 16)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)


env, policy = Balance(), Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = torch.finfo(torch.float64).eps


def select_action(state):
    probs = policy(torch.tensor(state).unsqueeze(0))
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R, policy_loss, returns = 0, [], deque()  # noqa: N806
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R  # noqa: N806
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns, strict=True):  # noqa: N806
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss.item()


running_reward = 10
for i_episode in range(1, 13):
    state, ep_reward = env.reset(), 0
    for t in count(1):
        state, reward, done = env.step(select_action(state))
        policy.rewards.append(reward)
        ep_reward += reward
        if done or t >= 40:
            break
    running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
    loss = finish_episode()
    if i_episode % args.log_interval == 0:
        print(f"Episode {i_episode} reward: {ep_reward:.2f} average: {running_reward:.10g} loss {loss:.10g}")
    if running_reward > 100:
        break
print(f"norms {sum(p.norm() for p in policy.parameters()):.10g}")
