"""Soft actor-critic: squashed samples, twin critics, a learned temperature, prioritized replay by NumPy."""

import random
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Normal

torch.set_default_dtype(torch.float64)
random.seed(3)
np.random.seed(3)
torch.manual_seed(3)
Transition = namedtuple("Transition", "state action reward next_state done")


class Pendulum:
    """A pendulum to be held upright; an episode ends when it falls too far."""

    def reset(self):
        self.angle, self.speed, self.steps = np.random.uniform(-0.4, 0.4), 0.0, 0
        return self._observe()

    def _observe(self):
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed])

    def step(self, action):
        self.speed += 0.3 * np.sin(self.angle) + 0.2 * float(action[0])
        self.angle += 0.2 * self.speed
        self.steps += 1
        done = abs(self.angle) > 1.2 or self.steps >= 25
        return self._observe(), -(self.angle**2) - 0.01 * float(action[0]) ** 2, done


class PrioritizedReplay:
    def __init__(self, capacity, alpha=0.6):
        self.memory, self.alpha = deque(maxlen=capacity), alpha
        self.priorities = deque(maxlen=capacity)

    def push(self, *transition):
        self.memory.append(Transition(*transition))
        self.priorities.append(max(self.priorities, default=1.0))

    def sample(self, batch_size, beta=0.4):
        scaled = np.array(self.priorities) ** self.alpha
        probabilities = scaled / scaled.sum()
        chosen = np.random.choice(len(self.memory), batch_size, p=probabilities)
        weights = (len(self.memory) * probabilities[chosen]) ** -beta
        rows = Transition(*map(np.stack, zip(*(self.memory[i] for i in chosen), strict=True)))
        columns = [torch.as_tensor(c, dtype=torch.float64) for c in rows]
        columns = [c if c.dim() == 2 else c.unsqueeze(1) for c in columns]
        return columns, torch.from_numpy(weights / weights.max()).unsqueeze(1), chosen


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.mean, self.log_std = nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, state):
        h = self.body(state)
        return self.mean(h), torch.clamp(self.log_std(h), min=-5, max=2)

    def sample(self, state):
        mean, log_std = self(state)
        normal = Normal(mean, log_std.exp())
        x = normal.rsample()
        action = torch.tanh(x)
        log_prob = normal.log_prob(x) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1, keepdim=True), torch.tanh(mean)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = (nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(2))

    def forward(self, state, action):
        x = torch.cat([state, action], 1)
        return self.q1(x), self.q2(x)


def soft_update(target, source, tau):
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.data.copy_(t.data * (1.0 - tau) + s.data * tau)


env, actor, critic, target = Pendulum(), Actor(), Critic(), Critic()
target.load_state_dict(critic.state_dict())
log_alpha = torch.zeros(1, requires_grad=True)
actor_opt, critic_opt = optim.Adam(actor.parameters(), 3e-3), optim.Adam(critic.parameters(), 3e-3)
alpha_opt = optim.Adam([log_alpha], lr=3e-3)
replay, updates, window = PrioritizedReplay(400), 0, deque(maxlen=5)
for episode in range(8):
    state, done, total = env.reset(), False, 0.0
    while not done:
        if episode < 2:
            action = np.random.uniform(-1, 1, 1)
        else:
            with torch.no_grad():
                action = actor.sample(torch.FloatTensor(state).double().unsqueeze(0))[0].cpu().numpy()[0]
        next_state, reward, done = env.step(action)
        replay.push(state, action, reward, next_state, float(done))
        state, total = next_state, total + reward
        if len(replay.memory) < 40:
            continue
        (s, a, r, s2, d), weights, chosen = replay.sample(17)
        alpha = log_alpha.exp()
        with torch.no_grad():
            a2, logp2, _ = actor.sample(s2)
            q_next = r + (1 - d) * 0.95 * (torch.min(*target(s2, a2)) - alpha * logp2)
        q1, q2 = critic(s, a)
        errors = (q1 - q_next).abs() + (q2 - q_next).abs()
        critic_loss = (weights * ((q1 - q_next) ** 2 + (q2 - q_next) ** 2)).mean()
        critic_opt.zero_grad()
        critic_loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 5.0)
        critic_opt.step()
        for i, error in zip(chosen, errors.detach().squeeze(1).tolist(), strict=True):
            replay.priorities[i] = error + 1e-5
        pi, logp, _ = actor.sample(s)
        actor_loss = (alpha.detach() * logp - torch.min(*critic(s, pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        alpha_loss = -(log_alpha * (logp + 1.0).detach()).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()
        soft_update(target, critic, 0.02)
        updates += 1
    window.append(total)
    print(
        f"episode {episode} return {total:.9g} steps {env.steps} mean {np.mean(window):.9g} updates {updates}"
    )
    if updates:
        print(
            f"  critic {critic_loss.item():.9g} actor {actor_loss.item():.9g} alpha {log_alpha.exp().item():.9g}"
        )
